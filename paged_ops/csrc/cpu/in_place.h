// Attention to one piece by vector instructions, reading K and V where they lie.
#pragma once

#include "cpu/dot_products.h"
#include "cpu/piece.h"
#include "cpu/weighted_sum.h"

namespace paged::cpu {
namespace {

// T is the cache's element type, and that of the queries unless the cache is quantised.
template <class T>
class InPlace {
 public:
  PAGED_INLINE InPlace(const AttentionParams& params, Memory memory)
      : columns_(columns_of(params)),
        queries_(memory.take<Query>(kBlockRows * prepared_stride<T>(params.pool.key.head_dim))),
        scores_(memory.take<float>(kBlockRows * kScoreStride)),
        values_(memory.take<float>(kBlockRows * columns_)),
        stream_(params, memory),
        end_(memory.address()) {}

  // Prepares for rows of the span; false if it sees no key of the piece.
  bool look_up(const AttentionParams& params, const RowSpan& span, int64_t piece) {
    return cpu::look_up(params, span, piece, stream_);
  }

  // Attends up to kBlockRows rows to `keys`, those of the piece that they see, at least one.
  void attend(const AttentionParams& params, const RowSpan& rows, int64_t piece, Visible keys,
              RowSoftmax* softmax) {
    prepare_queries(params, rows);
    multiply_keys(params, rows, keys);
    // The weights are left in place of the scores.
    weigh_rows(params, rows, piece, keys, stream_.scales, scores_, softmax,
               [&](int64_t r, int64_t key, Vec first, Vec second) {
                 store(scores_ + r * kScoreStride + key, first);
                 store(scores_ + r * kScoreStride + key + kLanes, second);
               });
    sum_values(params, rows, keys);
  }

  // The weighted sums of the last attend(): [kBlockRows][columns_of(params)].
  PAGED_INLINE const float* values() const { return values_; }
  PAGED_INLINE uintptr_t end() const { return end_; }

 private:
  using Query = typename Products<T>::Query;

  void prepare_queries(const AttentionParams& params, const RowSpan& rows) {
    if constexpr (kIsQuantised<T>) {
      by_dtype(params.dtype,
               [&](auto element) { prepare_queries_of<decltype(element)>(params, rows); });
    } else {
      prepare_queries_of<T>(params, rows);
    }
  }

  template <class Element>
  PAGED_INLINE void prepare_queries_of(const AttentionParams& params, const RowSpan& rows) {
    const int64_t head_dim = params.pool.key.head_dim;
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      Products<T>::prepare(query_at<Element>(params, query_row(params, rows, r)), head_dim,
                           queries_ + r * prepared_stride<T>(head_dim));
    }
  }

  void multiply_keys(const AttentionParams& params, const RowSpan& rows, Visible keys) {
    const int64_t head_dim = params.pool.key.head_dim;
    for (int64_t key = keys.first; key < keys.last; key += kTile) {
      const int64_t count = keys.last - key < kTile ? keys.last - key : kTile;
      dot_products<T>(queries_, rows.num_rows, stream_.key_rows() + key, count, head_dim,
                      scores_ + key, kScoreStride);
    }
  }

  void sum_values(const AttentionParams& params, const RowSpan& rows, Visible keys) {
    std::memset(values_, 0, static_cast<size_t>(rows.num_rows * columns_) * sizeof(float));
    for (int64_t key = keys.first; key < keys.last; key += kTile) {
      const int64_t end = keys.last - key < kTile ? keys.last : key + kTile;
      const WeightedSum<T> sum = {scores_, kScoreStride, stream_.value_rows(), key, end,
                                  values_, columns_};
      weighted_sum(sum, 0, rows.num_rows, params.pool.value.head_dim);
    }
  }

  int64_t columns_;
  Query* queries_;  // [kBlockRows][prepared_stride]
  float* scores_;   // [kBlockRows][kScoreStride]
  float* values_;   // [kBlockRows][columns_]
  RowStream<T> stream_;
  uintptr_t end_;
};

}  // namespace
}  // namespace paged::cpu
