// Sums in L0C, for one kind of product.
//
// A product fills one buffer or, by halves of its rows, two. The halves leave on their own: the
// next product begins in the buffer of the first one while the second one is on its way out.
#pragma once

#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/piece_steps.h"

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

  __aicore__ inline void Open() {
    AscendC::SetFlag<AscendC::HardEvent::FIX_M>(first);
    AscendC::SetFlag<AscendC::HardEvent::FIX_M>(first + 1);
    next_ = 0;
  }
  // Every set flag has its wait.
  __aicore__ inline void Close() const {
    AscendC::WaitFlag<AscendC::HardEvent::FIX_M>(first);
    AscendC::WaitFlag<AscendC::HardEvent::FIX_M>(first + 1);
  }

  // Begins a product of one half or two and says which buffer its first half has; the second one
  // has the other. A buffer is taken (Begin) until it is complete (End) and stored (Use, Used).
  PAGED_INLINE uint32_t Open(bool has_two) {
    const uint32_t buffer = next_;
    next_ = has_two ? buffer : buffer ^ 1;
    return buffer;
  }
  PAGED_INLINE void Begin(uint32_t buffer) const {
    AscendC::WaitFlag<AscendC::HardEvent::FIX_M>(EventOf(buffer));
  }
  PAGED_INLINE Float At(uint32_t buffer) const { return sums_[buffer * kL0cElements]; }
  PAGED_INLINE void End(uint32_t buffer) const {
    AscendC::SetFlag<AscendC::HardEvent::M_FIX>(EventOf(buffer));
  }
  PAGED_INLINE void Use(uint32_t buffer) const {
    AscendC::WaitFlag<AscendC::HardEvent::M_FIX>(EventOf(buffer));
  }
  PAGED_INLINE void Used(uint32_t buffer) const {
    AscendC::SetFlag<AscendC::HardEvent::FIX_M>(EventOf(buffer));
  }

 private:
  PAGED_INLINE static int32_t EventOf(uint32_t buffer) {
    return first + static_cast<int32_t>(buffer);
  }

  Float sums_;
  uint32_t next_;
};
