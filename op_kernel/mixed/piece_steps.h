// The steps of a group of one cube core and two vector cores: the units dealt to it, piece after
// piece, and in each piece band after band. So the keys and values of a piece come into L1 once for
// all bands of a unit. The three cores enumerate the same steps, each for itself. A group can walk
// through its units token by token, too: see verdict.h.
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
constexpr int64_t kFractalSize = kFractal * kFractal;

// Whole fractals around some keys.
__aicore__ inline Range SpanOf(const Range& seen) {
  return {seen.first / kFractal * kFractal, RoundUp(seen.last, kFractal)};
}

struct PieceStep {
  Unit unit;        // a band of it
  int64_t band;     // which one
  int64_t begin;    // the piece's first key
  Range seen;       // of the piece, that some row of the band sees; empty for a band without keys
  Range span;       // whole fractals around them
  Range unit_seen;  // of the piece, that some row of the unit sees
  Range unit_span;
  int64_t pitch;   // RowPitch of the band's rows
  int64_t buffer;  // of the exchange: steps with keys take them in turn
  bool has_keys;
  bool opens_piece;  // the unit's first step in the piece
  bool opens_band;
  bool closes_band;
  bool shares_piece;  // the unit has several bands
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
    num_bands_ = 0;
    band_ = 0;
    begin_ = 0;
    end_ = 0;
  }

  // Finds the group's next step. False: there is none.
  __aicore__ inline bool Next(PieceStep& step) {
    while (true) {
      while (band_ < num_bands_) {
        if (OpensStep(step, band_++)) {
          return true;
        }
      }
      begin_ += kPiece;
      if (begin_ >= end_ && !OpenUnit()) {
        return false;
      }
      band_ = 0;
      has_step_ = false;
      unit_seen_ = Within(seen_by_unit_, begin_, kPiece);
    }
  }

 private:
  // A band has a step in each piece of which it sees a key; one without keys has a step, too.
  __aicore__ inline bool OpensStep(PieceStep& step, int64_t band) {
    const Unit& unit = bands_[band];
    const Range seen = Within(unit.keys, begin_, kPiece);
    step.has_keys = seen.first < seen.last;
    const bool is_empty = unit.keys.first >= unit.keys.last;
    if (!step.has_keys && !(is_empty && !is_opened_[band])) {
      return false;
    }
    step.unit = unit;
    step.unit.piece = begin_ / kPiece;
    step.band = band;
    step.begin = begin_;
    step.seen = seen;
    step.span = SpanOf(seen);
    step.unit_seen = unit_seen_;
    step.unit_span = SpanOf(unit_seen_);
    step.pitch = RowPitch(unit.num_rows);
    step.buffer = buffer_;
    step.opens_piece = !has_step_;
    step.opens_band = !is_opened_[band];
    step.closes_band = is_empty || unit.keys.last <= begin_ + kPiece;
    step.shares_piece = num_bands_ > 1;
    is_opened_[band] = true;
    if (step.has_keys) {
      has_step_ = true;
      buffer_ = buffer_ + 1 == kExchangeBuffers ? 0 : buffer_ + 1;
    }
    return true;
  }

  __aicore__ inline bool OpenUnit() {
    if (rows_done_ == dealt_.num_rows) {
      if (!units_.Next(dealt_)) {
        num_bands_ = 0;
        return false;
      }
      rows_done_ = 0;
    }
    seen_by_unit_ = dealt_.keys;
    if (by_token_) {
      OpenBand(0, RowsOfToken(*tiling_, dealt_, rows_done_));
      seen_by_unit_ = bands_[0].keys;
      num_bands_ = 1;
    } else {
      num_bands_ = 0;
      while (rows_done_ < dealt_.num_rows) {
        OpenBand(num_bands_++, Smaller(tiling_->max_rows, dealt_.num_rows - rows_done_));
      }
    }
    begin_ = seen_by_unit_.first / kPiece * kPiece;
    end_ = seen_by_unit_.last;
    return true;
  }

  // The next `rows` rows of the unit that was dealt.
  __aicore__ inline void OpenBand(int64_t band, int64_t rows) {
    Unit& unit = bands_[band];
    unit = dealt_;
    is_opened_[band] = false;
    unit.row_begin += rows_done_;
    unit.num_rows = rows;
    rows_done_ += rows;
    if (rows < dealt_.num_rows) {
      const Range keys = KeysOfUnit(*tiling_, unit);
      unit.keys.first = Clamp(keys.first, dealt_.keys.first, dealt_.keys.last);
      unit.keys.last = Clamp(keys.last, unit.keys.first, dealt_.keys.last);
    }
  }

  const AttentionTilingData* tiling_;
  WorkUnits units_;
  bool by_token_;
  Unit dealt_;         // as it was dealt
  int64_t rows_done_;  // of it
  Unit bands_[kMostBands];
  bool is_opened_[kMostBands];
  Range seen_by_unit_;
  int64_t num_bands_;
  int64_t band_;   // the next one of the piece
  int64_t begin_;  // of the piece
  int64_t end_;    // of the last piece
  Range unit_seen_;
  bool has_step_;  // of the unit in the piece
  int64_t buffer_;
};
