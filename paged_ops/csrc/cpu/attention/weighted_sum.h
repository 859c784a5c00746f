// Accumulators: acc[r] += sum over keys of weight[r][k] * value[k], values read in place.
//
// Each element of an accumulator adds its products key after key with fma, whatever the shape of
// the block it is computed in, so its bits depend on nothing else.
#pragma once

#include "cpu/simd/simd.h"

namespace paged::cpu {
namespace {

// What the rows of a call have in common.
template <class T>
struct WeightedSum {
  const float* weights;  // [row][weight_stride]
  int64_t weight_stride;
  const T* const* values;
  int64_t key_begin;  // both weights and values are indexed by [key_begin, key_end)
  int64_t key_end;
  float* acc;  // [row][acc_stride]
  int64_t acc_stride;
};

template <class T, int kVecs>
PAGED_INLINE void load_vectors(const T* from, Vec (&out)[kVecs]) {
#if defined(PAGED_HAS_FLOAT8_TABLES)
  if constexpr (kIsFloat8<T> && kVecs % 4 == 0) {
#pragma GCC unroll 2
    for (int i = 0; i < kVecs; i += 4) load_four(from + i * kLanes, out + i);
    return;
  }
#endif
#pragma GCC unroll 8
  for (int i = 0; i < kVecs; ++i) out[i] = load(from + i * kLanes);
}

// kRows rows, elements [d, d + kVecs * kLanes).
template <class T, int kRows, int kVecs>
PAGED_INLINE void sum_block(const WeightedSum<T>& sum, int64_t row, int64_t d) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i)
      acc[r][i] = load(sum.acc + (row + r) * sum.acc_stride + d + i * kLanes);
  }
  for (int64_t k = sum.key_begin; k < sum.key_end; ++k) {
    Vec value[kVecs];
    load_vectors(sum.values[k] + d, value);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(sum.weights[(row + r) * sum.weight_stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) acc[r][i] = fma(weight, value[i], acc[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kVecs; ++i)
      store(sum.acc + (row + r) * sum.acc_stride + d + i * kLanes, acc[r][i]);
  }
}

// kRows rows, the last n < kLanes elements. The accumulator is padded; the values are not.
template <class T, int kRows>
PAGED_INLINE void sum_tail(const WeightedSum<T>& sum, int64_t row, int64_t d, int64_t n) {
  Vec acc[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) acc[r] = load(sum.acc + (row + r) * sum.acc_stride + d);
  for (int64_t k = sum.key_begin; k < sum.key_end; ++k) {
    const Vec value = load_partial(sum.values[k] + d, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      acc[r] = fma(broadcast(sum.weights[(row + r) * sum.weight_stride + k]), value, acc[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) store(sum.acc + (row + r) * sum.acc_stride + d, acc[r]);
}

template <class T, int kRows>
PAGED_INLINE void sum_rows(const WeightedSum<T>& sum, int64_t row, int64_t head_dim) {
  // As many accumulators as dot products fit the registers beside their operands.
  constexpr int kVecs = kRows == 1 ? 8 : (kDots >= 16 ? 16 : 8) / kRows;
  int64_t d = 0;
  for (; d + kVecs * kLanes <= head_dim; d += kVecs * kLanes)
    sum_block<T, kRows, kVecs>(sum, row, d);
  for (; d + kLanes <= head_dim; d += kLanes) sum_block<T, kRows, 1>(sum, row, d);
  if (d < head_dim) sum_tail<T, kRows>(sum, row, d, head_dim - d);
}

// Rows [row_begin, row_end), all with the same keys.
template <class T>
PAGED_INLINE void weighted_sum(const WeightedSum<T>& sum, int64_t row_begin, int64_t row_end,
                               int64_t head_dim) {
  int64_t row = row_begin;
  for (; row + 4 <= row_end; row += 4) sum_rows<T, 4>(sum, row, head_dim);
  for (; row + 2 <= row_end; row += 2) sum_rows<T, 2>(sum, row, head_dim);
  if (row < row_end) sum_rows<T, 1>(sum, row, head_dim);
}

}  // namespace
}  // namespace paged::cpu
