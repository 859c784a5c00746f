// Two buffers between two pipes of a core: one fills a buffer while the other uses the second one.
#pragma once

#include "kernel_operator.h"

// `filled` goes from the filling to the using pipe, `freed` back. The two buffers take the event
// ids `first` and `first` + 1 of both events.
template <AscendC::HardEvent filled, AscendC::HardEvent freed, int32_t first>
class PingPong {
 public:
  __aicore__ inline void Open() {
    AscendC::SetFlag<freed>(first);
    AscendC::SetFlag<freed>(first + 1);
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
    fill_ = 1 - fill_;
  }

  // The buffer that the using pipe may read from here on.
  __aicore__ inline int32_t Use() {
    AscendC::WaitFlag<filled>(first + use_);
    return use_;
  }

  __aicore__ inline void Used() {
    AscendC::SetFlag<freed>(first + use_);
    use_ = 1 - use_;
  }

  // Every set flag has its wait.
  __aicore__ inline void Close() {
    AscendC::WaitFlag<freed>(first);
    AscendC::WaitFlag<freed>(first + 1);
  }

 private:
  int32_t fill_;
  int32_t use_;
};
