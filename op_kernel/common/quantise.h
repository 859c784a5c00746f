// Rows of floats become rows of an int8 cache, and their scales, on their way from GM to GM.
#pragma once

#include "common/int8_rows.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "kernel_operator.h"

template <typename T>
class RowQuantiser {
 public:
  // `capacity` rows, at most 64, of up to `width` elements are moved at a time: op_host counts
  // these buffers in quantised_row_bytes.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t capacity, int64_t width) {
    const int64_t pitch = RoundUp(width, kRepeatLanes);
    pipe->InitBuffer(rows_in_, 2, capacity * UbPitch<T>(width) * sizeof(T));
    pipe->InitBuffer(scales_in_, 2, capacity * kGranuleBytes);
    pipe->InitBuffer(rows_out_, 2, capacity * UbPitch<int8_t>(width));
    pipe->InitBuffer(scales_out_, 2, RoundUp(capacity, kGranule) * kGranuleBytes);
    wide_ = NewBuffer<float>(pipe, capacity * pitch);
    work_ = NewBuffer<float>(pipe, capacity * pitch);
    bits_ = NewBuffer<uint8_t>(pipe, RoundUp(capacity * pitch / 8, kGranuleBytes));
    const Float lanes = NewBuffer<float>(pipe, 4 * kRepeatLanes);
    scales_ = lanes;
    divisors_ = lanes[kRepeatLanes];
    poison_ = lanes[2 * kRepeatLanes];
    largest_ = lanes[3 * kRepeatLanes];
    factors_ = NewBuffer<float>(pipe, kRepeatLanes * kGranule);
    AscendC::Duplicate(lanes, 0.0f, 3 * kRepeatLanes);
    AscendC::Duplicate(largest_, kLargest, kRepeatLanes);
    first_lanes_.Init(pipe);
  }

  // to[i] = the elements nearest to from[i] / scales[i]: `count` rows of `width` elements. With
  // `chooses_scales` scales[i] is written, else read. Strides count elements.
  __aicore__ inline void Move(const AscendC::GlobalTensor<int8_t>& to, int64_t to_stride,
                              const AscendC::GlobalTensor<float>& scales, int64_t scale_stride,
                              bool chooses_scales, const AscendC::GlobalTensor<T>& from,
                              int64_t from_stride, int64_t count, int64_t width) {
    AscendC::LocalTensor<T> rows = rows_in_.template AllocTensor<T>();
    CopyRowsIn(rows, from, count, width, from_stride);
    rows_in_.EnQue(rows);
    if (!chooses_scales) {
      LoadScales(scales, scale_stride, count);
    }
    rows = rows_in_.template DeQue<T>();
    pitch_ = RoundUp(width, kRepeatLanes);
    all_ = static_cast<int32_t>(count * pitch_);
    Widen(rows, count, width);
    rows_in_.FreeTensor(rows);
    if (chooses_scales) {
      ChooseScales(count);
      StoreScales(scales, scale_stride, count);
    }
    Divide(count);
    Round();

    AscendC::LocalTensor<int8_t> elements = rows_out_.template AllocTensor<int8_t>();
    RowsToInt8(elements, UbPitch<int8_t>(width), work_.template ReinterpretCast<half>(), pitch_,
               count, width);
    rows_out_.EnQue(elements);
    elements = rows_out_.template DeQue<int8_t>();
    CopyRowsOut(to, elements, count, width, to_stride);
    // Copies land in the order of the calls: a slot may be given twice.
    AscendC::PipeBarrier<PIPE_MTE3>();
    rows_out_.FreeTensor(elements);
  }

 private:
  __aicore__ inline void LoadScales(const AscendC::GlobalTensor<float>& scales, int64_t stride,
                                    int64_t count) {
    Float granules = scales_in_.template AllocTensor<float>();
    CopyRowsIn(granules, scales, count, 1, stride);
    scales_in_.EnQue(granules);
    granules = scales_in_.template DeQue<float>();
    first_lanes_.Take(scales_, granules, count);
    Barrier();
    scales_in_.FreeTensor(granules);
  }

  // Floats, with zeros up to the pitch.
  __aicore__ inline void Widen(const AscendC::LocalTensor<T>& rows, int64_t count, int64_t width) {
    AscendC::Duplicate(wide_, 0.0f, all_);
    Barrier();
    const AscendC::UnaryRepeatParams params(
        1, 1, static_cast<uint8_t>(pitch_ / kGranule),
        static_cast<uint8_t>(UbPitch<T>(width) * sizeof(T) / kGranuleBytes));
    for (int64_t c = 0; c < width; c += kRepeatLanes) {
      const uint64_t mask = static_cast<uint64_t>(Smaller(width - c, kRepeatLanes));
      if constexpr (sizeof(T) == sizeof(float)) {
        AscendC::Adds(wide_[c], rows[c], 0.0f, mask, static_cast<uint8_t>(count), params);
      } else {
        AscendC::Cast(wide_[c], rows[c], AscendC::RoundMode::CAST_NONE, mask,
                      static_cast<uint8_t>(count), params);
      }
    }
    Barrier();
  }

  // The largest magnitude of each row over the largest element; NaN for a row that holds one or an
  // infinity: 0 times what isn't finite is NaN, and stays in every sum.
  __aicore__ inline void ChooseScales(int64_t count) {
    const uint8_t repeats = static_cast<uint8_t>(count);
    const uint8_t row = static_cast<uint8_t>(pitch_ / kGranule);
    const AscendC::BinaryRepeatParams params(1, 1, 1, row, row, row);
    AscendC::Muls(work_, wide_, 0.0f, all_);
    Barrier();
    for (int64_t c = kRepeatLanes; c < pitch_; c += kRepeatLanes) {
      AscendC::Add(work_, work_, work_[c], static_cast<uint64_t>(kRepeatLanes), repeats, params);
      Barrier();
    }
    AscendC::WholeReduceSum(poison_, work_, kRepeatLanes, repeats, 1, 1, row);
    Barrier();
    AscendC::Abs(work_, wide_, all_);
    Barrier();
    for (int64_t c = kRepeatLanes; c < pitch_; c += kRepeatLanes) {
      AscendC::Max(work_, work_, work_[c], static_cast<uint64_t>(kRepeatLanes), repeats, params);
      Barrier();
    }
    AscendC::WholeReduceMax(scales_, work_, kRepeatLanes, repeats, 1, 1, row,
                            AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    Barrier();
    AscendC::Div(scales_, scales_, largest_, kRepeatLanes);
    Barrier();
    AscendC::Add(scales_, scales_, poison_, kRepeatLanes);
    Barrier();
  }

  __aicore__ inline void StoreScales(const AscendC::GlobalTensor<float>& scales, int64_t stride,
                                     int64_t count) {
    Float granules = scales_out_.template AllocTensor<float>();
    BroadcastLanes(granules, scales_, count);
    Barrier();
    scales_out_.EnQue(granules);
    granules = scales_out_.template DeQue<float>();
    CopyRowsOut(scales, granules, count, 1, stride);
    scales_out_.FreeTensor(granules);
  }

  // wide_ /= scales_. A scale of 0 or NaN says all about its row: by NaN the row becomes NaN, and
  // then zeros, as do single elements that are NaN.
  __aicore__ inline void Divide(int64_t count) {
    AscendC::CompareScalar(bits_, scales_, 0.0f, AscendC::CMPMODE::NE,
                           static_cast<uint32_t>(kRepeatLanes));
    Barrier();
    AscendC::Select(divisors_, bits_, scales_, kNotANumber,
                    AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, static_cast<uint32_t>(kRepeatLanes));
    Barrier();
    BroadcastLanes(factors_, divisors_, count);
    Barrier();
    const uint8_t row = static_cast<uint8_t>(pitch_ / kGranule);
    const AscendC::BinaryRepeatParams params(1, 1, 0, row, row, 1);
    for (int64_t c = 0; c < pitch_; c += kRepeatLanes) {
      AscendC::Div(wide_[c], wide_[c], factors_, static_cast<uint64_t>(kRepeatLanes),
                   static_cast<uint8_t>(count), params);
    }
    Barrier();
    AscendC::Compare(bits_, wide_, wide_, AscendC::CMPMODE::EQ, static_cast<uint32_t>(all_));
    Barrier();
    AscendC::Select(wide_, bits_, wide_, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE,
                    static_cast<uint32_t>(all_));
    Barrier();
  }

  // Halves in work_: wide_ to the nearest integers that int8 holds. Rounded as floats, since half
  // would round a first time what is then rounded again.
  __aicore__ inline void Round() {
    AscendC::Mins(wide_, wide_, kLargest, all_);
    Barrier();
    AscendC::Maxs(wide_, wide_, -kLargest - 1.0f, all_);
    Barrier();
    AscendC::Cast(wide_, wide_, AscendC::RoundMode::CAST_RINT, static_cast<uint32_t>(all_));
    Barrier();
    AscendC::Cast(work_.template ReinterpretCast<half>(), wide_, AscendC::RoundMode::CAST_NONE,
                  static_cast<uint32_t>(all_));
    Barrier();
  }

  static constexpr float kLargest = 127.0f;
  static constexpr float kNotANumber = __builtin_nanf("");

  AscendC::TQue<AscendC::TPosition::VECIN, 2> rows_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> scales_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> rows_out_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> scales_out_;
  int64_t pitch_;  // of wide_ and work_
  int32_t all_;    // their floats
  Float wide_;
  Float work_;
  AscendC::LocalTensor<uint8_t> bits_;
  Float scales_;    // a lane per row
  Float divisors_;  // the same, NaN for 0
  Float poison_;
  Float largest_;
  Float factors_;  // divisors, each over a granule
  FirstLanes first_lanes_;
};
