// Cuts a call into units and deals them to the cores.
//
// The words for how a call is cut, from large to small:
//
//   row      a query row: one query token with one of its heads
//   band     neighbouring rows of one sequence and KV head, up to max_rows; the head runs fastest
//   unit     what is dealt to a core, or a group: one band, or some neighbours, against all the
//   keys
//            that they see, or against one piece of them where the tiling splits
//   piece    the keys between two multiples of kPiece; it has a softmax of its own
//   tile     keys, or values, that come in from the cache at a time
//   step     what is worked on at a time: a unit's tile, or in a group a band's piece
//   group    one cube core and two vector cores
//   share    one vector core's rows of a step
//   chunk    scores that this core has in UB at a time: some keys of a share
//   slab     32 keys of a chunk, at fixed places of the piece
//   slice    sums of values that come into it at a time: some rows of a share
//   part     weights, or rows of output, that leave it at a time
//   pass     its work on one step, in rounds: one chunk of each of its jobs
//
// A block is one of the pool's, a slot a token's place in it. A granule is 32 bytes of UB, a lane
// one float of a vector. A ring is several buffers that are filled and used in the same order.
//
// Units are dealt there and back: core 0 to the last one, then the last one to core 0, and so on.
// Later units of a sequence see more keys, so dealing in one direction would give the last core the
// most. Where units don't go around evenly, the first, small ones go to fewer cores.
//
// The KV heads of a bundle take turns, so cores that work at a time read keys of several heads, and
// none of them meets all the keys first that nobody has brought into L2.
//
// Every core enumerates the same units from the lengths it reads, and takes its own: no host and no
// other core takes part. What a row's unit holds besides it doesn't reach its bits.
#pragma once

#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention_tiling_data.h"
#include "kernel_operator.h"

constexpr int64_t kBundledHeads = 8;

__aicore__ inline int64_t HeadsPerKvHead(const AttentionTilingData& tiling) {
  return tiling.heads_per_kv_head;
}

struct Unit {
  Sequence sequence;
  int64_t index;  // of the sequence
  int64_t kv_head;
  int64_t row_begin;  // rows (token, head of the KV head)
  int64_t num_rows;
  int64_t piece;  // the first one
  Range keys;     // that some row sees, inside the piece if the tiling splits
};

// One query row of a unit.
struct Row {
  int64_t token;  // of the call
  int64_t head;
  int64_t position;  // in the sequence
};

__aicore__ inline Row RowAt(const AttentionTilingData& tiling, const Unit& unit, int64_t i) {
  const int64_t row = unit.row_begin + i;
  const int64_t token = Divide(row, tiling.per_kv_head);
  const int64_t head = row - token * tiling.heads_per_kv_head;
  const Sequence& sequence = unit.sequence;
  return {sequence.first_token + token, unit.kv_head * tiling.heads_per_kv_head + head,
          sequence.length - sequence.new_tokens + token};
}

// Rows of one token are neighbours in memory: how many there are from row i of the unit on.
__aicore__ inline int64_t RowsOfToken(const AttentionTilingData& tiling, const Unit& unit,
                                      int64_t i) {
  const int64_t heads = tiling.heads_per_kv_head;
  const int64_t row = unit.row_begin + i;
  return Smaller(heads - (row - Divide(row, tiling.per_kv_head) * heads), unit.num_rows - i);
}

// The keys that row i of the unit sees, inside the unit's or not.
__aicore__ inline Range KeysOfRow(const AttentionTilingData& tiling, const Unit& unit, int64_t i) {
  return VisibleKeys(tiling, unit.sequence.length, RowAt(tiling, unit, i).position);
}

// The keys that some row of the unit sees. Both ends of what a row sees grow with its position.
__aicore__ inline Range KeysOfUnit(const AttentionTilingData& tiling, const Unit& unit) {
  return {KeysOfRow(tiling, unit, 0).first, KeysOfRow(tiling, unit, unit.num_rows - 1).last};
}

class WorkUnits {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, const Sequences& sequences,
                              int64_t core, int64_t num_cores) {
    tiling_ = &tiling;
    sequences_ = &sequences;
    next_skip_ = 2 * (num_cores - 1 - core);
    skip_after_ = 2 * core;
    skip_ = core - CountMissing(num_cores);
    if (skip_ < 0) {
      skip_ += next_skip_ + 1;
      Reverse();
    }
    sequence_ = -1;
    num_rows_ = 0;
    row_begin_ = 0;
    first_head_ = 0;
    end_head_ = 0;
    pieces_ = 1;
    at_ = -1;
    num_units_ = 0;
  }

  // Finds this core's next unit. False: there is none.
  __aicore__ inline bool Next() {
    at_ += skip_ + 1;
    while (at_ >= num_units_) {
      at_ -= num_units_;
      if (!OpenRows()) {
        num_units_ = 0;
        return false;
      }
    }
    skip_ = next_skip_;
    Reverse();
    int64_t piece = at_;
    unit_.kv_head = first_head_;
    while (piece >= pieces_) {
      piece -= pieces_;
      ++unit_.kv_head;
    }
    if (tiling_->split != 0) {
      unit_.piece = first_piece_ + piece;
      const int64_t begin = unit_.piece * kPiece;
      unit_.keys = {Larger(keys_.first, begin), Smaller(keys_.last, begin + kPiece)};
    }
    return true;
  }

  __aicore__ inline const Unit& Current() const { return unit_; }

 private:
  __aicore__ inline void Reverse() {
    const int64_t skip = next_skip_;
    next_skip_ = skip_after_;
    skip_after_ = skip;
  }

  // Units that would have to come before the first one for all to go around evenly. Pieces of a
  // unit are of one size, so it doesn't matter who takes the last ones.
  __aicore__ inline int64_t CountMissing(int64_t num_cores) const {
    if (tiling_->split != 0) {
      return 0;
    }
    int64_t units = 0;
    for (int64_t i = 0; i < sequences_->Count(); ++i) {
      const int64_t rows = sequences_->At(i).new_tokens * tiling_->heads_per_kv_head;
      units += Divide(rows + tiling_->unit_rows - 1, tiling_->per_unit) * tiling_->num_kv_heads;
    }
    // The only division, once in a launch: both numbers are the device's.
    return (num_cores - units % num_cores) % num_cores;
  }

  // Moves to the next rows of the KV heads that take turns, whose units follow each other.
  __aicore__ inline bool OpenRows() {
    row_begin_ += tiling_->unit_rows;
    if (row_begin_ >= num_rows_ && !OpenBundle()) {
      return false;
    }
    unit_.row_begin = row_begin_;
    unit_.num_rows = Smaller(tiling_->unit_rows, num_rows_ - row_begin_);
    keys_ = KeysOfUnit(*tiling_, unit_);
    first_piece_ = keys_.first / kPiece;
    unit_.keys = keys_;
    unit_.piece = first_piece_;
    // Rows that see nothing are a unit too: it writes zeros.
    pieces_ = 1;
    if (tiling_->split != 0) {
      pieces_ = Larger((keys_.last + kPiece - 1) / kPiece - first_piece_, 1);
    }
    num_units_ = (end_head_ - first_head_) * pieces_;
    return true;
  }

  // Moves to the first rows of the next KV heads that take turns.
  __aicore__ inline bool OpenBundle() {
    row_begin_ = 0;
    first_head_ = end_head_;
    if (num_rows_ == 0 || first_head_ == tiling_->num_kv_heads) {
      do {
        if (++sequence_ >= sequences_->Count()) {
          return false;
        }
        unit_.sequence = sequences_->At(sequence_);
        num_rows_ = unit_.sequence.new_tokens * tiling_->heads_per_kv_head;
      } while (num_rows_ == 0);
      unit_.index = sequence_;
      first_head_ = 0;
    }
    end_head_ = Smaller(first_head_ + kBundledHeads, tiling_->num_kv_heads);
    return true;
  }

  const AttentionTilingData* tiling_;
  const Sequences* sequences_;
  int64_t skip_;        // units of other cores before the next one
  int64_t next_skip_;   // and after it
  int64_t skip_after_;  // and after that one
  int64_t sequence_;
  int64_t num_rows_;  // of the sequence and a KV head
  int64_t row_begin_;
  int64_t first_head_;  // of those that take turns
  int64_t end_head_;
  Range keys_;           // that these rows see
  int64_t first_piece_;  // with such a key
  int64_t pieces_;       // that are units of their own
  int64_t num_units_;    // of these rows: all heads and pieces
  int64_t at_;           // this core's unit among them
  Unit unit_;
};
