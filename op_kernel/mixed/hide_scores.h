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

// Which keys of a piece some rows of a unit see.
struct Visibility {
  Range by_any;
  Range by_all;
  int64_t position;  // of the first row, counted from the piece's first key
  int64_t head;      // of the first row among those of its token
};

__aicore__ inline Visibility VisibilityOf(const AttentionTilingData& tiling, const Unit& unit,
                                          int64_t begin) {
  const Row row = RowAt(tiling, unit, 0);
  const Range first = VisibleKeys(tiling, unit.sequence.length, row.position);
  const Range last = KeysOfRow(tiling, unit, unit.num_rows - 1);
  return {{first.first - begin, last.last - begin},
          {last.first - begin, first.last - begin},
          row.position - begin,
          row.head - unit.kv_head * tiling.heads_per_kv_head};
}

// Further than any row.
constexpr int64_t kNoRow = int64_t{1} << 62;

// Bits [0, n) of 64.
PAGED_INLINE uint64_t BitsBelow(int64_t n) {
  return n <= 0 ? 0 : n >= 64 ? ~0ULL : (1ULL << n) - 1;
}

// Hides keys [first, last) of a chunk that begins with key `origin` of the piece from the rows that
// don't see them. Each token's rows see what those of the token before see, a key later.
__aicore__ inline void HideKeys(const AttentionTilingData& tiling, const Visibility& seen,
                                const ScoreChunk& chunk, int64_t first, int64_t last,
                                int64_t origin) {
  const int64_t heads = tiling.heads_per_kv_head;
  const uint64_t lanes = BitsBelow(chunk.rows);
  const int64_t row = (origin + first - seen.position) * heads - seen.head;
  if (tiling.sliding_window == 0) {
    // Rows see keys up to their own: some of the chunk's, and not all of them, come too early.
    for (int64_t k = first, early = row; k < last; ++k, early += heads) {
      uint64_t mask[2] = {((1ULL << early) - 1) & lanes, 0};
      AscendC::Duplicate(chunk.scores[k * chunk.rows], kMinusInf, mask, 1, 1, kGranule);
    }
    return;
  }
  // Under the causal mask the rows before this one come too early for the key.
  int64_t early = tiling.causal != 0 ? row : -kNoRow;
  // Those from this one on come too late.
  int64_t late = row + tiling.sliding_window * heads;
  for (int64_t k = first; k < last; ++k, early += heads, late += heads) {
    uint64_t mask[2] = {(BitsBelow(early) | ~BitsBelow(late)) & lanes, 0};
    if (mask[0] != 0) {
      AscendC::Duplicate(chunk.scores[k * chunk.rows], kMinusInf, mask, 1, 1, kGranule);
    }
  }
}

// The chunk begins with key `origin` of the piece.
__aicore__ inline void HideScores(const AttentionTilingData& tiling, const Visibility& seen,
                                  const ScoreChunk& chunk, int64_t origin) {
  const Range by_any = Within(seen.by_any, origin, chunk.keys);
  const int64_t all_first = Clamp(seen.by_all.first - origin, by_any.first, by_any.last);
  const int64_t all_last = Clamp(seen.by_all.last - origin, all_first, by_any.last);
  SetKeys(chunk, 0, by_any.first, kMinusInf);
  SetKeys(chunk, by_any.last, chunk.keys, kMinusInf);
  HideKeys(tiling, seen, chunk, by_any.first, all_first, origin);
  HideKeys(tiling, seen, chunk, all_last, by_any.last, origin);
  Barrier();
}
