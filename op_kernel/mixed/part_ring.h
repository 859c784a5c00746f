// Two buffers of a vector core for what leaves it: weights, or rows of output. One is filled while
// the other one is on its way. Used as a queue is, one tensor at a time.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

template <typename T>
class PartRing {
 public:
  // Buffers of `size` elements.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t size) {
    pipe_ = pipe;
    size_ = static_cast<uint32_t>(size);
    parts_ = NewBuffer<T>(pipe, kPartBuffers * size);
  }

  __aicore__ inline void Open() {
    for (uint32_t i = 0; i < kPartBuffers; ++i) {
      filled_[i] = pipe_->AllocEventID<AscendC::HardEvent::V_MTE3>();
      freed_[i] = pipe_->AllocEventID<AscendC::HardEvent::MTE3_V>();
      AscendC::SetFlag<AscendC::HardEvent::MTE3_V>(freed_[i]);
    }
    part_ = 0;
    at_ = 0;
  }

  __aicore__ inline void Close() {
    for (uint32_t i = 0; i < kPartBuffers; ++i) {
      AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(freed_[i]);
      pipe_->ReleaseEventID<AscendC::HardEvent::V_MTE3>(filled_[i]);
      pipe_->ReleaseEventID<AscendC::HardEvent::MTE3_V>(freed_[i]);
    }
  }

  // The next buffer, which the vector unit may write from here on.
  template <typename U>
  PAGED_INLINE AscendC::LocalTensor<U> AllocTensor() const {
    AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(freed_[part_]);
    return Part();
  }

  // It is full, and MTE3 may read it.
  PAGED_INLINE void EnQue(const AscendC::LocalTensor<T>&) const {
    AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(filled_[part_]);
  }
  template <typename U>
  PAGED_INLINE AscendC::LocalTensor<U> DeQue() const {
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(filled_[part_]);
    return Part();
  }

  PAGED_INLINE void FreeTensor(const AscendC::LocalTensor<T>&) {
    AscendC::SetFlag<AscendC::HardEvent::MTE3_V>(freed_[part_]);
    part_ ^= 1;
    at_ = size_ - at_;
  }

 private:
  static_assert(kPartBuffers == 2, "they take turns");

  PAGED_INLINE AscendC::LocalTensor<T> Part() const { return parts_[at_]; }

  AscendC::TPipe* pipe_;
  AscendC::LocalTensor<T> parts_;
  uint32_t size_;
  uint32_t part_;  // the one in use
  uint32_t at_;    // where it begins
  AscendC::TEventID filled_[kPartBuffers];
  AscendC::TEventID freed_[kPartBuffers];
};
