// The cube core's half of attention on a group of cores: the products of queries with keys, and of
// weights with values.
//
// Keys and values are walked through the block table straight into L1, tile after tile. Between
// each two memories lie two buffers, so every pipe works on one while the next fills the other:
//
//   GM --MTE2--> L1 --MTE1--> L0A, L0B --M--> L0C --FIX--> workspace
//
// Tiles of keys for the scores of a step and tiles of values for the products of an earlier one
// take turns: while the matrix unit multiplies the values, the scores are on their way out.
#pragma once

#include "attention_tensors.h"
#include "attention_tiling_data.h"
#include "block_walk.h"
#include "cube_copy.h"
#include "cube_sums.h"
#include "exchange.h"
#include "kernel_operator.h"
#include "piece_steps.h"
#include "sequence.h"
#include "turns.h"
#include "verdict.h"
#include "visible.h"
#include "work_units.h"

constexpr int64_t kL0Slot = 32 * 1024;  // bytes: half of L0A, half of L0B

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
    steps_.StartSlots();
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
    pipe->InitBuffer(query_buffer_, 2 * tiling_->max_rows * key_dim_ * sizeof(T));
    pipe->InitBuffer(tile_buffer_, kTilesInL1 * TileSize() * sizeof(T));
    pipe->InitBuffer(left_buffer_, 2 * kL0Slot);
    pipe->InitBuffer(right_buffer_, 2 * kL0Slot);
    pipe->InitBuffer(score_buffer_, 2 * kL0cSlot);
    pipe->InitBuffer(product_buffer_, 2 * kL0cSlot);
    queries_ = query_buffer_.template Get<T>();
    tiles_ = tile_buffer_.template Get<T>();
    left_ = left_buffer_.template Get<T>();
    right_ = right_buffer_.template Get<T>();
    scores_.Init(score_buffer_.template Get<float>());
    products_.Init(product_buffer_.template Get<float>());
  }

  __aicore__ inline void OpenAll() {
    query_turns_.Open();
    tile_turns_.Open();
    factor_turns_.Open();
    scores_.Open();
    products_.Open();
  }

  __aicore__ inline void CloseAll() {
    query_turns_.Close();
    tile_turns_.Close();
    factor_turns_.Close();
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
      OpenScores(step);
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

  __aicore__ inline void OpenScores(const PieceStep& step) {
    if (step.opens_unit) {
      LoadQueries(step.unit);
      query_slot_ = query_turns_.Use();
    }
  }

  __aicore__ inline void CloseScores(const PieceStep& step) {
    if (step.closes_unit) {
      query_turns_.Used();
    }
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kScoresReady);
  }

  __aicore__ inline void LoadQueries(const Unit& unit) {
    const AscendC::LocalTensor<T> to = queries_[query_turns_.Fill() * tiling_->max_rows * key_dim_];
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
    query_turns_.Filled();
  }

  // Tokens whose rows are all in the unit, from row i on, if it is a token's first; else 1.
  __aicore__ inline int64_t TokensFrom(const Unit& unit, int64_t i) const {
    const int64_t group = tiling_->num_heads / tiling_->num_kv_heads;
    const bool whole = RowsOfToken(*tiling_, unit, i) == group;
    return whole ? (unit.num_rows - i) / group : 1;
  }

  // `begin` is the tile's first lane of the piece.
  __aicore__ inline void ScoreTile(const PieceStep& step, int64_t begin) {
    const Visible span = InTile(step.span, begin, tiling_->tile);
    if (span.first == span.last) {
      return;
    }
    LoadKeys(step, begin, span);
    const int64_t pitch = tiling_->tile;
    const AscendC::LocalTensor<T> keys = Tile(tile_turns_.Use());
    const AscendC::LocalTensor<T> queries = queries_[query_slot_ * tiling_->max_rows * key_dim_];
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    for (int64_t c = 0; c < key_dim_; c += tiling_->key_columns) {
      const int64_t columns = Smaller(tiling_->key_columns, key_dim_ - c);
      const int32_t slot = factor_turns_.Fill();
      LoadRows<false>(Left(slot), keys[c * pitch], width, columns, pitch);
      LoadColumns<false>(Right(slot), queries[c * rows], rows, columns, rows);
      factor_turns_.Filled();
      const Factors factors = {width, rows, columns, rows, 0};
      Multiply(scores_, factors, c == 0, c == 0, c + columns == key_dim_);
    }
    tile_turns_.Used();
    Store(exchange_.Scores(step.slot)[(begin + span.first) * rows], scores_, width, width, rows);
    if (begin + tiling_->tile >= step.span.last) {
      CloseScores(step);
    }
  }

  __aicore__ inline void LoadKeys(const PieceStep& step, int64_t begin, const Visible& span) {
    const Visible lanes = InTile(step.lanes, begin, tiling_->tile);
    const AscendC::LocalTensor<T> keys = Tile(tile_turns_.Fill());
    CopyTileToL1(keys, key_cache_, tiling_->key, tables_, tiling_->block_size, step.unit,
                 step.begin + begin, lanes, span, tiling_->tile);
    tile_turns_.Filled();
  }

  // ---- products = weights x values

  __aicore__ inline void AddValuesOfTile(const PieceStep& step, int64_t begin) {
    const Visible span = InTile(step.span, begin, tiling_->tile);
    if (span.first == span.last) {
      return;
    }
    const bool opens = begin <= step.span.first;
    const bool closes = begin + tiling_->tile >= step.span.last;
    LoadValuesAndWeights(step, begin, span, opens);

    const int64_t pitch = tiling_->tile;
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    const AscendC::LocalTensor<T> values = Tile(tile_turns_.Use());
    const AscendC::LocalTensor<T> weights = values[pitch * value_dim_];
    for (int64_t c = 0; c < value_dim_; c += tiling_->value_columns) {
      const int64_t columns = Smaller(tiling_->value_columns, value_dim_ - c);
      const int32_t slot = factor_turns_.Fill();
      LoadColumns<true>(Left(slot), weights, width, rows, pitch);
      LoadRows<true>(Right(slot), values[c * pitch], width, columns, pitch);
      factor_turns_.Filled();
      const Factors factors = {rows, columns, width, value_dim_, c};
      Multiply(products_, factors, opens, opens && c == 0, closes && c + columns == value_dim_);
    }
    tile_turns_.Used();
    if (closes) {
      Store(exchange_.Products(step.slot), products_, rows, step.unit.num_rows, value_dim_);
    }
  }

  // Values first: they don't wait for the vector cores, as the weights of a step's first tile do.
  __aicore__ inline void LoadValuesAndWeights(const PieceStep& step, int64_t begin,
                                              const Visible& span, bool opens) {
    const int64_t pitch = tiling_->tile;
    const AscendC::LocalTensor<T> values = Tile(tile_turns_.Fill());
    const Visible lanes = InTile(step.lanes, begin, tiling_->tile);
    CopyTileToL1(values, value_cache_, tiling_->value, tables_, tiling_->block_size, step.unit,
                 step.begin + begin, lanes, span, pitch);
    if (opens) {
      AscendC::CrossCoreWaitFlag(kWeightsReady);
    }
    const AscendC::LocalTensor<T> weights = values[pitch * value_dim_];
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t first = begin + span.first;
    const int64_t keys = span.last - span.first;
    for (int64_t r = 0; r < rows;) {
      const int64_t share = r == 0 ? FirstShare(rows) : rows - r;
      CopyRowsToL1(weights[r * pitch], exchange_.Weights(step.slot, r)[first * share], keys, share,
                   share, pitch);
      r += share;
    }
    tile_turns_.Filled();
  }

  // ---- the buffers

  // Elements of a tile in L1: keys, or values and the weights that belong to them.
  __aicore__ inline int64_t TileSize() const {
    return tiling_->tile * Larger(key_dim_, value_dim_ + tiling_->max_rows);
  }
  __aicore__ inline AscendC::LocalTensor<T> Tile(int32_t slot) const {
    return tiles_[slot * TileSize()];
  }

  __aicore__ inline AscendC::LocalTensor<T> Left(int32_t slot) const {
    return left_[slot * (kL0Slot / sizeof(T))];
  }
  __aicore__ inline AscendC::LocalTensor<T> Right(int32_t slot) const {
    return right_[slot * (kL0Slot / sizeof(T))];
  }

  // Of a product [rows][width], what one load of L0 gives: its columns from `column` on, as a
  // product, or a part of the sum, over `depth`.
  struct Factors {
    int64_t rows;
    int64_t columns;
    int64_t depth;
    int64_t width;
    int64_t column;
  };

  // sums = or += left x right, in parts of the rows. With `begins` the parts take their buffers,
  // with `ends` they are complete.
  template <int32_t first>
  __aicore__ inline void Multiply(CubeSums<first>& sums, const Factors& factors, bool opens,
                                  bool begins, bool ends) {
    const int32_t slot = factor_turns_.Use();
    const int64_t rows_at_once = PartOf(factors.rows, factors.width);
    for (int64_t row = 0; row < factors.rows; row += rows_at_once) {
      const int64_t rows = Smaller(rows_at_once, factors.rows - row);
      const int32_t part = row == 0 ? 0 : 1;
      if (begins) {
        sums.Begin(part);
      }
      if (!opens && rows * factors.columns < kOrderedProducts) {
        AscendC::PipeBarrier<PIPE_M>();
      }
      const AscendC::MmadParams params(static_cast<uint16_t>(rows),
                                       static_cast<uint16_t>(factors.columns),
                                       static_cast<uint16_t>(factors.depth), 0, false, opens);
      AscendC::Mmad(sums.Part(part)[factors.column * rows], Left(slot)[row * factors.depth],
                    Right(slot), params);
      if (ends) {
        sums.End();
      }
    }
    factor_turns_.Used();
  }

  // Stores the first `stored` of `rows` rows of complete sums, one after the other.
  template <int32_t first>
  __aicore__ inline void Store(const AscendC::GlobalTensor<float>& to, CubeSums<first>& sums,
                               int64_t rows, int64_t stored, int64_t width) {
    const int64_t rows_at_once = PartOf(rows, width);
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      const int64_t pitch = Smaller(rows_at_once, rows - row);
      const AscendC::LocalTensor<float> part = sums.Use();
      const AscendC::FixpipeParamsV220 params(
          static_cast<uint16_t>(width), static_cast<uint16_t>(Smaller(pitch, stored - row)),
          static_cast<uint16_t>(pitch), static_cast<uint32_t>(width), false);
      AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(to[row * width], part, params);
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
  StepsInFlight<PieceStep> in_flight_;
  int32_t query_slot_;

  AscendC::GlobalTensor<T> query_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;

  AscendC::TBuf<AscendC::TPosition::A1> query_buffer_;
  AscendC::TBuf<AscendC::TPosition::B1> tile_buffer_;
  AscendC::TBuf<AscendC::TPosition::A2> left_buffer_;
  AscendC::TBuf<AscendC::TPosition::B2> right_buffer_;
  AscendC::TBuf<AscendC::TPosition::CO1> score_buffer_;
  AscendC::TBuf<AscendC::TPosition::CO1> product_buffer_;
  AscendC::LocalTensor<T> queries_;  // two units' [max_rows][key_dim]
  AscendC::LocalTensor<T> tiles_;    // of keys, or of values and weights
  AscendC::LocalTensor<T> left_;     // L0A
  AscendC::LocalTensor<T> right_;    // L0B
  CubeSums<0> scores_;
  CubeSums<2> products_;

  Turns<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 0, 2> query_turns_;
  Turns<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 2, kTilesInL1> tile_turns_;
  Turns<AscendC::HardEvent::MTE1_M, AscendC::HardEvent::M_MTE1, 0, 2> factor_turns_;
};
