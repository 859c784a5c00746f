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
  return {seen.first & -kFractal, (seen.last + kFractal - 1) & -kFractal};
}

struct PieceStep {
  Unit unit;        // a band of it
  int64_t band;     // which one
  int64_t begin;    // the piece's first key
  Range span;       // of the piece: whole fractals around the keys that some row of the band sees
  Range unit_seen;  // of the piece, that some row of the unit sees
  int64_t pitch;    // RowPitch of the band's rows
  int64_t buffer;   // of the exchange: steps with keys take them in turn
  bool has_keys;
  bool opens_piece;  // the unit's first step in the piece
  bool opens_band;
  bool closes_band;
  bool shares_piece;  // the unit has several bands
  bool is_odd;        // so is the unit's number among those of the group
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
    is_odd_ = true;
    num_rows_ = 0;
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
        const int64_t band = band_++;
        if (OpensStep(step, bands_[band], band)) {
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
  struct Band {
    int64_t row_begin;
    int64_t num_rows;
    Range keys;
    int64_t pitch;
    bool is_empty;  // without keys
    bool is_opened;
  };

  // A band has a step in each piece of which it sees a key; one without keys has a step, too.
  PAGED_INLINE bool OpensStep(PieceStep& step, Band& band, int64_t index) {
    const Range seen = num_bands_ == 1 ? unit_seen_ : Within(band.keys, begin_, kPiece);
    step.has_keys = seen.first < seen.last;
    if (!step.has_keys && !(band.is_empty && !band.is_opened)) {
      return false;
    }
    const Unit& unit = units_.Current();
    const int64_t piece = static_cast<int64_t>(static_cast<uint64_t>(begin_) / kPiece);
    step.unit = {unit.sequence, unit.index, unit.kv_head, band.row_begin,
                 band.num_rows, piece,      band.keys};
    step.band = index;
    step.begin = begin_;
    step.span = SpanOf(seen);
    step.unit_seen = unit_seen_;
    step.pitch = band.pitch;
    step.buffer = buffer_;
    step.opens_piece = !has_step_;
    step.opens_band = !band.is_opened;
    step.closes_band = band.is_empty || band.keys.last <= begin_ + kPiece;
    step.shares_piece = num_bands_ > 1;
    step.is_odd = is_odd_;
    band.is_opened = true;
    if (step.has_keys) {
      has_step_ = true;
      buffer_ = buffer_ + 1 == kExchangeBuffers ? 0 : buffer_ + 1;
    }
    return true;
  }

  __aicore__ inline bool OpenUnit() {
    if (rows_done_ == num_rows_) {
      if (!units_.Next()) {
        num_bands_ = 0;
        return false;
      }
      num_rows_ = units_.Current().num_rows;
      rows_done_ = 0;
      is_odd_ = !is_odd_;
    }
    const Unit& dealt = units_.Current();
    seen_by_unit_ = dealt.keys;
    if (by_token_) {
      OpenBand(0, RowsOfToken(*tiling_, dealt, rows_done_));
      seen_by_unit_ = bands_[0].keys;
      num_bands_ = 1;
    } else {
      num_bands_ = 0;
      while (rows_done_ < num_rows_) {
        OpenBand(num_bands_++, Smaller(tiling_->max_rows, num_rows_ - rows_done_));
      }
    }
    begin_ = seen_by_unit_.first & -kPiece;
    end_ = seen_by_unit_.last;
    return true;
  }

  // The next `rows` rows of the unit that was dealt.
  PAGED_INLINE void OpenBand(int64_t index, int64_t rows) {
    const Unit& dealt = units_.Current();
    Band& band = bands_[index];
    band.row_begin = dealt.row_begin + rows_done_;
    band.num_rows = rows;
    band.keys = dealt.keys;
    band.pitch = RowPitch(rows);
    band.is_opened = false;
    rows_done_ += rows;
    if (rows < num_rows_) {
      Unit unit = dealt;
      unit.row_begin = band.row_begin;
      unit.num_rows = rows;
      const Range keys = KeysOfUnit(*tiling_, unit);
      band.keys.first = Clamp(keys.first, dealt.keys.first, dealt.keys.last);
      band.keys.last = Clamp(keys.last, band.keys.first, dealt.keys.last);
    }
    band.is_empty = band.keys.first >= band.keys.last;
  }

  const AttentionTilingData* tiling_;
  WorkUnits units_;
  bool by_token_;
  bool is_odd_;
  int64_t num_rows_;   // of the unit that was dealt
  int64_t rows_done_;  // of them
  Band bands_[kMostBands];
  Range seen_by_unit_;
  int64_t num_bands_;
  int64_t band_;   // the next one of the piece
  int64_t begin_;  // of the piece
  int64_t end_;    // of the last piece
  Range unit_seen_;
  bool has_step_;  // of the unit in the piece
  int64_t buffer_;
};
