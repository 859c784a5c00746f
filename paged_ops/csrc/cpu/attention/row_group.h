// Attention of up to 16 rows to keys and values where they lie, a piece at a time: decode.
//
// Keys are the left-hand side of a product whose result is the scores by key, which are turned;
// values are interleaved, two keys at a time, on their way into a tile. A sum has the same terms in
// the same order as that of a RowBlock, and its bits.
#pragma once

#include "cpu/attention/chunk_mask.h"
#include "cpu/attention/segment.h"
#include "cpu/attention/tile_panels.h"
#include "cpu/attention/tile_weights.h"

namespace paged::cpu {
namespace {

class RowGroup {
 public:
  PAGED_INLINE RowGroup(const AttentionParams& params, bool wants_total, Arena& arena)
      : counts_(params),
        is_product_(scores_are_products(params)),
        wants_total_(wants_total),
        function_(is_product_ ? params.scale * kLog2E : kLog2E),
        queries_(arena.take<int32_t>(counts_.steps * kUnitsPerTile)),
        staged_(arena.take<int32_t>(2 * counts_.steps * kUnitsPerTile)),
        acc_(arena.take<float>(counts_.passes * 2 * kUnitsPerTile)),
        work_(arena.take<Work>(1)) {}

  // Prepares for up to 16 rows and a segment.
  void start(const AttentionParams& params, const RowSpan& rows) {
    num_rows_ = rows.num_rows;
    width_ = num_rows_ <= kNarrow ? kNarrow : kTileRows;
    first_hidden_ = first_hidden(params, rows.sequence);
    const int64_t head_dim = params.pool.key.head_dim;
    alignas(64) int32_t staged[kTileRows][kTileUnits] = {};
    look_at_rows(params, rows, work_->rows);
    for (int64_t step = 0; step < counts_.steps; ++step) {
      for (int64_t r = 0; r < num_rows_; ++r) {
        const BFloat16* from = query_at<BFloat16>(params, work_->rows[r].row) + step * kStep;
        store_units(staged[r], load_pairs(from, head_dim - step * kStep));
      }
      int32_t* to = queries_ + step * kTileUnits * width_;
      if (width_ == kTileRows) {
        transpose_rows(staged[0], kTileUnits, to, kTileRows);
      } else {
        for (int64_t i = 0; i < kTileUnits * kNarrow; ++i) to[i] = staged[i % kNarrow][i / kNarrow];
      }
    }
    for (int64_t i = 0; i < kTileRows; ++i) {
      store_units(work_->ones[i], broadcast_unit(0x3f803f80));  // two bfloat16
      work_->minus_references[i] = 0.0f;
      store(work_->totals[i], broadcast(0.0f));
      store(work_->largest[i], broadcast(kMinusInf));
    }
    has_no_reference_ = (1u << num_rows_) - 1;
    is_empty_ = true;
    ahead_.start_segment();
  }

  // Looks at the scores of a piece that begins at key `begin`, for references that no weight
  // exceeds: use_largest(), once all pieces of the segment have been looked at, before attend().
  void look_for_largest(const AttentionParams& params, const RowStream<BFloat16>& stream,
                        int64_t begin, const BFloat16* zeros) {
    const int64_t first = stream.keys.first / kChunk;
    const int64_t last = round_up(stream.keys.last, kChunk) / kChunk;
    ahead_.start_piece(params, stream, last - first);
    score(params, stream, first, last, zeros);
    ahead_.end_piece();
    for (int64_t chunk = first; chunk < last; ++chunk) {
      Vec turned[2][kTileRows];
      turn(chunk, turned);
      for (int64_t r = 0; r < num_rows_; ++r) {
        const SeenScores scores = seen_scores(params, begin, chunk, r, turned);
        if (scores.seen == 0) continue;
        has_no_reference_ &= ~(1u << r);
        store(work_->largest[r], larger(function_.largest(scores.first, scores.second, scores.seen),
                                        load(work_->largest[r])));
      }
    }
  }
  void use_largest() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const Vec largest = broadcast(max(load(work_->largest[r])));
      work_->minus_references[r] = minus_reference(largest)[0];
    }
    ahead_.start_segment();
  }

  // Adds the keys of a piece that begins at key `begin`, of which `stream` has the rows.
  void attend(const AttentionParams& params, const RowStream<BFloat16>& stream, int64_t begin,
              const BFloat16* zeros) {
    const FlushToZero flush;
    const int64_t first = stream.keys.first / kChunk;
    const int64_t last = round_up(stream.keys.last, kChunk) / kChunk;
    ahead_.start_piece(params, stream, (last - first) * (1 + (counts_.passes + 1) / 2));
    score(params, stream, first, last, zeros);
    for (int64_t chunk = first; chunk < last; ++chunk) weigh(params, begin, chunk);
    configure_tiles(value_tiles());
    for (int64_t pass = 0; pass < counts_.passes; pass += 2) {
      const int64_t column = pass * kPass;
      const int64_t rest = params.pool.value.head_dim - column;
      if (rest >= 2 * kPass) {
        sum_values<4, true>(params, stream, first, last, zeros, column);
      } else if (rest > kPass) {
        sum_values<4, false>(params, stream, first, last, zeros, column);
      } else {
        sum_values<2, false>(params, stream, first, last, zeros, column);
      }
    }
    memory_fence();
    ahead_.end_piece();
    is_empty_ = false;
  }

  // Rows that are asked for before they are read: by half a piece more than would be needed if all
  // were read as evenly as they are asked for, since the first pass over values reads them faster.
  static constexpr int64_t kRowsAhead = RowStream<BFloat16>::kFarthestAhead;

  // The softmax of a row, and its weighted sums from column d on.
  PAGED_INLINE SegmentSoftmax softmax(int64_t row) const {
    if ((has_no_reference_ >> row & 1) != 0) return {kMinusInf, 0.0f, 0.0f};
    const float rounded = work_->sums[row][0];
    return {-work_->minus_references[row], rounded,
            wants_total_ ? sum(load(work_->totals[row])) : rounded};
  }
  PAGED_INLINE Vec values(int64_t row, int64_t d) const {
    // Interleaving leaves the columns in this order: a tile has the first or the last half of each
    // 128-bit quarter.
    const float* low = acc_ + (d / kPass * 2 * kTileRows + row) * kTileUnits;
    const float* high = low + kUnitsPerTile;
    const IntVec begin = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    const IntVec indices = begin + (d % kPass == 0 ? 0 : 8);
    return _mm512_permutex2var_ps(load(low), (__m512i)indices, load(high));
  }

 private:
  static constexpr int64_t kNarrow = 4;

  // Asks the second cache for rows of K and V long before they are read. Only so many requests can
  // be under way at a time, so they are spread over all that is done with a piece: a chunk of each
  // pass over its keys and values has its share.
  class Ahead {
   public:
    PAGED_INLINE void start_segment() { num_asked_ = 0; }

    PAGED_INLINE void start_piece(const AttentionParams& params, const RowStream<BFloat16>& stream,
                                  int64_t num_chunks) {
      rows_ = stream.rows;
      key_lines_ = lines_of(params.pool.key.head_dim);
      value_lines_ = lines_of(params.pool.value.head_dim);
      piece_rows_ = stream.value_begin + stream.num_keys;
      value_begin_ = stream.value_begin == 0 ? piece_rows_ : stream.value_begin;
      num_rows_ = stream.num_rows;
      num_chunks_ = num_chunks;
      chunk_ = 0;
    }
    PAGED_INLINE void end_piece() {
      num_asked_ = num_asked_ > piece_rows_ ? num_asked_ - piece_rows_ : 0;
    }

    // The next chunk of a pass, with which the first `reached` rows have been read.
    PAGED_INLINE void start_chunk(int64_t reached) {
      if (num_asked_ < reached) num_asked_ = reached;
      int64_t end = chunk_ * piece_rows_ / num_chunks_ + kRowsAhead;
      if (end > num_rows_) end = num_rows_;
      // Twice the share, where the first rows of a segment are to be caught up with.
      const int64_t most = 2 * piece_rows_ / num_chunks_ + 2;
      left_ = end - num_asked_;
      if (left_ > most) left_ = most;
      ++chunk_;
    }

    // Asks for some of the chunk's share.
    PAGED_INLINE void ask(int64_t num_rows = 4) {
      for (; num_rows > 0 && left_ > 0; --num_rows, --left_, ++num_asked_) {
        const bool is_value = num_asked_ >= value_begin_ && num_asked_ < piece_rows_;
        const auto* row = reinterpret_cast<const char*>(rows_[num_asked_]);
        const int64_t lines = is_value ? value_lines_ : key_lines_;
        for (int64_t i = 0; i < lines; ++i) ask_for(row + i * kCacheLine);
      }
    }
    PAGED_INLINE void ask_for_rest() { ask(left_); }

   private:
    PAGED_INLINE static int64_t lines_of(int64_t head_dim) {
      return round_up(head_dim * int64_t{sizeof(BFloat16)}, kCacheLine) / kCacheLine;
    }

    const BFloat16* const* rows_;  // of the piece, and of keys after it
    int64_t key_lines_;
    int64_t value_lines_;
    int64_t value_begin_;
    int64_t piece_rows_;
    int64_t num_rows_;
    int64_t num_chunks_;  // of all passes
    int64_t chunk_;
    int64_t num_asked_;
    int64_t left_;  // to be asked for beside this chunk
  };

  struct alignas(64) Work {
    float scores[kChunksPerPiece][2][kTileRows * kTileRows];  // [chunk][group][16 keys][width]
    BFloat16 weights[kChunksPerPiece][kTileRows][kChunk];
    int32_t values[2][4][kTileRows][kTileUnits];  // of two chunks: [low or high half][pair][column]
    int32_t ones[kTileRows][kTileUnits];
    float sums[kTileRows][16];
    float totals[kTileRows][kLanes];
    float largest[kTileRows][kLanes];
    float minus_references[kTileRows];
    SeeingRow rows[kTileRows];
  };

  // 0 and 1 are scores, 2 to 5 queries, both only as wide as needed, 6 and 7 keys.
  PAGED_INLINE TileConfig score_tiles() const {
    TileConfig config = kFullTiles;
    for (int i = 0; i < 6; ++i) config.row_bytes[i] = static_cast<uint16_t>(width_ * kUnitBytes);
    return config;
  }
  // 0 to 3 are sums of values, 4 weights, 5 sums of weights, each of as many rows as there are, 6
  // and 7 values.
  PAGED_INLINE TileConfig value_tiles() const {
    TileConfig config = kFullTiles;
    for (int i = 0; i < 6; ++i) config.rows[i] = static_cast<uint8_t>(num_rows_);
    return config;
  }

  // 16 neighbouring keys, `stride` bytes apart.
  struct KeyRows {
    const char* rows;
    int64_t stride;
  };

  // The scores of chunks [first, last) of a piece, before what makes them more than products.
  void score(const AttentionParams& params, const RowStream<BFloat16>& stream, int64_t first,
             int64_t last, const BFloat16* zeros) {
    configure_tiles(score_tiles());
    switch (counts_.steps) {
      case 2:
        multiply_keys<2>(params, stream, first, last, zeros);
        break;
      case 4:
        multiply_keys<4>(params, stream, first, last, zeros);
        break;
      default:
        multiply_keys<0>(params, stream, first, last, zeros);
    }
    memory_fence();
  }

  template <int kSteps>
  PAGED_INLINE void multiply_keys(const AttentionParams& params, const RowStream<BFloat16>& stream,
                                  int64_t first, int64_t last, const BFloat16* zeros) {
    const int64_t query_bytes = width_ * kUnitBytes;
    const int64_t query_step = kTileUnits * width_;
    if constexpr (kSteps >= 2) {
      _tile_loadd(2, queries_, query_bytes);
      _tile_loadd(3, queries_ + query_step, query_bytes);
    }
    if constexpr (kSteps == 4) {
      _tile_loadd(4, queries_ + 2 * query_step, query_bytes);
      _tile_loadd(5, queries_ + 3 * query_step, query_bytes);
    }
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t key = chunk * kChunk;
      ahead_.start_chunk(key + kChunk - stream.keys.first);
      const KeyRows a = key_rows(params, stream, key, staged_, zeros);
      const KeyRows b =
          key_rows(params, stream, key + kTileRows, staged_ + counts_.steps * kUnitsPerTile, zeros);
      // Two sums, so that the unit needn't wait for either.
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kSteps == 0) {
        for (int64_t step = 0; step < counts_.steps; ++step) {
          _tile_loadd(2, queries_ + step * query_step, query_bytes);
          _tile_loadd(6, a.rows + step * 64, a.stride);
          _tile_dpbf16ps(0, 6, 2);
          ahead_.ask();
          _tile_loadd(7, b.rows + step * 64, b.stride);
          _tile_dpbf16ps(1, 7, 2);
          ahead_.ask();
        }
      } else {
        _tile_loadd(6, a.rows, a.stride);
        _tile_dpbf16ps(0, 6, 2);
        ahead_.ask();
        _tile_loadd(7, b.rows, b.stride);
        _tile_dpbf16ps(1, 7, 2);
        ahead_.ask();
        _tile_loadd(6, a.rows + 64, a.stride);
        _tile_dpbf16ps(0, 6, 3);
        ahead_.ask();
        _tile_loadd(7, b.rows + 64, b.stride);
        _tile_dpbf16ps(1, 7, 3);
        ahead_.ask();
        if constexpr (kSteps == 4) {
          _tile_loadd(6, a.rows + 128, a.stride);
          _tile_dpbf16ps(0, 6, 4);
          ahead_.ask();
          _tile_loadd(7, b.rows + 128, b.stride);
          _tile_dpbf16ps(1, 7, 4);
          ahead_.ask();
          _tile_loadd(6, a.rows + 192, a.stride);
          _tile_dpbf16ps(0, 6, 5);
          ahead_.ask();
          _tile_loadd(7, b.rows + 192, b.stride);
          _tile_dpbf16ps(1, 7, 5);
          ahead_.ask();
        }
      }
      _tile_stored(0, work_->scores[chunk][0], query_bytes);
      _tile_stored(1, work_->scores[chunk][1], query_bytes);
    }
  }

  // Keys in their place, if they are all there and in one block, else copied.
  PAGED_INLINE KeyRows key_rows(const AttentionParams& params, const RowStream<BFloat16>& stream,
                                int64_t key, int32_t* staged, const BFloat16* zeros) const {
    const bool is_in_place = params.pool.key.head_dim % kStep == 0 &&
                             params.pool.block_size % kTileRows == 0 && key >= stream.keys.first &&
                             key + kTileRows <= stream.keys.last;
    if (is_in_place) {
      return {reinterpret_cast<const char*>(stream.key_rows()[key]),
              params.pool.key.token_stride * int64_t{sizeof(BFloat16)}};
    }
    stage(stream, key, params.pool.key.head_dim, zeros, staged);
    return {reinterpret_cast<const char*>(staged), counts_.steps * kTileUnits * kUnitBytes};
  }

  // Copies 16 keys, padded with zeros.
  void stage(const RowStream<BFloat16>& stream, int64_t key, int64_t head_dim,
             const BFloat16* zeros, int32_t* to) const {
    const BFloat16* rows[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i) {
      rows[i] = stream.holds(key + i) ? stream.key_rows()[key + i] : zeros;
    }
    for (int64_t step = 0; step < counts_.steps; ++step) {
      stage_step(rows, step, head_dim, to + step * kTileUnits, counts_.steps * kTileUnits);
    }
    memory_fence();
  }

  // The scores of a chunk by row: those of its first 16 keys and of its last.
  PAGED_INLINE void turn(int64_t chunk, Vec (&turned)[2][kTileRows]) const {
    for (int64_t group = 0; group < 2; ++group) {
      const float* scores = work_->scores[chunk][group];
      if (width_ == kNarrow) {
        const auto pairs = [&](int64_t first, int row) __attribute__((always_inline)) {
          // Of 8 keys those of this row, then those of the next.
          const IntVec indices = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
          return _mm512_permutex2var_ps(load(scores + first * kNarrow), (__m512i)(indices + row),
                                        load(scores + (first + 4) * kNarrow));
        };
        for (int row = 0; row < kNarrow; row += 2) {
          const Vec low = pairs(0, row), high = pairs(8, row);
          turned[group][row] = _mm512_shuffle_f32x4(low, high, 0x44);
          turned[group][row + 1] = _mm512_shuffle_f32x4(low, high, 0xee);
        }
      } else {
        alignas(64) float by_row[kTileRows][kTileUnits];
        transpose_rows(reinterpret_cast<const int32_t*>(scores), kTileRows,
                       reinterpret_cast<int32_t*>(by_row[0]), kTileUnits);
        for (int64_t r = 0; r < num_rows_; ++r) turned[group][r] = load(by_row[r]);
      }
    }
  }

  // The scores of a row with a chunk, and which of them count.
  struct SeenScores {
    Vec first;
    Vec second;
    uint32_t seen;
  };
  PAGED_INLINE SeenScores seen_scores(const AttentionParams& params, int64_t piece_begin,
                                      int64_t chunk, int64_t r,
                                      const Vec (&turned)[2][kTileRows]) const {
    const int64_t begin = piece_begin + chunk * kChunk;
    SeenScores scores = {turned[0][r], turned[1][r],
                         chunk_mask(params, work_->rows[r], first_hidden_, begin)};
    if (!is_product_) {
      const ScoreRule rule = score_rule(params, work_->rows[r].row, begin);
      scores.first = rule.score(scores.first, lane_indices());
      scores.second = rule.score(scores.second, lane_indices() + kLanes);
    }
    return scores;
  }

  void weigh(const AttentionParams& params, int64_t piece_begin, int64_t chunk) {
    Vec turned[2][kTileRows];
    turn(chunk, turned);
    for (int64_t r = 0; r < num_rows_; ++r) {
      const auto [first, second, seen] = seen_scores(params, piece_begin, chunk, r, turned);
      float& reference = work_->minus_references[r];
      if ((has_no_reference_ >> r & 1) != 0 && seen != 0) {
        has_no_reference_ &= ~(1u << r);
        const Vec largest = broadcast(max(function_.largest(first, second, seen)));
        reference = minus_reference(largest)[0];
      }
      store_units(reinterpret_cast<int32_t*>(work_->weights[chunk][r]),
                  function_.weights(first, second, broadcast(reference), seen));
      if (wants_total_) {
        store(work_->totals[r], function_.add_precisely(load(work_->totals[r]), first, second,
                                                        broadcast(reference), seen));
      }
    }
  }

  // Columns from `column` on, whose sums the unit holds: two tiles for 32. With the first come the
  // sums of weights.
  template <int kTiles, bool kIsWhole>
  void sum_values(const AttentionParams& params, const RowStream<BFloat16>& stream, int64_t first,
                  int64_t last, const BFloat16* zeros, int64_t column) {
    const bool is_first = column == 0;
    const int64_t head_dim = params.pool.value.head_dim;
    float* acc = acc_ + column / kPass * 2 * kUnitsPerTile;
    load_sums<kTiles>(acc, is_first);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t key = chunk * kChunk;
      ahead_.start_chunk(stream.value_begin +
                         (is_first ? key + kChunk - stream.keys.first : stream.num_keys));
      auto& values = work_->values[chunk % 2];
      if (key >= stream.keys.first && key + kChunk <= stream.keys.last) {
        interleave<kTiles, kIsWhole>(stream.value_rows() + key, column, head_dim, values);
      } else {
        const ChunkRows some(stream.value_rows(), stream.keys, key, zeros);
        interleave<kTiles, kIsWhole>(some.rows, column, head_dim, values);
      }
      memory_fence();
      _tile_loadd(4, work_->weights[chunk], 64);
      if (is_first) {
        _tile_loadd(6, work_->ones, 64);
        _tile_dpbf16ps(5, 4, 6);
      }
      ahead_.ask();
      _tile_loadd(7, values[0], 64);
      _tile_dpbf16ps(0, 4, 7);
      ahead_.ask();
      _tile_loadd(6, values[1], 64);
      _tile_dpbf16ps(1, 4, 6);
      ahead_.ask();
      if constexpr (kTiles == 4) {
        _tile_loadd(7, values[2], 64);
        _tile_dpbf16ps(2, 4, 7);
        ahead_.ask();
        _tile_loadd(6, values[3], 64);
        _tile_dpbf16ps(3, 4, 6);
      }
      ahead_.ask_for_rest();
    }
    store_sums<kTiles>(acc, is_first);
  }

  template <int kTiles, bool kIsWhole>
  PAGED_INLINE static void interleave(const BFloat16* const* rows, int64_t column, int64_t head_dim,
                                      int32_t (&to)[4][kTileRows][kTileUnits]) {
#pragma GCC unroll 16
    for (int64_t pair = 0; pair < kTileRows; ++pair) {
      const BFloat16* first = rows[2 * pair] + column;
      const BFloat16* second = rows[2 * pair + 1] + column;
#pragma GCC unroll 2
      for (int64_t tile = 0; tile < kTiles; tile += 2) {
        const int64_t at = tile / 2 * kPass;
        const int64_t count = kIsWhole ? kPass : head_dim - column - at;
        const auto a = (__m512i)load_pairs(first + at, count);
        const auto b = (__m512i)load_pairs(second + at, count);
        store_units(to[tile][pair], (IntVec)_mm512_unpacklo_epi16(a, b));
        store_units(to[tile + 1][pair], (IntVec)_mm512_unpackhi_epi16(a, b));
      }
    }
  }

  // Begins with the sums of the pieces before: those of values, and of weights.
  template <int kTiles>
  PAGED_INLINE void load_sums(const float* acc, bool has_weights) const {
    if (is_empty_) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_zero(5);
      return;
    }
    if (has_weights) _tile_loadd(5, work_->sums, 64);
    _tile_loadd(0, acc, 64);
    _tile_loadd(1, acc + kUnitsPerTile, 64);
    if constexpr (kTiles == 4) {
      _tile_loadd(2, acc + 2 * kUnitsPerTile, 64);
      _tile_loadd(3, acc + 3 * kUnitsPerTile, 64);
    }
  }
  template <int kTiles>
  PAGED_INLINE void store_sums(float* acc, bool has_weights) const {
    if (has_weights) _tile_stored(5, work_->sums, 64);
    _tile_stored(0, acc, 64);
    _tile_stored(1, acc + kUnitsPerTile, 64);
    if constexpr (kTiles == 4) {
      _tile_stored(2, acc + 2 * kUnitsPerTile, 64);
      _tile_stored(3, acc + 3 * kUnitsPerTile, 64);
    }
  }

  Ahead ahead_;
  TileCounts counts_;
  bool is_product_;   // a score is the scale times the dot product
  bool wants_total_;  // of the weights before rounding
  WeightFunction function_;
  int32_t* queries_;  // [steps][16 pairs of elements][width_]
  int32_t* staged_;   // twice [16 keys][steps][16 pairs]
  float* acc_;        // [passes][low or high half of the columns' quarters][16 rows][16]
  Work* work_;
  int64_t num_rows_ = 0;
  int64_t width_ = kNarrow;
  int64_t first_hidden_ = 0;
  uint32_t has_no_reference_ = 0;  // a bit for each row
  bool is_empty_ = true;
};

}  // namespace
}  // namespace paged::cpu
