// A ring of buffers between two pipes of a core: one pipe fills the next ones while the other uses
// an earlier one.
#pragma once

#include "kernel_operator.h"

// `count` buffers, filled, used and freed in the same order; `filled` goes from the filling to the
// using pipe, `freed` back. They take the event ids from `first` on of both events.
template <AscendC::HardEvent filled, AscendC::HardEvent freed, int32_t first, int32_t count>
class Ring {
 public:
  __aicore__ inline void Open() {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::SetFlag<freed>(first + i);
    }
    fill_ = 0;
    filled_ = 0;
    use_ = 0;
    used_ = 0;
  }

  // The buffer that the filling pipe may write from here on. It may have begun several.
  __aicore__ inline int32_t Fill() {
    const int32_t buffer = fill_;
    AscendC::WaitFlag<freed>(first + buffer);
    fill_ = After(buffer);
    return buffer;
  }

  // The first one that was begun is full.
  __aicore__ inline void Filled() {
    AscendC::SetFlag<filled>(first + filled_);
    filled_ = After(filled_);
  }

  // The next buffer, which the using pipe may read from here on. It may use several.
  __aicore__ inline int32_t Use() {
    const int32_t buffer = use_;
    AscendC::WaitFlag<filled>(first + buffer);
    use_ = After(buffer);
    return buffer;
  }

  // The first one in use is free.
  __aicore__ inline void Used() {
    AscendC::SetFlag<freed>(first + used_);
    used_ = After(used_);
  }

  // Every set flag has its wait.
  __aicore__ inline void Close() {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::WaitFlag<freed>(first + i);
    }
  }

 private:
  static_assert((count & (count - 1)) == 0, "buffers are found by a mask");

  __aicore__ static inline int32_t After(int32_t buffer) { return (buffer + 1) & (count - 1); }

  int32_t fill_;
  int32_t filled_;
  int32_t use_;
  int32_t used_;
};
