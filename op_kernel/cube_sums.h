// Sums in L0C, for one kind of product.
//
// A product fills one buffer or, in two parts of its rows, two. The parts leave on their own: the
// next product begins in the first one while the second one is on its way out.
#pragma once

#include "kernel_operator.h"
#include "piece_steps.h"
#include "turns.h"

constexpr int64_t kL0cSlot = 32 * 1024;  // bytes: a quarter of L0C

// The unit keeps two products in one place in order, without a barrier, from 10 fractals on.
constexpr int64_t kOrderedProducts = 10 * kFractal * kFractal;

// Rows of the first part of a product [rows][width]; the second part takes the rest.
__aicore__ inline int64_t PartOf(int64_t rows, int64_t width) {
  const bool fits = rows * width * static_cast<int64_t>(sizeof(float)) <= kL0cSlot;
  return fits ? rows : RoundUp(rows / 2, kFractal);
}

// Takes the event ids `first` and `first` + 1 between M and FIX.
template <int32_t first>
class CubeSums {
 public:
  // `sums` has room for two buffers.
  __aicore__ inline void Init(const AscendC::LocalTensor<float>& sums) { sums_ = sums; }

  __aicore__ inline void Open() { turns_.Open(); }
  __aicore__ inline void Close() { turns_.Close(); }

  // Takes a buffer for a part, which is 0 or 1; the parts end in the order in which they begin.
  __aicore__ inline void Begin(int32_t part) { slots_[part] = turns_.Fill(); }
  __aicore__ inline AscendC::LocalTensor<float> Part(int32_t part) const {
    return At(slots_[part]);
  }
  __aicore__ inline void End() { turns_.Filled(); }

  // The next complete part.
  __aicore__ inline AscendC::LocalTensor<float> Use() { return At(turns_.Use()); }
  __aicore__ inline void Used() { turns_.Used(); }

 private:
  __aicore__ inline AscendC::LocalTensor<float> At(int32_t slot) const {
    return sums_[slot * (kL0cSlot / sizeof(float))];
  }

  Turns<AscendC::HardEvent::M_FIX, AscendC::HardEvent::FIX_M, first, 2> turns_;
  AscendC::LocalTensor<float> sums_;
  int32_t slots_[2];
};
