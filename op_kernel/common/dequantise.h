// Rows of an int8 cache become rows of floats on their way from GM to GM.
#pragma once

#include "common/int8_rows.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "kernel_operator.h"

class RowDequantiser {
 public:
  // `capacity` rows, at most 64, of up to `width` elements are moved at a time: op_host counts
  // these buffers in dequantised_row_bytes.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t capacity, int64_t width) {
    pipe->InitBuffer(rows_in_, 2, capacity * UbPitch<int8_t>(width));
    pipe->InitBuffer(scales_in_, 2, capacity * kGranuleBytes);
    pipe->InitBuffer(rows_out_, 2, capacity * UbPitch<float>(width) * sizeof(float));
    halves_ = NewBuffer<half>(pipe, capacity * UbPitch<half>(width));
    scales_ = NewBuffer<float>(pipe, kRepeatLanes);
    factors_ = NewBuffer<float>(pipe, kRepeatLanes * kGranule);
    AscendC::Duplicate(scales_, 0.0f, kRepeatLanes);
    first_lanes_.Init(pipe);
  }

  // to[i] = from[i] * scales[i]: `count` rows of `width` elements. Strides count elements.
  __aicore__ inline void Move(const AscendC::GlobalTensor<float>& to, int64_t to_stride,
                              const AscendC::GlobalTensor<int8_t>& from, int64_t from_stride,
                              const AscendC::GlobalTensor<float>& scales, int64_t scale_stride,
                              int64_t count, int64_t width) {
    AscendC::LocalTensor<int8_t> rows = rows_in_.template AllocTensor<int8_t>();
    CopyRowsIn(rows, from, count, width, from_stride);
    rows_in_.EnQue(rows);
    Float granules = scales_in_.template AllocTensor<float>();
    CopyRowsIn(granules, scales, count, 1, scale_stride);
    scales_in_.EnQue(granules);

    granules = scales_in_.template DeQue<float>();
    first_lanes_.Take(scales_, granules, count);
    scales_in_.FreeTensor(granules);
    rows = rows_in_.template DeQue<int8_t>();
    RowsToHalf(halves_, UbPitch<half>(width), rows, UbPitch<int8_t>(width), count, width);
    rows_in_.FreeTensor(rows);
    Barrier();
    BroadcastLanes(factors_, scales_, count);
    Float wide = rows_out_.template AllocTensor<float>();
    WidenHalves(wide, count, width);
    Barrier();
    Scale(wide, count, width);
    Barrier();
    rows_out_.EnQue(wide);
    wide = rows_out_.template DeQue<float>();
    CopyRowsOut(to, wide, count, width, to_stride);
    rows_out_.FreeTensor(wide);
  }

 private:
  __aicore__ inline void WidenHalves(const Float& wide, int64_t count, int64_t width) {
    const AscendC::UnaryRepeatParams params(
        1, 1, static_cast<uint8_t>(UbPitch<float>(width) / kGranule),
        static_cast<uint8_t>(UbPitch<half>(width) / kHalfGranule));
    for (int64_t c = 0; c < width; c += kRepeatLanes) {
      AscendC::Cast(wide[c], halves_[c], AscendC::RoundMode::CAST_NONE,
                    static_cast<uint64_t>(Smaller(width - c, kRepeatLanes)),
                    static_cast<uint8_t>(count), params);
    }
  }

  __aicore__ inline void Scale(const Float& wide, int64_t count, int64_t width) {
    const uint8_t pitch = static_cast<uint8_t>(UbPitch<float>(width) / kGranule);
    const AscendC::BinaryRepeatParams params(1, 1, 0, pitch, pitch, 1);
    for (int64_t c = 0; c < width; c += kRepeatLanes) {
      AscendC::Mul(wide[c], wide[c], factors_,
                   static_cast<uint64_t>(Smaller(width - c, kRepeatLanes)),
                   static_cast<uint8_t>(count), params);
    }
  }

  AscendC::TQue<AscendC::TPosition::VECIN, 2> rows_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> scales_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> rows_out_;
  AscendC::LocalTensor<half> halves_;
  Float scales_;   // a lane per row
  Float factors_;  // each over a granule
  FirstLanes first_lanes_;
};
