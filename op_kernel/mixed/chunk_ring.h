// Buffers of a vector core for what comes in: filled in the order in which they are taken, and
// freed in any order.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

class ChunkRing {
 public:
  // `count` buffers of kChunkScores floats. Their events are the pipe's while the ring is open.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t count) {
    pipe_ = pipe;
    count_ = static_cast<int32_t>(count);
    const Float all = NewBuffer<float>(pipe, count * kChunkScores);
    for (int64_t i = 0; i < count; ++i) {
      buffers_[i] = all[i * kChunkScores];
    }
  }

  __aicore__ inline void Open() {
    for (int32_t i = 0; i < count_; ++i) {
      filled_[i] = pipe_->AllocEventID<AscendC::HardEvent::MTE2_V>();
      freed_[i] = pipe_->AllocEventID<AscendC::HardEvent::V_MTE2>();
      idle_[i] = i;
      AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(freed_[i]);
    }
    next_idle_ = 0;
    last_idle_ = static_cast<uint32_t>(count_);
    next_full_ = 0;
    last_full_ = 0;
  }

  // All buffers are free again.
  __aicore__ inline void Close() {
    for (int32_t i = 0; i < count_; ++i) {
      AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_[i]);
      pipe_->ReleaseEventID<AscendC::HardEvent::MTE2_V>(filled_[i]);
      pipe_->ReleaseEventID<AscendC::HardEvent::V_MTE2>(freed_[i]);
    }
  }

  PAGED_INLINE bool HasIdle() const { return next_idle_ != last_idle_; }

  PAGED_INLINE const Float& At(int32_t buffer) const { return buffers_[buffer]; }

  // A free buffer, which MTE2 may write from here on.
  PAGED_INLINE int32_t Begin() {
    const int32_t buffer = idle_[next_idle_++ % kPlaces];
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_[buffer]);
    return buffer;
  }

  // What was begun is on its way.
  PAGED_INLINE void End(int32_t buffer) {
    AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(filled_[buffer]);
    full_[last_full_++ % kPlaces] = buffer;
  }

  // The next buffer that is full.
  PAGED_INLINE int32_t Take() {
    const int32_t buffer = full_[next_full_++ % kPlaces];
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(filled_[buffer]);
    return buffer;
  }

  PAGED_INLINE void Free(int32_t buffer) {
    AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(freed_[buffer]);
    idle_[last_idle_++ % kPlaces] = buffer;
  }

 private:
  static constexpr uint32_t kPlaces = 8;
  static_assert(kMostChunkBuffers < kPlaces, "an event for each buffer");

  AscendC::TPipe* pipe_;
  Float buffers_[kMostChunkBuffers];
  int32_t count_;
  AscendC::TEventID filled_[kPlaces];
  AscendC::TEventID freed_[kPlaces];
  int32_t idle_[kPlaces];
  int32_t full_[kPlaces];
  uint32_t next_idle_;
  uint32_t last_idle_;
  uint32_t next_full_;
  uint32_t last_full_;
};
