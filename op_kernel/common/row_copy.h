// Copies of head_dim vectors between GM and UB. In UB each vector begins on a granule.
#pragma once

#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

// Elements from one vector of `width` elements to the next in UB.
template <typename T>
__aicore__ inline int64_t UbPitch(int64_t width) {
  return RoundUp(width, kGranuleBytes / sizeof(T));
}

// Copies `count` vectors of `width` elements, `stride` elements apart in GM, into UB.
template <typename T>
PAGED_INLINE void CopyRowsIn(const AscendC::LocalTensor<T>& to,
                             const AscendC::GlobalTensor<T>& from, int64_t count, int64_t width,
                             int64_t stride) {
  const uint32_t bytes = static_cast<uint32_t>(width * sizeof(T));
  const AscendC::DataCopyPadExtParams<T> no_padding(false, 0, 0, 0);
  if (stride >= width) {
    const uint32_t gap = static_cast<uint32_t>((stride - width) * sizeof(T));
    const AscendC::DataCopyExtParams rows(static_cast<uint16_t>(count), bytes, gap, 0, 0);
    AscendC::DataCopyPad(to, from, rows, no_padding);
    return;
  }
  // Overlapping rows, as in an expanded tensor: a gap can't be negative.
  const AscendC::DataCopyExtParams one_row(1, bytes, 0, 0, 0);
  for (int64_t i = 0; i < count; ++i) {
    AscendC::DataCopyPad(to[i * UbPitch<T>(width)], from[i * stride], one_row, no_padding);
  }
}

// The reverse. The rows in GM must not overlap; they may be closer than `width` only if count is 1.
template <typename T>
PAGED_INLINE void CopyRowsOut(const AscendC::GlobalTensor<T>& to,
                              const AscendC::LocalTensor<T>& from, int64_t count, int64_t width,
                              int64_t stride) {
  const uint32_t bytes = static_cast<uint32_t>(width * sizeof(T));
  const uint32_t gap = count > 1 ? static_cast<uint32_t>((stride - width) * sizeof(T)) : 0;
  const AscendC::DataCopyExtParams rows(static_cast<uint16_t>(count), bytes, 0, gap, 0);
  AscendC::DataCopyPad(to, from, rows);
}

// Moves vectors from GM to GM through two UB buffers, so that reading and writing overlap.
template <typename T>
class RowMover {
 public:
  // `capacity` vectors of up to `width` elements fit one buffer.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t capacity, int64_t width) {
    pipe->InitBuffer(queue_, 2, capacity * UbPitch<T>(width) * sizeof(T));
  }

  __aicore__ inline void Move(const AscendC::GlobalTensor<T>& to, int64_t to_stride,
                              const AscendC::GlobalTensor<T>& from, int64_t from_stride,
                              int64_t count, int64_t width) {
    AscendC::LocalTensor<T> rows = queue_.template AllocTensor<T>();
    CopyRowsIn(rows, from, count, width, from_stride);
    queue_.EnQue(rows);
    rows = queue_.template DeQue<T>();
    CopyRowsOut(to, rows, count, width, to_stride);
    // Copies land in the order of the calls: a slot may be given twice, and values may be a view of
    // keys.
    AscendC::PipeBarrier<PIPE_MTE3>();
    queue_.FreeTensor(rows);
  }

 private:
  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> queue_;
};
