// Scores of bfloat16 with packed keys, for many rows: what dot_products of keys read in place
// gives, bit for bit, with nothing to shuffle.
//
// There a dot product is kLanes partial sums, lane l adding the units (pairs of neighbouring
// elements) l, l + kLanes, ... in order, and sum_each adds the lanes. Here the lanes are kLanes
// keys: each of the partial sums is a vector, and they are added in the order of sum_each, within
// each four first and third, second and fourth, then both; then neighbouring fours, then both.
#pragma once

#include "cpu/attention/dot_products.h"
#include "cpu/attention/piece.h"

namespace paged::cpu {
namespace {

// Keys by chunks: [chunks][kLanes partial sums][steps][kChunk keys], a unit in each. Keys that
// aren't there are zeros.
struct KeyPanel {
  static_assert(kChunk == 2 * kLanes);

  int32_t* data;
  int64_t steps;  // units of each partial sum

  PAGED_INLINE int32_t* chunk(int64_t key) const { return data + key * kLanes * steps; }
};

// Fills the chunks of the panel that hold one of stream.keys.
inline void pack_keys(const RowStream<BFloat16>& stream, int64_t head_dim, const KeyPanel& panel) {
  constexpr int kStep = Products<BFloat16>::kStep;
  const int64_t end = round_up(stream.keys.last, kChunk);
  for (int64_t key = stream.keys.first / kChunk * kChunk; key < end; key += kLanes) {
    const BFloat16* rows[kLanes];
    bool is_whole = true;
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = stream.holds(key + i) ? stream.key_rows()[key + i] : nullptr;
      is_whole &= rows[i] != nullptr;
      if (rows[i] == nullptr) continue;
      prefetch_ahead(stream, key + i - stream.keys.first, head_dim * int64_t{sizeof(BFloat16)});
    }
    int32_t* to = panel.chunk(key / kChunk * kChunk) + key % kChunk;
    for (int64_t s = 0; s < panel.steps; ++s) {
      alignas(64) BFloat16 staged[kLanes][kStep];
      const BFloat16* at[kLanes];
      const int64_t count = head_dim - s * kStep;
      const bool is_staged = !is_whole || count < kStep;
      for (int i = 0; i < kLanes; ++i) {
        at[i] = is_staged ? staged[i] : rows[i] + s * kStep;
        if (!is_staged) continue;
        store_units(reinterpret_cast<int32_t*>(staged[i]),
                    rows[i] == nullptr ? IntVec{} : load_pairs(rows[i] + s * kStep, count));
      }
      transpose_pairs(at, to + s * kChunk, panel.steps * kChunk);
    }
  }
}

// For kRows rows and a chunk of keys: the partial sums of the first lane of both and of the lane
// two further on, added. kSteps are the steps, 0 for any.
template <int kRows, int kSteps>
PAGED_INLINE void add_lanes(const int32_t* queries, int64_t query_stride, const int32_t* keys,
                            int64_t steps, Vec (&sums)[kRows][2]) {
  if constexpr (kSteps != 0) steps = kSteps;
  Vec acc[2][kRows][2] = {};
#pragma GCC unroll 4
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 2
    for (int l = 0; l < 2; ++l) {
      const int32_t* at = keys + (2 * l * steps + s) * kChunk;
      const IntVec key[2] = {load_units(at), load_units(at + kLanes)};
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const IntVec query = broadcast_unit(queries[r * query_stride + s * kLanes + 2 * l]);
        acc[l][r][0] = dot_pairs(query, key[0], acc[l][r][0]);
        acc[l][r][1] = dot_pairs(query, key[1], acc[l][r][1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    sums[r][0] = acc[0][r][0] + acc[1][r][0];
    sums[r][1] = acc[0][r][1] + acc[1][r][1];
  }
}

// scores[r * score_stride + k] = queries[r] . keys[k], for kRows rows and a chunk of keys.
template <int kRows, int kSteps>
PAGED_INLINE void multiply_chunk(const int32_t* queries, const int32_t* keys, int64_t steps,
                                 float* scores, int64_t score_stride) {
  if constexpr (kSteps != 0) steps = kSteps;
  const int64_t query_stride = steps * kLanes;
  const int64_t lane = steps * kChunk;
  Vec quarters[4][kRows][2];
  for (int q = 0; q < 4; ++q) {
    Vec even[kRows][2];
    Vec odd[kRows][2];
    add_lanes<kRows, kSteps>(queries + 4 * q, query_stride, keys + 4 * q * lane, steps, even);
    add_lanes<kRows, kSteps>(queries + 4 * q + 1, query_stride, keys + (4 * q + 1) * lane, steps,
                             odd);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      quarters[q][r][0] = even[r][0] + odd[r][0];
      quarters[q][r][1] = even[r][1] + odd[r][1];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      store(scores + r * score_stride + i * kLanes,
            (quarters[0][r][i] + quarters[1][r][i]) + (quarters[2][r][i] + quarters[3][r][i]));
    }
  }
}

template <int kSteps>
PAGED_INLINE void multiply_chunks(const int32_t* queries, int64_t num_rows, const KeyPanel& panel,
                                  Visible keys, float* scores, int64_t score_stride) {
  const int64_t query_stride = panel.steps * kLanes;
  for (int64_t key = keys.first / kChunk * kChunk; key < keys.last; key += kChunk) {
    const int32_t* chunk = panel.chunk(key);
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) {
      multiply_chunk<4, kSteps>(queries + r * query_stride, chunk, panel.steps,
                                scores + r * score_stride + key, score_stride);
    }
    for (; r < num_rows; ++r) {
      multiply_chunk<1, kSteps>(queries + r * query_stride, chunk, panel.steps,
                                scores + r * score_stride + key, score_stride);
    }
  }
}

// The scores of the chunks that hold `keys`, for num_rows prepared rows of queries. The loops over
// steps of the usual lengths, head_dim 64 and 128, are unrolled: each is over in a few products.
PAGED_INLINE void multiply_packed(const BFloat16* queries, int64_t num_rows, const KeyPanel& panel,
                                  Visible keys, float* scores, int64_t score_stride) {
  const int32_t* units = reinterpret_cast<const int32_t*>(queries);
  switch (panel.steps) {
    case 2:
      return multiply_chunks<2>(units, num_rows, panel, keys, scores, score_stride);
    case 4:
      return multiply_chunks<4>(units, num_rows, panel, keys, scores, score_stride);
    default:
      return multiply_chunks<0>(units, num_rows, panel, keys, scores, score_stride);
  }
}

}  // namespace
}  // namespace paged::cpu
