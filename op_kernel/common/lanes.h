// Vectors of floats in UB.
//
// A lane is one float. A repeat, which one vector instruction works on at a time, is 64 lanes; a
// granule is 32 bytes, where every operand begins and ends (Ascend C: a data block).
#pragma once

#include "common/scalar.h"
#include "kernel_operator.h"

using Float = AscendC::LocalTensor<float>;

constexpr float kMinusInf = -__builtin_inff();
constexpr float kInf = __builtin_inff();
constexpr int32_t kRepeatLanes = 64;
constexpr int32_t kGranule = 8;  // floats
constexpr int64_t kGranuleBytes = 32;

PAGED_INLINE void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }

// Memory for as long as the kernel runs: `count` elements. It is the pipe's, not that of the TBuf.
template <typename T, AscendC::TPosition position = AscendC::TPosition::VECCALC>
__aicore__ inline AscendC::LocalTensor<T> NewBuffer(AscendC::TPipe* pipe, int64_t count) {
  AscendC::TBuf<position> buffer;
  pipe->InitBuffer(buffer, static_cast<uint32_t>(count * sizeof(T)));
  return buffer.template Get<T>();
}

// lanes[i] = value, the other lanes unchanged. Writes of one granule must not overtake each other.
PAGED_INLINE void SetLane(const Float& lanes, int64_t i, float value) {
  uint64_t mask[2] = {1ULL << i, 0};
  AscendC::Duplicate(lanes, value, mask, 1, 1, kGranule);
  Barrier();
}

// Lanes of whole granules that hold a lane for each of `rows` rows.
PAGED_INLINE int32_t LanesOf(int64_t rows) {
  return static_cast<int32_t>((rows + kGranule - 1) & -kGranule);
}

// factor[r][0..8) = lanes[r]. The barrier after it is left to the caller.
PAGED_INLINE void BroadcastLanes(const Float& factor, const Float& lanes, int64_t rows) {
  const AscendC::BrcbRepeatParams dense(1, kGranule);
  AscendC::Brcb(factor, lanes, static_cast<uint8_t>(LanesOf(rows) / kGranule), dense);
}

// Repeats the first `rows` lanes over the 64 of a repeat.
__aicore__ inline void RepeatLanes(const Float& lanes, int64_t rows) {
  for (int64_t filled = rows; filled < kRepeatLanes; filled *= 2) {
    AscendC::Adds(lanes[filled], lanes, 0.0f, static_cast<int32_t>(filled));
    Barrier();
  }
}
