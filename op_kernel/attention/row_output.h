// The last step of a row: sinks, the division by the sum, output and lse.
#pragma once

#include "attention/row_state.h"
#include "attention/tensors.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "kernel_operator.h"

// Rows leave through a queue, or what is used like one.
template <typename T, typename Queue = AscendC::TQue<AscendC::TPosition::VECOUT, 2>>
class RowOutput {
 public:
  // `rows` query rows are written at a time, a multiple of kGranule, through buffers of
  // `rows_out` that hold as many, and a granule for each row of a unit. Its owner may use the queue
  // for other tensors, too.
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
    sink_lanes_ = NewBuffer<float>(pipe, 2 * kRepeatLanes);
    ones_ = sink_lanes_[kRepeatLanes];
    AscendC::Duplicate(sink_lanes_, 0.0f, kRepeatLanes);
    AscendC::Duplicate(ones_, 1.0f, kRepeatLanes);
    Barrier();
  }

  // Writes the unit's rows from their states, which are used up.
  __aicore__ inline void Write(const Unit& unit, const RowState& state, const RowScratch& scratch) {
    Finish(unit, state, scratch);
    for (int64_t begin = 0; begin < unit.num_rows; begin += rows_) {
      WriteRows(unit, state, begin);
    }
    Barrier();  // the next unit clears the accumulators
  }

  // The beginning of Write: states become rows, lse is written.
  __aicore__ inline void Finish(const Unit& unit, const RowState& state,
                                const RowScratch& scratch) {
    bool has_odd_sink = false;
    if (tiling_->has_sinks != 0) {
      for (int64_t r = 0; r < unit.num_rows; ++r) {
        const float sink = SinkOf(unit, r);
        has_odd_sink = has_odd_sink || IsOdd(sink);
        SetLane(sink_lanes_, r, sink != sink ? kLowest : sink == kInf ? kHighest : sink);
      }
      if (has_odd_sink) {
        SpoilRows(unit, state, scratch);
      }
      // A sink joins the denominator like a key of that score; it has no value.
      Rescale(state, sink_lanes_, ones_, scratch, unit.num_rows, width_);
    }
    Normalise(state, scratch, unit.num_rows, width_);
    if (tiling_->has_lse != 0) {
      for (int64_t r = 0; has_odd_sink && r < unit.num_rows; ++r) {
        const float sink = SinkOf(unit, r);
        if (IsOdd(sink)) {
          SetLane(state.max, r, sink);
        }
      }
      StoreLse(unit, state);
    }
  }

  // The rest of Write: the rows that leave together, from `begin` on.
  __aicore__ inline void WriteRows(const Unit& unit, const RowState& state, int64_t begin) {
    const int64_t end = Smaller(begin + rows_, unit.num_rows);
    AscendC::LocalTensor<T> rows = rows_out_->template AllocTensor<T>();
    const int32_t count = static_cast<int32_t>((end - begin) * width_);
    if constexpr (sizeof(T) == sizeof(float)) {
      AscendC::Adds(rows, state.acc[begin * width_], 0.0f, count);
    } else {
      AscendC::Cast(rows, state.acc[begin * width_], AscendC::RoundMode::CAST_RINT, count);
    }
    rows_out_->EnQue(rows);
    rows = rows_out_->template DeQue<T>();
    for (int64_t i = begin; i < end;) {
      i += CopyTokensOut(unit, i, end, rows[(i - begin) * width_]);
    }
    rows_out_->FreeTensor(rows);
  }

  __aicore__ inline int64_t RowsAtOnce() const { return rows_; }

 private:
  __aicore__ inline float SinkOf(const Unit& unit, int64_t r) const {
    return sinks_.GetValue(RowAt(*tiling_, unit, r).head);
  }

  // Sinks that the arithmetic doesn't take as they are: the lse of their rows is the sink itself.
  PAGED_INLINE static bool IsOdd(float sink) { return sink == kInf || sink != sink; }

  // Rows of a sink that is NaN become NaN if they have weights. The sum of weights is 0 or about 1
  // at least, so it becomes 0 or infinite, and NaN only then if it is taken from itself.
  __aicore__ inline void SpoilRows(const Unit& unit, const RowState& state,
                                   const RowScratch& scratch) {
    const int32_t lanes = LanesOf(unit.num_rows);
    AscendC::Muls(scratch.keep, state.sum, kHighest, lanes);
    Barrier();
    AscendC::Muls(scratch.keep, scratch.keep, kHighest, lanes);
    Barrier();
    AscendC::Sub(scratch.keep, scratch.keep, scratch.keep, lanes);
    Barrier();
    for (int64_t r = 0; r < unit.num_rows; ++r) {
      if (SinkOf(unit, r) == SinkOf(unit, r)) {
        SetLane(scratch.keep, r, 0.0f);
      }
    }
    BroadcastLanes(scratch.factor, scratch.keep, unit.num_rows);
    Barrier();
    AddScaledRows(state.acc, state.acc, scratch.factor, unit.num_rows, width_);
    Barrier();
  }

  // Copies rows of one token, or of all tokens whose rows are there; says how many.
  __aicore__ inline int64_t CopyTokensOut(const Unit& unit, int64_t i, int64_t end,
                                          const AscendC::LocalTensor<T>& rows) {
    const RowLayout& layout = tiling_->output;
    const int64_t heads = HeadsPerKvHead(*tiling_);
    const Row row = RowAt(*tiling_, unit, i);
    const AscendC::GlobalTensor<T> to =
        output_[row.token * layout.token_stride + row.head * layout.head_stride];
    const int64_t copied = Smaller(RowsOfToken(*tiling_, unit, i), end - i);
    if (copied < heads || layout.head_stride != width_) {
      CopyRowsOut(to, rows, copied, width_, layout.head_stride);
      return copied;
    }
    const int64_t tokens = Divide(end - i, tiling_->per_kv_head);
    CopyRowsOut(to, rows, tokens, heads * width_, layout.token_stride);
    return tokens * heads;
  }

  __aicore__ inline void StoreLse(const Unit& unit, const RowState& state) {
    AscendC::LocalTensor<T> rows = rows_out_->template AllocTensor<T>();
    const Float lse = rows.template ReinterpretCast<float>();
    BroadcastLanes(lse, state.max, unit.num_rows);
    Barrier();
    rows_out_->EnQue(rows);
    rows = rows_out_->template DeQue<T>();
    // The rows of a token lie side by side in GM.
    const Row first = RowAt(*tiling_, unit, 0);
    const int64_t heads = HeadsPerKvHead(*tiling_);
    int64_t to = first.token * tiling_->num_heads + first.head;
    int64_t copied = RowsOfToken(*tiling_, unit, 0);
    CopyRowsOut(lse_[to], lse, copied, 1, 1);
    to += tiling_->num_heads - first.head + unit.kv_head * heads;
    for (int64_t i = copied; i < unit.num_rows; i += copied) {
      copied = Smaller(heads, unit.num_rows - i);
      CopyRowsOut(lse_[to], lse[i * kGranule], copied, 1, 1);
      to += tiling_->num_heads;
    }
    rows_out_->FreeTensor(rows);
  }

  const AttentionTilingData* tiling_;
  Queue* rows_out_;
  int64_t rows_;
  int64_t width_;
  AscendC::GlobalTensor<T> output_;
  AscendC::GlobalTensor<float> sinks_;
  AscendC::GlobalTensor<float> lse_;
  Float sink_lanes_;  // a lane per row
  Float ones_;
};
