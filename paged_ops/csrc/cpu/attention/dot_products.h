// Scores: the dot products of a few query rows with a few keys, read in place.
//
// A dot product is kept as kLanes partial sums over head_dim, which sum_each adds in a fixed order.
// So a score has the same bits whichever rows and keys it is computed with.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/simd.h"

namespace paged::cpu {
namespace {

// How one chunk of a query row is multiplied with one chunk of a key, of type T: widened to
// float32.
template <class T>
struct Products {
  using Query = float;  // the element type of prepared query rows
  using Operand = Vec;
  static constexpr int kStep = kLanes;
  PAGED_INLINE static Operand query(const Query* q) { return load(q); }
  PAGED_INLINE static Operand key(const T* k) { return load(k); }
  PAGED_INLINE static Operand key_partial(const T* k, int64_t n) { return load_partial(k, n); }
  PAGED_INLINE static Vec add(Vec acc, Operand q, Operand k) { return fma(q, k, acc); }
  template <class Element>
  PAGED_INLINE static void prepare(const Element* row, int64_t head_dim, Query* out) {
    int64_t d = 0;
    for (; d + kLanes <= head_dim; d += kLanes) store(out + d, load(row + d));
    if (d < head_dim) store(out + d, load_partial(row + d, head_dim - d));
  }
};

#if defined(PAGED_HAS_BF16_PAIRS)
// Copies a row and fills it with zeros up to a multiple of `step`.
PAGED_INLINE void copy_padded(const BFloat16* row, int64_t head_dim, int64_t step, BFloat16* out) {
  const int64_t padded = round_up(head_dim, step);
  std::memset(out, 0, static_cast<size_t>(padded) * sizeof(BFloat16));
  std::memcpy(out, row, static_cast<size_t>(head_dim) * sizeof(BFloat16));
}

// In pairs: two products at a time, exact, added in float32.
template <class T>
struct ProductsOfPairs {
  using Query = BFloat16;
  using Operand = IntVec;
  static constexpr int kStep = 2 * kLanes;
  PAGED_INLINE static Operand query(const Query* q) { return load_pairs(q, kStep); }
  PAGED_INLINE static Operand key(const T* k) { return load_pairs(k, kStep); }
  PAGED_INLINE static Operand key_partial(const T* k, int64_t n) {
    if (n <= 0 || n >= kStep) __builtin_unreachable();  // so there is one way through load_pairs
    return load_pairs(k, n);
  }
#if !defined(PAGED_HAS_BF16_QUADS)
  PAGED_INLINE static Vec add(Vec acc, Operand q, Operand k) { return dot_pairs(q, k, acc); }
#endif
  PAGED_INLINE static void prepare(const BFloat16* row, int64_t head_dim, Query* out) {
    copy_padded(row, head_dim, kStep, out);
  }
};
template <>
struct Products<BFloat16> : ProductsOfPairs<BFloat16> {};
#if defined(PAGED_HAS_FLOAT8_TABLES)
// The same for float8, of which 64 are looked up at a time.
template <class T>
struct Products<Paired<T>> : ProductsOfPairs<T> {
  using Query = BFloat16;
  struct Operand {
    IntVec pairs[2];
  };
  static constexpr int kStep = 4 * kLanes;
  PAGED_INLINE static Operand query(const Query* q) {
    return {{load_pairs(q, 2 * kLanes), load_pairs(q + 2 * kLanes, 2 * kLanes)}};
  }
  PAGED_INLINE static Operand key(const T* k) { return key_partial(k, kStep); }
  PAGED_INLINE static Operand key_partial(const T* k, int64_t n) {
    Operand key;
    load_64_pairs(k, n, key.pairs);
    return key;
  }
  PAGED_INLINE static Vec add(Vec acc, Operand q, Operand k) {
    return dot_pairs(q.pairs[1], k.pairs[1], dot_pairs(q.pairs[0], k.pairs[0], acc));
  }
  PAGED_INLINE static void prepare(const BFloat16* row, int64_t head_dim, Query* out) {
    copy_padded(row, head_dim, kStep, out);
  }
};
#endif
#endif

// Elements between two prepared query rows.
template <class T>
PAGED_INLINE constexpr int64_t prepared_stride(int64_t head_dim) {
  return round_up(head_dim, Products<T>::kStep);
}

// What is done to all prepared rows of a call together.
template <class T>
PAGED_INLINE void join_rows(typename Products<T>::Query*, int64_t, int64_t) {}

// scores[r * score_stride + k] = queries[r] . keys[k], for kRows rows and kDots / kRows keys.
template <class T, int kRows>
PAGED_INLINE void dot_block(const typename Products<T>::Query* queries, const T* const* keys,
                            int64_t head_dim, float* scores, int64_t score_stride) {
  using P = Products<T>;
  constexpr int kKeys = kDots / kRows;
  const int64_t query_stride = prepared_stride<T>(head_dim);
  Vec acc[kDots] = {};
  int64_t d = 0;
  for (; d + P::kStep <= head_dim; d += P::kStep) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const typename P::Operand key = P::key(keys[k] + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        acc[r * kKeys + k] =
            P::add(acc[r * kKeys + k], P::query(queries + r * query_stride + d), key);
      }
    }
  }
  if (d < head_dim) {
#pragma GCC unroll 16
    for (int k = 0; k < kKeys; ++k) {
      const typename P::Operand key = P::key_partial(keys[k] + d, head_dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        acc[r * kKeys + k] =
            P::add(acc[r * kKeys + k], P::query(queries + r * query_stride + d), key);
      }
    }
  }
  float sums[kDots];
#pragma GCC unroll 4
  for (int i = 0; i < kDots; i += kLanes) {
    store(sums + i, sum_each(reinterpret_cast<const Vec(&)[kLanes]>(acc[i])));
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(scores + r * score_stride, sums + r * kKeys, kKeys * sizeof(float));
  }
}

template <class T, int kRows>
PAGED_INLINE void dot_rows(const typename Products<T>::Query* queries, const T* const* keys,
                           int64_t num_keys, int64_t head_dim, float* scores,
                           int64_t score_stride) {
  constexpr int kKeys = kDots / kRows;
  int64_t k = 0;
  for (; k + kKeys <= num_keys; k += kKeys) {
    dot_block<T, kRows>(queries, keys + k, head_dim, scores + k, score_stride);
  }
  if (k < num_keys) {
    const T* last[kKeys];
    for (int i = 0; i < kKeys; ++i) last[i] = keys[k + i < num_keys ? k + i : num_keys - 1];
    dot_block<T, kRows>(queries, last, head_dim, scores + k, score_stride);
  }
}

// scores[r * score_stride + k] for num_rows rows and num_keys keys. Writes up to kDots - 1 scores
// of no meaning past num_keys in each row.
template <class T>
PAGED_INLINE void dot_products(const typename Products<T>::Query* queries, int64_t num_rows,
                               const T* const* keys, int64_t num_keys, int64_t head_dim,
                               float* scores, int64_t score_stride) {
  const int64_t query_stride = prepared_stride<T>(head_dim);
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4) {
    dot_rows<T, 4>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                   score_stride);
  }
  for (; r + 2 <= num_rows; r += 2) {
    dot_rows<T, 2>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                   score_stride);
  }
  if (r < num_rows) {
    dot_rows<T, 1>(queries + r * query_stride, keys, num_keys, head_dim, scores + r * score_stride,
                   score_stride);
  }
}

}  // namespace
}  // namespace paged::cpu

#if defined(PAGED_HAS_BF16_QUADS)
#include "cpu/attention/quad_products.h"  // of bfloat16
#endif
