// Segments: the unit in which the matrix unit attends to keys of bfloat16.
//
// A segment is four pieces. Within it the sums of one row are never rescaled: each weight is
// 2^(t - reference), t the score in units of log2, with the reference that the row's first keys
// set. A reference is an integer, so that the states of segments, whose references differ, are
// folded by powers of two, which is exact.
#pragma once

#include <math.h>

#include "cpu/attention/softmax.h"

namespace paged::cpu {
namespace {

// Long enough that references, folds and the packing of panels cost little beside the products;
// short enough that its panels fit into a second cache of 2 MB (1 MB at head_dim 128), and that
// decode of a long sequence feeds many threads.
constexpr int64_t kPiecesPerSegment = 4;
constexpr int64_t kSegment = kPiecesPerSegment * kPiece;

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// Whether a score is the scale times the dot product, and nothing else: then the weights are made
// from dot products.
PAGED_INLINE bool scores_are_products(const AttentionParams& params) {
  return params.softcap == 0.0f && params.alibi_slopes == nullptr;
}

// A row's softmax over one segment. `sum` is that of the weights as bfloat16, which is what the
// weighted values are divided by; `total` that of the weights before rounding, where somebody asks
// for it, else `sum` again.
struct SegmentSoftmax {
  float reference;
  float sum;
  float total;
};

// From this sum of weights on a row may have had a weight cut to infinity: some key's score lies
// that far above the first keys'.
constexpr float kLargestSum = 0x1p126f;

// The states of some rows over some segments: a State whose `max` is a reference, with the sums of
// weights before rounding beside it. `sum` is 1/2 to 1, but 0 where no key weighs anything. The state
// of no keys has the reference -inf, and an accumulator that nobody wrote.
struct SegmentState {
  State rounded;
  float* total;

  PAGED_INLINE SegmentState from(int64_t row) const { return {rounded.from(row), total + row}; }
};

PAGED_INLINE SegmentState segment_state_at(float* memory, int64_t num_rows, int64_t columns) {
  const int64_t padded = round_up(num_rows, 16);
  return {{memory, memory + padded, memory + 3 * padded, columns}, memory + 2 * padded};
}

PAGED_INLINE void clear(const SegmentState& state, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    state.rounded.max[r] = kMinusInf;
    state.rounded.sum[r] = 0.0f;
    state.total[r] = 0.0f;
  }
}

// n such that x is 2^n times 1/2 to 1: a weighted sum divided by this power of two is no larger than
// the largest value.
PAGED_INLINE float exponent_of(float x) { return exponents(broadcast(x))[0] + 1.0f; }
PAGED_INLINE float times_power_of_two(float x, float n) {
  return times_power_of_two(broadcast(x), broadcast(n))[0];
}

// Folds the softmax of row `r` over a later segment with its weighted values, of which values(d)
// are kLanes, into the row's state.
template <class F>
PAGED_INLINE void fold_segment(const SegmentState& into, int64_t r, SegmentSoftmax more, F values) {
  if (more.reference == kMinusInf) return;  // no keys, no values
  float& reference = into.rounded.max[r];
  float& sum = into.rounded.sum[r];
  float* acc = into.rounded.acc + r * into.rounded.acc_stride;
  const bool is_first = reference == kMinusInf;
  const float exponent = more.sum == 0.0f ? 0.0f : exponent_of(more.sum);
  const float own = more.reference + exponent;
  const float top = own > reference || is_first ? own : reference;
  float keep = is_first ? 0.0f : reference - top;  // exponents of the factors
  float add = own - top - exponent;
  sum = times_power_of_two(sum, keep) + times_power_of_two(more.sum, add);
  into.total[r] = times_power_of_two(into.total[r], keep) + times_power_of_two(more.total, add);
  const float carry = sum == 0.0f ? 0.0f : exponent_of(sum);
  sum = times_power_of_two(sum, -carry);
  into.total[r] = times_power_of_two(into.total[r], -carry);
  reference = top + carry;
  keep -= carry;
  add -= carry;
  for (int64_t d = 0; d < into.rounded.acc_stride; d += kLanes) {
    Vec x = times_power_of_two(values(d), broadcast(add));
    if (!is_first) x = times_power_of_two(load(acc + d), broadcast(keep)) + x;
    store(acc + d, x);
  }
}

// Below that of any key that weighs something.
constexpr float kLowestReference = -0x1p120f;

// The same of a state over a later piece, whose maximum and weights are those of e^x.
PAGED_INLINE void fold_state(const SegmentState& into, int64_t r, const State& more) {
  const float top = more.max[0] * kLog2E;
  const bool is_empty = more.sum[0] == 0.0f;
  // Infinite values reach the accumulator even where no key weighs anything.
  const float reference = is_empty ? kLowestReference : ceilf(top);
  const float factor = is_empty ? 1.0f : exp(broadcast((top - reference) * kLn2))[0];
  const float sum = more.sum[0] * factor;
  fold_segment(into, r, {reference, sum, sum},
               [&](int64_t d) { return load(more.acc + d) * factor; });
}

}  // namespace
}  // namespace paged::cpu
