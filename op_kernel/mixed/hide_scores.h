// -inf where a row doesn't see a key, for a chunk of scores.
//
// Both ends of what a row sees grow with the row, so a key is seen by neighbouring rows: by all
// from where the last row begins to see to where the first one ends.
#pragma once

#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "kernel_operator.h"
#include "mixed/score_chunk.h"

// The rows of a unit that see a key, for keys in ascending order.
class SeeingRows {
 public:
  __aicore__ inline SeeingRows(const AttentionTilingData& tiling, const Unit& unit)
      : tiling_(&tiling), unit_(&unit), rows_({0, 0}) {}

  __aicore__ inline Range At(int64_t key) {
    while (rows_.first < unit_->num_rows && KeysOfRow(*tiling_, *unit_, rows_.first).last <= key) {
      rows_.first += RowsOfToken(*tiling_, *unit_, rows_.first);
    }
    while (rows_.last < unit_->num_rows && KeysOfRow(*tiling_, *unit_, rows_.last).first <= key) {
      rows_.last += RowsOfToken(*tiling_, *unit_, rows_.last);
    }
    return rows_;
  }

 private:
  const AttentionTilingData* tiling_;
  const Unit* unit_;
  Range rows_;
};

// Hides keys [first, last) of a chunk that begins with key `origin` from the rows that don't see
// them.
__aicore__ inline void HideKeys(const ScoreChunk& chunk, int64_t first, int64_t last,
                                int64_t origin, SeeingRows& seeing) {
  const uint64_t lanes = MaskOf({0, chunk.rows});
  for (int64_t k = first; k < last; ++k) {
    uint64_t mask[2] = {lanes & ~MaskOf(seeing.At(origin + k)), 0};
    if (mask[0] != 0) {
      AscendC::Duplicate(chunk.scores[k * chunk.rows], kMinusInf, mask, 1, 1, kGranule);
    }
  }
}

// The chunk begins with key `origin` of the sequence.
__aicore__ inline void HideScores(const AttentionTilingData& tiling, const Unit& unit,
                                  const ScoreChunk& chunk, int64_t origin) {
  const Range first_row = Within(KeysOfRow(tiling, unit, 0), origin, chunk.keys);
  const Range last_row = Within(KeysOfRow(tiling, unit, unit.num_rows - 1), origin, chunk.keys);
  if (last_row.first == 0 && first_row.last == chunk.keys) {
    return;
  }
  SetKeys(chunk, 0, first_row.first, kMinusInf);
  SetKeys(chunk, last_row.last, chunk.keys, kMinusInf);
  SeeingRows seeing(tiling, unit);
  const int64_t all_last = Larger(last_row.first, first_row.last);
  HideKeys(chunk, first_row.first, Smaller(last_row.first, last_row.last), origin, seeing);
  HideKeys(chunk, all_last, last_row.last, origin, seeing);
  Barrier();
}
