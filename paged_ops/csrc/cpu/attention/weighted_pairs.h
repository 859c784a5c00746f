// Accumulators of bfloat16 values, two keys at a time: acc[r] += sum over pairs of keys of
// weight[r][2p] * value[2p] + weight[r][2p + 1] * value[2p + 1].
//
// A weight is one bfloat16. Pairs begin at even keys, and each element of an accumulator adds them
// in order, so its bits depend neither on the shape of the block it is computed in nor on where
// the values are read. A key that isn't there counts as zeros.
#pragma once

#include "cpu/attention/softmax.h"

namespace paged::cpu {
namespace {

// Columns of two rows that are interleaved at a time: two vectors of pairs.
constexpr int64_t kPairColumns = 2 * kLanes;

// Values read where they lie, interleaved on the way.
struct PairedRows {
  const BFloat16* const* rows;  // by key: those of [key_begin, key_end) are there
  int64_t key_begin;
  int64_t key_end;
  int64_t head_dim;

  // Both rows of a whole pair are there.
  template <bool kIsWhole>
  PAGED_INLINE void load(int64_t pair, int64_t column, IntVec (&units)[2]) const {
    const int64_t count = head_dim - column;
    const bool has_first = kIsWhole || 2 * pair >= key_begin;
    const bool has_second = kIsWhole || 2 * pair + 1 < key_end;
    interleave_rows(has_first ? rows[2 * pair] + column : nullptr, has_first ? count : 0,
                    has_second ? rows[2 * pair + 1] + column : nullptr, has_second ? count : 0,
                    units);
  }
};

// Values interleaved before: [pairs of keys][stride].
struct PairPanel {
  int32_t* data;
  int64_t stride;

  template <bool kIsWhole>
  PAGED_INLINE void load(int64_t pair, int64_t column, IntVec (&units)[2]) const {
    const int32_t* from = data + pair * stride + column;
    units[0] = load_units(from);
    units[1] = load_units(from + kLanes);
  }
};

// Fills the panel with the pairs of keys of which at least one is there.
inline void pack_pairs(const PairedRows& values, const PairPanel& panel) {
  const int64_t end = (values.key_end + 1) / 2;
  for (int64_t pair = values.key_begin / 2; pair < end; ++pair) {
    int32_t* to = panel.data + pair * panel.stride;
    for (int64_t column = 0; column < values.head_dim; column += kPairColumns) {
      IntVec units[2];
      values.load<false>(pair, column, units);
      store_units(to + column, units[0]);
      store_units(to + column + kLanes, units[1]);
    }
  }
}

// What the rows of a call have in common.
template <class Values>
struct PairSum {
  const int32_t* weights;  // [row][weight_stride], a pair in each
  int64_t weight_stride;
  Values values;
  int64_t key_begin;
  int64_t key_end;
  float* acc;  // [row][acc_stride]
  int64_t acc_stride;
};

template <bool kIsWhole, int kRows, int kGroups, class Values>
PAGED_INLINE void add_pair(const PairSum<Values>& sum, int64_t row, int64_t column, int64_t pair,
                           Vec (&acc)[kRows][2 * kGroups]) {
  IntVec weights[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    weights[r] = broadcast_unit(sum.weights[(row + r) * sum.weight_stride + pair]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {
    IntVec values[2];
    sum.values.template load<kIsWhole>(pair, column + g * kPairColumns, values);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      acc[r][2 * g] = dot_pairs(weights[r], values[0], acc[r][2 * g]);
      acc[r][2 * g + 1] = dot_pairs(weights[r], values[1], acc[r][2 * g + 1]);
    }
  }
}

// kRows rows, kGroups groups of kPairColumns columns from `column` on.
template <int kRows, int kGroups, class Values>
PAGED_INLINE void sum_pairs_block(const PairSum<Values>& sum, int64_t row, int64_t column) {
  float* to = sum.acc + row * sum.acc_stride + column;
  Vec acc[kRows][2 * kGroups];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kGroups; ++i) acc[r][i] = load(to + r * sum.acc_stride + i * kLanes);
  }
  int64_t pair = sum.key_begin / 2;
  if (sum.key_begin % 2 != 0) add_pair<false, kRows, kGroups>(sum, row, column, pair++, acc);
  for (; pair < sum.key_end / 2; ++pair) {
    add_pair<true, kRows, kGroups>(sum, row, column, pair, acc);
  }
  if (2 * pair < sum.key_end) add_pair<false, kRows, kGroups>(sum, row, column, pair, acc);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kGroups; ++i) store(to + r * sum.acc_stride + i * kLanes, acc[r][i]);
  }
}

template <int kRows, class Values>
PAGED_INLINE void sum_pairs_rows(const PairSum<Values>& sum, int64_t row, int64_t num_columns) {
  // Sixteen accumulators, but no more than four groups.
  constexpr int kGroups = kRows == 4 ? 2 : 4;
  int64_t column = 0;
  for (; column + kGroups * kPairColumns <= num_columns; column += kGroups * kPairColumns) {
    sum_pairs_block<kRows, kGroups>(sum, row, column);
  }
  for (; column < num_columns; column += kPairColumns) sum_pairs_block<kRows, 1>(sum, row, column);
}

// num_columns is a multiple of kPairColumns.
template <class Values>
void sum_pairs(const PairSum<Values>& sum, int64_t num_rows, int64_t num_columns) {
  int64_t row = 0;
  for (; row + 4 <= num_rows; row += 4) sum_pairs_rows<4>(sum, row, num_columns);
  for (; row + 2 <= num_rows; row += 2) sum_pairs_rows<2>(sum, row, num_columns);
  if (row < num_rows) sum_pairs_rows<1>(sum, row, num_columns);
}

// Makes up for the rounding of one row's weights for keys [begin, end), multiples of kPairColumns.
PAGED_INLINE void correct(RowSoftmax& softmax, const int32_t* weights, int64_t begin, int64_t end) {
  constexpr int32_t kOnes = 0x3f803f80;
  Vec total = broadcast(0.0f);
  for (int64_t key = begin; key < end; key += kPairColumns) {
    total = dot_pairs(load_units(weights + key / 2), broadcast_unit(kOnes), total);
  }
  const float rounded = sum(total);
  if (rounded != 0.0f) softmax.correction = softmax.sum / rounded;
}

}  // namespace
}  // namespace paged::cpu
