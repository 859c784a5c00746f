// The geometry of a row span: which query row is which, which keys it sees, and how large its state
// is.
#pragma once

#include "cpu/kernels.h"

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
  const int64_t head = span.kv_head * group + row % group;
  if (span.shared != nullptr) {
    const SharedToken& token = span.shared->tokens[row / group];
    return {token.token, head, token.position};
  }
  const int64_t new_tokens = num_query_tokens(params, span.sequence);
  return {params.query_start_loc[span.sequence] + row / group, head,
          params.seq_lens[span.sequence] - new_tokens + row / group};
}

// Rows [begin, begin + count) of the span.
PAGED_INLINE RowSpan rows_of(const RowSpan& span, int64_t begin, int64_t count) {
  return {span.sequence, span.kv_head, span.row_begin + begin, count, span.shared};
}

// The same for rows one after another, without a division for each.
class RowCursor {
 public:
  PAGED_INLINE RowCursor(const AttentionParams& params, const RowSpan& span)
      : row_(query_row(params, span, 0)),
        token_(span.shared == nullptr ? nullptr
                                      : span.shared->tokens + span.row_begin / group_size(params)),
        rows_left_(span.num_rows - 1),
        first_head_(span.kv_head * group_size(params)),
        last_head_(first_head_ + group_size(params) - 1) {}

  PAGED_INLINE const QueryRow& row() const { return row_; }
  PAGED_INLINE void next() {
    if (rows_left_-- == 0) return;
    if (row_.head < last_head_) {
      ++row_.head;
    } else if (token_ == nullptr) {
      row_ = {row_.token + 1, first_head_, row_.position + 1};
    } else {
      ++token_;
      row_ = {token_->token, first_head_, token_->position};
    }
  }

 private:
  QueryRow row_;
  const SharedToken* token_;  // of the row, if the span's are shared
  int64_t rows_left_;
  int64_t first_head_;
  int64_t last_head_;
};

// The keys that a row of the span sees, of those that are attended to.
PAGED_INLINE Visible row_visible(const AttentionParams& params, const RowSpan& span,
                                 const QueryRow& row) {
  if (span.shared != nullptr) return span.shared->keys;
  return visible_to(params, params.seq_lens[span.sequence], row.position, row.token);
}

// The same of all tokens of the span that have key ranges. Kept out of the code around its calls,
// which is that of plain attention.
[[gnu::noinline, maybe_unused]] inline Visible ranges_of_span(const AttentionParams& params,
                                                              const RowSpan& span) {
  const QueryRow first = query_row(params, span, 0);
  const QueryRow last = query_row(params, span, span.num_rows - 1);
  return visible_to_some(params, params.seq_lens[span.sequence], first.position, first.token,
                         last.token - first.token + 1);
}

// All keys that some row of the span sees. Without key ranges both ends grow with the position, so
// the first and the last row decide.
PAGED_INLINE Visible span_visible(const AttentionParams& params, const RowSpan& span) {
  if (span.shared != nullptr) return span.shared->keys;
  if (params.key_ranges.data != nullptr) return ranges_of_span(params, span);
  const int64_t seq_len = params.seq_lens[span.sequence];
  const Visible first = visible(params, seq_len, query_row(params, span, 0).position);
  const Visible last =
      visible(params, seq_len, query_row(params, span, span.num_rows - 1).position);
  return {first.first, last.last};
}

// The pieces of so many keys that hold `keys`.
PAGED_INLINE PieceRange pieces_of(const Visible& keys, int64_t piece_keys) {
  if (keys.first >= keys.last) return {0, 0};
  return {keys.first / piece_keys, (keys.last + piece_keys - 1) / piece_keys};
}

// Floats of an accumulator, the weighted sum of one row's values: whole steps of what any engine
// takes.
PAGED_INLINE int64_t columns_of(const AttentionParams& params) {
  constexpr int64_t kColumnStep = 32;
  return round_up(params.pool.value.head_dim, kColumnStep);
}

// Floats of the state of `num_rows` rows over one piece: three numbers of each row, then an
// accumulator for each. All of them are multiples of 16, so that consecutive states start on cache
// lines. The first number of a row that saw no key is -inf, all else is 0.
constexpr int64_t kNumbersPerRow = 3;
PAGED_INLINE constexpr int64_t numbers_stride(int64_t num_rows) { return round_up(num_rows, 16); }
PAGED_INLINE constexpr int64_t state_floats(int64_t num_rows, int64_t columns) {
  return kNumbersPerRow * numbers_stride(num_rows) + num_rows * columns;
}
inline int64_t floats_per_state(const AttentionParams& params, int64_t num_rows) {
  return state_floats(num_rows, columns_of(params));
}

}  // namespace
}  // namespace paged::cpu
