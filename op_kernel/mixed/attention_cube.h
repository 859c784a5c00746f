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

// With kWidth keys and values are so wide and tiles kTileKeys keys, and a factor is all of a tile:
// then the compiler knows what most instructions are told. With 0 all that is the tiling's.
template <typename T, int64_t kWidth, int64_t kTileKeys>
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
      staying_keys_.Init(pipe, TileKeys(), KeyDim());
      staying_values_.Init(pipe, TileKeys(), ValueDim());
      tile_size_ = static_cast<uint32_t>(TileKeys() * tiling_->max_rows);
    } else {
      const int64_t width = Larger(KeyDim(), ValueDim() + tiling_->max_rows);
      tile_size_ = static_cast<uint32_t>(TileKeys() * width);
    }
    tiles_ = NewBuffer<T, TPosition::B1>(pipe, kTilesInL1 * tile_size_);
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
  __aicore__ inline int64_t KeyDim() const { return kWidth != 0 ? kWidth : tiling_->key.head_dim; }
  __aicore__ inline int64_t ValueDim() const {
    return kWidth != 0 ? kWidth : tiling_->value.head_dim;
  }
  __aicore__ inline int64_t TileKeys() const { return kWidth != 0 ? kTileKeys : tiling_->tile; }
  __aicore__ inline uint32_t KeyColumns() const {
    return static_cast<uint32_t>(kWidth != 0 ? kWidth : tiling_->key_columns);
  }
  __aicore__ inline uint32_t ValueColumns() const {
    return static_cast<uint32_t>(kWidth != 0 ? kWidth : tiling_->value_columns);
  }

  __aicore__ inline void Walk(bool by_token) {
    steps_.Init(*tiling_, sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), by_token);
    int64_t n = 0;
    bool has_next = NextStep(0);
    if (has_next) {
      LoadQueries(StepAt(0));
    }
    for (; has_next; ++n) {
      const PieceStep& step = StepAt(n);
      if (step.opens_band) {
        query_index_[step.band] = next_query_;
        query_ring_.Use(next_query_);
      }
      has_next = NextStep(n + 1);
      RunStep(step, n, has_next);
    }
    for (int64_t oldest = Larger(0, n - kAhead); oldest < n; ++oldest) {
      for (int64_t begin = 0; begin < kPiece; begin += TileKeys()) {
        AddValuesOfTile(StepAt(oldest), begin);
      }
      TellProducts();
    }
  }

  // The scores of step n and the products of an earlier one.
  __aicore__ inline void RunStep(const PieceStep& step, int64_t n, bool has_next) {
    const PieceStep& oldest = StepAt(n - kAhead);
    const bool ends_one = n >= kAhead;
    for (int64_t begin = 0; begin < kPiece; begin += TileKeys()) {
      ScoreTile(step, begin);
      if (begin == 0 && has_next) {
        LoadQueries(StepAt(n + 1));
      }
      if (ends_one) {
        AddValuesOfTile(oldest, begin);
      }
    }
    if (ends_one) {
      TellProducts();
    }
  }

  // The products of the oldest step are there.
  __aicore__ inline void TellProducts() {
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kProductsReady);
  }

  // Steps with keys, by their number: the next one, this one, and those in flight.
  __aicore__ inline PieceStep& StepAt(int64_t n) { return window_[n & (kWindow - 1)]; }

  // Finds step n, the next one with keys. False: there is none.
  __aicore__ inline bool NextStep(int64_t n) {
    PieceStep& step = StepAt(n);
    do {
      if (!steps_.Next(step)) {
        return false;
      }
    } while (!step.has_keys);
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
    const AscendC::LocalTensor<T> to = Queries(next_query_);
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
  // them, counted from the tile's first one.
  struct Tile {
    int64_t begin;   // of the piece
    uint32_t first;  // of the band's fractals
    uint32_t keys;   // in them
    Range seen;      // by the unit
    Range span;      // the unit's fractals, which are in L1
    bool is_whole;   // all keys are seen
    bool opens;      // the step
    bool closes;
  };

  __aicore__ inline Tile TileAt(const PieceStep& step, int64_t begin) const {
    const int64_t size = TileKeys();
    const int64_t end = begin + size;
    const bool is_whole = step.span.first <= begin && end <= step.span.last &&
                          step.unit_seen.first <= begin && end <= step.unit_seen.last;
    Tile tile = {begin,     0,        static_cast<uint32_t>(size), {0, size},
                 {0, size}, is_whole, begin <= step.span.first,    end >= step.span.last};
    if (!is_whole) {
      const Range span = Within(step.span, begin, size);
      tile.first = static_cast<uint32_t>(span.first);
      tile.keys = static_cast<uint32_t>(span.last - span.first);
      tile.seen = Within(step.unit_seen, begin, size);
      tile.span = SpanOf(tile.seen);
    }
    return tile;
  }

  __aicore__ inline void ScoreTile(const PieceStep& step, int64_t begin) {
    const Tile tile = TileAt(step, begin);
    if (tile.keys == 0) {
      return;
    }
    const uint32_t width = static_cast<uint32_t>(KeyDim());
    const uint32_t rows = static_cast<uint32_t>(step.pitch);
    const uint32_t turn = tile_ring_.Begin();
    const AscendC::LocalTensor<T> keys =
        LoadTile(TileOfRing(turn), staying_keys_, key_cache_, tiling_->key, KeyDim(), step,
                 tile)[FromSpan(tile) * width];
    tile_ring_.Filled(turn);
    tile_ring_.Use(turn);
    const uint32_t query = query_index_[step.band];
    const AscendC::LocalTensor<T> queries = Queries(query);
    for (uint32_t c = 0; c < width; c += KeyColumns()) {
      const uint32_t columns = Part(width, c, KeyColumns());
      const uint32_t buffer = factor_ring_.Begin();
      LoadRows<false>(Left(buffer), keys, tile.keys, width, c, columns);
      LoadColumns<false>(Right(buffer), queries[c * rows], rows, columns, rows);
      factor_ring_.Filled(buffer);
      const Factors factors = {tile.keys, rows, columns, rows, 0};
      Multiply(scores_, buffer, factors, c == 0, c == 0, c + columns == width);
    }
    tile_ring_.Used(turn);
    Store(exchange_.Scores(step.buffer)[(begin + tile.first) * rows], scores_, tile.keys, tile.keys,
          rows);
    if (tile.closes) {
      if (step.closes_band) {
        query_ring_.Used(query);
      }
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kScoresReady);
    }
  }

  // Where the band's fractals begin in those that are in L1.
  __aicore__ inline uint32_t FromSpan(const Tile& tile) const {
    return tile.first - static_cast<uint32_t>(tile.span.first);
  }

  // Columns from column `c` on, at most `most`.
  __aicore__ static inline uint32_t Part(uint32_t width, uint32_t c, uint32_t most) {
    return width - c < most ? width - c : most;
  }

  // Brings a tile in, unless it is there: to `place`, or where it stays.
  __aicore__ inline AscendC::LocalTensor<T> LoadTile(const AscendC::LocalTensor<T>& place,
                                                     StayingTiles<T>& staying,
                                                     const AscendC::GlobalTensor<T>& cache,
                                                     const CacheLayout& layout, int64_t width,
                                                     const PieceStep& step, const Tile& tile) {
    AscendC::LocalTensor<T> to = place;
    if (tiles_stay_) {
      const bool comes_in = staying.Take(step.opens_piece && tile.opens, tile.begin);
      to = staying.At(tile.begin);
      if (!comes_in) {
        return to;
      }
    }
    if (tile.is_whole) {
      const BlockTables::Run run =
          tables_.RunFrom(layout, step.unit.index, step.unit.kv_head, step.begin + tile.begin);
      if (run.count >= TileKeys() && RowsAreNear(width, layout.token_stride)) {
        CopyMatricesToL1(to, cache[run.at], TileKeys() / kFractal, kFractal, width,
                         layout.token_stride);
        return to;
      }
    }
    CopyTileToL1(to, cache, layout, width, tables_, step.unit, step.begin + tile.begin, tile.seen,
                 tile.span);
    return to;
  }

  // ---- products = weights x values

  __aicore__ inline void AddValuesOfTile(const PieceStep& step, int64_t begin) {
    const Tile tile = TileAt(step, begin);
    if (tile.keys == 0) {
      return;
    }
    const uint32_t width = static_cast<uint32_t>(ValueDim());
    const uint32_t rows = static_cast<uint32_t>(step.pitch);
    const uint32_t pitch = static_cast<uint32_t>(TileKeys());
    const uint32_t turn = tile_ring_.Begin();
    const AscendC::LocalTensor<T> place = TileOfRing(turn);
    // Values first: they don't wait for the vector cores, as the weights of a step's first tile do.
    const AscendC::LocalTensor<T> values =
        LoadTile(place, staying_values_, value_cache_, tiling_->value, ValueDim(), step,
                 tile)[FromSpan(tile) * width];
    const AscendC::LocalTensor<T> weights = tiles_stay_ ? place : place[pitch * width];
    if (tile.opens) {
      AscendC::CrossCoreWaitFlag(kWeightsReady);
    }
    LoadWeights(weights, step, begin + tile.first, tile.keys);
    tile_ring_.Filled(turn);

    tile_ring_.Use(turn);
    for (uint32_t c = 0; c < width; c += ValueColumns()) {
      const uint32_t columns = Part(width, c, ValueColumns());
      const uint32_t buffer = factor_ring_.Begin();
      LoadColumns<true>(Left(buffer), weights, tile.keys, rows, pitch);
      LoadRows<true>(Right(buffer), values, tile.keys, width, c, columns);
      factor_ring_.Filled(buffer);
      const Factors factors = {rows, columns, tile.keys, width, c};
      Multiply(products_, buffer, factors, tile.opens, tile.opens && c == 0,
               tile.closes && c + columns == width);
    }
    tile_ring_.Used(turn);
    if (tile.closes) {
      Store(exchange_.Products(step.buffer), products_, rows,
            static_cast<uint32_t>(step.unit.num_rows), width);
    }
  }

  // The weights of `keys` keys from `first` on, column by column of 16 rows.
  __aicore__ inline void LoadWeights(const AscendC::LocalTensor<T>& to, const PieceStep& step,
                                     int64_t first, uint32_t keys) {
    const AscendC::DataCopyParams params(
        static_cast<uint16_t>(static_cast<uint32_t>(step.pitch) / kFractal),
        static_cast<uint16_t>(keys), static_cast<uint16_t>(tiling_->exchange_keys - keys),
        static_cast<uint16_t>(TileKeys() - keys));
    AscendC::DataCopy(to, exchange_.Weights(step.buffer, 0)[first * kFractal], params);
  }

  // ---- the buffers

  __aicore__ inline AscendC::LocalTensor<T> Queries(uint32_t buffer) const {
    return queries_[buffer * query_size_];
  }
  __aicore__ inline AscendC::LocalTensor<T> TileOfRing(uint32_t buffer) const {
    return tiles_[buffer * tile_size_];
  }
  __aicore__ inline AscendC::LocalTensor<T> Left(uint32_t buffer) const {
    return left_[buffer * kL0Elements];
  }
  __aicore__ inline AscendC::LocalTensor<T> Right(uint32_t buffer) const {
    return right_[buffer * kL0Elements];
  }

  // Of a product [rows][width], what one load of L0 gives: its columns from `column` on, as a
  // product, or as a term of the sum, over `depth`.
  struct Factors {
    uint32_t rows;
    uint32_t columns;
    uint32_t depth;
    uint32_t width;
    uint32_t column;
  };

  // sums = or += left x right, by halves of the rows. With `begins` the halves take their buffers,
  // with `ends` they are complete.
  template <int32_t first>
  __aicore__ inline void Multiply(CubeSums<first>& sums, uint32_t buffer, const Factors& factors,
                                  bool opens, bool begins, bool ends) {
    factor_ring_.Use(buffer);
    uint32_t rows = FirstHalf(factors.rows, factors.width);
    for (uint32_t row = 0, half = 0; row < factors.rows; ++half) {
      if (begins) {
        sums.Begin(half);
      }
      if (!opens && rows * factors.columns < kOrderedProducts) {
        AscendC::PipeBarrier<PIPE_M>();
      }
      const AscendC::MmadParams params(static_cast<uint16_t>(rows),
                                       static_cast<uint16_t>(factors.columns),
                                       static_cast<uint16_t>(factors.depth), 0, false, opens);
      AscendC::Mmad(sums.Half(half)[factors.column * rows], Left(buffer)[row * factors.depth],
                    Right(buffer), params);
      if (ends) {
        sums.End(half);
      }
      row += rows;
      rows = factors.rows - row;
    }
    factor_ring_.Used(buffer);
  }

  // Stores the first `stored` of `rows` rows of complete sums, one after the other.
  template <int32_t first>
  __aicore__ inline void Store(const AscendC::GlobalTensor<float>& to, const CubeSums<first>& sums,
                               uint32_t rows, uint32_t stored, uint32_t width) {
    uint32_t pitch = FirstHalf(rows, width);
    for (uint32_t row = 0, half = 0; row < rows; ++half) {
      sums.Use(half);
      const uint32_t left = stored - row;
      const AscendC::FixpipeParamsV220 params(static_cast<uint16_t>(width),
                                              static_cast<uint16_t>(pitch < left ? pitch : left),
                                              static_cast<uint16_t>(pitch), width, false);
      AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(to[row * width], sums.Half(half),
                                                             params);
      sums.Used(half);
      row += pitch;
      pitch = rows - row;
    }
  }

  const AttentionTilingData* tiling_;
  Sequences sequences_;
  BlockTables tables_;
  Exchange<T> exchange_;
  PieceSteps steps_;
  static constexpr int64_t kWindow = 8;  // a power of two over kAhead + 1
  PieceStep window_[kWindow];
  uint32_t query_index_[kMostBands];  // of the ring of queries: the bands'
  uint32_t next_query_;               // the next band's
  uint32_t query_size_;               // elements of a band's queries
  bool tiles_stay_;
  uint32_t tile_size_;  // elements of one of tiles_

  AscendC::GlobalTensor<T> query_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;

  AscendC::LocalTensor<T> queries_;  // two bands' [max_rows][key_dim]
  AscendC::LocalTensor<T> tiles_;  // of keys, or of values and weights; of weights, if others stay
  AscendC::LocalTensor<T> left_;   // L0A
  AscendC::LocalTensor<T> right_;  // L0B
  StayingTiles<T> staying_keys_;
  StayingTiles<T> staying_values_;
  CubeSums<0> scores_;
  CubeSums<2> products_;

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
    if (is_usual) {
      Run<kUsualWidth, kUsualTile>();
    } else {
      Run<0, 0>();
    }
  }

 private:
  static constexpr int64_t kUsualWidth = 128;
  static constexpr int64_t kUsualTile = 128;

  template <int64_t kWidth, int64_t kTileKeys>
  __aicore__ inline void Run() {
    CubeHalf<T, kWidth, kTileKeys> half;
    half.Init(*tensors_, *tiling_, pipe_);
    half.Process();
  }

  const AttentionTensors* tensors_;
  const AttentionTilingData* tiling_;
  AscendC::TPipe* pipe_;
};
