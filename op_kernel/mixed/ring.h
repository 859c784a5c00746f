// A ring of buffers between two pipes of a core: one pipe fills the next ones while the other uses
// an earlier one.
#pragma once

#include "common/scalar.h"
#include "kernel_operator.h"

// `count` buffers, filled in turn; `filled` goes from the filling to the using pipe, `freed` back.
// They take the event ids from `first` on of both events. Who began a buffer knows its number until
// it is used.
template <AscendC::HardEvent filled, AscendC::HardEvent freed, int32_t first, int32_t count>
class Ring {
 public:
  __aicore__ inline void Open() {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::SetFlag<freed>(first + i);
    }
    next_ = 0;
  }

  // The next buffer, which the filling pipe may write from here on.
  PAGED_INLINE uint32_t Begin() {
    const uint32_t buffer = next_;
    next_ = (buffer + 1) & (count - 1);
    AscendC::WaitFlag<freed>(first + static_cast<int32_t>(buffer));
    return buffer;
  }

  // What the filling pipe has done so far is all of it.
  PAGED_INLINE void Filled(uint32_t buffer) const {
    AscendC::SetFlag<filled>(first + static_cast<int32_t>(buffer));
  }

  // The using pipe may read it from here on.
  PAGED_INLINE void Use(uint32_t buffer) const {
    AscendC::WaitFlag<filled>(first + static_cast<int32_t>(buffer));
  }

  PAGED_INLINE void Used(uint32_t buffer) const {
    AscendC::SetFlag<freed>(first + static_cast<int32_t>(buffer));
  }

  // Every set flag has its wait.
  __aicore__ inline void Close() const {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::WaitFlag<freed>(first + i);
    }
  }

 private:
  static_assert((count & (count - 1)) == 0, "buffers are found by a mask");

  uint32_t next_;
};
