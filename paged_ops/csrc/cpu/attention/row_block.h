// Attention of a block of up to 32 rows to packed keys, a piece at a time.
//
// For each piece scores become weights, 32 rows of 512 (32 KB), then the weights are multiplied
// with values, 32 columns in a pass. Both products are of two tiles by two, and the sums stay in
// tiles along a chunk's depth, or along a piece's keys. Between pieces they lie in memory as they
// are, so that a piece's end changes no bit.
//
// Exponentials are written between the tile instructions, since the processor looks ahead by only a
// few of these: beside the scores of a chunk run the weights of the last but one, and those of a
// piece's last two chunks beside the first pass over its values.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/attention/chunk_mask.h"
#include "cpu/attention/segment.h"
#include "cpu/attention/tile_panels.h"
#include "cpu/attention/tile_weights.h"

namespace paged::cpu {
namespace {

// What a block of rows keeps over a segment. Followed by the weighted sums of values,
// [passes][2 row tiles][2 groups of 16 columns][16][16].
struct alignas(64) BlockSums {
  float weights[2][kTileRows][16];  // sums of a row's weights, the same in each column
  float totals[kBlockRows][kLanes];
  float minus_references[kBlockRows];
  uint32_t has_no_reference;  // a bit for each row
  bool has_totals;
  bool is_empty;

  PAGED_INLINE float* acc() { return reinterpret_cast<float*>(this + 1); }
  PAGED_INLINE const float* acc() const { return reinterpret_cast<const float*>(this + 1); }
  PAGED_INLINE static constexpr int64_t acc_floats(int64_t passes) {
    return passes * 4 * kUnitsPerTile;
  }
  PAGED_INLINE static constexpr int64_t bytes(int64_t passes) {
    return int64_t{sizeof(BlockSums)} + acc_floats(passes) * int64_t{sizeof(float)};
  }

  PAGED_INLINE void clear(bool wants_totals) {
    std::memset(totals, 0, sizeof(totals));
    std::memset(minus_references, 0, sizeof(minus_references));
    has_no_reference = ~uint32_t{0};
    has_totals = wants_totals;
    is_empty = true;
  }

  // The sum of a row's weights, in all lanes.
  PAGED_INLINE Vec weight(int64_t row) const {
    return load(weights[row / kTileRows][row % kTileRows]);
  }

  // The softmax of a row, and its weighted sums from column d on.
  PAGED_INLINE SegmentSoftmax softmax(int64_t row) const {
    if ((has_no_reference >> row & 1) != 0) return {kMinusInf, 0.0f, 0.0f};
    const float rounded = weights[row / kTileRows][row % kTileRows][0];
    return {-minus_references[row], rounded, has_totals ? sum(load(totals[row])) : rounded};
  }
  PAGED_INLINE Vec values(int64_t row, int64_t d) const {
    const int64_t tile = d / kPass * 4 + row / kTileRows * 2 + d % kPass / kTileUnits;
    return load(acc() + tile * kUnitsPerTile + row % kTileRows * kTileUnits);
  }
};

// Rows of K and V that are to be packed soon, to be asked for: one of each beside a chunk.
struct RowsAhead {
  const BFloat16* const* keys;
  const BFloat16* const* values;
  int64_t count;  // 0: none
};

class RowBlock {
 public:
  PAGED_INLINE RowBlock(const AttentionParams& params, bool wants_total, Arena& arena)
      : counts_(params),
        is_product_(scores_are_products(params)),
        wants_total_(wants_total),
        function_(is_product_ ? params.scale * kLog2E : kLog2E),
        queries_(arena.take<int32_t>(counts_.steps * 2 * kUnitsPerTile)),
        work_(arena.take<Work>(1)) {}

  // Prepares for up to kBlockRows rows.
  void start(const AttentionParams& params, const RowSpan& rows) {
    num_rows_ = rows.num_rows;
    first_hidden_ = first_hidden(params, rows.sequence);
    look_at_rows(params, rows, work_->rows);
    look_at_ends();
    num_asked_ = 0;
    const int64_t head_dim = params.pool.key.head_dim;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      int32_t* to = queries_ + r * kTileUnits;
      if (r < num_rows_) {
        const BFloat16* from = query_at<BFloat16>(params, work_->rows[r].row);
        for (int64_t step = 0; step < counts_.steps; ++step) {
          store_units(to + step * 2 * kUnitsPerTile,
                      load_pairs(from + step * kStep, head_dim - step * kStep));
        }
      } else {
        for (int64_t step = 0; step < counts_.steps; ++step) {
          store_units(to + step * 2 * kUnitsPerTile, IntVec{});
        }
      }
    }
    for (int64_t i = 0; i < kTileRows; ++i) {
      store_units(work_->ones[i], broadcast_unit(0x3f803f80));  // two bfloat16
    }
  }

  // Queries that the next block will need are asked for beside this one's products.
  void ask_for_queries(const AttentionParams& params, const RowSpan& rows) {
    num_ahead_ = rows.num_rows;
    if (num_ahead_ <= 0) return;
    RowCursor cursor(params, rows);
    for (int64_t r = 0; r < num_ahead_; ++r, cursor.next()) {
      work_->queries_ahead[r] = query_at<BFloat16>(params, cursor.row());
    }
  }

  // Adds chunks [first, last) of a piece that begins at key `begin`: what their packed keys and
  // values are is said by the first chunk's place.
  void attend(const AttentionParams& params, int64_t begin, int64_t first, int64_t last,
              const int32_t* keys, const int32_t* values, const RowsAhead& ahead, BlockSums& sums) {
    const FlushToZero flush;
    const int64_t first_key = begin + first * kChunk;
    num_chunks_ = last - first;
    look_at_edges(params, first_key);
    memory_fence();
    switch (counts_.steps) {
      case 2:
        weigh<2>(params, first_key, keys, ahead, sums);
        break;
      case 4:
        weigh<4>(params, first_key, keys, ahead, sums);
        break;
      case 8:
        weigh<8>(params, first_key, keys, ahead, sums);
        break;
      default:
        weigh<0>(params, first_key, keys, ahead, sums);
    }
    sum_values(values, sums);
    memory_fence();
    sums.is_empty = false;
  }

 private:
  static constexpr int64_t kSumsPerPass = 4 * kUnitsPerTile;
  static constexpr int kTileBytes = kUnitsPerTile * kUnitBytes;
  using Scores = float[2][2][kTileRows][16];       // [row tile][group of 16 keys]
  using Weights = BFloat16[2][kTileRows][kChunk];  // [row tile]

  struct alignas(64) Work {
    Scores scores[2];  // of two chunks
    Weights weights[kChunksPerPiece];
    int32_t ones[kTileRows][kTileUnits];
    uint32_t seen[kChunksPerPiece][kBlockRows];  // of chunks with an edge, and the last two
    SeeingRow rows[kBlockRows];
    int32_t first_seen[kBlockRows];  // what rows[] says, and all keys for rows that aren't there
    int32_t last_seen[kBlockRows];
    const BFloat16* queries_ahead[kBlockRows];
  };

  void look_at_ends() {
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const bool is_there = r < num_rows_;
      work_->first_seen[r] = is_there ? static_cast<int32_t>(work_->rows[r].seen.first) : 0;
      work_->last_seen[r] = is_there ? static_cast<int32_t>(work_->rows[r].seen.last) : INT32_MAX;
    }
  }

  // Which chunks have keys that some row doesn't see, and what is seen there.
  void look_at_edges(const AttentionParams& params, int64_t first_key) {
    const Visible all = seen_by_all(params, work_->rows, num_rows_, first_hidden_);
    edges_ = 0;
    for (int64_t j = 0; j < num_chunks_; ++j) {
      const int64_t begin = first_key + j * kChunk;
      const bool is_edge = begin < all.first || begin + kChunk > all.last;
      edges_ |= static_cast<uint32_t>(is_edge) << j;
      if (is_edge) {
        look_at_edge(params, begin, work_->seen[j]);
      } else if (j + 2 >= num_chunks_) {
        for (int64_t r = 0; r < kBlockRows; ++r) work_->seen[j][r] = kWholeChunk;
      }
    }
  }

  PAGED_INLINE void look_at_edge(const AttentionParams& params, int64_t begin,
                                 uint32_t* seen) const {
    if (params.tree_mask.data == nullptr) {
      for (int64_t r = 0; r < kBlockRows; r += kLanes) {
        store_units(reinterpret_cast<int32_t*>(seen + r),
                    bits_between(load_units(work_->first_seen + r),
                                 load_units(work_->last_seen + r), begin));
      }
    } else {
      for (int64_t r = 0; r < kBlockRows; ++r) {
        seen[r] =
            r < num_rows_ ? chunk_mask(params, work_->rows[r], first_hidden_, begin) : kWholeChunk;
      }
    }
  }

  template <bool kIsMasked>
  PAGED_INLINE static void weigh_row(const WeightFunction& function, Work& work, int64_t chunk,
                                     int64_t r, const BlockSums& sums) {
    const Scores& scores = work.scores[chunk % 2];
    const int64_t tile = r / kTileRows, i = r % kTileRows;
    function.store_weights<kIsMasked>(
        scores[tile][0][i], scores[tile][1][i], &sums.minus_references[r],
        kIsMasked ? work.seen[chunk][r] : kWholeChunk, work.weights[chunk][tile][i]);
  }

  // Adds to tiles 0 to 3 the products of two tiles of rows, one behind the other, and two of
  // columns; beside(i) runs after the i-th. first(i) comes just before it.
  template <int kRowsAt, int kFirstAt, int kSecondAt, class F, class G>
  PAGED_INLINE static void multiply_two_by_two(const void* rows, const int32_t* columns, F first,
                                               G beside) {
    PAGED_LOAD_TILE_AT(4, rows, kRowsAt);
    PAGED_STREAM_TILE_AT(6, columns, kFirstAt);
    first(std::integral_constant<int, 0>{});
    _tile_dpbf16ps(0, 4, 6);
    beside(0);
    PAGED_STREAM_TILE_AT(7, columns, kSecondAt);
    first(std::integral_constant<int, 1>{});
    _tile_dpbf16ps(1, 4, 7);
    beside(1);
    PAGED_LOAD_TILE_AT(5, rows, kRowsAt + kTileBytes);
    first(std::integral_constant<int, 2>{});
    _tile_dpbf16ps(2, 5, 6);
    beside(2);
    first(std::integral_constant<int, 3>{});
    _tile_dpbf16ps(3, 5, 7);
    beside(3);
  }

  // Stores tile t to the t-th place at `to`.
  template <int t>
  PAGED_INLINE static void store_tile(float* to) {
    if constexpr (t == 0) PAGED_STORE_TILE_AT(0, to, 0);
    if constexpr (t == 1) PAGED_STORE_TILE_AT(1, to, kTileBytes);
    if constexpr (t == 2) PAGED_STORE_TILE_AT(2, to, 2 * kTileBytes);
    if constexpr (t == 3) PAGED_STORE_TILE_AT(3, to, 3 * kTileBytes);
  }
  // Begins a sum in tile t with that in the t-th place at `from`, or with zeros.
  template <int t>
  PAGED_INLINE static void start_tile(const float* from, bool is_zero) {
    if (is_zero) {
      if constexpr (t == 0) _tile_zero(0);
      if constexpr (t == 1) _tile_zero(1);
      if constexpr (t == 2) _tile_zero(2);
      if constexpr (t == 3) _tile_zero(3);
    } else {
      if constexpr (t == 0) PAGED_LOAD_TILE_AT(0, from, 0);
      if constexpr (t == 1) PAGED_LOAD_TILE_AT(1, from, kTileBytes);
      if constexpr (t == 2) PAGED_LOAD_TILE_AT(2, from, 2 * kTileBytes);
      if constexpr (t == 3) PAGED_LOAD_TILE_AT(3, from, 3 * kTileBytes);
    }
  }
  PAGED_INLINE static void store_tiles(float* to) {
    store_tile<0>(to);
    store_tile<1>(to);
    store_tile<2>(to);
    store_tile<3>(to);
  }

  // Scores of a chunk. In the first step the tiles of the last chunk are stored to `last`, each
  // just before it is needed; beside(i) runs after the i-th product.
  template <int kSteps, bool kStore, class F>
  PAGED_INLINE static void multiply_keys(const int32_t* queries, const int32_t* keys, int64_t steps,
                                         float* last, F beside) {
    const auto start = [&](auto t) __attribute__((always_inline)) {
      if constexpr (kStore) store_tile<t>(last);
      start_tile<t>(nullptr, true);
    };
    const auto nothing = [](auto) {};
    if constexpr (kSteps > 0) {
      constexpr int kSecond = kSteps * kTileBytes;
      multiply_two_by_two<0, 0, kSecond>(queries, keys, start, beside);
      [&]<int... s>(std::integer_sequence<int, s...>) __attribute__((always_inline)) {
        (multiply_two_by_two<(s + 1) * 2 * kTileBytes, (s + 1) * kTileBytes,
                             kSecond + (s + 1) * kTileBytes>(
             queries, keys, nothing,
             [&](int i) __attribute__((always_inline)) { beside(4 * (s + 1) + i); }),
         ...);
      }(std::make_integer_sequence<int, kSteps - 1>{});
    } else {
      const int32_t* second = keys + steps * kUnitsPerTile;
      for (int64_t step = 0; step < steps; ++step) {
        const int32_t* rows = queries + step * 2 * kUnitsPerTile;
        PAGED_LOAD_TILE_AT(4, rows, 0);
        PAGED_STREAM_TILE_AT(6, keys + step * kUnitsPerTile, 0);
        if (step == 0) start(std::integral_constant<int, 0>{});
        _tile_dpbf16ps(0, 4, 6);
        beside(4 * step);
        PAGED_STREAM_TILE_AT(7, second + step * kUnitsPerTile, 0);
        if (step == 0) start(std::integral_constant<int, 1>{});
        _tile_dpbf16ps(1, 4, 7);
        beside(4 * step + 1);
        PAGED_LOAD_TILE_AT(5, rows, kTileBytes);
        if (step == 0) start(std::integral_constant<int, 2>{});
        _tile_dpbf16ps(2, 5, 6);
        beside(4 * step + 2);
        if (step == 0) start(std::integral_constant<int, 3>{});
        _tile_dpbf16ps(3, 5, 7);
        beside(4 * step + 3);
      }
    }
  }

  // Weights of all chunks but the last two.
  template <int kSteps>
  void weigh(const AttentionParams& params, int64_t first_key, const int32_t* keys,
             const RowsAhead& ahead, BlockSums& sums) {
    WeightFunction function = function_;
    function.keep_in_registers();
    const int64_t steps = kSteps == 0 ? counts_.steps : kSteps;
    const int64_t rows_beside = (kBlockRows + 4 * steps - 1) / (4 * steps);
    const int64_t passes = counts_.passes;
    const int64_t num_chunks = num_chunks_;
    const int32_t* queries = queries_;
    Work& work = *work_;
    for (int64_t j = 0; j < num_chunks; ++j, keys += 2 * steps * kUnitsPerTile) {
      float* last = work.scores[(j + 1) % 2][0][0][0];
      // A row of K and one of V for each chunk, and two queries, a line beside each product.
      const bool has_ahead = j < ahead.count;
      const auto* key_ahead = reinterpret_cast<const char*>(has_ahead ? ahead.keys[j] : nullptr);
      const auto* value_ahead =
          reinterpret_cast<const char*>(has_ahead ? ahead.values[j] : nullptr);
      const bool has_queries = num_asked_ < num_ahead_;
      const auto* const* queries_ahead =
          reinterpret_cast<const char* const*>(work.queries_ahead + num_asked_);
      if (has_queries) num_asked_ += 2;
      const auto ask = [&](int64_t i) __attribute__((always_inline)) {
        if (i < steps) {
          if (has_ahead) ask_for(key_ahead + i * kCacheLine);
        } else if (i < 2 * steps) {
          if (has_queries) ask_for(queries_ahead[0] + (i - steps) * kCacheLine);
        } else if (i < 3 * steps) {
          if (has_queries) ask_for(queries_ahead[1] + (i - 2 * steps) * kCacheLine);
        } else if (i < 3 * steps + passes) {
          if (has_ahead) ask_for(value_ahead + (i - 3 * steps) * kCacheLine);
        }
      };
      const auto weigh_rows = [&]<bool kIsMasked>(int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int64_t r = i * rows_beside; r < (i + 1) * rows_beside; ++r) {
          if (r < kBlockRows) weigh_row<kIsMasked>(function, work, j - 2, r, sums);
        }
      };
      if (j == 0) {
        multiply_keys<kSteps, false>(queries, keys, steps, last, ask);
        continue;
      }
      if (j == 1) {
        multiply_keys<kSteps, true>(queries, keys, steps, last, ask);
      } else if ((edges_ >> (j - 2) & 1) != 0) {
        multiply_keys<kSteps, true>(queries, keys, steps, last,
                                    [&](int64_t i) __attribute__((always_inline)) {
                                      ask(i);
                                      weigh_rows.template operator()<true>(i);
                                    });
      } else {
        multiply_keys<kSteps, true>(queries, keys, steps, last,
                                    [&](int64_t i) __attribute__((always_inline)) {
                                      ask(i);
                                      weigh_rows.template operator()<false>(i);
                                    });
      }
      complete(params, first_key, j - 1, sums);
    }
    store_tiles(work.scores[(num_chunks - 1) % 2][0][0][0]);
    complete(params, first_key, num_chunks - 1, sums);
  }

  // What there may be to do between a chunk's products and its weights.
  PAGED_INLINE void complete(const AttentionParams& params, int64_t first_key, int64_t chunk,
                             BlockSums& sums) {
    if (is_product_ && !wants_total_ && sums.has_no_reference == 0) return;
    memory_fence();
    complete_scores(params, first_key + chunk * kChunk, chunk, sums);
    memory_fence();
  }

  __attribute__((noinline)) void complete_scores(const AttentionParams& params, int64_t begin,
                                                 int64_t chunk, BlockSums& sums) {
    Scores& scores = work_->scores[chunk % 2];
    const bool is_edge = (edges_ >> chunk & 1) != 0;
    const auto seen = [&](int64_t r) { return is_edge ? work_->seen[chunk][r] : kWholeChunk; };
    if (!is_product_) {
      for (int64_t r = 0; r < num_rows_; ++r) {
        const ScoreRule rule = score_rule(params, work_->rows[r].row, begin);
        const auto row = [&](int64_t group) { return scores[r / 16][group][r % 16]; };
        store(row(0), rule.score(load(row(0)), lane_indices()));
        store(row(1), rule.score(load(row(1)), lane_indices() + kLanes));
      }
    }
    if (sums.has_no_reference != 0) {
      for (int64_t tile = 0; tile < 2; ++tile) set_references(scores[tile], tile, seen, sums);
    }
    if (!wants_total_) return;
    for (int64_t r = 0; r < num_rows_; ++r) {
      const Vec first = load(scores[r / 16][0][r % 16]), second = load(scores[r / 16][1][r % 16]);
      store(sums.totals[r], function_.add_precisely(load(sums.totals[r]), first, second,
                                                    broadcast(sums.minus_references[r]), seen(r)));
    }
  }

  // The reference of a row: its largest score in the first chunk of which it sees a key, rounded up
  // to an integer.
  template <class F>
  PAGED_INLINE void set_references(const float (&scores)[2][kTileRows][16], int64_t tile, F seen,
                                   BlockSums& sums) const {
    Vec largest[kLanes];
    uint32_t set = 0;
    for (int64_t i = 0; i < kTileRows; ++i) {
      const uint32_t mask = seen(tile * kTileRows + i);
      largest[i] = function_.largest(load(scores[0][i]), load(scores[1][i]), mask);
      set |= static_cast<uint32_t>(mask != 0) << i;
    }
    set &= sums.has_no_reference >> (tile * kTileRows);
    set &= 0xffff;
    float* to = sums.minus_references + tile * kTileRows;
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(set), minus_reference(max_each(largest)));
    sums.has_no_reference &= ~(set << (tile * kTileRows));
  }

  // Multiplies the weights of the piece with its values, beside which those of its last two chunks
  // are made, and with ones.
  void sum_values(const int32_t* values, BlockSums& sums) {
    constexpr int64_t kPassStride = kChunksPerPiece * 2 * kUnitsPerTile;
    float* acc = sums.acc();
    sum_first_pass(values, acc, sums);
    for (int64_t pass = 1; pass < counts_.passes; ++pass) {
      values += kPassStride;
      acc += kSumsPerPass;
      sum_pass<true>(values, acc, sums.is_empty, [](int) {});
    }
    sum_weights(acc, sums);
  }

  PAGED_INLINE void sum_first_pass(const int32_t* values, float* acc, const BlockSums& sums) const {
    WeightFunction function = function_;
    function.keep_in_registers();
    Work& work = *work_;
    int64_t late = num_chunks_ > 1 ? (num_chunks_ - 2) * kBlockRows : 0;
    const int64_t late_end = num_chunks_ * kBlockRows;
    const auto weigh_two_rows = [&]() __attribute__((always_inline)) {
      if (late == late_end) return;
      weigh_row<true>(function, work, late / kBlockRows, late % kBlockRows, sums);
      weigh_row<true>(function, work, late / kBlockRows, late % kBlockRows + 1, sums);
      late += 2;
    };
    // The products before those with the late weights.
    const int64_t slots = 4 * (num_chunks_ - 2);
    const int64_t at_once = slots > 0 ? (kBlockRows + slots - 1) / slots : kBlockRows;
    if (slots <= 0) {
      for (int64_t i = 0; i < at_once; ++i) weigh_two_rows();
    }
    if (at_once == 1) {
      sum_pass<false>(values, acc, sums.is_empty,
                      [&](int) __attribute__((always_inline)) { weigh_two_rows(); });
    } else {
      sum_pass<false>(values, acc, sums.is_empty, [&](int) __attribute__((always_inline)) {
        for (int64_t i = 0; i < at_once; ++i) weigh_two_rows();
      });
    }
  }

  // The sums of 32 columns. In the first step those of the last pass are stored, each tile just
  // before it is needed.
  template <bool kStore, class F>
  PAGED_INLINE void sum_pass(const int32_t* values, float* acc, bool is_empty, F beside) const {
    const auto start = [&](auto t) __attribute__((always_inline)) {
      if constexpr (kStore) store_tile<t>(acc - kSumsPerPass);
      start_tile<t>(acc, is_empty);
    };
    const char* weights = reinterpret_cast<const char*>(work_->weights[0]);
    const int64_t num_chunks = num_chunks_;
    multiply_two_by_two<0, 0, kTileBytes>(weights, values, start, beside);
    for (int64_t j = 1; j < num_chunks; ++j) {
      weights += 2 * kTileBytes;
      values += 2 * kUnitsPerTile;
      multiply_two_by_two<0, 0, kTileBytes>(weights, values, [](auto) {}, beside);
    }
  }

  // The sums of weights; stores those of the last pass over values to `last` on the way.
  PAGED_INLINE void sum_weights(float* last, BlockSums& sums) const {
    const char* weights = reinterpret_cast<const char*>(work_->weights[0]);
    float* to = sums.weights[0][0];
    PAGED_LOAD_TILE_AT(7, work_->ones, 0);
    PAGED_LOAD_TILE_AT(4, weights, 0);
    store_tile<0>(last);
    start_tile<0>(to, sums.is_empty);
    _tile_dpbf16ps(0, 4, 7);
    PAGED_LOAD_TILE_AT(5, weights, kTileBytes);
    store_tile<1>(last);
    start_tile<1>(to, sums.is_empty);
    _tile_dpbf16ps(1, 5, 7);
    for (int64_t j = 1; j < num_chunks_; ++j) {
      weights += 2 * kTileBytes;
      PAGED_LOAD_TILE_AT(4, weights, 0);
      _tile_dpbf16ps(0, 4, 7);
      PAGED_LOAD_TILE_AT(5, weights, kTileBytes);
      _tile_dpbf16ps(1, 5, 7);
    }
    store_tile<2>(last);
    store_tile<3>(last);
    store_tile<0>(to);
    store_tile<1>(to);
  }

  TileCounts counts_;
  bool is_product_;   // a score is the scale times the dot product
  bool wants_total_;  // of the weights before rounding
  WeightFunction function_;
  int32_t* queries_;  // [steps][2 row tiles][16][16 units]
  Work* work_;
  int64_t num_rows_ = 0;
  int64_t first_hidden_ = 0;
  int64_t num_chunks_ = 0;
  int64_t num_ahead_ = 0;  // queries of the next block
  int64_t num_asked_ = 0;
  uint32_t edges_ = 0;  // a bit for each chunk
};

}  // namespace
}  // namespace paged::cpu
