// The last step of a row: sinks, the division by the sum, output and lse.
#pragma once

#include "attention_tensors.h"
#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "row_copy.h"
#include "row_state.h"
#include "work_units.h"

template <typename T>
class RowOutput {
 public:
  using Queue = AscendC::TQue<AscendC::TPosition::VECOUT, 2>;

  // `rows` query rows are written at a time, a multiple of kBlockLanes, through buffers of
  // `rows_out` that hold as many. Its owner may use the queue for other tensors, too.
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe, Queue* rows_out, int64_t rows) {
    tiling_ = &tiling;
    rows_out_ = rows_out;
    rows_ = rows;
    width_ = tiling.value.head_dim;
    output_.SetGlobalBuffer((__gm__ T*)tensors.output);
    if (tiling.has_sinks != 0) {
      sinks_.SetGlobalBuffer((__gm__ float*)tensors.sinks);
    }
    if (tiling.has_lse != 0) {
      lse_.SetGlobalBuffer((__gm__ float*)tensors.lse);
    }
    pipe->InitBuffer(lse_out_, 1, rows * kBlockLanes * sizeof(float));
    pipe->InitBuffer(sinks_buffer_, kRepeatLanes * sizeof(float));
    sink_lanes_ = sinks_buffer_.template Get<float>();
    AscendC::Duplicate(sink_lanes_, 0.0f, kRepeatLanes);
    Barrier();
  }

  // Writes the unit's rows from their states, which are used up.
  __aicore__ inline void Write(const Unit& unit, const RowState& state, const RowScratch& scratch) {
    if (tiling_->has_sinks != 0) {
      for (int64_t r = 0; r < unit.num_rows; ++r) {
        SetLane(sink_lanes_, r, sinks_.GetValue(RowAt(*tiling_, unit, r).head));
      }
      JoinSinks(state, sink_lanes_, scratch, unit.num_rows, width_);
    }
    Normalise(state, scratch, unit.num_rows, width_);
    for (int64_t begin = 0; begin < unit.num_rows; begin += rows_) {
      const int64_t end = Smaller(begin + rows_, unit.num_rows);
      StoreRows(unit, state, begin, end);
      if (tiling_->has_lse != 0) {
        StoreLse(unit, state, begin, end);
      }
    }
  }

 private:
  __aicore__ inline void StoreRows(const Unit& unit, const RowState& state, int64_t begin,
                                   int64_t end) {
    AscendC::LocalTensor<T> rows = rows_out_->template AllocTensor<T>();
    const int32_t count = static_cast<int32_t>((end - begin) * width_);
    if constexpr (sizeof(T) == sizeof(float)) {
      AscendC::Adds(rows, state.acc[begin * width_], 0.0f, count);
    } else {
      AscendC::Cast(rows, state.acc[begin * width_], AscendC::RoundMode::CAST_RINT, count);
    }
    Barrier();  // the next unit clears the accumulators
    rows_out_->EnQue(rows);
    rows = rows_out_->template DeQue<T>();
    const RowLayout& layout = tiling_->output;
    for (int64_t i = begin; i < end;) {
      const Row row = RowAt(*tiling_, unit, i);
      const int64_t copied = Smaller(RowsOfToken(*tiling_, unit, i), end - i);
      CopyRowsOut(output_[row.token * layout.token_stride + row.head * layout.head_stride],
                  rows[(i - begin) * width_], copied, width_, layout.head_stride);
      i += copied;
    }
    rows_out_->FreeTensor(rows);
  }

  __aicore__ inline void StoreLse(const Unit& unit, const RowState& state, int64_t begin,
                                  int64_t end) {
    AscendC::LocalTensor<float> lse = lse_out_.template AllocTensor<float>();
    BroadcastLanes(lse, state.max[begin], end - begin);
    lse_out_.EnQue(lse);
    lse = lse_out_.template DeQue<float>();
    for (int64_t i = begin; i < end;) {
      const Row row = RowAt(*tiling_, unit, i);
      const int64_t copied = Smaller(RowsOfToken(*tiling_, unit, i), end - i);
      CopyRowsOut(lse_[row.token * tiling_->num_heads + row.head], lse[(i - begin) * kBlockLanes],
                  copied, 1, 1);
      i += copied;
    }
    lse_out_.FreeTensor(lse);
  }

  const AttentionTilingData* tiling_;
  Queue* rows_out_;
  int64_t rows_;
  int64_t width_;
  AscendC::GlobalTensor<T> output_;
  AscendC::GlobalTensor<float> sinks_;
  AscendC::GlobalTensor<float> lse_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> lse_out_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> sinks_buffer_;
  AscendC::LocalTensor<float> sink_lanes_;  // a lane per row
};
