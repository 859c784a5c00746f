// Attention to one piece of an int8 cache by integer products of the matrix unit.
//
// The elements are multiplied as they are: queries and weights are cut into digits of eight bits,
// each a row of its own, whose products are exact and whose sums in int32 are too, in whatever
// order they are added. Three digits have the bits of a float32.
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

// Asks the second cache for rows of K or V of a sequence, one after the other, a few at a time:
// spread over the products they don't fill the buffers between caches and memory.
class RowsToCome {
 public:
  RowsToCome() = default;
  PAGED_INLINE RowsToCome(const AttentionParams& params, const RowSpan& span, const Cache& cache,
                          Visible keys)
      : head_(static_cast<const char*>(cache.data) + span.kv_head * cache.head_stride),
        block_stride_(cache.block_stride),
        token_stride_(cache.token_stride),
        bytes_(cache.head_dim),
        tables_(&params.block_tables),
        sequence_(span.sequence),
        block_size_(params.pool.block_size),
        column_(keys.first / block_size_),
        offset_(keys.first % block_size_),
        left_(keys.last - keys.first) {
    if (left_ > 0) find_block();
  }

  PAGED_INLINE void ask(int64_t count) {
    for (; count > 0 && left_ > 0; --count, --left_) {
      prefetch_row<2>(row_, bytes_);
      row_ += token_stride_;
      if (++offset_ < block_size_) continue;
      offset_ = 0;
      ++column_;
      if (left_ > 1) find_block();
    }
  }

 private:
  PAGED_INLINE void find_block() {
    row_ = head_ + tables_->at(sequence_, column_) * block_stride_ + offset_ * token_stride_;
  }

  const char* head_ = nullptr;
  const char* row_ = nullptr;
  int64_t block_stride_ = 0;
  int64_t token_stride_ = 0;
  int64_t bytes_ = 0;
  const BlockTables* tables_ = nullptr;
  int64_t sequence_ = 0;
  int64_t block_size_ = 0;
  int64_t column_ = 0;
  int64_t offset_ = 0;
  int64_t left_ = 0;
};

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
        staged_keys_(arena.take<Int8>(kMostStaged * steps_ * kTileBytes)),
        keys_(arena.take<int32_t>(kPiece / kTileRows * steps_ * kUnitsOfTile)),
        values_panel_(arena.take<int32_t>(passes_ * kKeySteps * kUnitsOfStep)),
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
    are_values_packed_ = span.num_rows > kBlockRows;
    look_ahead(params, span, piece);
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
    if (num_digit_rows() <= kTileRows) {
      sum_values(first, last);
    } else {
      sum_packed_values(first, last);
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
  static constexpr int64_t kUnitsOfStep = 4 * kUnitsOfTile;  // those of a step of keys
  // As with scores: a cache line longer than a piece.
  static constexpr int64_t kWeightStride = kPiece + kCacheLine;

  static constexpr int64_t kMostStaged = 4 * kTileRows;

  struct alignas(64) Work {
    int32_t products[kMostDigits * kPassColumns];  // by packed panels
    int32_t row_products[2][6 * kUnitsOfTile];     // of two batches of keys where they lie
    int32_t turned[kMostGroups * kTileRows][kTileRows];
    int32_t values[2][kUnitsOfStep];  // of two steps
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
        work_->query_exponents[r] =
            cut_query(row, head_dim_, queries_ + r * row_bytes(), num_rows_ * row_bytes());
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

  // The values of this piece are asked for beside its keys, and the keys of the next piece beside
  // its values.
  void look_ahead(const AttentionParams& params, const RowSpan& span, int64_t piece) {
    const int64_t begin = piece * kPiece, next = begin + kPiece;
    const int64_t end = span_visible(params, span).last;
    values_to_come_ = {};
    if (stream_.value_begin != 0) {
      values_to_come_ = {
          params, span, params.pool.value, {begin + stream_.keys.first, begin + stream_.keys.last}};
    }
    keys_to_come_ = {
        params, span, params.pool.key, {next, end < next + kPiece ? end : next + kPiece}};
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
  void stage_keys(int64_t key, Int8* to) const {
    for (int64_t i = 0; i < kTileRows; ++i, to += row_bytes()) {
      std::memcpy(to, stream_.key_rows()[held(key + i)], static_cast<size_t>(head_dim_));
      std::memset(to + head_dim_, 0, static_cast<size_t>(row_bytes() - head_dim_));
    }
  }

  void pack_keys() {
    const int64_t end = round_up(stream_.keys.last, kChunk);
    for (int64_t key = stream_.keys.first / kChunk * kChunk; key < end; key += kTileRows) {
      ask_ahead_of_keys(key, kTileRows);
      if (!are_values_packed_) values_to_come_.ask(kTileRows);
      int32_t* to = keys_ + key / kTileRows * steps_ * kUnitsOfTile;
      const Int8* rows[kTileRows];
      if (head_dim_ % kTileBytes == 0) {
        for (int64_t i = 0; i < kTileRows; ++i) rows[i] = stream_.key_rows()[held(key + i)];
      } else {
        stage_keys(key, staged_keys_);
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

  void multiply_keys(const AttentionParams& params, Visible keys) {
    const int64_t digits = num_digit_rows();
    if (digits <= kTileRows) return multiply_keys_in_place<1>(params, keys);
    if (digits <= 2 * kTileRows) return multiply_keys_in_place<2>(params, keys);
    multiply_keys_in_place<3>(params, keys);
  }

  // A batch of keys at a time; while the unit multiplies one, the scores of the last are turned.
  template <int kGroups>
  void multiply_keys_in_place(const AttentionParams& params, Visible keys) {
    constexpr int64_t kBatchGroups = kGroups == 1 ? 4 : 2;
    constexpr int64_t kBatch = kBatchGroups * kTileRows;
    const bool is_in_place = head_dim_ % kTileBytes == 0 && params.pool.block_size % kTileRows == 0;
    const int64_t begin = keys.first / kBatch * kBatch;
    constexpr int64_t kProducts = kGroups == 3 ? 6 : 4;  // of a step
    const int64_t rows_beside = (kBatch + steps_ * kProducts - 1) / (steps_ * kProducts);
    for (int64_t key = begin; key < keys.last; key += kBatch) {
      ByteRows rows[kBatchGroups];
      for (int64_t i = 0; i < kBatchGroups; ++i) {
        const int64_t first = key + i * kTileRows;
        if (is_in_place && first >= stream_.keys.first && first + kTileRows <= stream_.keys.last) {
          rows[i] = {reinterpret_cast<const char*>(stream_.key_rows()[first]),
                     params.pool.key.token_stride};
        } else {
          Int8* staged = staged_keys_ + i * kTileRows * row_bytes();
          stage_keys(first, staged);
          rows[i] = {reinterpret_cast<const char*>(staged), row_bytes()};
        }
      }
      memory_fence();
      int64_t row = key;
      multiply_row_bytes<kGroups>(rows, query_columns_, steps_,
                                  [&]() __attribute__((always_inline)) {
                                    if (row >= key + kBatch) return;
                                    ask_ahead_of_keys(row, rows_beside);
                                    values_to_come_.ask(rows_beside);
                                    row += rows_beside;
                                  });
      if (key > begin) turn_scores<kGroups>(key - kBatch);
      store_row_bytes<kGroups>(row_products<kGroups>(key));
      memory_fence();
    }
    turn_scores<kGroups>((keys.last - 1) / kBatch * kBatch);
  }

  template <int kGroups>
  PAGED_INLINE int32_t* row_products(int64_t key) const {
    return work_->row_products[key / (kGroups == 1 ? 4 * kTileRows : 2 * kTileRows) % 2];
  }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // a false alarm of GCC 12 in its own headers
  // From products by key to scores by row, of the batch that begins at that key.
  template <int kGroups>
  [[gnu::noinline]] void turn_scores(int64_t key) const {
    const int32_t* products = row_products<kGroups>(key);
    int32_t (*turned)[kTileRows] = work_->turned;
    for (int64_t i = 0; i < (kGroups == 1 ? 4 : 2); ++i) {
      for (int64_t group = 0; group < kGroups; ++group, products += kUnitsOfTile) {
        transpose_rows(products, kTileUnits, turned[group * kTileRows], kTileRows);
      }
      join_scores(key + i * kTileRows, [&](int64_t row) __attribute__((always_inline)) {
        return load_units(turned[row]);
      });
    }
  }
#pragma GCC diagnostic pop

  void cut_weights(Visible keys) const {
    const int64_t begin = keys.first / kChunk * kChunk, end = round_up(keys.last, kChunk);
    const int64_t first = begin / kKeyStep * kKeyStep, last = round_up(end, kKeyStep);
    for (int64_t r = 0; r < num_rows_; ++r) {
      float* weights = scores_ + r * kScoreStride;
      for (int64_t i = first; i < begin; i += kLanes) store(weights + i, broadcast(0.0f));
      for (int64_t i = end; i < last; i += kLanes) store(weights + i, broadcast(0.0f));
      work_->weight_exponents[r] = cpu::cut_weights(
          weights, first, last, weights_ + r * kWeightStride, num_rows_ * kWeightStride);
    }
  }

  // Interleaves the values of a step of 64 keys, columns of a pass, into four tiles; beside() runs
  // four times.
  template <class F>
  PAGED_INLINE void interleave_step(int64_t step, int64_t pass, int32_t* to, F beside) const {
    const int64_t key = step * kKeyStep, column = pass * kPassColumns;
    const Int8* clamped[kKeyStep];
    const Int8* const* rows = stream_.value_rows() + key;
    if (key < stream_.keys.first || key + kKeyStep > stream_.keys.last) {
      for (int64_t i = 0; i < kKeyStep; ++i) clamped[i] = stream_.value_rows()[held(key + i)];
      rows = clamped;
    }
    if (head_dim_v_ - column >= kPassColumns) {
      interleave_rows_of_step(rows, column, kPassColumns, to, beside);
    } else {
      interleave_rows_of_step(rows, column, head_dim_v_ - column, to, beside);
    }
  }
  template <class F>
  PAGED_INLINE static void interleave_rows_of_step(const Int8* const* rows, int64_t column,
                                                   int64_t count, int32_t* to, F beside) {
    for (int64_t quad = 0; quad < kTileRows; quad += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i, rows += 4, to += kTileUnits) {
        interleave_bytes(rows[0] + column, rows[1] + column, rows[2] + column, rows[3] + column,
                         count, to, kUnitsOfTile);
      }
      beside();
    }
  }

  // What runs four times in each step and pass, to ask for a piece of keys.
  PAGED_INLINE auto ask_beside_values(int64_t first, int64_t last) {
    const int64_t times = 4 * passes_ * (last - first);
    return [this, rows = (kPiece + times - 1) / times]()
               __attribute__((always_inline)) { keys_to_come_.ask(rows); };
  }

  PAGED_INLINE int32_t* panel_of(int64_t pass) const {
    return values_panel_ + pass * kKeySteps * kUnitsOfStep;
  }

  void pack_values() {
    const int64_t end = round_up(stream_.keys.last, kKeyStep) / kKeyStep;
    for (int64_t step = stream_.keys.first / kKeyStep; step < end; ++step) {
      ask_ahead_of_values(step * kKeyStep, kKeyStep);
      for (int64_t pass = 0; pass < passes_; ++pass) {
        interleave_step(step, pass, panel_of(pass) + step * kUnitsOfStep, [] {});
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

  void sum_packed_values(int64_t first, int64_t last) {
    int32_t* products = work_->products;
    const auto beside = ask_beside_values(first, last);
    for (int64_t pass = 0; pass < passes_; ++pass) {
      // One pass after the other in the same place: it stays in the first cache.
      int32_t* packed = panel_of(are_values_packed_ ? pass : 0);
      for (int64_t step = first; step < last && !are_values_packed_; ++step) {
        interleave_step(step, pass, packed + step * kUnitsOfStep, beside);
      }
      BytePanel panel = {packed + first * kUnitsOfStep, kUnitsOfStep, kUnitsOfTile};
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

  // 0 to 3 are sums, 4 weights, each of as many rows as there are digits, 5 to 7 values.
  PAGED_INLINE TileConfig value_tiles() const {
    TileConfig config = kFullTiles;
    for (int i = 0; i < 5; ++i) config.rows[i] = static_cast<uint8_t>(num_digit_rows());
    return config;
  }

  PAGED_INLINE void add_values(int64_t step) const {
    const int32_t* values = work_->values[step % 2];
    _tile_loadd(4, weights_ + step * kKeyStep, kWeightStride);
    _tile_loadd(5, values, kTileBytes);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(6, values + kUnitsOfTile, kTileBytes);
    _tile_dpbusd(1, 4, 6);
    _tile_loadd(7, values + 2 * kUnitsOfTile, kTileBytes);
    _tile_dpbusd(2, 4, 7);
    _tile_loadd(5, values + 3 * kUnitsOfTile, kTileBytes);
    _tile_dpbusd(3, 4, 5);
  }

  // While the unit multiplies the values of one step, those of the next are interleaved.
  void sum_values(int64_t first, int64_t last) {
    configure_tiles(value_tiles());
    int32_t* products = work_->products;
    const auto beside = ask_beside_values(first, last);
    for (int64_t pass = 0; pass < passes_; ++pass) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t step = first; step < last; ++step) {
        interleave_step(step, pass, work_->values[step % 2], beside);
        memory_fence();
        if (step > first) add_values(step - 1);
      }
      add_values(last - 1);
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
  RowsToCome values_to_come_;
  RowsToCome keys_to_come_;
  uintptr_t end_;
  int64_t num_rows_ = 0;
  bool are_keys_packed_ = false;
  bool are_values_packed_ = false;
};

}  // namespace
}  // namespace paged::cpu
