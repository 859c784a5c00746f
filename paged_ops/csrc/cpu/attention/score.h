// From dot products to scores, for one row over one piece: the one place that knows the rule.
#pragma once

#include "cpu/attention/row_span.h"
#include "cpu/simd/simd_math.h"

namespace paged::cpu {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// How a dot product becomes a score: scale, softcap, ALiBi, in this order. What a row doesn't see
// is hidden after that.
struct ScoreRule {
  float scale;
  float softcap;       // 0: off
  float alibi_slope;   // 0: off
  float key_distance;  // position of the piece's first key minus that of the query

  // Whether a score is a positive scale times the dot product, and nothing else: the softmax then
  // takes the dot products, which have the order of the scores.
  PAGED_INLINE bool is_product() const {
    return softcap == 0.0f && alibi_slope == 0.0f && scale > 0.0f;
  }

  PAGED_INLINE Vec score(Vec dot, IntVec key) const {
    Vec s = dot * scale;
    if (softcap > 0.0f) s = tanh(s / softcap) * softcap;
    if (alibi_slope != 0.0f) {
      const Vec distance = __builtin_convertvector(key, Vec) + key_distance;
      s = fma(broadcast(alibi_slope), distance, s);
    }
    return s;
  }
};

PAGED_INLINE ScoreRule score_rule(const AttentionParams& params, const QueryRow& row,
                                  int64_t first_key) {
  const float slope = params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[row.head];
  return {params.scale, params.softcap, slope, static_cast<float>(first_key - row.position)};
}

// Where a row's softmax over one piece is computed: dot products, then scores, of keys [begin,
// end), multiples of 2 * kLanes, of which the row sees [first, last).
struct RowScores {
  float* scores;
  int64_t begin;
  int64_t end;
  int64_t first;
  int64_t last;
};

// Indices 0, 1, 2, ... by lane.
PAGED_INLINE IntVec lane_indices() {
  IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// Whether keys i, i + 1, ... of a vector are seen.
PAGED_INLINE IntVec seen(const RowScores& row, IntVec keys) {
  return (keys >= static_cast<int32_t>(row.first)) & (keys < static_cast<int32_t>(row.last));
}

// Multiplies the dot products by factors of the keys.
PAGED_INLINE void multiply(const RowScores& row, const float* factors) {
  for (int64_t i = row.begin; i < row.end; i += kLanes) {
    store(row.scores + i, load(row.scores + i) * load(factors + i));
  }
}

PAGED_INLINE float largest(const RowScores& row) {
  Vec top = broadcast(kMinusInf);
  for (int64_t i = row.begin; i < row.end; i += kLanes) top = larger(load(row.scores + i), top);
  return max(top);
}

// Turns dot products into scores, -inf for keys that aren't seen, and returns the largest.
PAGED_INLINE float apply(const ScoreRule& rule, const RowScores& row) {
  const IntVec lanes = lane_indices();
  Vec top = broadcast(kMinusInf);
  for (int64_t i = row.begin; i < row.end; i += kLanes) {
    const IntVec keys = lanes + static_cast<int32_t>(i);
    const Vec s = seen(row, keys) ? rule.score(load(row.scores + i), keys) : broadcast(kMinusInf);
    store(row.scores + i, s);
    top = larger(s, top);
  }
  return max(top);
}

// The same where a score is a product: leaves the dot products, -inf for keys that aren't seen, and
// returns the largest.
PAGED_INLINE float largest_product(const RowScores& row) {
  const IntVec lanes = lane_indices();
  Vec top = broadcast(kMinusInf);
  for (int64_t i = row.begin; i < row.end; i += kLanes) {
    Vec dot = load(row.scores + i);
    if (i < row.first || i + kLanes > row.last) {
      const IntVec keys = lanes + static_cast<int32_t>(i);
      dot = seen(row, keys) ? dot : broadcast(kMinusInf);
      store(row.scores + i, dot);
    }
    top = larger(dot, top);
  }
  return max(top);
}

// What the tree mask hides from one row, of the keys of a piece: none but new tokens.
struct RowMask {
  const TreeMask& mask;
  int64_t token;
  int64_t first_new;  // key, counted from the piece's begin

  PAGED_INLINE int64_t first(int64_t key) const { return first_new > key ? first_new : key; }
  PAGED_INLINE bool hides(int64_t key) const { return !mask.at(token, key - first_new); }
};

PAGED_INLINE RowMask row_mask(const AttentionParams& params, const RowSpan& span,
                              const QueryRow& row, int64_t piece) {
  const int64_t first_new =
      params.seq_lens[span.sequence] - num_query_tokens(params, span.sequence) - piece * kPiece;
  return {params.tree_mask, row.token, first_new};
}

// Hides from a row what its mask says, and returns the largest score of the rest.
PAGED_INLINE float hide(const RowMask& mask, const RowScores& row) {
  for (int64_t key = mask.first(row.first); key < row.last; ++key) {
    if (mask.hides(key)) row.scores[key] = kMinusInf;
  }
  return largest(row);
}

// Scores in multiples of `unit`, of which the largest has `top`.
struct Scored {
  float top;
  float unit;
};

// Turns the dot products of a row of the span with the keys of a piece into scores.
PAGED_INLINE Scored score(const AttentionParams& params, const RowSpan& span, const QueryRow& row,
                          int64_t piece, const float* key_scales, const RowScores& scores) {
  const ScoreRule rule = score_rule(params, row, piece * kPiece);
  if (key_scales != nullptr) multiply(scores, key_scales);
  const bool is_product = rule.is_product();
  const float unit = is_product ? rule.scale : 1.0f;
  float top = is_product ? largest_product(scores) : apply(rule, scores);
  if (params.tree_mask.data != nullptr) top = hide(row_mask(params, span, row, piece), scores);
  return {top, unit};
}

}  // namespace
}  // namespace paged::cpu
