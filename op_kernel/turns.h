// Buffers between two pipes of a core, taken in turns: one pipe fills the next ones while the other
// uses an earlier one.
#pragma once

#include "kernel_operator.h"

// `count` buffers; `filled` goes from the filling to the using pipe, `freed` back. They take the
// event ids from `first` on of both events.
template <AscendC::HardEvent filled, AscendC::HardEvent freed, int32_t first, int32_t count>
class Turns {
 public:
  __aicore__ inline void Open() {
    for (int32_t i = 0; i < count; ++i) {
      AscendC::SetFlag<freed>(first + i);
    }
    fill_ = 0;
    use_ = 0;
  }

  // The buffer that the filling pipe may write from here on.
  __aicore__ inline int32_t Fill() {
    AscendC::WaitFlag<freed>(first + fill_);
    return fill_;
  }

  __aicore__ inline void Filled() {
    AscendC::SetFlag<filled>(first + fill_);
    fill_ = (fill_ + 1) % count;
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
  int32_t use_;
};
