// The running ("online") softmax of one row, a tile of kTile keys at a time, and its foldable
// state.
//
// Invariant: with m = max, l = sum and o = acc of a state over a set of keys,
//   l = sum over keys of e^(score - m),  o = sum over keys of e^(score - m) * value.
// The state of no keys is m = -inf, l = 0, o = 0. Milakov and Gimelshein, arXiv 1805.02867; the
// fold of two states is that of FlashAttention, Dao et al., arXiv 2205.14135.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd_math.h"

namespace paged::cpu {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// Indices 0, 1, 2, ... by lane.
PAGED_INLINE IntVec lane_indices() {
  IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// The running state of kMaxRows rows over one stretch of keys: a view of kMaxRows * (2 +
// acc_stride) floats.
struct State {
  float* max;
  float* sum;
  float* acc;  // [kMaxRows][acc_stride]
  int64_t acc_stride;
};

PAGED_INLINE constexpr int64_t state_floats(int64_t acc_stride) {
  return kMaxRows * (2 + acc_stride);
}

PAGED_INLINE State state_at(float* memory, int64_t acc_stride) {
  return {memory, memory + kMaxRows, memory + 2 * kMaxRows, acc_stride};
}

PAGED_INLINE void clear(const State& state, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    state.max[r] = kMinusInf;
    state.sum[r] = 0.0f;
  }
  std::memset(state.acc, 0, static_cast<size_t>(num_rows * state.acc_stride) * sizeof(float));
}

PAGED_INLINE void scale_row(float* row, int64_t width, float factor) {
  for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * factor);
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

// Turns the dot products of a row with the keys of a tile into weights relative to the new maximum,
// in place: 0 for keys outside [first, last), which must not be empty. Updates the row's max and
// sum, and returns the factor by which its accumulator must shrink.
PAGED_INLINE float softmax_tile(float* scores, int64_t first, int64_t last, const ScoreRule& rule,
                                float& running_max, float& running_sum) {
  const IntVec lanes = lane_indices();
  const int32_t begin = static_cast<int32_t>(first);
  const int32_t end = static_cast<int32_t>(last);
  Vec top = broadcast(kMinusInf);
  for (int32_t i = 0; i < kTile; i += kLanes) {
    const IntVec key = lanes + i;
    const IntVec seen = (key >= begin) & (key < end);
    const Vec s = seen ? score(rule, load(scores + i), key) : broadcast(kMinusInf);
    store(scores + i, s);
    top = s > top ? s : top;
  }
  const float tile_max = max(top);
  const float new_max = tile_max > running_max ? tile_max : running_max;
  // All scores may be -inf although keys are seen; -inf - -inf must not become NaN.
  const float reference = new_max == kMinusInf ? 0.0f : new_max;
  Vec total = broadcast(0.0f);
  for (int32_t i = 0; i < kTile; i += kLanes) {
    const Vec weight = exp(load(scores + i) - reference);
    store(scores + i, weight);
    total = total + weight;
  }
  const float shrink = exp(broadcast(running_max - reference))[0];
  running_sum = running_sum * shrink + sum(total);
  running_max = new_max;
  return shrink;
}

// Folds `from`, the state over later keys, into `into`. Folding into an empty state copies exactly.
PAGED_INLINE void fold(const State& into, const State& from, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float new_max = from.max[r] > into.max[r] ? from.max[r] : into.max[r];
    const float keep = weight_of(into.max[r], new_max);
    const float add = weight_of(from.max[r], new_max);
    into.sum[r] = into.sum[r] * keep + from.sum[r] * add;
    into.max[r] = new_max;
    float* to = into.acc + r * into.acc_stride;
    const float* more = from.acc + r * from.acc_stride;
    for (int64_t d = 0; d < into.acc_stride; d += kLanes) {
      store(to + d, fma(load(more + d), broadcast(add), load(to + d) * keep));
    }
  }
}

}  // namespace
}  // namespace paged::cpu
