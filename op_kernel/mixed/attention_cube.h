// The cube core's half of attention on a group of cores: the products of queries with keys, and of
// weights with values.
//
// Keys and values come through the block table straight into L1, tile after tile. Between each two
// memories lies a ring of buffers, so every pipe works on one while the one before it fills others:
//
//   GM --MTE2--> L1 --MTE1--> L0A, L0B --M--> L0C --FIX--> workspace
//
// Tiles of keys for the scores of a step and tiles of values for the products of an earlier one
// take turns: while the matrix unit multiplies the values, the scores are on their way out. Where
// units have several bands, the tiles of a piece stay in L1 until the last band has used them.
#pragma once

#include "attention/block_tables.h"
#include "attention/sequence.h"
#include "attention/tensors.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "mixed/cube_copy.h"
#include "mixed/cube_step.h"
#include "mixed/cube_sums.h"
#include "mixed/exchange.h"
#include "mixed/piece_steps.h"
#include "mixed/ring.h"
#include "mixed/staying_tiles.h"
#include "mixed/verdict.h"

constexpr uint32_t kL0Elements = 16 * 1024;  // of 16 bits: one of two buffers in L0A, in L0B

// Tiles that come in ahead of their use, of keys and of values with their weights: one of each is
// used while the next ones come in.
constexpr int32_t kTilesInL1 = 4;

// With kWidth keys and values are so wide and tiles kTileKeys keys, dense or not, and a factor is
// all of a tile: then the compiler knows what most instructions are told. With 0 all that is the
// tiling's.
template <typename T, int64_t kWidth, int64_t kTileKeys, bool kDense>
class CubeHalf {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    query_.SetGlobalBuffer((__gm__ T*)tensors.query);
    key_cache_.SetGlobalBuffer((__gm__ T*)tensors.key_cache);
    value_cache_.SetGlobalBuffer((__gm__ T*)tensors.value_cache);
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    tables_.Init(tiling, tensors.block_tables);
    exchange_.Init(tiling, tensors.workspace, AscendC::GetBlockIdx());
    steps_.StartRing();
    blocks_hold_tiles_ = (tiling.block_size & (TileKeys() - 1)) == 0 &&
                         RowsAreNear(KeyDim(), tiling.key.token_stride) &&
                         RowsAreNear(ValueDim(), tiling.value.token_stride);
    if (IsDense()) {
      DescribeDenseRows(TileKeys(), Larger(KeyDim(), ValueDim()));
    }
    InitBuffers(pipe);
  }

  __aicore__ inline void Process() {
    OpenAll();
    Walk(false);
    if (MayMixVisibility(*tiling_) && SharesTrouble()) {
      Walk(true);
    }
    CloseAll();
  }

 private:
  // op_host's L1 budget counts these buffers: attention_tiling.cpp, attention_l1_bytes.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    using AscendC::TPosition;
    query_size_ = static_cast<uint32_t>(tiling_->max_rows * KeyDim());
    queries_ = NewBuffer<T, TPosition::A1>(pipe, 2 * query_size_);
    tiles_stay_ = tiling_->unit_rows > tiling_->max_rows;
    if (tiles_stay_) {
      staying_.Init(TileKeys());
      tile_size_ = static_cast<uint32_t>(TileKeys() * tiling_->max_rows);
      weights_at_ = 0;
      staying_keys_ = kTilesInL1 * tile_size_;
      staying_values_ = staying_keys_ + static_cast<uint32_t>(kPiece * KeyDim());
    } else {
      const int64_t width = Larger(KeyDim(), ValueDim() + tiling_->max_rows);
      tile_size_ = static_cast<uint32_t>(TileKeys() * width);
      weights_at_ = static_cast<uint32_t>(TileKeys() * ValueDim());
    }
    const int64_t staying = tiles_stay_ ? kPiece * (KeyDim() + ValueDim()) : 0;
    tiles_ = NewBuffer<T, TPosition::B1>(pipe, kTilesInL1 * tile_size_ + staying);
    left_ = NewBuffer<T, TPosition::A2>(pipe, 2 * kL0Elements);
    right_ = NewBuffer<T, TPosition::B2>(pipe, 2 * kL0Elements);
    scores_.Init(pipe);
    products_.Init(pipe);
  }

  __aicore__ inline void OpenAll() {
    query_ring_.Open();
    tile_ring_.Open();
    factor_ring_.Open();
    scores_.Open();
    products_.Open();
  }

  __aicore__ inline void CloseAll() {
    query_ring_.Close();
    tile_ring_.Close();
    factor_ring_.Close();
    scores_.Close();
    products_.Close();
  }

  // What the compiler may know.
  PAGED_INLINE int64_t KeyDim() const { return kWidth != 0 ? kWidth : tiling_->key.head_dim; }
  PAGED_INLINE int64_t ValueDim() const { return kWidth != 0 ? kWidth : tiling_->value.head_dim; }
  PAGED_INLINE int64_t TileKeys() const { return kWidth != 0 ? kTileKeys : tiling_->tile; }
  PAGED_INLINE bool IsDense() const { return kWidth != 0 ? kDense : tiling_->dense_tiles != 0; }
  PAGED_INLINE uint32_t KeyColumns() const {
    return static_cast<uint32_t>(kWidth != 0 ? kWidth : tiling_->key_columns);
  }
  PAGED_INLINE uint32_t ValueColumns() const {
    return static_cast<uint32_t>(kWidth != 0 ? kWidth : tiling_->value_columns);
  }

  __aicore__ inline void Walk(bool by_token) {
    steps_.Init(*tiling_, sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), by_token);
    for (int64_t i = 0; i < kWindow; ++i) {
      window_[i].tiles = window_[i].whole = {0, 0};  // there are none before the first step
    }
    int64_t n = 0;
    bool has_next = NextStep(StepAt(0));
    if (has_next) {
      LoadQueries(StepAt(0).step);
    }
    for (; has_next; ++n) {
      CubeStep& step = StepAt(n);
      if (step.step.opens_band) {
        query_index_[step.step.band] = next_query_;
        query_ring_.Use(next_query_);
      }
      step.query = query_index_[step.step.band];
      step.queries_at = step.query * query_size_;
      CubeStep& next = StepAt(n + 1);
      has_next = NextStep(next);
      RunStep(step, StepAt(n - kAhead), has_next ? &next : nullptr);
      if (n >= kAhead) {
        TellProducts();
      }
    }
    for (int64_t oldest = Larger(0, n - kAhead); oldest < n; ++oldest) {
      for (int64_t begin = 0, i = 0; begin < kPiece; begin += TileKeys(), ++i) {
        AddValuesAt(StepAt(oldest), begin, i);
      }
      TellProducts();
    }
  }

  // The scores of a step and the products of an earlier one; and the queries of the next one, if
  // there is one.
  PAGED_INLINE void RunStep(CubeStep& step, const CubeStep& oldest, const CubeStep* next) {
    for (int64_t begin = 0, i = 0; begin < kPiece; begin += TileKeys(), ++i) {
      if (HasTile(step.whole, begin)) {
        ScoreTile<true>(step, begin, step.places[i]);
      } else if (HasTile(step.tiles, begin)) {
        ScoreTile<false>(step, begin, step.places[i]);
      }
      if (begin == 0 && next != nullptr) {
        LoadQueries(next->step);
      }
      AddValuesAt(oldest, begin, i);
    }
  }

  PAGED_INLINE void AddValuesAt(const CubeStep& step, int64_t begin, int64_t i) {
    if (HasTile(step.whole, begin)) {
      AddValuesOfTile<true>(step, begin, step.places[i]);
    } else if (HasTile(step.tiles, begin)) {
      AddValuesOfTile<false>(step, begin, step.places[i]);
    }
  }

  // The products of the oldest step are there.
  __aicore__ inline void TellProducts() {
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kProductsReady);
  }

  // Steps with keys, by their number: the next one, this one, and those in flight.
  PAGED_INLINE CubeStep& StepAt(int64_t n) { return window_[n & (kWindow - 1)]; }

  // Finds the next step with keys. False: there is none.
  __aicore__ inline bool NextStep(CubeStep& next) {
    PieceStep& step = next.step;
    do {
      if (!steps_.Next(step)) {
        return false;
      }
    } while (!step.has_keys);
    next.rows = static_cast<uint32_t>(step.pitch);
    next.product_half = FirstHalf(next.rows, static_cast<uint32_t>(ValueDim()));
    next.pairs_at = exchange_.PairsAt(step.buffer);
    next.table_at = tables_.RowOf(step.unit.index);
    next.key_head = step.unit.kv_head * tiling_->key.head_stride;
    next.value_head = step.unit.kv_head * tiling_->value.head_stride;
    FindTiles(next, TileKeys(), blocks_hold_tiles_);
    return true;
  }

  // Whether a vector core of the group has seen a sum that isn't a number. Tells them, too.
  __aicore__ inline bool SharesTrouble() {
    AscendC::CrossCoreWaitFlag(kVerdictReady);
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE2>(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  // ---- scores = keys x queries

  // Of the step's band, if it is its first one.
  __aicore__ inline void LoadQueries(const PieceStep& step) {
    if (!step.opens_band) {
      return;
    }
    const Unit& unit = step.unit;
    next_query_ = query_ring_.Begin();
    const AscendC::LocalTensor<T> to = queries_[next_query_ * query_size_];
    const RowLayout& layout = tiling_->query;
    for (int64_t i = 0; i < unit.num_rows;) {
      const Row row = RowAt(*tiling_, unit, i);
      const int64_t rows = RowsOfToken(*tiling_, unit, i);
      const int64_t tokens = layout.token_stride <= kWidestNdStride ? TokensFrom(unit, i, rows) : 1;
      const int64_t at = row.token * layout.token_stride + row.head * layout.head_stride;
      CopyTokensToL1(to[i * kFractal], query_[at], tokens, layout.token_stride, rows, KeyDim(),
                     layout.head_stride, step.pitch);
      i += tokens * rows;
    }
    ZeroRowsInL1(to, unit.num_rows, step.pitch, KeyDim(), step.pitch);
    query_ring_.Filled(next_query_);
  }

  // Tokens whose rows are all in the unit, from row i on, the first of `rows` rows of its token; 1
  // if the first one isn't whole.
  __aicore__ inline int64_t TokensFrom(const Unit& unit, int64_t i, int64_t rows) const {
    const bool whole = rows == tiling_->heads_per_kv_head;
    return whole ? Divide(unit.num_rows - i, tiling_->per_kv_head) : 1;
  }

  // ---- a tile's part in a step

  // The keys of a tile that some row of the band, and of the unit, sees, and whole fractals around
  // them, counted from the tile's first one. All of them are if it is whole.
  struct Tile {
    uint32_t first;  // of the band's fractals
    uint32_t keys;   // in them
    uint32_t place;  // of the first one in the unit's fractals, which are in L1
    Range seen;      // by the unit
    Range span;      // the unit's fractals
  };

  PAGED_INLINE Tile PartOfTile(const PieceStep& step, int64_t begin) const {
    const Range span = Within(step.span, begin, TileKeys());
    const Range seen = Within(step.unit_seen, begin, TileKeys());
    const Range fractals = SpanOf(seen);
    return {static_cast<uint32_t>(span.first), static_cast<uint32_t>(span.last - span.first),
            static_cast<uint32_t>(span.first - fractals.first), seen, fractals};
  }

  template <bool kWhole>
  PAGED_INLINE void ScoreTile(CubeStep& cube, int64_t begin, TilePlace& place) {
    const PieceStep& step = cube.step;
    const uint32_t width = static_cast<uint32_t>(KeyDim());
    const uint32_t rows = cube.rows;
    uint32_t first = 0;
    uint32_t num_keys = static_cast<uint32_t>(TileKeys());
    const uint32_t turn = tile_ring_.Begin();
    FindPlace<kWhole>(cube, begin, place);
    uint32_t at = tiles_stay_ ? staying_keys_ + place.place * width : turn * tile_size_;
    if constexpr (kWhole) {
      if (!tiles_stay_ || place.comes_in) {
        CopyWhole(at, key_cache_, tiling_->key, KeyDim(), cube.key_head, place);
      }
    } else {
      const Tile tile = PartOfTile(step, begin);
      if (!tiles_stay_ || place.comes_in) {
        CopyPart(at, key_cache_, tiling_->key, KeyDim(), step, begin, tile);
      }
      first = tile.first;
      num_keys = tile.keys;
      at += tile.place * width;
    }
    tile_ring_.Filled(turn);
    tile_ring_.Use(turn);
    const AscendC::LocalTensor<T> keys = tiles_[at];
    const AscendC::LocalTensor<T> queries = queries_[cube.queries_at];
    const uint32_t half = FirstHalf(num_keys, rows);
    const uint32_t sums = scores_.Open(half < num_keys);
    for (uint32_t c = 0; c < width; c += KeyColumns()) {
      const uint32_t columns = Part(width, c, KeyColumns());
      const uint32_t buffer = factor_ring_.Begin();
      LoadTile<false>(Left(buffer), keys, num_keys, width, c, columns);
      LoadColumns<false>(Right(buffer), queries[c * rows], rows, columns, rows);
      factor_ring_.Filled(buffer);
      const Factors factors = {num_keys, half, rows, columns, 0};
      Multiply(scores_, sums, buffer, factors, c == 0, c == 0, c + columns == width);
    }
    tile_ring_.Used(turn);
    Store(exchange_.Scores(0)[cube.pairs_at + (begin + first) * rows], scores_, sums, num_keys,
          half, num_keys, rows);
    if (begin + TileKeys() >= step.span.last) {
      if (step.closes_band) {
        query_ring_.Used(cube.query);
      }
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kScoresReady);
    }
  }

  // Columns from column `c` on, at most `most`.
  PAGED_INLINE static uint32_t Part(uint32_t width, uint32_t c, uint32_t most) {
    return width - c < most ? width - c : most;
  }

  // Where a tile's keys and values are, and whether they have yet to come in.
  template <bool kWhole>
  PAGED_INLINE void FindPlace(const CubeStep& cube, int64_t begin, TilePlace& place) {
    const PieceStep& step = cube.step;
    if (tiles_stay_) {
      place.comes_in = staying_.Take(step.opens_piece && begin <= step.span.first, begin);
      place.place = staying_.At(begin);
    }
    if constexpr (kWhole) {
      const int64_t key = step.begin + begin;
      const int64_t column = Divide(key, tiling_->per_block);
      place.block = tables_.BlockAt(cube.table_at, column);
      place.slot = key - column * tiling_->block_size;
    }
  }

  // Brings in a tile that is whole.
  PAGED_INLINE void CopyWhole(uint32_t at, const AscendC::GlobalTensor<T>& cache,
                              const CacheLayout& layout, int64_t width, int64_t head,
                              const TilePlace& place) const {
    const int64_t from =
        place.block * layout.block_stride + place.slot * layout.token_stride + head;
    if (IsDense()) {
      AscendC::DataCopy(tiles_[at], cache[from], static_cast<uint32_t>(TileKeys() * width));
    } else {
      CopyMatricesToL1(tiles_[at], cache[from], TileKeys() / kFractal, kFractal, width,
                       layout.token_stride);
    }
  }

  // Brings in what there is of one.
  __aicore__ inline void CopyPart(uint32_t at, const AscendC::GlobalTensor<T>& cache,
                                  const CacheLayout& layout, int64_t width, const PieceStep& step,
                                  int64_t begin, const Tile& tile) const {
    if (IsDense()) {
      CopyDenseTileToL1(tiles_[at], cache, layout, width, tables_, step.unit, step.begin + begin,
                        tile.seen, tile.span);
    } else {
      CopyTileToL1(tiles_[at], cache, layout, width, tables_, step.unit, step.begin + begin,
                   tile.seen, tile.span);
    }
  }

  // ---- products = weights x values

  template <bool kWhole>
  PAGED_INLINE void AddValuesOfTile(const CubeStep& cube, int64_t begin, const TilePlace& place) {
    const PieceStep& step = cube.step;
    const bool opens = begin <= step.span.first;
    const bool closes = begin + TileKeys() >= step.span.last;
    const uint32_t width = static_cast<uint32_t>(ValueDim());
    const uint32_t rows = cube.rows;
    uint32_t first = 0;
    uint32_t num_keys = static_cast<uint32_t>(TileKeys());
    const uint32_t turn = tile_ring_.Begin();
    uint32_t at = tiles_stay_ ? staying_values_ + place.place * width : turn * tile_size_;
    // Values first: they don't wait for the vector cores, as the weights of a step's first tile do.
    if constexpr (kWhole) {
      if (!tiles_stay_ || place.comes_in) {
        CopyWhole(at, value_cache_, tiling_->value, ValueDim(), cube.value_head, place);
      }
    } else {
      const Tile tile = PartOfTile(step, begin);
      if (!tiles_stay_ || place.comes_in) {
        CopyPart(at, value_cache_, tiling_->value, ValueDim(), step, begin, tile);
      }
      first = tile.first;
      num_keys = tile.keys;
      at += tile.place * width;
    }
    if (opens) {
      product_ = products_.Open(cube.product_half < rows);
      AscendC::CrossCoreWaitFlag(kWeightsReady);
    }
    const AscendC::LocalTensor<T> values = tiles_[at];
    const AscendC::LocalTensor<T> weights = tiles_[turn * tile_size_ + weights_at_];
    LoadWeights(weights, cube, begin + first, num_keys);
    tile_ring_.Filled(turn);

    tile_ring_.Use(turn);
    for (uint32_t c = 0; c < width; c += ValueColumns()) {
      const uint32_t columns = Part(width, c, ValueColumns());
      const uint32_t buffer = factor_ring_.Begin();
      LoadColumns<true>(Left(buffer), weights, num_keys, rows, static_cast<uint32_t>(TileKeys()));
      LoadTile<true>(Right(buffer), values, num_keys, width, c, columns);
      factor_ring_.Filled(buffer);
      const Factors factors = {rows, cube.product_half, columns, num_keys, c};
      Multiply(products_, product_, buffer, factors, opens, opens && c == 0,
               closes && c + columns == width);
    }
    tile_ring_.Used(turn);
    if (closes) {
      Store(exchange_.Products(step.buffer), products_, product_, rows, cube.product_half,
            static_cast<uint32_t>(step.unit.num_rows), width);
    }
  }

  // The weights of `keys` keys from `first` on, column by column of 16 rows.
  PAGED_INLINE void LoadWeights(const AscendC::LocalTensor<T>& to, const CubeStep& cube,
                                int64_t first, uint32_t keys) {
    const AscendC::DataCopyParams params(static_cast<uint16_t>(cube.rows / kFractal),
                                         static_cast<uint16_t>(keys),
                                         static_cast<uint16_t>(tiling_->exchange_keys - keys),
                                         static_cast<uint16_t>(TileKeys() - keys));
    AscendC::DataCopy(to, exchange_.Weights(0, 0)[cube.pairs_at + first * kFractal], params);
  }

  // ---- the buffers

  PAGED_INLINE AscendC::LocalTensor<T> Left(uint32_t buffer) const {
    return left_[buffer * kL0Elements];
  }
  PAGED_INLINE AscendC::LocalTensor<T> Right(uint32_t buffer) const {
    return right_[buffer * kL0Elements];
  }

  // Loads columns of keys as the left factor, or of values as the right one.
  template <bool kRight>
  PAGED_INLINE void LoadTile(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<T>& from,
                             uint32_t rows, uint32_t width, uint32_t column,
                             uint32_t columns) const {
    if (IsDense()) {
      LoadDenseRows(to, from, rows, width, column, columns);
    } else {
      LoadRows<kRight>(to, from, rows, width, column, columns);
    }
  }

  // Of a product, what one load of L0 gives: its columns from `column` on, as a product, or as a
  // term of the sum, over `depth`.
  struct Factors {
    uint32_t rows;
    uint32_t half;  // rows of the first half
    uint32_t columns;
    uint32_t depth;
    uint32_t column;
  };

  // sums = or += left x right, by halves of the rows, the first one in buffer `sum`. With `begins`
  // the halves take their buffers, with `ends` they are complete.
  template <int32_t first>
  PAGED_INLINE void Multiply(const CubeSums<first>& sums, uint32_t sum, uint32_t buffer,
                             const Factors& factors, bool opens, bool begins, bool ends) {
    factor_ring_.Use(buffer);
    MultiplyHalf(sums, sum, buffer, factors, 0, factors.half, opens, begins, ends);
    if (factors.half < factors.rows) {
      MultiplyHalf(sums, sum ^ 1, buffer, factors, factors.half, factors.rows - factors.half, opens,
                   begins, ends);
    }
    factor_ring_.Used(buffer);
  }

  template <int32_t first>
  PAGED_INLINE void MultiplyHalf(const CubeSums<first>& sums, uint32_t sum, uint32_t buffer,
                                 const Factors& factors, uint32_t row, uint32_t rows, bool opens,
                                 bool begins, bool ends) {
    if (begins) {
      sums.Begin(sum);
    }
    if (!opens && rows * factors.columns < kOrderedProducts) {
      AscendC::PipeBarrier<PIPE_M>();
    }
    const AscendC::MmadParams params(static_cast<uint16_t>(rows),
                                     static_cast<uint16_t>(factors.columns),
                                     static_cast<uint16_t>(factors.depth), 0, false, opens);
    AscendC::Mmad(sums.At(sum)[factors.column * rows], Left(buffer)[row * factors.depth],
                  Right(buffer), params);
    if (ends) {
      sums.End(sum);
    }
  }

  // Stores the first `stored` of `rows` rows of complete sums, one after the other.
  template <int32_t first>
  PAGED_INLINE void Store(const AscendC::GlobalTensor<float>& to, const CubeSums<first>& sums,
                          uint32_t sum, uint32_t rows, uint32_t half, uint32_t stored,
                          uint32_t width) {
    StoreHalf(to, sums, sum, half, stored, width);
    if (half < rows) {
      StoreHalf(to[half * width], sums, sum ^ 1, rows - half, stored - half, width);
    }
  }

  template <int32_t first>
  PAGED_INLINE void StoreHalf(const AscendC::GlobalTensor<float>& to, const CubeSums<first>& sums,
                              uint32_t sum, uint32_t rows, uint32_t stored, uint32_t width) {
    sums.Use(sum);
    const AscendC::FixpipeParamsV220 params(static_cast<uint16_t>(width),
                                            static_cast<uint16_t>(rows < stored ? rows : stored),
                                            static_cast<uint16_t>(rows), width, false);
    AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(to, sums.At(sum), params);
    sums.Used(sum);
  }

  const AttentionTilingData* tiling_;
  Sequences sequences_;
  BlockTables tables_;
  Exchange<T> exchange_;
  PieceSteps steps_;
  bool blocks_hold_tiles_;
  bool tiles_stay_;
  static constexpr int64_t kWindow = 8;  // a power of two over kAhead + 1
  CubeStep window_[kWindow];
  uint32_t query_index_[kMostBands];  // of the ring of queries: the bands'
  uint32_t next_query_;               // the next band's
  uint32_t query_size_;               // elements of a band's queries
  uint32_t tile_size_;                // elements of one of tiles_
  uint32_t weights_at_;               // where its weights begin, behind values
  uint32_t staying_keys_;             // where the places are, in tiles_: [kPiece][key_dim]
  uint32_t staying_values_;           // [kPiece][value_dim]

  AscendC::GlobalTensor<T> query_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;

  AscendC::LocalTensor<T> queries_;  // two bands' [max_rows][key_dim]
  // Of keys, or of values and weights; if tiles stay, of weights, and behind them the places.
  AscendC::LocalTensor<T> tiles_;
  AscendC::LocalTensor<T> left_;   // L0A
  AscendC::LocalTensor<T> right_;  // L0B
  StayingTiles staying_;
  CubeSums<0> scores_;
  CubeSums<2> products_;
  uint32_t product_;  // the buffer of the first half of the oldest step's

  Ring<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 0, 2> query_ring_;
  Ring<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 2, kTilesInL1> tile_ring_;
  // TPipe has the ids 0, 1 and 2 of M_MTE1 on a cube core.
  Ring<AscendC::HardEvent::MTE1_M, AscendC::HardEvent::M_MTE1, 3, 2> factor_ring_;
};

// The cube core's half, for all dims.
template <typename T>
class AttentionCube {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tensors_ = &tensors;
    tiling_ = &tiling;
    pipe_ = pipe;
  }

  __aicore__ inline void Process() {
    const bool is_usual = tiling_->key.head_dim == kUsualWidth &&
                          tiling_->value.head_dim == kUsualWidth &&
                          tiling_->key_columns == kUsualWidth &&
                          tiling_->value_columns == kUsualWidth && tiling_->tile == kUsualTile;
    if (!is_usual) {
      Run<0, 0, false>();
    } else if (tiling_->dense_tiles != 0) {
      Run<kUsualWidth, kUsualTile, true>();
    } else {
      Run<kUsualWidth, kUsualTile, false>();
    }
  }

 private:
  static constexpr int64_t kUsualWidth = 128;
  static constexpr int64_t kUsualTile = 128;

  template <int64_t kWidth, int64_t kTileKeys, bool kDense>
  __aicore__ inline void Run() {
    CubeHalf<T, kWidth, kTileKeys, kDense> half;
    half.Init(*tensors_, *tiling_, pipe_);
    half.Process();
  }

  const AttentionTensors* tensors_;
  const AttentionTilingData* tiling_;
  AscendC::TPipe* pipe_;
};
