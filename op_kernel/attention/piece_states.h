// States of pieces in the workspace, where the tiling splits: written by whoever computed a piece,
// folded in the order of the pieces by whichever core a row is dealt to.
#pragma once

#include "attention/row_output.h"
#include "attention/row_state.h"
#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/row_copy.h"
#include "kernel_operator.h"

class PieceStates {
 public:
  // `rows` states are stored at a time; a multiple of kGranule.
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR states,
                              AscendC::TPipe* pipe, int64_t rows) {
    tiling_ = &tiling;
    rows_ = rows;
    width_ = tiling.value.head_dim;
    if (tiling.split == 0) {
      return;
    }
    states_.SetGlobalBuffer((__gm__ float*)states);
    pipe->InitBuffer(state_in_, 2, (width_ + kStateTail) * sizeof(float));
    pipe->InitBuffer(state_out_, 1, rows * (width_ + kStateTail) * sizeof(float));
  }

  // Writes the states of the unit's rows over its piece: acc, then max and sum, each repeated over
  // a granule.
  __aicore__ inline void Store(const Unit& unit, const RowState& state) {
    for (int64_t begin = 0; begin < unit.num_rows; begin += rows_) {
      StoreRows(unit, state, begin, Smaller(begin + rows_, unit.num_rows));
    }
  }

  // Folds the stored states of every row dealt to `core` into `total` and writes the row.
  template <typename Output>
  __aicore__ inline void Combine(const Sequences& sequences, int64_t core, int64_t num_cores,
                                 Output& output, const RowState& total, const RowScratch& scratch) {
    int64_t skip = core;
    for (int64_t i = 0; i < tiling_->batch; ++i) {
      const Sequence sequence = sequences.At(i);
      const int64_t rows = sequence.new_tokens * tiling_->num_heads;
      for (; skip < rows; skip += num_cores) {
        const Unit unit =
            RowUnit(sequence, i, skip / tiling_->num_heads, skip % tiling_->num_heads);
        FoldRow(unit, total, scratch);
        output.Write(unit, total, scratch);
      }
      skip -= rows;
    }
  }

 private:
  __aicore__ inline int64_t StateAt(const Row& row, int64_t piece) const {
    const int64_t index = row.token * tiling_->num_heads + row.head;
    return (index * tiling_->max_pieces + piece) * (width_ + kStateTail);
  }

  __aicore__ inline void StoreRows(const Unit& unit, const RowState& state, int64_t begin,
                                   int64_t end) {
    const int64_t count = end - begin;
    Float states = state_out_.template AllocTensor<float>();
    const Float max = states[rows_ * width_];
    const Float sum = states[rows_ * (width_ + kGranule)];
    AscendC::Adds(states, state.acc[begin * width_], 0.0f, static_cast<int32_t>(count * width_));
    BroadcastLanes(max, state.max[begin], count);
    BroadcastLanes(sum, state.sum[begin], count);
    Barrier();
    state_out_.EnQue(states);
    states = state_out_.template DeQue<float>();
    for (int64_t r = 0; r < count; ++r) {
      const int64_t at = StateAt(RowAt(*tiling_, unit, begin + r), unit.piece);
      CopyRowsOut(states_[at], states[r * width_], 1, width_, width_);
      CopyRowsOut(states_[at + width_], max[r * kGranule], 1, kGranule, kGranule);
      CopyRowsOut(states_[at + width_ + kGranule], sum[r * kGranule], 1, kGranule, kGranule);
    }
    state_out_.FreeTensor(states);
  }

  // One query row against all the keys it sees.
  __aicore__ inline Unit RowUnit(const Sequence& sequence, int64_t index, int64_t token,
                                 int64_t head) const {
    const int64_t heads = HeadsPerKvHead(*tiling_);
    Unit unit = {sequence, index, head / heads, token * heads + head % heads, 1, 0, {}};
    unit.keys = KeysOfRow(*tiling_, unit, 0);
    return unit;
  }

  __aicore__ inline void FoldRow(const Unit& unit, const RowState& total,
                                 const RowScratch& scratch) {
    Clear(total, 1, width_);
    const Range& keys = unit.keys;
    const int64_t end =
        keys.first < keys.last ? (keys.last + tiling_->piece - 1) / tiling_->piece : 0;
    const Row row = RowAt(*tiling_, unit, 0);
    for (int64_t piece = keys.first / tiling_->piece; piece < end; ++piece) {
      Float state = state_in_.template AllocTensor<float>();
      CopyRowsIn(state, states_[StateAt(row, piece)], 1, width_ + kStateTail, width_ + kStateTail);
      state_in_.EnQue(state);
      state = state_in_.template DeQue<float>();
      const RowState from = {state[width_], state[width_ + kGranule], state};
      Fold(total, from, scratch, 1, width_);
      state_in_.FreeTensor(state);
    }
  }

  const AttentionTilingData* tiling_;
  int64_t rows_;
  int64_t width_;
  AscendC::GlobalTensor<float> states_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> state_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> state_out_;
};
