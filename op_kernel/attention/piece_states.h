// States of pieces in the workspace, where the tiling splits: written by whoever computed a piece,
// folded in the order of the pieces by whichever core a row is dealt to.
//
// A state is acc, then max and sum, each repeated over a granule: what a row's acc is multiplied
// with is there as the vector unit takes it. The states of a row's pieces lie side by side.
#pragma once

#include "attention/row_output.h"
#include "attention/row_state.h"
#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/row_copy.h"
#include "kernel_operator.h"

// With kWidth rows are so wide, and the compiler knows it. With 0 that is the tiling's.
template <int64_t kWidth = 0>
class PieceStates {
 public:
  // `rows` states are stored at a time; a multiple of kGranule.
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR states,
                              AscendC::TPipe* pipe, int64_t rows) {
    tiling_ = &tiling;
    pipe_ = pipe;
    rows_ = rows;
    if (tiling.split == 0) {
      return;
    }
    states_.SetGlobalBuffer((__gm__ float*)states);
    pipe->InitBuffer(states_out_, 1, rows * Pitch() * sizeof(float));
    const Float lanes = NewBuffer<float>(pipe, kStateBuffers * kStateLanes);
    max_ = lanes;
    sum_ = lanes[kStateLanes];
    new_max_ = lanes[2 * kStateLanes];
    keep_ = lanes[3 * kStateLanes];
    add_ = lanes[4 * kStateLanes];
  }

  // Writes the states of the unit's rows over its piece.
  __aicore__ inline void Store(const Unit& unit, const RowState& state) {
    for (int64_t begin = 0; begin < unit.num_rows; begin += rows_) {
      StoreRows(unit, state, begin, Smaller(begin + rows_, unit.num_rows));
    }
  }

  // Folds the stored states of every row dealt to `core` into `total` and writes the row: some rows
  // of a token and KV head, up to kGranule, at a time.
  template <typename Output>
  __aicore__ inline void Combine(const Sequences& sequences, int64_t core, int64_t num_cores,
                                 Output& output, const RowState& total, const RowScratch& scratch) {
    const int64_t heads = tiling_->heads_per_kv_head;
    filled_ = pipe_->AllocEventID<AscendC::HardEvent::MTE2_V>();
    freed_ = pipe_->AllocEventID<AscendC::HardEvent::V_MTE2>();
    // The place of the states on their way out serves those on their way in.
    Float states = states_out_.template AllocTensor<float>();
    AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(freed_);
    const int64_t parts = (heads + kGranule - 1) / kGranule;  // of a token
    int64_t at = core;                                        // of the parts, the core's next one
    for (int64_t i = 0; i < sequences.Count(); ++i) {
      const Sequence sequence = sequences.At(i);
      const int64_t end = sequence.new_tokens * parts;
      for (int64_t head = 0; head < tiling_->num_kv_heads; ++head) {
        for (; at < end; at += num_cores) {
          int64_t token = 0;
          int64_t row = at;
          for (; row >= parts; row -= parts) {
            ++token;
          }
          row *= kGranule;
          const int64_t rows = Smaller(kGranule, heads - row);
          Unit unit = {sequence, i, head, token * heads + row, rows, 0, {}};
          unit.keys = KeysOfRow(*tiling_, unit, 0);
          FoldRows(unit, states, total);
          output.Write(unit, total, scratch);
        }
        at -= end;
      }
    }
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_);
    states_out_.EnQue(states);
    states = states_out_.template DeQue<float>();
    states_out_.FreeTensor(states);
    pipe_->ReleaseEventID<AscendC::HardEvent::MTE2_V>(filled_);
    pipe_->ReleaseEventID<AscendC::HardEvent::V_MTE2>(freed_);
  }

 private:
  PAGED_INLINE int64_t Width() const { return kWidth != 0 ? kWidth : tiling_->value.head_dim; }
  PAGED_INLINE int64_t Pitch() const { return Width() + kStateTail; }  // of a state

  static constexpr int64_t kStateBuffers = 5;
  static constexpr int32_t kStateLanes = kGranule * kGranule;  // a granule for each of 8 rows

  __aicore__ inline int64_t StateAt(const Row& row, int64_t piece) const {
    const int64_t index = row.token * tiling_->num_heads + row.head;
    return (index * tiling_->max_pieces + piece) * Pitch();
  }

  __aicore__ inline uint8_t RowGranules() const { return static_cast<uint8_t>(Pitch() / kGranule); }

  __aicore__ inline void StoreRows(const Unit& unit, const RowState& state, int64_t begin,
                                   int64_t end) {
    const uint8_t count = static_cast<uint8_t>(end - begin);
    const uint8_t eights = static_cast<uint8_t>(LanesOf(count) / kGranule);
    Float states = states_out_.template AllocTensor<float>();
    const AscendC::UnaryRepeatParams rows(1, 1, RowGranules(),
                                          static_cast<uint8_t>(Width() / kGranule));
    for (int64_t c = 0; c < Width(); c += kRepeatLanes) {
      AscendC::Adds(states[c], state.acc[begin * Width() + c], 0.0f, ColumnMask(Width(), c), count,
                    rows);
    }
    for (uint8_t i = 0; i < eights; ++i) {
      const int64_t row = i * kGranule;
      const AscendC::BrcbRepeatParams tails(RowGranules(), kGranule);
      AscendC::Brcb(states[row * Pitch() + Width()], state.max[begin + row], 1, tails);
      AscendC::Brcb(states[row * Pitch() + Width() + kGranule], state.sum[begin + row], 1, tails);
    }
    Barrier();
    states_out_.EnQue(states);
    states = states_out_.template DeQue<float>();
    for (int64_t r = begin; r < end;) {
      const int64_t copied = Smaller(RowsOfToken(*tiling_, unit, r), end - r);
      CopyRowsOut(states_[StateAt(RowAt(*tiling_, unit, r), unit.piece)],
                  states[(r - begin) * Pitch()], copied, Pitch(), tiling_->max_pieces * Pitch());
      r += copied;
    }
    states_out_.FreeTensor(states);
  }

  // The unit's rows, of one token, against all the keys that they see.
  __aicore__ inline void FoldRows(const Unit& unit, const Float& states, const RowState& total) {
    const int64_t rows = unit.num_rows;
    AscendC::Duplicate(max_, kLowest, kStateLanes);
    AscendC::Duplicate(sum_, 0.0f, kStateLanes);
    AscendC::Duplicate(total.acc, 0.0f, static_cast<int32_t>(rows * Width()));
    Barrier();
    const Range& keys = unit.keys;
    const int64_t end = keys.first < keys.last ? (keys.last + kPiece - 1) / kPiece : 0;
    const int64_t at = StateAt(RowAt(*tiling_, unit, 0), 0);
    for (int64_t piece = keys.first / kPiece; piece < end; ++piece) {
      AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_);
      CopyRowsIn(states, states_[at + piece * Pitch()], rows, Pitch(),
                 tiling_->max_pieces * Pitch());
      AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(filled_);
      AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(filled_);
      FoldPiece(states, total, rows);
      AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(freed_);
    }
    AscendC::BlockReduceMax(total.max, max_, 1, kRepeatLanes, 1, 1, kGranule);
    AscendC::BlockReduceMax(total.sum, sum_, 1, kRepeatLanes, 1, 1, kGranule);
    Barrier();
  }

  // Fold of row_state.h, operation by operation, where maxima, sums and factors are granules.
  __aicore__ inline void FoldPiece(const Float& states, const RowState& total, int64_t rows) {
    const int32_t lanes = static_cast<int32_t>(rows * kGranule);
    const uint8_t repeats = static_cast<uint8_t>(rows);
    const uint8_t pitch = RowGranules();
    const uint64_t granule = kGranule;
    const Float max = states[Width()];
    const Float sum = states[Width() + kGranule];
    AscendC::Max(new_max_, max_, max, granule, repeats,
                 AscendC::BinaryRepeatParams(1, 1, 1, 1, 1, pitch));
    Barrier();
    AscendC::Sub(keep_, max_, new_max_, lanes);
    AscendC::Sub(add_, max, new_max_, granule, repeats,
                 AscendC::BinaryRepeatParams(1, 1, 1, 1, pitch, 1));
    Barrier();
    AscendC::Exp(keep_, keep_, lanes);
    AscendC::Exp(add_, add_, lanes);
    AscendC::Adds(max_, new_max_, 0.0f, lanes);
    Barrier();
    AscendC::Mul(sum_, sum_, keep_, lanes);
    MultiplyRows(total.acc, keep_, rows, Width());
    Barrier();
    AscendC::MulAddDst(sum_, sum, add_, granule, repeats,
                       AscendC::BinaryRepeatParams(1, 1, 1, 1, pitch, 1));
    const AscendC::BinaryRepeatParams by_row(1, 1, 0, static_cast<uint8_t>(Width() / kGranule),
                                             pitch, 1);
    for (int64_t c = 0; c < Width(); c += kRepeatLanes) {
      AscendC::MulAddDst(total.acc[c], states[c], add_, ColumnMask(Width(), c), repeats, by_row);
    }
    Barrier();
  }

  const AttentionTilingData* tiling_;
  AscendC::TPipe* pipe_;
  int64_t rows_;
  AscendC::GlobalTensor<float> states_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> states_out_;
  // Of the rows that are combined, a granule for each.
  Float max_;
  Float sum_;
  Float new_max_;
  Float keep_;
  Float add_;
  AscendC::TEventID filled_;
  AscendC::TEventID freed_;
};
