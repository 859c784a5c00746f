// Sums in L0C, for one kind of product.
//
// A product fills one buffer or, by halves of its rows, two. The halves leave on their own: the
// next product begins in the buffer of the first one while the second one is on its way out.
#pragma once

#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/piece_steps.h"
#include "mixed/ring.h"

constexpr uint32_t kL0cElements = 8 * 1024;  // float32: a quarter of L0C

// The matrix unit keeps two products in one place in order, without a barrier, from 10 fractals on.
constexpr uint32_t kOrderedProducts = 10 * kFractalSize;

// Rows of the first half of a product [rows][width], all if one buffer holds them; the second half
// takes the rest.
__aicore__ inline uint32_t FirstHalf(uint32_t rows, uint32_t width) {
  return rows * width <= kL0cElements ? rows : (rows / 2 + kFractal - 1) / kFractal * kFractal;
}

// Takes the event ids `first` and `first` + 1 between M and FIX.
template <int32_t first>
class CubeSums {
 public:
  __aicore__ inline void Init(AscendC::TPipe* pipe) {
    sums_ = NewBuffer<float, AscendC::TPosition::CO1>(pipe, 2 * kL0cElements);
  }

  __aicore__ inline void Open() { ring_.Open(); }
  __aicore__ inline void Close() { ring_.Close(); }

  // Takes a buffer for a half, 0 or 1, until it is complete (End) and stored (Use, Used).
  __aicore__ inline void Begin(uint32_t half) { buffers_[half] = ring_.Begin(); }
  __aicore__ inline Float Half(uint32_t half) const { return sums_[buffers_[half] * kL0cElements]; }
  __aicore__ inline void End(uint32_t half) const { ring_.Filled(buffers_[half]); }
  __aicore__ inline void Use(uint32_t half) const { ring_.Use(buffers_[half]); }
  __aicore__ inline void Used(uint32_t half) const { ring_.Used(buffers_[half]); }

 private:
  Ring<AscendC::HardEvent::M_FIX, AscendC::HardEvent::FIX_M, first, 2> ring_;
  Float sums_;
  uint32_t buffers_[2];
};
