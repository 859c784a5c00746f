// The geometry of a row span: which query row is which, and which keys it sees.
#pragma once

#include "cpu/kernels.h"
#include "params.h"

namespace paged::cpu {
namespace {

PAGED_INLINE int64_t group_size(const AttentionParams& params) {
  return params.num_heads / params.pool.num_kv_heads;
}

PAGED_INLINE int64_t num_query_tokens(const AttentionParams& params, int64_t sequence) {
  return params.query_start_loc[sequence + 1] - params.query_start_loc[sequence];
}

// One query row: its token and head in the call's tensors, its position in the sequence.
struct QueryRow {
  int64_t token;
  int64_t head;
  int64_t position;
};

PAGED_INLINE QueryRow query_row(const AttentionParams& params, const RowSpan& span, int64_t i) {
  const int64_t group = group_size(params);
  const int64_t row = span.row_begin + i;
  const int64_t new_tokens = num_query_tokens(params, span.sequence);
  return {params.query_start_loc[span.sequence] + row / group, span.kv_head * group + row % group,
          params.seq_lens[span.sequence] - new_tokens + row / group};
}

// All keys that some row of the span sees. Both ends grow with the position, so the first and the
// last row decide.
PAGED_INLINE Visible span_visible(const AttentionParams& params, const RowSpan& span) {
  const int64_t seq_len = params.seq_lens[span.sequence];
  const Visible first = visible(params, seq_len, query_row(params, span, 0).position);
  const Visible last =
      visible(params, seq_len, query_row(params, span, span.num_rows - 1).position);
  return {first.first, last.last};
}

// The pieces of kPiece keys that hold `keys`: [begin, end).
struct PieceRange {
  int64_t begin;
  int64_t end;
};

PAGED_INLINE PieceRange pieces_of(const Visible& keys) {
  if (keys.first >= keys.last) return {0, 0};
  return {keys.first / kPiece, (keys.last + kPiece - 1) / kPiece};
}

}  // namespace
}  // namespace paged::cpu
