// Attention of bfloat16 queries to one piece of a float8 cache by the matrix unit.
//
// K and V are packed into panels, in the order in which tiles are read, once for all the rows that
// see the piece:
//
//   key panel    [groups of 16 keys][pairs of elements][16]     for scores = Q K^T
//   value panel  [pairs of keys][elements of head_dim_v]        for sums = P V
//
// Where there are few rows, K isn't transposed but the scores are; a score's bits are the same.
#pragma once

#include "cpu/attention/amx.h"
#include "cpu/attention/piece.h"

namespace paged::cpu {
namespace {

// The rows of 16 neighbouring keys; null for a key that the piece's rows don't hold.
template <class T>
struct KeyGroup {
  const T* rows[kTileRows];
};

template <class T>
PAGED_INLINE KeyGroup<T> key_group(const RowStream<T>& stream, int64_t begin, int64_t head_dim) {
  KeyGroup<T> group;
  for (int i = 0; i < kTileRows; ++i) {
    const int64_t key = begin + i;
    group.rows[i] = stream.holds(key) ? stream.key_rows()[key] : nullptr;
    if (group.rows[i] == nullptr) continue;
    prefetch_ahead(stream, key - stream.keys.first, head_dim * int64_t{sizeof(T)});
  }
  return group;
}

// T is the cache's element type, whose values become bfloat16 on the way into a tile, which holds
// each of them.
template <class T>
class ByTiles {
  static_assert(kIsFloat8<T>);

 public:
  PAGED_INLINE ByTiles(const AttentionParams& params, Arena arena)
      : head_dim_(params.pool.key.head_dim),
        head_dim_v_(params.pool.value.head_dim),
        depth_(round_up((head_dim_ + 1) / 2, kTileUnits)),
        columns_(columns_of(params)),
        key_panel_{arena.take<int32_t>(kPiece * depth_), 16, depth_ * 16},
        value_panel_{arena.take<int32_t>(kPiece / 2 * columns_), columns_, 16},
        queries_{arena.take<int32_t>(kBlockRows * depth_), depth_, 0},
        query_group_(arena.take<int32_t>(kTileRows * depth_)),
        staged_keys_(arena.take<int32_t>(kTileRows * depth_)),
        scores_(arena.take<float>(kBlockRows * kScoreStride)),
        weights_{arena.take<int32_t>(kWeightParts * kBlockRows * kScoreStride / 2),
                 kScoreStride / 2, kBlockRows * kScoreStride / 2},
        values_(arena.take<float>(kBlockRows * columns_)),
        stream_(params, arena),
        end_(arena.address()) {}

  // Prepares for rows of the span; false if it sees no key of the piece.
  bool look_up(const AttentionParams& params, const RowSpan& span, int64_t piece) {
    if (!cpu::look_up(params, span, piece, stream_)) return false;
    are_keys_packed_ = span.num_rows > kTileRows;
    if (are_keys_packed_) pack_keys();
    pack_values();
    return true;
  }

  // Attends up to kBlockRows rows to `keys`, those of the piece that they see, at least one.
  void attend(const AttentionParams& params, const RowSpan& rows, int64_t piece, Visible keys,
              RowSoftmax* softmax) {
    prepare_queries(params, rows);
    if (are_keys_packed_) {
      multiply_packed_keys(rows, keys);
    } else {
      multiply_key_groups(keys);
    }
    weigh_rows(params, rows, piece, keys, stream_.scales, scores_, softmax,
               [&](int64_t r, int64_t key, Vec first, Vec second) {
                 store_weights(r, key, first, second);
               });
    const int64_t begin = keys.first / kChunk * kChunk;
    const int64_t end = round_up(keys.last, kChunk);
    multiply<kWeightParts>(weights_.from(0, begin / 2), rows.num_rows,
                           value_panel_.from_row(begin / 2), (end - begin) / 2, columns_, values_,
                           columns_);
  }

  // The weighted sums of the last attend(): [kBlockRows][columns_of(params)].
  PAGED_INLINE const float* values() const { return values_; }
  PAGED_INLINE uintptr_t end() const { return end_; }

 private:
  // A weight is the sum of two bfloat16: over a quantised cache results are as exact as in float32.
  static constexpr int kWeightParts = 2;

  // Copies 16 units of each row of the group, from unit u on, to `to`: zeros for what isn't there.
  PAGED_INLINE void stage(const KeyGroup<T>& group, int64_t u, int32_t* to, int64_t stride) const {
    for (int i = 0; i < kTileRows; ++i) {
      const T* row = group.rows[i];
      store_units(to + i * stride,
                  row == nullptr ? IntVec{} : load_pairs(row + 2 * u, head_dim_ - 2 * u));
    }
  }

  void pack_keys() {
    alignas(64) int32_t staged[kTileRows][kTileUnits];
    const int64_t end = round_up(stream_.keys.last, kTile);
    for (int64_t key = stream_.keys.first / kTile * kTile; key < end; key += kTileRows) {
      const KeyGroup<T> group = key_group(stream_, key, head_dim_);
      const Panel to = key_panel_.from_group(key / kTileRows);
      for (int64_t u = 0; u < depth_; u += kTileUnits) {
        stage(group, u, staged[0], kTileUnits);
        transpose_rows(staged[0], kTileUnits, to.from_row(u).data, to.stride);
      }
    }
  }

  void pack_values() {
    const int64_t end = round_up(stream_.keys.last, kChunk);
    for (int64_t key = stream_.keys.first / kChunk * kChunk; key < end; key += 2) {
      const T* rows[2];
      for (int i = 0; i < 2; ++i) {
        rows[i] = stream_.holds(key + i) ? stream_.value_rows()[key + i] : nullptr;
        if (rows[i] == nullptr) continue;
        prefetch_ahead(stream_, stream_.num_keys + key + i - stream_.keys.first,
                       head_dim_v_ * int64_t{sizeof(T)});
      }
      int32_t* to = value_panel_.from_row(key / 2).data;
      for (int64_t d = 0; d < columns_; d += 32) {
        const T* at[2] = {};
        int64_t count[2] = {};
        for (int i = 0; i < 2; ++i) {
          if (rows[i] == nullptr) continue;
          at[i] = rows[i] + d;
          count[i] = head_dim_v_ - d;
        }
        IntVec pairs[2];
        interleave_rows(at[0], count[0], at[1], count[1], pairs);
        store_units(to + d, pairs[0]);
        store_units(to + d + 16, pairs[1]);
      }
    }
  }

  void prepare_queries(const AttentionParams& params, const RowSpan& rows) const {
    for (int64_t r = 0; r < round_up(rows.num_rows, kTileRows); ++r) {
      int32_t* to = queries_.from(r, 0).data;
      if (r >= rows.num_rows) {
        std::memset(to, 0, static_cast<size_t>(depth_ * kUnitBytes));
        continue;
      }
      const BFloat16* from = query_at<BFloat16>(params, query_row(params, rows, r));
      for (int64_t u = 0; u < depth_; u += kTileUnits) {
        store_units(to + u, load_pairs(from + 2 * u, head_dim_ - 2 * u));
      }
    }
  }

  void multiply_packed_keys(const RowSpan& rows, Visible keys) const {
    for (int64_t key = keys.first / kTile * kTile; key < keys.last; key += kTile) {
      multiply<1>(queries_, rows.num_rows, key_panel_.from_group(key / kTileRows), depth_, kTile,
                  scores_ + key, kScoreStride);
    }
  }

  void multiply_key_groups(Visible keys) const {
    for (int64_t u = 0; u < depth_; u += kTileUnits) {
      transpose_rows(queries_.from(0, u).data, depth_, query_group_ + u * 16, 16);
    }
    for (int64_t key = keys.first / kTileRows * kTileRows; key < keys.last; key += kTileRows) {
      const KeyGroup<T> group = key_group(stream_, key, head_dim_);
      for (int64_t u = 0; u < depth_; u += kTileUnits) {
        stage(group, u, staged_keys_ + u, depth_);
      }
      multiply_key_rows(staged_keys_, depth_, query_group_, depth_, scores_ + key, kScoreStride);
    }
  }

  PAGED_INLINE void store_weights(int64_t r, int64_t key, Vec first, Vec second) const {
    int32_t* to = weights_.from(r, key / 2).data;
    store_units(to, high_halves(first, second));
    store_units(to + weights_.part_stride,
                narrow_pair(first - high_half(first), second - high_half(second)));
  }

  int64_t head_dim_;
  int64_t head_dim_v_;
  int64_t depth_;    // units of a key
  int64_t columns_;  // of a value
  Panel key_panel_;
  Panel value_panel_;
  Matrix queries_;        // [kBlockRows][depth_]
  int32_t* query_group_;  // [depth_][16 rows]
  int32_t* staged_keys_;  // [16][depth_]
  float* scores_;         // [kBlockRows][kScoreStride]
  Matrix weights_;        // kWeightParts times [kBlockRows][kScoreStride / 2]
  float* values_;         // [kBlockRows][columns_]
  RowStream<T> stream_;
  uintptr_t end_;
  bool are_keys_packed_ = false;
};

}  // namespace
}  // namespace paged::cpu
