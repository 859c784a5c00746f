// The steps of a group of one cube core and two vector cores: the units dealt to it, piece after
// piece. The three cores enumerate the same steps, each for itself. A group can walk through its
// units token by token, too: see verdict.h.
#pragma once

#include "attention_tiling_data.h"
#include "exchange.h"
#include "kernel_operator.h"
#include "sequence.h"
#include "visible.h"
#include "work_units.h"

// Rows of a fractal, and elements of 16 bits in one of its rows: matrices on the cube are multiples
// of this in each direction.
constexpr int64_t kFractal = 16;

__aicore__ inline int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

struct PieceStep {
  Unit unit;
  int64_t begin;  // the piece's first key
  Visible lanes;  // of the piece, that some row sees; empty for a unit without keys
  Visible span;   // whole fractals around the lanes
  int64_t slot;   // of the exchange: steps with keys take turns
  bool opens_unit;
  bool closes_unit;
};

__aicore__ inline bool HasKeys(const PieceStep& step) { return step.lanes.first < step.lanes.last; }

// Steps that have begun and not ended, at most kAhead, the oldest first.
template <typename Item>
class StepsInFlight {
 public:
  __aicore__ inline void Clear() {
    first_ = 0;
    count_ = 0;
  }
  __aicore__ inline bool IsFull() const { return count_ == kAhead; }
  __aicore__ inline bool IsEmpty() const { return count_ == 0; }
  __aicore__ inline void Add(const Item& item) {
    items_[(first_ + count_) % kAhead] = item;
    ++count_;
  }
  __aicore__ inline const Item& Oldest() const { return items_[first_]; }
  __aicore__ inline void DropOldest() {
    first_ = (first_ + 1) % kAhead;
    --count_;
  }

 private:
  Item items_[kAhead];
  int64_t first_;
  int64_t count_;
};

class PieceSteps {
 public:
  // Steps with keys so far decide the slot, so a second walk goes on where the first one ended.
  __aicore__ inline void StartSlots() { slot_ = 0; }

  // With `by_token` each token's rows of a unit are a unit of their own.
  __aicore__ inline void Init(const AttentionTilingData& tiling, const Sequences& sequences,
                              int64_t group, int64_t num_groups, bool by_token) {
    tiling_ = &tiling;
    units_.Init(tiling, sequences, group, num_groups);
    by_token_ = by_token;
    block_.num_rows = 0;
    rows_done_ = 0;
    has_unit_ = false;
  }

  // Finds the group's next step. False: there is none.
  __aicore__ inline bool Next(PieceStep& step) {
    const bool opens_unit = !has_unit_ || next_begin_ >= unit_.keys.last;
    if (opens_unit) {
      has_unit_ = NextUnit();
      if (!has_unit_) {
        return false;
      }
      next_begin_ = unit_.keys.first / kCubePiece * kCubePiece;
    }
    step.unit = unit_;
    step.unit.piece = next_begin_ / kCubePiece;
    step.begin = next_begin_;
    next_begin_ += kCubePiece;
    step.lanes = InTile(unit_.keys, step.begin, kCubePiece);
    step.span = {step.lanes.first / kFractal * kFractal, RoundUp(step.lanes.last, kFractal)};
    step.slot = slot_;
    step.opens_unit = opens_unit;
    step.closes_unit = next_begin_ >= unit_.keys.last;
    if (HasKeys(step)) {
      slot_ = (slot_ + 1) % kSlots;
    }
    return true;
  }

 private:
  __aicore__ inline bool NextUnit() {
    if (rows_done_ == block_.num_rows) {
      if (!units_.Next(block_)) {
        return false;
      }
      rows_done_ = 0;
    }
    unit_ = block_;
    if (by_token_) {
      unit_.row_begin += rows_done_;
      unit_.num_rows = RowsOfToken(*tiling_, block_, rows_done_);
      const Visible keys = KeysOfRow(*tiling_, unit_, 0);
      unit_.keys.first = Clamp(keys.first, block_.keys.first, block_.keys.last);
      unit_.keys.last = Clamp(keys.last, unit_.keys.first, block_.keys.last);
    }
    rows_done_ += unit_.num_rows;
    return true;
  }

  const AttentionTilingData* tiling_;
  WorkUnits units_;
  bool by_token_;
  Unit block_;         // as it was dealt
  int64_t rows_done_;  // of it
  Unit unit_;
  bool has_unit_;
  int64_t next_begin_;
  int64_t slot_;
};
