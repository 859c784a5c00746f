// The cube core's half of attention on a group of cores: the products of queries with keys, and of
// weights with values.
//
// Keys and values come through the block table straight into L1, tile after tile. Between each two
// memories lies a ring of buffers, so every pipe works on one while the one before it fills others:
//
//   GM --MTE2--> L1 --MTE1--> L0A, L0B --M--> L0C --FIX--> workspace
//
// Tiles of keys for the scores of a step and tiles of values for the products of an earlier one
// take turns: while the matrix unit multiplies the values, the scores are on their way out.
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
#include "mixed/verdict.h"

constexpr int64_t kL0Elements = 16 * 1024;  // of 16 bits: one of two buffers in L0A, in L0B

// Of keys, and of values with their weights: one of each is used while the next ones come in.
constexpr int32_t kTilesInL1 = 4;

template <typename T>
class AttentionCube {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    key_dim_ = tiling.key.head_dim;
    value_dim_ = tiling.value.head_dim;
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
    queries_ = NewBuffer<T, TPosition::A1>(pipe, 2 * tiling_->max_rows * key_dim_);
    tiles_ = NewBuffer<T, TPosition::B1>(pipe, kTilesInL1 * TileSize());
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

  __aicore__ inline void Walk(bool by_token) {
    steps_.Init(*tiling_, sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), by_token);
    in_flight_.Clear();
    PieceStep step;
    while (steps_.Next(step)) {
      if (!HasKeys(step)) {
        continue;
      }
      const bool ends_one = in_flight_.IsFull();
      if (step.opens_unit) {
        LoadQueries(step.unit);
        query_index_ = query_ring_.Use();
      }
      for (int64_t begin = 0; begin < kCubePiece; begin += tiling_->tile) {
        ScoreTile(step, begin);
        if (ends_one) {
          AddValuesOfTile(in_flight_.Oldest(), begin);
        }
      }
      if (ends_one) {
        CloseOldest();
      }
      in_flight_.Add(step);
    }
    while (!in_flight_.IsEmpty()) {
      for (int64_t begin = 0; begin < kCubePiece; begin += tiling_->tile) {
        AddValuesOfTile(in_flight_.Oldest(), begin);
      }
      CloseOldest();
    }
  }

  // The products of the oldest step in flight are there.
  __aicore__ inline void CloseOldest() {
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kProductsReady);
    in_flight_.DropOldest();
  }

  // Whether a vector core of the group has seen a sum that isn't a number. Tells them, too.
  __aicore__ inline bool SharesTrouble() {
    AscendC::CrossCoreWaitFlag(kVerdictReady);
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE2>(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  // ---- scores = keys x queries

  __aicore__ inline void LoadQueries(const Unit& unit) {
    const AscendC::LocalTensor<T> to = queries_[query_ring_.Fill() * tiling_->max_rows * key_dim_];
    const int64_t pitch = RowPitch(unit.num_rows);
    const RowLayout& layout = tiling_->query;
    for (int64_t i = 0; i < unit.num_rows;) {
      const Row row = RowAt(*tiling_, unit, i);
      const int64_t rows = RowsOfToken(*tiling_, unit, i);
      const int64_t tokens = layout.token_stride <= kWidestNdStride ? TokensFrom(unit, i) : 1;
      const int64_t at = row.token * layout.token_stride + row.head * layout.head_stride;
      CopyTokensToL1(to[i * kFractal], query_[at], tokens, layout.token_stride, rows, key_dim_,
                     layout.head_stride, pitch);
      i += tokens * rows;
    }
    ZeroRowsInL1(to, unit.num_rows, pitch, key_dim_, pitch);
    query_ring_.Filled();
  }

  // Tokens whose rows are all in the unit, from row i on, if it is a token's first; else 1.
  __aicore__ inline int64_t TokensFrom(const Unit& unit, int64_t i) const {
    const int64_t heads = HeadsPerKvHead(*tiling_);
    const bool whole = RowsOfToken(*tiling_, unit, i) == heads;
    return whole ? (unit.num_rows - i) / heads : 1;
  }

  // `begin` is the tile's first key of the piece.
  __aicore__ inline void ScoreTile(const PieceStep& step, int64_t begin) {
    const Range span = Within(step.span, begin, tiling_->tile);
    if (span.first == span.last) {
      return;
    }
    LoadKeys(step, begin, span);
    const int64_t pitch = tiling_->tile;
    const AscendC::LocalTensor<T> keys = Tile(tile_ring_.Use());
    const AscendC::LocalTensor<T> queries = queries_[query_index_ * tiling_->max_rows * key_dim_];
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    for (int64_t c = 0; c < key_dim_; c += tiling_->key_columns) {
      const int64_t columns = Smaller(tiling_->key_columns, key_dim_ - c);
      const int32_t buffer = factor_ring_.Fill();
      LoadRows<false>(Left(buffer), keys[c * pitch], width, columns, pitch);
      LoadColumns<false>(Right(buffer), queries[c * rows], rows, columns, rows);
      factor_ring_.Filled();
      const Factors factors = {width, rows, columns, rows, 0};
      Multiply(scores_, factors, c == 0, c == 0, c + columns == key_dim_);
    }
    tile_ring_.Used();
    Store(exchange_.Scores(step.buffer)[(begin + span.first) * rows], scores_, width, width, rows);
    if (begin + tiling_->tile >= step.span.last) {
      if (step.closes_unit) {
        query_ring_.Used();
      }
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kScoresReady);
    }
  }

  __aicore__ inline void LoadKeys(const PieceStep& step, int64_t begin, const Range& span) {
    const Range seen = Within(step.seen, begin, tiling_->tile);
    const AscendC::LocalTensor<T> keys = Tile(tile_ring_.Fill());
    CopyTileToL1(keys, key_cache_, tiling_->key, tables_, step.unit, step.begin + begin, seen, span,
                 tiling_->tile);
    tile_ring_.Filled();
  }

  // ---- products = weights x values

  __aicore__ inline void AddValuesOfTile(const PieceStep& step, int64_t begin) {
    const Range span = Within(step.span, begin, tiling_->tile);
    if (span.first == span.last) {
      return;
    }
    const bool opens = begin <= step.span.first;
    const bool closes = begin + tiling_->tile >= step.span.last;
    LoadValuesAndWeights(step, begin, span, opens);

    const int64_t pitch = tiling_->tile;
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    const AscendC::LocalTensor<T> values = Tile(tile_ring_.Use());
    const AscendC::LocalTensor<T> weights = values[pitch * value_dim_];
    for (int64_t c = 0; c < value_dim_; c += tiling_->value_columns) {
      const int64_t columns = Smaller(tiling_->value_columns, value_dim_ - c);
      const int32_t buffer = factor_ring_.Fill();
      LoadColumns<true>(Left(buffer), weights, width, rows, pitch);
      LoadRows<true>(Right(buffer), values[c * pitch], width, columns, pitch);
      factor_ring_.Filled();
      const Factors factors = {rows, columns, width, value_dim_, c};
      Multiply(products_, factors, opens, opens && c == 0, closes && c + columns == value_dim_);
    }
    tile_ring_.Used();
    if (closes) {
      Store(exchange_.Products(step.buffer), products_, rows, step.unit.num_rows, value_dim_);
    }
  }

  // Values first: they don't wait for the vector cores, as the weights of a step's first tile do.
  __aicore__ inline void LoadValuesAndWeights(const PieceStep& step, int64_t begin,
                                              const Range& span, bool opens) {
    const int64_t pitch = tiling_->tile;
    const AscendC::LocalTensor<T> values = Tile(tile_ring_.Fill());
    const Range seen = Within(step.seen, begin, tiling_->tile);
    CopyTileToL1(values, value_cache_, tiling_->value, tables_, step.unit, step.begin + begin, seen,
                 span, pitch);
    if (opens) {
      AscendC::CrossCoreWaitFlag(kWeightsReady);
    }
    const AscendC::LocalTensor<T> weights = values[pitch * value_dim_];
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t first = begin + span.first;
    const int64_t keys = span.last - span.first;
    for (int64_t r = 0; r < rows;) {
      const int64_t share = r == 0 ? FirstShare(rows) : rows - r;
      CopyRowsToL1(weights[r * pitch], exchange_.Weights(step.buffer, r)[first * share], keys,
                   share, share, pitch);
      r += share;
    }
    tile_ring_.Filled();
  }

  // ---- the buffers

  // Elements of a tile in L1: keys, or values and the weights that belong to them.
  __aicore__ inline int64_t TileSize() const {
    return tiling_->tile * Larger(key_dim_, value_dim_ + tiling_->max_rows);
  }
  __aicore__ inline AscendC::LocalTensor<T> Tile(int32_t buffer) const {
    return tiles_[buffer * TileSize()];
  }

  __aicore__ inline AscendC::LocalTensor<T> Left(int32_t buffer) const {
    return left_[buffer * kL0Elements];
  }
  __aicore__ inline AscendC::LocalTensor<T> Right(int32_t buffer) const {
    return right_[buffer * kL0Elements];
  }

  // Of a product [rows][width], what one load of L0 gives: its columns from `column` on, as a
  // product, or as a term of the sum, over `depth`.
  struct Factors {
    int64_t rows;
    int64_t columns;
    int64_t depth;
    int64_t width;
    int64_t column;
  };

  // sums = or += left x right, by halves of the rows. With `begins` the halves take their buffers,
  // with `ends` they are complete.
  template <int32_t first>
  __aicore__ inline void Multiply(CubeSums<first>& sums, const Factors& factors, bool opens,
                                  bool begins, bool ends) {
    const int32_t buffer = factor_ring_.Use();
    const int64_t rows_at_once = FirstHalf(factors.rows, factors.width);
    for (int64_t row = 0; row < factors.rows; row += rows_at_once) {
      const int64_t rows = Smaller(rows_at_once, factors.rows - row);
      const int32_t half = row == 0 ? 0 : 1;
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
        sums.End();
      }
    }
    factor_ring_.Used();
  }

  // Stores the first `stored` of `rows` rows of complete sums, one after the other.
  template <int32_t first>
  __aicore__ inline void Store(const AscendC::GlobalTensor<float>& to, CubeSums<first>& sums,
                               int64_t rows, int64_t stored, int64_t width) {
    const int64_t rows_at_once = FirstHalf(rows, width);
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      const int64_t pitch = Smaller(rows_at_once, rows - row);
      const Float half = sums.Use();
      const AscendC::FixpipeParamsV220 params(
          static_cast<uint16_t>(width), static_cast<uint16_t>(Smaller(pitch, stored - row)),
          static_cast<uint16_t>(pitch), static_cast<uint32_t>(width), false);
      AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(to[row * width], half, params);
      sums.Used();
    }
  }

  const AttentionTilingData* tiling_;
  int64_t key_dim_;
  int64_t value_dim_;
  Sequences sequences_;
  BlockTables tables_;
  Exchange<T> exchange_;
  PieceSteps steps_;
  StepsInFlight in_flight_;
  int32_t query_index_;  // of the ring of queries: the unit's

  AscendC::GlobalTensor<T> query_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;

  AscendC::LocalTensor<T> queries_;  // two units' [max_rows][key_dim]
  AscendC::LocalTensor<T> tiles_;    // of keys, or of values and weights
  AscendC::LocalTensor<T> left_;     // L0A
  AscendC::LocalTensor<T> right_;    // L0B
  CubeSums<0> scores_;
  CubeSums<2> products_;

  Ring<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 0, 2> query_ring_;
  Ring<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 2, kTilesInL1> tile_ring_;
  Ring<AscendC::HardEvent::MTE1_M, AscendC::HardEvent::M_MTE1, 3, 2> factor_ring_;
};
