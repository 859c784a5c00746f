// Attention to one piece by vector instructions.
//
// K and V are read where they lie, but for bfloat16 where more rows than a block see them and the
// ISA interleaves rows: these blocks share panels of K and V, packed once. A result's bits are the
// same.
#pragma once

#include "cpu/attention/dot_products.h"
#include "cpu/attention/piece.h"
#include "cpu/attention/weighted_sum.h"
#if defined(PAGED_HAS_INTERLEAVED_ROWS)
#include "cpu/attention/transposed_keys.h"
#include "cpu/attention/weighted_pairs.h"
#endif

namespace paged::cpu {
namespace {

// How keys are multiplied with prepared queries: where they lie.
template <class T>
class KeyProducts {
 public:
  using Query = typename Products<T>::Query;

  PAGED_INLINE KeyProducts(const AttentionParams& params, Arena&)
      : head_dim_(params.pool.key.head_dim) {}

  // Prepares for a span of `num_rows` rows.
  PAGED_INLINE void look_up(const RowStream<T>&, int64_t) const {}

  // Writes the scores of `keys`, and others of no meaning in the chunks that hold them.
  PAGED_INLINE void multiply(const RowStream<T>& stream, const Query* queries, int64_t num_rows,
                             Visible keys, float* scores) const {
    dot_products<T>(queries, num_rows, stream.key_rows() + keys.first, keys.last - keys.first,
                    head_dim_, scores + keys.first, kScoreStride);
  }

 private:
  int64_t head_dim_;
};

#if defined(PAGED_HAS_INTERLEAVED_ROWS)
// Blocks of rows share a panel of transposed keys; a single block reads them where they lie, once
// they are asked for.
template <>
class KeyProducts<BFloat16> {
 public:
  PAGED_INLINE KeyProducts(const AttentionParams& params, Arena& arena)
      : head_dim_(params.pool.key.head_dim),
        steps_(prepared_stride<BFloat16>(head_dim_) / Products<BFloat16>::kStep),
        panel_{arena.take<int32_t>(kPiece * kLanes * steps_), steps_} {}

  PAGED_INLINE void look_up(const RowStream<BFloat16>& stream, int64_t num_rows) {
    is_packed_ = num_rows > kBlockRows;
    if (is_packed_) pack_keys(stream, head_dim_, panel_);
  }

  PAGED_INLINE void multiply(const RowStream<BFloat16>& stream, const BFloat16* queries,
                             int64_t num_rows, Visible keys, float* scores) const {
    if (is_packed_) {
      multiply_packed(queries, num_rows, panel_, keys, scores, kScoreStride);
    } else {
      dot_products<BFloat16>(queries, num_rows, stream.key_rows() + keys.first,
                             keys.last - keys.first, head_dim_, scores + keys.first, kScoreStride);
    }
  }

 private:
  int64_t head_dim_;
  int64_t steps_;
  KeyPanel panel_;
  bool is_packed_ = false;
};
#endif

// How values are summed: key by key, with float32 weights.
template <class T>
class ValueSums {
 public:
  PAGED_INLINE ValueSums(const AttentionParams& params, Arena&)
      : head_dim_(params.pool.value.head_dim), columns_(columns_of(params)) {}

  // Prepares for a span of `num_rows` rows.
  PAGED_INLINE void look_up(const RowStream<T>&, int64_t) const {}

  // Leaves the weights in place of the row's scores.
  PAGED_INLINE static void store_weights(float* scores, int64_t key, Vec first, Vec second) {
    store(scores + key, first);
    store(scores + key + kLanes, second);
  }
  PAGED_INLINE static void correct(RowSoftmax&, const float*, Visible) {}

  // Adds the weighted values of `keys` to acc[num_rows][columns_of(params)].
  PAGED_INLINE void add(const RowStream<T>& stream, const float* weights, int64_t num_rows,
                        Visible keys, float* acc) const {
    const WeightedSum<T> sum = {weights, kScoreStride, stream.value_rows(), keys.first, keys.last,
                                acc,     columns_};
    weighted_sum(sum, 0, num_rows, head_dim_);
  }

 private:
  int64_t head_dim_;
  int64_t columns_;
};

#if defined(PAGED_HAS_INTERLEAVED_ROWS)
// Two keys at a time, with bfloat16 weights. Blocks of rows share a panel of interleaved values; a
// single block reads them where they lie, once they are asked for.
template <>
class ValueSums<BFloat16> {
 public:
  PAGED_INLINE ValueSums(const AttentionParams& params, Arena& arena)
      : head_dim_(params.pool.value.head_dim),
        columns_(columns_of(params)),
        panel_{arena.take<int32_t>(kPiece / 2 * columns_), columns_} {}

  PAGED_INLINE void look_up(const RowStream<BFloat16>& stream, int64_t num_rows) {
    is_packed_ = num_rows > kBlockRows;
    if (is_packed_) pack_pairs(paired(stream, stream.keys), panel_);
  }

  PAGED_INLINE static void store_weights(float* scores, int64_t key, Vec first, Vec second) {
    store_units(reinterpret_cast<int32_t*>(scores) + key / 2, narrow_pair(first, second));
  }
  PAGED_INLINE static void correct(RowSoftmax& softmax, const float* weights, Visible keys) {
    cpu::correct(softmax, reinterpret_cast<const int32_t*>(weights), keys.first / kChunk * kChunk,
                 round_up(keys.last, kChunk));
  }

  PAGED_INLINE void add(const RowStream<BFloat16>& stream, const float* weights, int64_t num_rows,
                        Visible keys, float* acc) const {
    if (is_packed_) {
      add(panel_, weights, num_rows, keys, acc);
    } else {
      add(paired(stream, keys), weights, num_rows, keys, acc);
    }
  }

 private:
  PAGED_INLINE PairedRows paired(const RowStream<BFloat16>& stream, Visible keys) const {
    return {stream.value_rows(), keys.first, keys.last, head_dim_};
  }

  template <class Values>
  PAGED_INLINE void add(const Values& values, const float* weights, int64_t num_rows, Visible keys,
                        float* acc) const {
    const PairSum<Values> sum = {reinterpret_cast<const int32_t*>(weights),
                                 kScoreStride,
                                 values,
                                 keys.first,
                                 keys.last,
                                 acc,
                                 columns_};
    sum_pairs(sum, num_rows, columns_);
  }

  int64_t head_dim_;
  int64_t columns_;
  PairPanel panel_;
  bool is_packed_ = false;
};
#endif

// T is the cache's element type, and that of the queries unless the cache is quantised.
template <class T>
class ByVectors {
 public:
  PAGED_INLINE ByVectors(const AttentionParams& params, Arena arena)
      : columns_(columns_of(params)),
        queries_(arena.take<Query>(kBlockRows * prepared_stride<T>(params.pool.key.head_dim))),
        scores_(arena.take<float>(kBlockRows * kScoreStride)),
        values_(arena.take<float>(kBlockRows * columns_)),
        stream_(params, arena),
        products_(params, arena),
        sums_(params, arena),
        end_(arena.address()) {}

  // Prepares for rows of the span; false if it sees no key of the piece.
  bool look_up(const AttentionParams& params, const RowSpan& span, int64_t piece) {
    if (!cpu::look_up(params, span, piece, stream_)) return false;
    products_.look_up(stream_, span.num_rows);
    sums_.look_up(stream_, span.num_rows);
    is_read_once_ = span.num_rows <= kBlockRows;
    // Nothing has asked for the first rows of the first piece.
    prefetch(-stream_.kFarAhead, 0, params.pool.key.head_dim);
    return true;
  }

  // Attends up to kBlockRows rows to `keys`, those of the piece that they see, at least one.
  void attend(const AttentionParams& params, const RowSpan& rows, int64_t piece, Visible keys,
              RowSoftmax* softmax) {
    prepare_queries(params, rows);
    multiply_keys(params, rows, keys);
    weigh_rows(params, rows, piece, keys, stream_.scales, scores_, softmax,
               [&](int64_t r, int64_t key, Vec first, Vec second) {
                 sums_.store_weights(scores_ + r * kScoreStride, key, first, second);
               });
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      sums_.correct(softmax[r], scores_ + r * kScoreStride, keys);
    }
    sum_values(rows, keys);
  }

  // The weighted sums of the last attend(): [kBlockRows][columns_of(params)].
  PAGED_INLINE const float* values() const { return values_; }
  PAGED_INLINE uintptr_t end() const { return end_; }

 private:
  using Query = typename Products<T>::Query;

  // Keys that are read at a time where each is read once: what comes later is asked for as often.
  static constexpr int64_t kReadTile = 16;

  void prepare_queries(const AttentionParams& params, const RowSpan& rows) {
    if constexpr (!kIsQuantised<T>) {
      prepare_queries_of<T>(params, rows);
    } else if constexpr (kIsBFloat16<Query>) {
      prepare_queries_of<BFloat16>(params, rows);
    } else {
      by_dtype(params.dtype,
               [&](auto element) { prepare_queries_of<decltype(element)>(params, rows); });
    }
  }

  template <class Element>
  PAGED_INLINE void prepare_queries_of(const AttentionParams& params, const RowSpan& rows) {
    const int64_t head_dim = params.pool.key.head_dim;
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      Products<T>::prepare(query_at<Element>(params, query_row(params, rows, r)), head_dim,
                           queries_ + r * prepared_stride<T>(head_dim));
    }
    join_rows<T>(queries_, rows.num_rows, head_dim);
  }

  void multiply_keys(const AttentionParams& params, const RowSpan& rows, Visible keys) {
    const int64_t head_dim = params.pool.key.head_dim;
    const int64_t tile = is_read_once_ ? kReadTile : kTile;
    for (int64_t key = keys.first / tile * tile; key < keys.last; key += tile) {
      const Visible part = {key < keys.first ? keys.first : key,
                            keys.last - key < tile ? keys.last : key + tile};
      prefetch(part.first - stream_.keys.first, part.last - stream_.keys.first, head_dim);
      products_.multiply(stream_, queries_, rows.num_rows, part, scores_);
    }
  }

  void sum_values(const RowSpan& rows, Visible keys) {
    std::memset(values_, 0, static_cast<size_t>(rows.num_rows * columns_) * sizeof(float));
    const int64_t values = stream_.value_begin - stream_.keys.first;
    const int64_t tile = is_read_once_ ? kReadTile : kTile;
    for (int64_t key = keys.first / tile * tile; key < keys.last; key += tile) {
      const Visible part = {key < keys.first ? keys.first : key,
                            keys.last - key < tile ? keys.last : key + tile};
      prefetch(values + part.first, values + part.last, columns_);
      sums_.add(stream_, scores_, rows.num_rows, part, values_);
    }
  }

  // Where rows [begin, end) of the stream are read only now, asks for those that come later.
  PAGED_INLINE void prefetch(int64_t begin, int64_t end, int64_t head_dim) const {
    if (!is_read_once_) return;
    prefetch_far(stream_, begin, end, head_dim * static_cast<int64_t>(sizeof(T)));
  }

  int64_t columns_;
  Query* queries_;  // [kBlockRows][prepared_stride]
  float* scores_;   // [kBlockRows][kScoreStride]
  float* values_;   // [kBlockRows][columns_]
  RowStream<T> stream_;
  KeyProducts<T> products_;
  ValueSums<T> sums_;
  uintptr_t end_;
  bool is_read_once_ = false;
};

}  // namespace
}  // namespace paged::cpu
