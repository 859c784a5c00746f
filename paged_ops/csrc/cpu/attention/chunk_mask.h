// Which keys of a chunk a row sees, as bits.
#pragma once

#include "cpu/attention/piece.h"

namespace paged::cpu {
namespace {

static_assert(kChunk == 32);
constexpr uint32_t kWholeChunk = ~uint32_t{0};

// A row, and the keys that it sees but for those that a tree mask hides.
struct SeeingRow {
  QueryRow row;
  Visible seen;
};

PAGED_INLINE void look_at_rows(const AttentionParams& params, const RowSpan& span,
                               SeeingRow* rows) {
  RowCursor cursor(params, span);
  for (int64_t r = 0; r < span.num_rows; ++r, cursor.next()) {
    const QueryRow& row = cursor.row();
    rows[r] = {row, row_visible(params, span, row)};
  }
}

// Keys from `begin` on; bit i is key begin + i.
PAGED_INLINE uint32_t bits_from(int64_t key, int64_t begin) {
  const int64_t skipped = key - begin;
  if (skipped <= 0) return kWholeChunk;
  return skipped >= kChunk ? 0 : kWholeChunk << skipped;
}

// Bits of keys from `begin` on that lie in [first, last), for each lane.
PAGED_INLINE IntVec bits_between(IntVec first, IntVec last, int64_t begin) {
  const __m512i none = _mm512_setzero_si512();
  const __m512i all = _mm512_set1_epi32(-1);
  const __m512i at = _mm512_set1_epi32(static_cast<int32_t>(begin));
  const auto bits_from = [&](IntVec key) __attribute__((always_inline)) {
    return _mm512_sllv_epi32(all, _mm512_max_epi32(_mm512_sub_epi32((__m512i)key, at), none));
  };
  return (IntVec)_mm512_andnot_si512(bits_from(last), bits_from(first));
}

// The first of a sequence's new tokens, which a tree mask may hide; its length where there is no
// such mask.
PAGED_INLINE int64_t first_hidden(const AttentionParams& params, int64_t sequence) {
  const int64_t seq_len = params.seq_lens[sequence];
  if (params.tree_mask.data == nullptr) return seq_len;
  return seq_len - num_query_tokens(params, sequence);
}

// Keys [begin, begin + kChunk) that the row sees.
PAGED_INLINE uint32_t chunk_mask(const AttentionParams& params, const SeeingRow& row,
                                 int64_t first_hidden, int64_t begin) {
  uint32_t mask = bits_from(row.seen.first, begin) & ~bits_from(row.seen.last, begin);
  if (params.tree_mask.data == nullptr) return mask;
  for (int64_t i = first_hidden > begin ? first_hidden - begin : 0; i < kChunk; ++i) {
    if ((mask >> i & 1) == 0) continue;
    if (!params.tree_mask.at(row.row.token, begin + i - first_hidden)) mask &= ~(1u << i);
  }
  return mask;
}

// The keys that all of some rows see, whatever a tree mask says. Without key ranges both ends grow
// with the position, so the first and the last row decide.
PAGED_INLINE Visible seen_by_all(const AttentionParams& params, const SeeingRow* rows,
                                 int64_t num_rows, int64_t first_hidden) {
  int64_t first = rows[num_rows - 1].seen.first;
  int64_t last = rows[0].seen.last;
  if (params.key_ranges.data != nullptr) {
    for (int64_t r = 0; r < num_rows; ++r) {
      if (rows[r].seen.first > first) first = rows[r].seen.first;
      if (rows[r].seen.last < last) last = rows[r].seen.last;
    }
  }
  return {first, last < first_hidden ? last : first_hidden};
}

}  // namespace
}  // namespace paged::cpu
