// Scores of bfloat16 where the ISA multiplies matrices of 2 x 4 and 4 x 2: two rows with two keys.
//
// A dot product is two sums, of the first and of the last four of every eight elements, each added
// in order, and then their sum; so its bits don't depend on the rows and keys it is computed with.
// One row alone takes its own two halves for the two rows, and those of a key for the two keys: the
// diagonal of that product is what is wanted, and nothing is shuffled.
#pragma once

#include "cpu/attention/dot_products.h"

namespace paged::cpu {
namespace {

// Joins rows two by two: of every eight elements, the first four of both rows come to lie where the
// first row was, and the last four of both where the second was. An odd last row stays.
template <>
PAGED_INLINE void join_rows<BFloat16>(BFloat16* queries, int64_t num_rows, int64_t head_dim) {
  constexpr int kStep = Products<BFloat16>::kStep;
  const int64_t stride = prepared_stride<BFloat16>(head_dim);
  for (int64_t r = 0; r + 2 <= num_rows; r += 2) {
    BFloat16* first = queries + r * stride;
    for (int64_t d = 0; d < stride; d += kStep) {
      const IntVec a = load_pairs(first + d, kStep);
      const IntVec b = load_pairs(first + stride + d, kStep);
      store_pairs(first + d, first_halves(a, b));
      store_pairs(first + stride + d, last_halves(a, b));
    }
  }
}

// scores[r * score_stride + k] = queries[r] . keys[k], for kRows joined rows and kKeys keys.
template <int kRows, int kKeys>
PAGED_INLINE void joined_block(const BFloat16* queries, const BFloat16* const* keys,
                               int64_t head_dim, float* scores, int64_t score_stride) {
  using P = Products<BFloat16>;
  const int64_t query_stride = prepared_stride<BFloat16>(head_dim);
  Vec acc[kKeys / 2][kRows] = {};  // the first sums of two rows, then their last sums
  const auto add = [&](int64_t d, auto load_key) {
#pragma GCC unroll 8
    for (int k = 0; k < kKeys / 2; ++k) {
      const IntVec a = load_key(keys[2 * k] + d);
      const IntVec b = load_key(keys[2 * k + 1] + d);
      const IntVec halves[2] = {first_halves(a, b), last_halves(a, b)};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        acc[k][r] = add_quads(P::query(queries + r * query_stride + d), halves[r % 2], acc[k][r]);
      }
    }
  };
  int64_t d = 0;
  for (; d + P::kStep <= head_dim; d += P::kStep) add(d, P::key);
  if (d < head_dim) add(d, [&](const BFloat16* k) { return P::key_partial(k, head_dim - d); });
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r += 2) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeys / 2; k += 2) {
      const IntVec a = (IntVec)(acc[k][r] + acc[k][r + 1]);
      const IntVec b = (IntVec)(acc[k + 1][r] + acc[k + 1][r + 1]);
      store(scores + r * score_stride + 2 * k, (Vec)first_halves(a, b));
      store(scores + (r + 1) * score_stride + 2 * k, (Vec)last_halves(a, b));
    }
  }
}

// The same for one row, as it was prepared, and kDots keys.
PAGED_INLINE void single_block(const BFloat16* query, const BFloat16* const* keys, int64_t head_dim,
                               float* scores) {
  using P = Products<BFloat16>;
  Vec acc[kDots] = {};
  const auto add = [&](int64_t d, auto load_key) {
    const IntVec q = P::query(query + d);
#pragma GCC unroll 16
    for (int k = 0; k < kDots; ++k) acc[k] = add_quads(q, load_key(keys[k] + d), acc[k]);
  };
  int64_t d = 0;
  for (; d + P::kStep <= head_dim; d += P::kStep) add(d, P::key);
  if (d < head_dim) add(d, [&](const BFloat16* k) { return P::key_partial(k, head_dim - d); });
#pragma GCC unroll 4
  for (int k = 0; k < kDots; k += kLanes) {
    store(scores + k, sum_diagonals({acc[k], acc[k + 1], acc[k + 2], acc[k + 3]}));
  }
}

template <int kRows>
PAGED_INLINE void quad_rows(const BFloat16* queries, const BFloat16* const* keys, int64_t num_keys,
                            int64_t head_dim, float* scores, int64_t score_stride) {
  // As many accumulators in every form.
  constexpr int kKeys = kRows == 1 ? kDots : 2 * kDots / kRows;
  const auto block = [&](const BFloat16* const* some, int64_t k) {
    if constexpr (kRows == 1) {
      single_block(queries, some, head_dim, scores + k);
    } else {
      joined_block<kRows, kKeys>(queries, some, head_dim, scores + k, score_stride);
    }
  };
  int64_t k = 0;
  for (; k + kKeys <= num_keys; k += kKeys) block(keys + k, k);
  if (k < num_keys) {
    const BFloat16* last[kKeys];
    for (int i = 0; i < kKeys; ++i) last[i] = keys[k + i < num_keys ? k + i : num_keys - 1];
    block(last, k);
  }
}

template <>
PAGED_INLINE void dot_products<BFloat16>(const BFloat16* queries, int64_t num_rows,
                                         const BFloat16* const* keys, int64_t num_keys,
                                         int64_t head_dim, float* scores, int64_t score_stride) {
  const int64_t query_stride = prepared_stride<BFloat16>(head_dim);
  int64_t r = 0;
  for (; r + 8 <= num_rows; r += 8) {
    quad_rows<8>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                 score_stride);
  }
  for (; r + 4 <= num_rows; r += 4) {
    quad_rows<4>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                 score_stride);
  }
  for (; r + 2 <= num_rows; r += 2) {
    quad_rows<2>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                 score_stride);
  }
  if (r < num_rows) {
    quad_rows<1>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                 score_stride);
  }
}

}  // namespace
}  // namespace paged::cpu
