// The softmax of one row over one piece of keys, and its state, which folds with those of other
// pieces.
//
// Invariant: with m = max, l = sum and o = acc of a state over a set of keys,
//   l = sum over keys of e^(score - m),  o = sum over keys of e^(score - m) * value.
// The state of no keys is m = -inf, l = 0, o = 0. Milakov and Gimelshein, arXiv 1805.02867; the
// fold of two states is that of FlashAttention, Dao et al., arXiv 2205.14135.
#pragma once

#include "cpu/attention/score.h"

namespace paged::cpu {
namespace {

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

PAGED_INLINE State state_at(float* memory, int64_t num_rows, int64_t acc_stride) {
  const int64_t padded = numbers_stride(num_rows);
  return {memory, memory + padded, memory + kNumbersPerRow * padded, acc_stride};
}

PAGED_INLINE void clear(const State& state, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    state.max[r] = kMinusInf;
    state.sum[r] = 0.0f;
  }
  std::memset(state.acc, 0, static_cast<size_t>(num_rows * state.acc_stride) * sizeof(float));
}

// e^(a - b) for a <= b, where b = -inf stands for "no keys": then 0. Equals weigh 1, infinite ones
// too.
PAGED_INLINE float weight_of(float a, float b) {
  if (b == kMinusInf) return 0.0f;
  if (a == b) return 1.0f;
  return exp(broadcast(a - b))[0];
}

// A row's softmax over one piece: m and l of the invariant above, and by how much the weighted sum
// that comes with it is too small: the weights are rounded for it, so it is divided by their sum
// as rounded and multiplied by l.
struct RowSoftmax {
  float max;
  float sum;
  float correction = 1.0f;
};

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
