// The softmax of one row over one piece of keys, and its state, which folds with those of other
// pieces.
//
// Invariant: with m = max, l = sum and o = acc of a state over a set of keys,
//   l = sum over keys of e^(score - m),  o = sum over keys of e^(score - m) * value.
// The state of no keys is m = -inf, l = 0, o = 0. Milakov and Gimelshein, arXiv 1805.02867; the
// fold of two states is that of FlashAttention, Dao et al., arXiv 2205.14135.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/simd_math.h"

namespace paged::cpu {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// Indices 0, 1, 2, ... by lane.
PAGED_INLINE IntVec lane_indices() {
  IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// The states of some rows over one set of keys: a view of state_floats(num_rows, acc_stride)
// floats.
struct State {
  float* max;
  float* sum;
  float* acc;  // [row][acc_stride]
  int64_t acc_stride;

  // The states of the rows from `row` on.
  PAGED_INLINE State from(int64_t row) const {
    return {max + row, sum + row, acc + row * acc_stride, acc_stride};
  }
};

// Both are multiples of 16, so that consecutive states start on cache lines.
PAGED_INLINE constexpr int64_t state_floats(int64_t num_rows, int64_t acc_stride) {
  return 2 * round_up(num_rows, 16) + num_rows * acc_stride;
}

PAGED_INLINE State state_at(float* memory, int64_t num_rows, int64_t acc_stride) {
  const int64_t padded = round_up(num_rows, 16);
  return {memory, memory + padded, memory + 2 * padded, acc_stride};
}

PAGED_INLINE void clear(const State& state, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    state.max[r] = kMinusInf;
    state.sum[r] = 0.0f;
  }
  std::memset(state.acc, 0, static_cast<size_t>(num_rows * state.acc_stride) * sizeof(float));
}

// e^(a - b) for a <= b, where b = -inf stands for "no keys": then 0.
PAGED_INLINE float weight_of(float a, float b) {
  if (b == kMinusInf) return 0.0f;
  return exp(broadcast(a - b))[0];
}

// How a dot product becomes a score: scale, softcap, ALiBi, in this order.
struct ScoreRule {
  float scale;
  float softcap;       // 0: off
  float alibi_slope;   // 0: off
  float key_distance;  // position of the tile's first key minus that of the query
};

PAGED_INLINE Vec score(const ScoreRule& rule, Vec dot, IntVec key) {
  Vec s = dot * rule.scale;
  if (rule.softcap > 0.0f) s = tanh(s / rule.softcap) * rule.softcap;
  if (rule.alibi_slope != 0.0f) {
    const Vec distance = __builtin_convertvector(key, Vec) + rule.key_distance;
    s = fma(broadcast(rule.alibi_slope), distance, s);
  }
  return s;
}

// A row's softmax over one piece: m and l of the invariant above, and by how much the weighted sum
// that comes with it is too small: the weights are rounded for it, so it is divided by their sum
// as rounded and multiplied by l.
struct RowSoftmax {
  float max;
  float sum;
  float correction = 1.0f;
};

// Where a row's softmax over one piece is computed: dot products, then scores, of keys [begin,
// end), multiples of 2 * kLanes, of which the row sees [first, last).
struct RowScores {
  float* scores;
  int64_t begin;
  int64_t end;
  int64_t first;
  int64_t last;
};

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
PAGED_INLINE float score_row(const RowScores& row, const ScoreRule& rule) {
  const IntVec lanes = lane_indices();
  Vec top = broadcast(kMinusInf);
  for (int64_t i = row.begin; i < row.end; i += kLanes) {
    const IntVec keys = lanes + static_cast<int32_t>(i);
    const Vec s = seen(row, keys) ? score(rule, load(row.scores + i), keys) : broadcast(kMinusInf);
    store(row.scores + i, s);
    top = larger(s, top);
  }
  return max(top);
}

// The same where a score is a positive scale times the dot product: leaves the dot products, -inf
// for keys that aren't seen, and returns the largest.
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

// Turns scores, in multiples of `scale`, into weights relative to the largest, `top`, and returns
// their sum. The weights go to store_weights(key, kLanes weights, kLanes weights).
template <class F>
PAGED_INLINE float weigh_row(const RowScores& row, float scale, float top, F store_weights) {
  // All scores may be -inf although keys are seen; -inf - -inf must not become NaN.
  const float reference = top == kMinusInf ? 0.0f : top;
  Vec total = broadcast(0.0f);
  for (int64_t i = row.begin; i < row.end; i += 2 * kLanes) {
    const Vec a = exp((load(row.scores + i) - reference) * scale);
    const Vec b = exp((load(row.scores + i + kLanes) - reference) * scale);
    total = total + a;
    total = total + b;
    store_weights(i, a, b);
  }
  return sum(total);
}

// Folds the row softmax `more` over later keys, with its weighted sum of values, into row `r`.
// Folding into the state of no keys copies exactly, but for the correction.
PAGED_INLINE void fold_row(const State& into, int64_t r, RowSoftmax more, const float* values) {
  const float new_max = more.max > into.max[r] ? more.max : into.max[r];
  const float keep = weight_of(into.max[r], new_max);
  const float add = weight_of(more.max, new_max);
  into.sum[r] = into.sum[r] * keep + more.sum * add;
  into.max[r] = new_max;
  float* to = into.acc + r * into.acc_stride;
  for (int64_t d = 0; d < into.acc_stride; d += kLanes) {
    store(to + d, fma(load(values + d) * more.correction, broadcast(add), load(to + d) * keep));
  }
}

}  // namespace
}  // namespace paged::cpu
