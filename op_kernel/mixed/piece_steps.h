// The steps of a group of one cube core and two vector cores: the units dealt to it, piece after
// piece. The three cores enumerate the same steps, each for itself. A group can walk through its
// units token by token, too: see verdict.h.
#pragma once

#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/exchange.h"

// Rows of a fractal, and elements of 16 bits in one of its rows: matrices on the cube are multiples
// of this in each direction.
constexpr int64_t kFractal = 16;

struct PieceStep {
  Unit unit;
  int64_t begin;   // the piece's first key
  Range seen;      // of the piece, that some row sees; empty for a unit without keys
  Range span;      // whole fractals around them
  int64_t buffer;  // of the exchange: steps with keys take them in turn
  bool opens_unit;
  bool closes_unit;
};

__aicore__ inline bool HasKeys(const PieceStep& step) { return step.seen.first < step.seen.last; }

// Steps that have begun and not ended, at most kAhead, the oldest first.
class StepsInFlight {
 public:
  __aicore__ inline void Clear() {
    first_ = 0;
    count_ = 0;
  }
  __aicore__ inline bool IsFull() const { return count_ == kAhead; }
  __aicore__ inline bool IsEmpty() const { return count_ == 0; }
  __aicore__ inline void Add(const PieceStep& step) {
    steps_[(first_ + count_) % kAhead] = step;
    ++count_;
  }
  __aicore__ inline const PieceStep& Oldest() const { return steps_[first_]; }
  __aicore__ inline void DropOldest() {
    first_ = (first_ + 1) % kAhead;
    --count_;
  }

 private:
  PieceStep steps_[kAhead];
  int64_t first_;
  int64_t count_;
};

class PieceSteps {
 public:
  // Steps with keys so far decide the buffer, so a second walk goes on where the first one ended.
  __aicore__ inline void StartRing() { buffer_ = 0; }

  // With `by_token` each token's rows of a unit are a unit of their own.
  __aicore__ inline void Init(const AttentionTilingData& tiling, const Sequences& sequences,
                              int64_t group, int64_t num_groups, bool by_token) {
    tiling_ = &tiling;
    units_.Init(tiling, sequences, group, num_groups);
    by_token_ = by_token;
    dealt_.num_rows = 0;
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
    step.seen = Within(unit_.keys, step.begin, kCubePiece);
    step.span = {step.seen.first / kFractal * kFractal, RoundUp(step.seen.last, kFractal)};
    step.buffer = buffer_;
    step.opens_unit = opens_unit;
    step.closes_unit = next_begin_ >= unit_.keys.last;
    if (HasKeys(step)) {
      buffer_ = (buffer_ + 1) % kExchangeBuffers;
    }
    return true;
  }

 private:
  __aicore__ inline bool NextUnit() {
    if (rows_done_ == dealt_.num_rows) {
      if (!units_.Next(dealt_)) {
        return false;
      }
      rows_done_ = 0;
    }
    unit_ = dealt_;
    if (by_token_) {
      unit_.row_begin += rows_done_;
      unit_.num_rows = RowsOfToken(*tiling_, dealt_, rows_done_);
      const Range keys = KeysOfRow(*tiling_, unit_, 0);
      unit_.keys.first = Clamp(keys.first, dealt_.keys.first, dealt_.keys.last);
      unit_.keys.last = Clamp(keys.last, unit_.keys.first, dealt_.keys.last);
    }
    rows_done_ += unit_.num_rows;
    return true;
  }

  const AttentionTilingData* tiling_;
  WorkUnits units_;
  bool by_token_;
  Unit dealt_;         // as it was dealt
  int64_t rows_done_;  // of it
  Unit unit_;
  bool has_unit_;
  int64_t next_begin_;
  int64_t buffer_;
};
