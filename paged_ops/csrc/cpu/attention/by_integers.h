// Attention to one piece of an int8 cache by integer products of the matrix unit.
//
// The elements are multiplied as they are: queries and weights are cut into digits of eight bits,
// each a row of its own, whose products are exact and whose sums in int32 are too, in whatever
// order they are added. Three digits are as exact as float32 sums.
//
// Few rows read keys where they lie, as the left-hand side of a product; the scores are turned. If
// their digits are no more than a tile has rows, values are interleaved on their way into a tile,
// too. More rows share panels of K and V that are packed once.
//
// A row that can't be cut (infinities, NaN, negative scales) has NaN for sums, and is attended to
// again: alone, with just what it sees, and if that didn't help, by vectors.
#pragma once

#include "cpu/attention/by_vectors.h"
#include "cpu/attention/digits.h"
#include "cpu/attention/integer_tiles.h"

namespace paged::cpu {
namespace {

class ByIntegers {
 public:
  // What attends to rows that can't be cut.
  using Exact = ByVectors<Int8>;

  // Longer rows might not fit the sums.
  static bool takes(const AttentionParams& params) {
    return params.pool.key.head_dim <= int64_t{1} << 16;
  }

  PAGED_INLINE ByIntegers(const AttentionParams& params, Arena arena)
      : head_dim_(params.pool.key.head_dim),
        head_dim_v_(params.pool.value.head_dim),
        steps_(round_up(head_dim_, kTileBytes) / kTileBytes),
        passes_(round_up(head_dim_v_, kPassColumns) / kPassColumns),
        columns_(columns_of(params)),
        exact_end_(Exact(params, arena).end()),
        queries_(arena.take<int8_t>(kMostDigits * steps_ * kTileBytes)),
        query_columns_(arena.take<int32_t>(kMostGroups * steps_ * kUnitsOfTile)),
        staged_keys_(arena.take<Int8>(kTileRows * steps_ * kTileBytes)),
        keys_(arena.take<int32_t>(kPiece / kTileRows * steps_ * kUnitsOfTile)),
        values_panel_(arena.take<int32_t>(passes_ * kKeySteps * 4 * kUnitsOfTile)),
        scores_(arena.take<float>(kBlockRows * kScoreStride)),
        weights_(arena.take<int8_t>(kMostDigits * kWeightStride)),
        values_(arena.take<float>(kBlockRows * columns_)),
        work_(arena.take<Work>(1)),
        stream_(params, arena),
        end_(arena.address() > exact_end_ ? arena.address() : exact_end_) {}

  // Prepares for rows of the span; false if it sees no key of the piece.
  bool look_up(const AttentionParams& params, const RowSpan& span, int64_t piece) {
    if (!cpu::look_up(params, span, piece, stream_)) return false;
    configure_tiles(kFullTiles);
    are_keys_packed_ = span.num_rows > kTileRows;
    are_values_packed_ = kDigits * span.num_rows > kTileRows;
    if (are_keys_packed_) pack_keys();
    if (are_values_packed_) pack_values();
    return true;
  }

  // Attends up to kBlockRows rows to `keys`, those of the piece that they see, at least one.
  void attend(const AttentionParams& params, const RowSpan& rows, int64_t piece, Visible keys,
              RowSoftmax* softmax) {
    num_rows_ = rows.num_rows;
    cut_queries(params, rows);
    if (are_keys_packed_) {
      multiply_packed_keys(keys);
    } else {
      multiply_keys(params, keys);
    }
    weigh_rows(params, rows, piece, keys, stream_.scales, scores_, softmax,
               [&](int64_t r, int64_t key, Vec first, Vec second) {
                 store(scores_ + r * kScoreStride + key, first);
                 store(scores_ + r * kScoreStride + key + kLanes, second);
               });
    cut_weights(keys);
    const int64_t first = keys.first / kKeyStep;
    const int64_t last = round_up(keys.last, kKeyStep) / kKeyStep;
    if (are_values_packed_) {
      sum_packed_values(first, last);
    } else {
      sum_values(first, last);
    }
  }

  // The weighted sums of the last attend(): [kBlockRows][columns_of(params)].
  PAGED_INLINE const float* values() const { return values_; }
  PAGED_INLINE uintptr_t end() const { return end_; }

 private:
  static constexpr int64_t kMostDigits = kDigits * kBlockRows;  // rows of digits
  static constexpr int64_t kMostGroups = kDigits;               // of 16 columns of few rows' digits
  static constexpr int64_t kKeyStep = 64;                       // keys of a sum that a tile holds
  static constexpr int64_t kKeySteps = kPiece / kKeyStep;
  static constexpr int64_t kPassColumns = 64;  // of values that are interleaved at a time
  // As with scores: a cache line longer than a piece.
  static constexpr int64_t kWeightStride = kPiece + kCacheLine;

  struct alignas(64) Work {
    int32_t products[kMostDigits * kPassColumns];
    int32_t turned[kMostGroups * kTileRows][kTileRows];
    int32_t values[2][4][kTileRows][kTileUnits];  // of two steps
    Exponent query_exponents[kBlockRows];
    Exponent weight_exponents[kBlockRows];
  };

  PAGED_INLINE int64_t row_bytes() const { return steps_ * kTileBytes; }
  // Row r of the digits at a place is number place * num_rows_ + r.
  PAGED_INLINE int64_t num_digit_rows() const { return kDigits * num_rows_; }

  void cut_queries(const AttentionParams& params, const RowSpan& rows) {
    by_dtype(params.dtype, [&](auto element) {
      for (int64_t r = 0; r < num_rows_; ++r) {
        const auto* row = query_at<decltype(element)>(params, query_row(params, rows, r));
        work_->query_exponents[r] = cut_query(row, head_dim_, row_bytes(),
                                              queries_ + r * row_bytes(), num_rows_ * row_bytes());
      }
    });
    if (are_keys_packed_) return;
    const int64_t groups = round_up(num_digit_rows(), kTileRows) / kTileRows;
    for (int64_t step = 0; step < steps_; ++step) {
      for (int64_t group = 0; group < groups; ++group) {
        const int8_t* from = queries_ + group * kTileRows * row_bytes() + step * kTileBytes;
        transpose_rows(reinterpret_cast<const int32_t*>(from), row_bytes() / kUnitBytes,
                       query_columns_ + (step * groups + group) * kUnitsOfTile, kTileUnits);
      }
    }
  }

  // The row of a key, or that of another: what nobody sees counts for nothing.
  PAGED_INLINE int64_t held(int64_t key) const {
    if (key < stream_.keys.first) return stream_.keys.first;
    return key < stream_.keys.last ? key : stream_.keys.last - 1;
  }

  // Asks for rows [begin, begin + count) of the stream, counted kFarAhead later.
  PAGED_INLINE void ask_ahead(int64_t begin, int64_t count, int64_t bytes) const {
    int64_t i = begin + stream_.kFarAhead, end = i + count;
    if (i < 0) i = 0;
    if (end > stream_.num_rows) end = stream_.num_rows;
    for (; i < end; ++i) prefetch_row<2>(stream_.rows[i], bytes);
  }
  PAGED_INLINE void ask_ahead_of_keys(int64_t key, int64_t count) const {
    ask_ahead(key - stream_.keys.first, count, head_dim_);
  }
  PAGED_INLINE void ask_ahead_of_values(int64_t key, int64_t count) const {
    if (stream_.value_begin == 0) return;
    ask_ahead(stream_.value_begin + key - stream_.keys.first, count, head_dim_v_);
  }

  // Copies 16 keys, padded with zeros.
  void stage_keys(int64_t key) const {
    for (int64_t i = 0; i < kTileRows; ++i) {
      const Int8* row = stream_.key_rows()[held(key + i)];
      Int8* to = staged_keys_ + i * row_bytes();
      std::memcpy(to, row, static_cast<size_t>(head_dim_));
      std::memset(to + head_dim_, 0, static_cast<size_t>(row_bytes() - head_dim_));
    }
    memory_fence();
  }

  void pack_keys() {
    const int64_t end = round_up(stream_.keys.last, kChunk);
    for (int64_t key = stream_.keys.first / kChunk * kChunk; key < end; key += kTileRows) {
      ask_ahead_of_keys(key, kTileRows);
      int32_t* to = keys_ + key / kTileRows * steps_ * kUnitsOfTile;
      const Int8* rows[kTileRows];
      if (head_dim_ % kTileBytes == 0) {
        for (int64_t i = 0; i < kTileRows; ++i) rows[i] = stream_.key_rows()[held(key + i)];
      } else {
        stage_keys(key);
        for (int64_t i = 0; i < kTileRows; ++i) rows[i] = staged_keys_ + i * row_bytes();
      }
      for (int64_t step = 0; step < steps_; ++step) {
        transpose_units([&](int j, int i) { return rows[j] + step * kTileBytes + 4 * i; },
                        to + step * kUnitsOfTile, kTileUnits);
      }
    }
  }

  // The scores of a row of digits from `key` on are those of its number, joined.
  template <class F>
  PAGED_INLINE void join_scores(int64_t key, F products) const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      store(scores_ + r * kScoreStride + key,
            join_digits(products(r), products(num_rows_ + r), products(2 * num_rows_ + r),
                        work_->query_exponents[r]));
    }
  }

  void multiply_packed_keys(Visible keys) const {
    int32_t* products = work_->products;
    for (int64_t key = keys.first / kChunk * kChunk; key < keys.last; key += kChunk) {
      const BytePanel panel = {keys_ + key / kTileRows * steps_ * kUnitsOfTile, kUnitsOfTile,
                               steps_ * kUnitsOfTile};
      memory_fence();
      multiply_bytes<true>(queries_, row_bytes(), num_digit_rows(), panel, steps_, products,
                           kChunk);
      memory_fence();
      for (int64_t i = 0; i < kChunk; i += kLanes) {
        join_scores(key + i, [&](int64_t row) __attribute__((always_inline)) {
          return load_units(products + row * kChunk + i);
        });
      }
    }
  }

  void multiply_keys(const AttentionParams& params, Visible keys) const {
    const int64_t digits = num_digit_rows();
    if (digits <= kTileRows) return multiply_keys_in_place<1>(params, keys);
    if (digits <= 2 * kTileRows) return multiply_keys_in_place<2>(params, keys);
    multiply_keys_in_place<3>(params, keys);
  }

  template <int kGroups>
  void multiply_keys_in_place(const AttentionParams& params, Visible keys) const {
    const bool is_in_place = head_dim_ % kTileBytes == 0 && params.pool.block_size % kTileRows == 0;
    int32_t (*turned)[kTileRows] = work_->turned;
    const int64_t end = round_up(keys.last, kChunk);
    for (int64_t key = keys.first / kChunk * kChunk; key < end; key += kTileRows) {
      ask_ahead_of_keys(key, kTileRows);
      memory_fence();
      if (is_in_place && key >= stream_.keys.first && key + kTileRows <= stream_.keys.last) {
        multiply_row_bytes<kGroups>(reinterpret_cast<const char*>(stream_.key_rows()[key]),
                                    params.pool.key.token_stride, query_columns_, steps_,
                                    work_->products);
      } else {
        stage_keys(key);
        multiply_row_bytes<kGroups>(reinterpret_cast<const char*>(staged_keys_), row_bytes(),
                                    query_columns_, steps_, work_->products);
      }
      memory_fence();
      for (int64_t group = 0; group < kGroups; ++group) {
        transpose_rows(work_->products + group * kUnitsOfTile, kTileUnits,
                       turned[group * kTileRows], kTileRows);
      }
      join_scores(
          key, [&](int64_t row) __attribute__((always_inline)) { return load_units(turned[row]); });
    }
  }

  void cut_weights(Visible keys) const {
    const int64_t begin = keys.first / kChunk * kChunk, end = round_up(keys.last, kChunk);
    for (int64_t r = 0; r < num_rows_; ++r) {
      work_->weight_exponents[r] =
          cpu::cut_weights(scores_ + r * kScoreStride, begin, end, weights_ + r * kWeightStride,
                           num_rows_ * kWeightStride);
    }
    // The rest of the first and the last step.
    for (int64_t row = 0; row < num_digit_rows(); ++row) {
      int8_t* to = weights_ + row * kWeightStride;
      if (begin % kKeyStep != 0) std::memset(to + begin - kChunk, 0, kChunk);
      if (end % kKeyStep != 0) std::memset(to + end, 0, kChunk);
    }
  }

  // The rows of values of four neighbouring keys, columns from a pass on.
  PAGED_INLINE void interleave(int64_t key, int64_t pass, int32_t* to) const {
    const int64_t column = pass * kPassColumns;
    const auto at = [&](int64_t i) __attribute__((always_inline)) {
      return stream_.value_rows()[held(key + i)] + column;
    };
    interleave_bytes(at(0), at(1), at(2), at(3), head_dim_v_ - column, to, kUnitsOfTile);
  }

  void pack_values() {
    const int64_t end = round_up(stream_.keys.last, kKeyStep);
    for (int64_t key = stream_.keys.first / kKeyStep * kKeyStep; key < end; key += 4) {
      ask_ahead_of_values(key, 4);
      const int64_t step = key / kKeyStep, quad = key % kKeyStep / 4;
      for (int64_t pass = 0; pass < passes_; ++pass) {
        interleave(
            key, pass,
            values_panel_ + (pass * kKeySteps + step) * 4 * kUnitsOfTile + quad * kTileUnits);
      }
    }
  }

  // Joins the sums of a pass, of which sums(row, tile) has 16 columns.
  template <class F>
  PAGED_INLINE void join_values(int64_t pass, F sums) const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const Exponent exponent =
          is_cut(work_->query_exponents[r]) ? work_->weight_exponents[r] : __builtin_nanf("");
      Vec x[4];
#pragma GCC unroll 4
      for (int64_t tile = 0; tile < 4; ++tile) {
        x[tile] = is_cut(exponent) ? join_digits(sums(r, tile), sums(num_rows_ + r, tile),
                                                 sums(2 * num_rows_ + r, tile), exponent)
                                   : broadcast(exponent);
      }
      order_columns(x);
      float* to = values_ + r * columns_ + pass * kPassColumns;
      const int64_t rest = columns_ - pass * kPassColumns;
      for (int64_t i = 0; i < 4 && i * kLanes < rest; ++i) store(to + i * kLanes, x[i]);
    }
  }

  void sum_packed_values(int64_t first, int64_t last) const {
    int32_t* products = work_->products;
    for (int64_t pass = 0; pass < passes_; ++pass) {
      BytePanel panel = {values_panel_ + (pass * kKeySteps + first) * 4 * kUnitsOfTile,
                         4 * kUnitsOfTile, kUnitsOfTile};
      memory_fence();
      for (int64_t half = 0; half < 2; ++half, panel.data += 2 * kUnitsOfTile) {
        multiply_bytes<false>(weights_ + first * kKeyStep, kWeightStride, num_digit_rows(), panel,
                              last - first, products + half * kPassColumns / 2, kPassColumns);
      }
      memory_fence();
      join_values(pass, [&](int64_t row, int64_t tile) __attribute__((always_inline)) {
        return load_units(products + row * kPassColumns + tile * kTileUnits);
      });
    }
  }

  // 0 to 3 are sums, 4 weights, each of as many rows as there are digits, 5 and 6 values.
  PAGED_INLINE TileConfig value_tiles() const {
    TileConfig config = kFullTiles;
    for (int i = 0; i < 5; ++i) config.rows[i] = static_cast<uint8_t>(num_digit_rows());
    return config;
  }

  void sum_values(int64_t first, int64_t last) const {
    configure_tiles(value_tiles());
    int32_t* products = work_->products;
    for (int64_t pass = 0; pass < passes_; ++pass) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = first; step < last; ++step) {
        auto& values = work_->values[step % 2];
        if (pass == 0) ask_ahead_of_values(step * kKeyStep, kKeyStep);
#pragma GCC unroll 4
        for (int64_t quad = 0; quad < kTileRows; ++quad) {
          interleave(step * kKeyStep + 4 * quad, pass, values[0][quad]);
        }
        memory_fence();
        _tile_loadd(4, weights_ + step * kKeyStep, kWeightStride);
        _tile_loadd(5, values[0], kTileBytes);
        _tile_dpbusd(0, 4, 5);
        _tile_loadd(6, values[1], kTileBytes);
        _tile_dpbusd(1, 4, 6);
        _tile_loadd(5, values[2], kTileBytes);
        _tile_dpbusd(2, 4, 5);
        _tile_loadd(6, values[3], kTileBytes);
        _tile_dpbusd(3, 4, 6);
      }
      _tile_stored(0, products, kTileBytes);
      _tile_stored(1, products + kUnitsOfTile, kTileBytes);
      _tile_stored(2, products + 2 * kUnitsOfTile, kTileBytes);
      _tile_stored(3, products + 3 * kUnitsOfTile, kTileBytes);
      memory_fence();
      join_values(pass, [&](int64_t row, int64_t tile) __attribute__((always_inline)) {
        return load_units(products + tile * kUnitsOfTile + row * kTileUnits);
      });
    }
    configure_tiles(kFullTiles);
  }

  int64_t head_dim_;
  int64_t head_dim_v_;
  int64_t steps_;   // of 64 elements of a key
  int64_t passes_;  // of 64 columns of values
  int64_t columns_;
  uintptr_t exact_end_;
  int8_t* queries_;         // [digit rows][row_bytes()]
  int32_t* query_columns_;  // [steps_][groups of 16 digit rows][16 units][16]
  Int8* staged_keys_;       // [16][row_bytes()]
  int32_t* keys_;           // [groups of 16 keys][steps_][16 units][16 keys]
  int32_t* values_panel_;   // [passes_][steps of 64 keys][4 tiles][16 quads of keys][16]
  float* scores_;           // [kBlockRows][kScoreStride], then weights
  int8_t* weights_;         // [digit rows][kWeightStride]
  float* values_;           // [kBlockRows][columns_]
  Work* work_;
  RowStream<Int8> stream_;
  uintptr_t end_;
  int64_t num_rows_ = 0;
  bool are_keys_packed_ = false;
  bool are_values_packed_ = false;
};

}  // namespace
}  // namespace paged::cpu
