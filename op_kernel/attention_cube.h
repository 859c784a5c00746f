// The cube core's half of attention on a group of cores: the products of queries with keys, and of
// weights with values.
//
// Keys and values are walked through the block table straight into L1, tile after tile. Between
// each two memories lie two buffers, so every pipe works on one while the next fills the other:
//
//   GM --MTE2--> L1 --MTE1--> L0A, L0B --M--> L0C --FIX--> workspace
//
// The scores of a step are written before the products of earlier steps: while the cube does one,
// the vector cores turn the scores of the other into weights.
#pragma once

#include "attention_tensors.h"
#include "attention_tiling_data.h"
#include "block_walk.h"
#include "cube_copy.h"
#include "exchange.h"
#include "kernel_operator.h"
#include "piece_steps.h"
#include "sequence.h"
#include "turns.h"
#include "verdict.h"
#include "visible.h"
#include "work_units.h"

constexpr int64_t kL0Slot = 32 * 1024;   // bytes: half of L0A, half of L0B
constexpr int64_t kL0cSlot = 64 * 1024;  // bytes: half of L0C

// While the cube is held up by scores on their way out, tiles of values and weights come in ahead.
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
    pipe->InitBuffer(sum_buffer_, 2 * kL0cSlot);
    queries_ = query_buffer_.template Get<T>();
    tiles_ = tile_buffer_.template Get<T>();
    left_ = left_buffer_.template Get<T>();
    right_ = right_buffer_.template Get<T>();
    sums_ = sum_buffer_.template Get<float>();
  }

  __aicore__ inline void OpenAll() {
    query_turns_.Open();
    tile_turns_.Open();
    factor_turns_.Open();
    sum_turns_.Open();
  }

  __aicore__ inline void CloseAll() {
    query_turns_.Close();
    tile_turns_.Close();
    factor_turns_.Close();
    sum_turns_.Close();
  }

  __aicore__ inline void Walk(bool by_token) {
    steps_.Init(*tiling_, sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), by_token);
    in_flight_.Clear();
    PieceStep step;
    while (steps_.Next(step)) {
      if (!HasKeys(step)) {
        continue;
      }
      Score(step);
      if (in_flight_.IsFull()) {
        AddValuesOfOldest();
      }
      in_flight_.Add(step);
    }
    while (!in_flight_.IsEmpty()) {
      AddValuesOfOldest();
    }
  }

  __aicore__ inline void AddValuesOfOldest() {
    AddValues(in_flight_.Oldest());
    in_flight_.DropOldest();
  }

  // Whether a vector core of the group has seen a sum that isn't a number. Tells them, too.
  __aicore__ inline bool SharesTrouble() {
    AscendC::CrossCoreWaitFlag(kVerdictReady);
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE2>(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  // ---- scores = keys x queries

  __aicore__ inline void Score(const PieceStep& step) {
    if (step.opens_unit) {
      LoadQueries(step.unit);
      query_slot_ = query_turns_.Use();
    }
    for (int64_t begin = 0; begin < kCubePiece; begin += tiling_->tile) {
      const Visible span = InTile(step.span, begin, tiling_->tile);
      if (span.first < span.last) {
        ScoreTile(step, begin, span);
      }
    }
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

  // `begin` is the tile's first lane of the piece, `span` counts from there.
  __aicore__ inline void ScoreTile(const PieceStep& step, int64_t begin, const Visible& span) {
    const Visible lanes = InTile(step.lanes, begin, tiling_->tile);
    const int64_t pitch = tiling_->tile;
    CopyTileToL1(Tile(tile_turns_.Fill()), key_cache_, tiling_->key, tables_, tiling_->block_size,
                 step.unit, step.begin + begin, lanes, span, pitch);
    tile_turns_.Filled();

    const AscendC::LocalTensor<T> keys = Tile(tile_turns_.Use());
    const AscendC::LocalTensor<T> queries = queries_[query_slot_ * tiling_->max_rows * key_dim_];
    const AscendC::LocalTensor<float> sums = Sums(sum_turns_.Fill());
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    for (int64_t c = 0; c < key_dim_; c += tiling_->key_columns) {
      const int64_t columns = Smaller(tiling_->key_columns, key_dim_ - c);
      const int32_t slot = factor_turns_.Fill();
      LoadLeft(Left(slot), keys[c * pitch], width, columns, pitch);
      LoadRightOfRows(Right(slot), queries[c * rows], rows, columns, rows);
      factor_turns_.Filled();
      Multiply(sums, width, rows, columns, c == 0);
    }
    tile_turns_.Used();
    sum_turns_.Filled();
    StoreSums(exchange_.Scores(step.slot)[(begin + span.first) * rows], width, rows, width);
  }

  // ---- products = weights x values

  __aicore__ inline void AddValues(const PieceStep& step) {
    const AscendC::LocalTensor<float> sums = Sums(sum_turns_.Fill());
    bool opens = true;
    for (int64_t begin = 0; begin < kCubePiece; begin += tiling_->tile) {
      const Visible span = InTile(step.span, begin, tiling_->tile);
      if (span.first < span.last) {
        AddValuesOfTile(step, begin, span, sums, opens);
        opens = false;
      }
    }
    sum_turns_.Filled();
    StoreSums(exchange_.Products(step.slot), step.unit.num_rows, value_dim_,
              RowPitch(step.unit.num_rows));
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_FIX>(kProductsReady);
  }

  __aicore__ inline void AddValuesOfTile(const PieceStep& step, int64_t begin, const Visible& span,
                                         const AscendC::LocalTensor<float>& sums, bool opens) {
    const int64_t pitch = tiling_->tile;
    const int64_t rows = RowPitch(step.unit.num_rows);
    const int64_t width = span.last - span.first;
    LoadValuesAndWeights(step, begin, span, opens);

    const AscendC::LocalTensor<T> values = Tile(tile_turns_.Use());
    const AscendC::LocalTensor<T> weights = values[pitch * value_dim_];
    for (int64_t c = 0; c < value_dim_; c += tiling_->value_columns) {
      const int64_t columns = Smaller(tiling_->value_columns, value_dim_ - c);
      const int32_t slot = factor_turns_.Fill();
      LoadLeftOfColumns(Left(slot), weights, rows, width, pitch);
      LoadRightOfColumns(Right(slot), values[c * pitch], width, columns, pitch);
      factor_turns_.Filled();
      Multiply(sums[c * rows], rows, columns, width, opens);
    }
    tile_turns_.Used();
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
  __aicore__ inline AscendC::LocalTensor<float> Sums(int32_t slot) const {
    return sums_[slot * (kL0cSlot / sizeof(float))];
  }

  // sums [rows][columns] = or += left [rows][depth] x right [depth][columns]
  __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& sums, int64_t rows,
                                  int64_t columns, int64_t depth, bool opens) {
    const int32_t slot = factor_turns_.Use();
    if (!opens) {
      AscendC::PipeBarrier<PIPE_M>();
    }
    const AscendC::MmadParams params(static_cast<uint16_t>(rows), static_cast<uint16_t>(columns),
                                     static_cast<uint16_t>(depth), 0, false, opens);
    AscendC::Mmad(sums, Left(slot), Right(slot), params);
    factor_turns_.Used();
  }

  // Stores the first `rows` of the sums' `pitch` rows, one after the other.
  __aicore__ inline void StoreSums(const AscendC::GlobalTensor<float>& to, int64_t rows,
                                   int64_t columns, int64_t pitch) {
    const AscendC::LocalTensor<float> sums = Sums(sum_turns_.Use());
    const AscendC::FixpipeParamsV220 params(
        static_cast<uint16_t>(columns), static_cast<uint16_t>(rows), static_cast<uint16_t>(pitch),
        static_cast<uint32_t>(columns), false);
    AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(to, sums, params);
    sum_turns_.Used();
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
  AscendC::TBuf<AscendC::TPosition::CO1> sum_buffer_;
  AscendC::LocalTensor<T> queries_;   // two units' [max_rows][key_dim]
  AscendC::LocalTensor<T> tiles_;     // of keys, or of values and weights
  AscendC::LocalTensor<T> left_;      // L0A
  AscendC::LocalTensor<T> right_;     // L0B
  AscendC::LocalTensor<float> sums_;  // L0C

  Turns<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 0, 2> query_turns_;
  Turns<AscendC::HardEvent::MTE2_MTE1, AscendC::HardEvent::MTE1_MTE2, 2, kTilesInL1> tile_turns_;
  Turns<AscendC::HardEvent::MTE1_M, AscendC::HardEvent::M_MTE1, 0, 2> factor_turns_;
  Turns<AscendC::HardEvent::M_FIX, AscendC::HardEvent::FIX_M, 0, 2> sum_turns_;
};
