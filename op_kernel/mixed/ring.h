// A ring of buffers between two pipes of a core: one pipe fills the next ones while the other uses
// an earlier one.
#pragma once

#include "kernel_operator.h"

// `count` buffers, filled and used in the same order; `filled` goes from the filling to the using
// pipe, `freed` back. They take the event ids from `first` on of both events.
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
  }

  // The buffer that the filling pipe may write from here on. It may have begun several.
  __aicore__ inline int32_t Fill() {
    const int32_t buffer = fill_;
    AscendC::WaitFlag<freed>(first + buffer);
    fill_ = (fill_ + 1) % count;
    return buffer;
  }

  // The first one that was begun is full.
  __aicore__ inline void Filled() {
    AscendC::SetFlag<filled>(first + filled_);
    filled_ = (filled_ + 1) % count;
  }

  // The buffer that the using pipe may read from here on.
  __aicore__ inline int32_t Use() {
    AscendC::WaitFlag<filled>(first + use_);
    return use_;
  }

  __aicore__ inline void Used() {
    AscendC::SetFlag<freed>(first + use_);
    use_ = (use_ + 1) % count;
  }

  // Every set flag has its wait.
  __aicore__ inline void Close() {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::WaitFlag<freed>(first + i);
    }
  }

 private:
  int32_t fill_;
  int32_t filled_;
  int32_t use_;
};
