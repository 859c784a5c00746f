// Paged attention on the vector cores: every dtype, option and phase.
//
// For each unit, tile after tile: K and V come in through the block table (two tiles in
// flight), each row's products are summed to scores, the running softmax is updated for all rows at
// once, and the weighted values are added. Where the tiling splits, the states of the pieces go
// through the workspace, and after a barrier of all cores they are folded in order.
#pragma once

#include "attention/block_tables.h"
#include "attention/piece_states.h"
#include "attention/row_output.h"
#include "attention/row_state.h"
#include "attention/score_options.h"
#include "attention/sequence.h"
#include "attention/tensors.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/int8_rows.h"
#include "kernel_operator.h"
#include "vector/tile_scales.h"
#include "vector/tree_mask.h"

// Keys whose weighted values are kept apart before they are added up pairwise.
constexpr int64_t kSumRows = 16;

// One tile of one unit.
struct TileStep {
  Unit unit;
  int64_t begin;  // the tile's first key
  Range seen;     // of the tile, that some row sees; empty for a unit without keys
  bool opens_unit;
  bool closes_unit;
  bool opens_piece;
  bool closes_piece;
};

// T is an element of query and output, C one of the caches: the same, or int8.
template <typename T, typename C>
class AttentionVector {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    key_dim_ = tiling.key.head_dim;
    value_dim_ = tiling.value.head_dim;
    query_.SetGlobalBuffer((__gm__ T*)tensors.query);
    key_cache_.SetGlobalBuffer((__gm__ C*)tensors.key_cache);
    value_cache_.SetGlobalBuffer((__gm__ C*)tensors.value_cache);
    if (tiling.has_alibi_slopes != 0) {
      alibi_slopes_.SetGlobalBuffer((__gm__ float*)tensors.alibi_slopes);
    }
    InitBuffers(pipe);
    tree_mask_.Init(tiling, tensors.tree_mask, pipe);
    if constexpr (kHasScales) {
      first_lanes_.Init(pipe);
      key_scales_.Init(tiling, tiling.key_scale, tensors.key_scale, first_lanes_, pipe);
      value_scales_.Init(tiling, tiling.value_scale, tensors.value_scale, first_lanes_, pipe);
    }
    row_output_.Init(tensors, tiling, pipe, &output_out_, tiling.max_rows);
    piece_states_.Init(tiling, tensors.workspace, pipe, tiling.max_rows);
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    tables_.Init(tiling, tensors.block_tables);
    units_.Init(tiling, sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
    has_unit_ = false;
    FillConstants();
  }

  __aicore__ inline void Process() {
    TileStep next;
    bool more = NextStep(next);
    if (more) {
      Load(next);
    }
    while (more) {
      const TileStep step = next;
      more = NextStep(next);
      if (more) {
        Load(next);
      }
      Attend(step);
    }
    if (tiling_->split != 0) {
      AscendC::PipeBarrier<PIPE_ALL>();
      AscendC::SyncAll();
      piece_states_.Combine(sequences_, AscendC::GetBlockIdx(), AscendC::GetBlockNum(), row_output_,
                            total_, scratch_);
    }
  }

 private:
  static constexpr bool kHasScales = sizeof(C) == 1;

  // op_host's UB budget counts these buffers and those of row_output_ and piece_states_:
  // attention_tiling.cpp, attention_ub_bytes.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    const int64_t tile = tiling_->tile;
    const int64_t rows = tiling_->max_rows;
    pipe->InitBuffer(query_in_, 2, rows * key_dim_ * sizeof(T));
    scales_at_ = tile * UbPitch<C>(key_dim_);
    tree_at_ = scales_at_ + (kHasScales ? 2 * TileScales::BytesIn(tile) / sizeof(C) : 0);
    const int64_t tree_bytes = tiling_->tree_columns != 0 ? TreeMaskBits::kBytesIn : 0;
    pipe->InitBuffer(key_in_, 2, tree_at_ * sizeof(C) + tree_bytes);
    if (tiling_->values_are_keys == 0) {
      pipe->InitBuffer(value_in_, 2, tile * UbPitch<C>(value_dim_) * sizeof(C));
    }
    pipe->InitBuffer(output_out_, 1, rows * value_dim_ * sizeof(T));
    queries_ = NewBuffer<float>(pipe, rows * key_dim_);
    if (sizeof(C) != sizeof(float)) {
      wide_ = NewBuffer<float>(pipe, tile * Larger(key_dim_, value_dim_));
    }
    num_products_ = Larger(tile * kRepeatLanes, kSumRows * Smaller(value_dim_, kSumColumns));
    products_ = NewBuffer<float>(pipe, num_products_);
    scores_ = NewBuffer<float>(pipe, 2 * rows * kRepeatLanes);
    // The other half of the buffer: more than enough, rows being 8 at least.
    distances_ = scores_[rows * kRepeatLanes];
    cap_granule_ = distances_[kRepeatLanes];
    slopes_ = cap_granule_[kGranule];
    weights_ = NewBuffer<float>(pipe, kRepeatLanes * kGranule);
    // Where states go through the workspace, none of a piece is left when rows are folded.
    const int64_t totals = tiling_->split != 0 ? 0 : rows;
    const Float acc = NewBuffer<float>(pipe, (rows + totals) * value_dim_);
    const Float lanes = NewBuffer<float>(pipe, kNumLaneBuffers * kMaxRows);
    piece_ = {lanes, lanes[kMaxRows], acc};
    total_ = {lanes[2 * kMaxRows], lanes[3 * kMaxRows], acc[totals * value_dim_]};
    scratch_ = {lanes[4 * kMaxRows], lanes[5 * kMaxRows], lanes[6 * kMaxRows],
                NewBuffer<float>(pipe, rows * kGranule)};
    tile_lanes_ = lanes[7 * kMaxRows];
    indices_ = NewBuffer<float>(pipe, kRepeatLanes);
  }

  // Lanes beyond a unit's rows are computed along and must hold numbers; 0, 1, 2, ... serve ALiBi.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(piece_.max, 0.0f, kNumLaneBuffers * kMaxRows);
    AscendC::Duplicate(cap_granule_, -2.0f * tiling_->softcap, kGranule);
    for (int64_t i = 0; i < kRepeatLanes; ++i) {
      SetLane(indices_, i, static_cast<float>(i));
    }
    Barrier();
  }

  // ---- which tile comes next

  __aicore__ inline bool NextStep(TileStep& step) {
    const bool opens_unit = !has_unit_ || next_begin_ >= units_.Current().keys.last;
    if (opens_unit) {
      has_unit_ = units_.Next();
      if (!has_unit_) {
        return false;
      }
      next_begin_ = units_.Current().keys.first / tiling_->tile * tiling_->tile;
    }
    step.unit = units_.Current();
    step.begin = next_begin_;
    next_begin_ += tiling_->tile;
    step.seen = Within(step.unit.keys, step.begin, tiling_->tile);
    step.opens_unit = opens_unit;
    step.closes_unit = next_begin_ >= step.unit.keys.last;
    step.opens_piece = opens_unit || step.begin % kPiece == 0;
    step.closes_piece = step.closes_unit || next_begin_ % kPiece == 0;
    return true;
  }

  // ---- from GM

  __aicore__ inline void Load(const TileStep& step) {
    if (step.opens_unit) {
      LoadQueries(step.unit);
    }
    if (step.seen.first == step.seen.last) {
      return;
    }
    AscendC::LocalTensor<C> keys = key_in_.template AllocTensor<C>();
    CopyTileIn(keys, key_cache_, tiling_->key, step);
    if constexpr (kHasScales) {
      key_scales_.Load(ScalesIn(keys, 0), tables_, step.unit, step.begin, step.seen);
      value_scales_.Load(ScalesIn(keys, 1), tables_, step.unit, step.begin, step.seen);
    }
    tree_mask_.Load(TreeIn(keys), step.unit, step.begin, step.seen);
    key_in_.EnQue(keys);
    if (tiling_->values_are_keys == 0) {
      AscendC::LocalTensor<C> values = value_in_.template AllocTensor<C>();
      CopyTileIn(values, value_cache_, tiling_->value, step);
      value_in_.EnQue(values);
    }
  }

  // What comes in behind the keys of a tile: scales of keys (0) and of values (1), and its part of
  // the tree mask.
  __aicore__ inline Float ScalesIn(const AscendC::LocalTensor<C>& keys, int64_t half) const {
    const int64_t at = scales_at_ + half * TileScales::BytesIn(tiling_->tile) / sizeof(C);
    return keys[at].template ReinterpretCast<float>();
  }

  __aicore__ inline AscendC::LocalTensor<uint8_t> TreeIn(
      const AscendC::LocalTensor<C>& keys) const {
    return keys[tree_at_].template ReinterpretCast<uint8_t>();
  }

  // Copies the keys (or values) of a tile that some row sees; those of a block are one copy.
  __aicore__ inline void CopyTileIn(const AscendC::LocalTensor<C>& to,
                                    const AscendC::GlobalTensor<C>& cache,
                                    const CacheLayout& layout, const TileStep& step) const {
    for (int64_t k = step.seen.first; k < step.seen.last;) {
      const int64_t key = step.begin + k;
      const int64_t count = Smaller(tables_.CountFrom(key), step.seen.last - k);
      const int64_t at = tables_.Find(layout, step.unit.index, step.unit.kv_head, key);
      CopyRowsIn(to[k * UbPitch<C>(layout.head_dim)], cache[at], count, layout.head_dim,
                 layout.token_stride);
      k += count;
    }
  }

  __aicore__ inline void LoadQueries(const Unit& unit) {
    AscendC::LocalTensor<T> queries = query_in_.template AllocTensor<T>();
    for (int64_t i = 0; i < unit.num_rows;) {
      const Row row = RowAt(*tiling_, unit, i);
      const int64_t count = RowsOfToken(*tiling_, unit, i);
      const int64_t at =
          row.token * tiling_->query.token_stride + row.head * tiling_->query.head_stride;
      CopyRowsIn(queries[i * key_dim_], query_[at], count, key_dim_, tiling_->query.head_stride);
      i += count;
    }
    query_in_.EnQue(queries);
  }

  // The keys (or values) `seen` of a tile as float32, without their scales, in a buffer that the
  // next call overwrites.
  __aicore__ inline Float Widened(const AscendC::LocalTensor<C>& from, const Range& seen,
                                  int64_t width) {
    if constexpr (sizeof(C) == sizeof(float)) {
      return from;
    } else if constexpr (kHasScales) {
      const int64_t at_once = num_products_ * sizeof(float) / (width * sizeof(half));
      for (int64_t k = seen.first; k < seen.last; k += at_once) {
        WidenInt8(from, k, Smaller(at_once, seen.last - k), width);
      }
      return wide_;
    } else {
      const int64_t at = seen.first * width;
      AscendC::Cast(wide_[at], from[at], AscendC::RoundMode::CAST_NONE,
                    static_cast<uint32_t>((seen.last - seen.first) * width));
      Barrier();
      return wide_;
    }
  }

  // Through halves, which have room where products come later.
  __aicore__ inline void WidenInt8(const AscendC::LocalTensor<int8_t>& from, int64_t k,
                                   int64_t count, int64_t width) {
    const AscendC::LocalTensor<half> halves = products_.template ReinterpretCast<half>();
    const int64_t pitch = UbPitch<int8_t>(width);
    RowsToHalf(halves, width, from[k * pitch], pitch, count, width);
    Barrier();
    AscendC::Cast(wide_[k * width], halves, AscendC::RoundMode::CAST_NONE,
                  static_cast<uint32_t>(count * width));
    Barrier();
  }

  // ---- one tile

  __aicore__ inline void Attend(const TileStep& step) {
    if (step.opens_unit) {
      OpenUnit(step.unit);
    }
    if (step.opens_piece) {
      Clear(piece_, step.unit.num_rows, value_dim_);
    }
    if (step.seen.first < step.seen.last) {
      AttendTile(step);
    }
    if (step.closes_piece) {
      ClosePiece(step);
    }
    if (step.closes_unit && tiling_->split == 0) {
      row_output_.Write(step.unit, total_, scratch_);
    }
  }

  __aicore__ inline void AttendTile(const TileStep& step) {
    AscendC::LocalTensor<C> keys = key_in_.template DeQue<C>();
    tree_mask_.Take(TreeIn(keys), step.unit, step.begin, step.seen, products_);
    if constexpr (kHasScales) {
      key_scales_.Take(ScalesIn(keys, 0), step.seen);
      value_scales_.Take(ScalesIn(keys, 1), step.seen);
    }
    const Float wide_keys = Widened(keys, step.seen, key_dim_);
    Score(step, wide_keys);
    if (tiling_->values_are_keys != 0) {
      UpdateSoftmax(step);
      AddValues(step, wide_keys, key_dim_);
      FreeKeys(keys);
      return;
    }
    FreeKeys(keys);
    UpdateSoftmax(step);
    AscendC::LocalTensor<C> values = value_in_.template DeQue<C>();
    AddValues(step, Widened(values, step.seen, value_dim_), value_dim_);
    value_in_.FreeTensor(values);
  }

  __aicore__ inline void FreeKeys(AscendC::LocalTensor<C>& keys) { key_in_.FreeTensor(keys); }

  // Widens the unit's queries and scales them, so that the scores come out scaled.
  __aicore__ inline void OpenUnit(const Unit& unit) {
    AscendC::LocalTensor<T> queries = query_in_.template DeQue<T>();
    const int32_t count = static_cast<int32_t>(unit.num_rows * key_dim_);
    if constexpr (sizeof(T) == sizeof(float)) {
      AscendC::Muls(queries_, queries, tiling_->scale, count);
    } else {
      AscendC::Cast(queries_, queries, AscendC::RoundMode::CAST_NONE, count);
      Barrier();
      AscendC::Muls(queries_, queries_, tiling_->scale, count);
    }
    Barrier();
    query_in_.FreeTensor(queries);
    if (tiling_->has_alibi_slopes != 0) {
      SetSlopes(unit);
    }
    if constexpr (kHasScales) {
      key_scales_.OpenUnit(unit);
      value_scales_.OpenUnit(unit);
    }
    if (tiling_->split == 0) {
      Clear(total_, unit.num_rows, value_dim_);
    }
  }

  __aicore__ inline Range SeenByRow(const TileStep& step, int64_t r) const {
    return Within(KeysOfRow(*tiling_, step.unit, r), step.begin, tiling_->tile);
  }

  // The keys of the tile that row r sees, a bit each.
  __aicore__ inline uint64_t MaskOfRow(const TileStep& step, int64_t r) const {
    return MaskOf(SeenByRow(step, r)) & tree_mask_.OfRow(step.unit, r);
  }

  // scores_[r][k] *= scale[k]
  __aicore__ inline void ScaleScores(const TileStep& step, const Float& scales) {
    AscendC::Mul(scores_, scores_, scales, static_cast<uint64_t>(kRepeatLanes),
                 static_cast<uint8_t>(step.unit.num_rows),
                 AscendC::BinaryRepeatParams(1, 1, 1, kGranule, kGranule, 0));
    Barrier();
  }

  // scores_[r][k] for the loaded keys, the others 0; then the options, then -inf where r doesn't
  // see k.
  __aicore__ inline void Score(const TileStep& step, const Float& keys) {
    const int64_t count = step.seen.last - step.seen.first;
    const Float wide = keys[step.seen.first * key_dim_];
    const int32_t all = static_cast<int32_t>(step.unit.num_rows * kRepeatLanes);
    AscendC::Duplicate(scores_, 0.0f, all);
    Barrier();
    for (int64_t r = 0; r < step.unit.num_rows; ++r) {
      ScoreRow(queries_[r * key_dim_], wide, count, scores_[r * kRepeatLanes + step.seen.first]);
    }
    if constexpr (kHasScales) {
      ScaleScores(step, key_scales_.Lanes());
    }
    if (tiling_->softcap > 0.0f) {
      CapScores(scores_, all, cap_granule_, tiling_->softcap);
    }
    for (int64_t r = 0; r < step.unit.num_rows; ++r) {
      if (tiling_->has_alibi_slopes != 0) {
        AddAlibi(step, r);
      }
      HideScores(step, r);
    }
    Barrier();
  }

  // The products of 64 elements of the query with 64 of each key, then of the next 64, added up.
  __aicore__ inline void ScoreRow(const Float& query, const Float& keys, int64_t count,
                                  const Float& scores) {
    const uint8_t key_row = static_cast<uint8_t>(key_dim_ / kGranule);
    const uint8_t repeats = static_cast<uint8_t>(count);
    const AscendC::BinaryRepeatParams params(1, 1, 1, kGranule, key_row, 0);
    for (int64_t c = 0; c < key_dim_; c += kRepeatLanes) {
      const uint64_t mask = ColumnMask(key_dim_, c);
      if (c == 0) {
        AscendC::Mul(products_, keys, query, mask, repeats, params);
      } else {
        AscendC::MulAddDst(products_, keys[c], query[c], mask, repeats, params);
      }
      Barrier();
    }
    const int32_t lanes = static_cast<int32_t>(ColumnMask(key_dim_, 0));
    AscendC::WholeReduceSum(scores, products_, lanes, repeats, 1, 1, kGranule);
    Barrier();
  }

  __aicore__ inline void SetSlopes(const Unit& unit) {
    for (int64_t r = 0; r < unit.num_rows; ++r) {
      const float slope = alibi_slopes_.GetValue(RowAt(*tiling_, unit, r).head);
      AscendC::Duplicate(slopes_[r * kGranule], slope, kGranule);
    }
    Barrier();
  }

  __aicore__ inline void AddAlibi(const TileStep& step, int64_t r) {
    const int64_t distance = step.begin - RowAt(*tiling_, step.unit, r).position;
    AddBias(scores_[r * kRepeatLanes], indices_, static_cast<float>(distance),
            slopes_[r * kGranule], true, distances_, 1);
  }

  __aicore__ inline void HideScores(const TileStep& step, int64_t r) {
    const uint64_t hidden = ~MaskOfRow(step, r);
    if (hidden == 0) {
      return;
    }
    uint64_t mask[2] = {hidden, 0};
    AscendC::Duplicate(scores_[r * kRepeatLanes], kMinusInf, mask, 1, 1, kGranule);
  }

  // Ring scores into weights e^(score - max) and brings max, sum and acc of the piece up to date.
  __aicore__ inline void UpdateSoftmax(const TileStep& step) {
    const int64_t rows = step.unit.num_rows;
    const int32_t lanes = LanesOf(rows);
    const uint8_t repeats = static_cast<uint8_t>(rows);
    AscendC::WholeReduceMax(tile_lanes_, scores_, kRepeatLanes, repeats, 1, 1, kGranule,
                            AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    Barrier();
    AscendC::Max(scratch_.new_max, piece_.max, tile_lanes_, lanes);
    Barrier();
    WeightLanes(scratch_.keep, piece_.max, scratch_.new_max, lanes);
    AscendC::Adds(piece_.max, scratch_.new_max, 0.0f, lanes);
    BroadcastLanes(scratch_.factor, scratch_.new_max, rows);
    Barrier();
    AscendC::Sub(scores_, scores_, scratch_.factor, kRepeatLanes, repeats,
                 AscendC::BinaryRepeatParams(1, 1, 0, kGranule, kGranule, 1));
    Barrier();
    AscendC::Exp(scores_, scores_, static_cast<int32_t>(rows * kRepeatLanes));
    AscendC::Mul(piece_.sum, piece_.sum, scratch_.keep, lanes);
    Barrier();
    AscendC::WholeReduceSum(tile_lanes_, scores_, kRepeatLanes, repeats, 1, 1, kGranule);
    BroadcastLanes(scratch_.factor, scratch_.keep, rows);
    Barrier();
    AscendC::Add(piece_.sum, piece_.sum, tile_lanes_, lanes);
    MultiplyRows(piece_.acc, scratch_.factor, rows, value_dim_);
    Barrier();
  }

  // `values` are floats, `pitch` from one to the next.
  __aicore__ inline void AddValues(const TileStep& step, const Float& values, int64_t pitch) {
    if constexpr (kHasScales) {
      ScaleScores(step, value_scales_.Lanes());
    }
    for (int64_t r = 0; r < step.unit.num_rows; ++r) {
      const Range seen = SeenByRow(step, r);
      if (seen.first < seen.last) {
        AddValuesOfRow(values, pitch, seen, MaskOfRow(step, r), r);
      }
    }
  }

  // acc[r] += sum over the keys that r sees of weight * value.
  __aicore__ inline void AddValuesOfRow(const Float& values, int64_t pitch, const Range& seen,
                                        uint64_t mask, int64_t r) {
    const AscendC::BrcbRepeatParams dense(1, kGranule);
    AscendC::Brcb(weights_, scores_[r * kRepeatLanes],
                  static_cast<uint8_t>(kRepeatLanes / kGranule), dense);
    for (int64_t c = 0; c < value_dim_; c += kSumColumns) {
      const int64_t width = Smaller(value_dim_ - c, kSumColumns);
      SumValues(values[c], pitch, seen, mask, width);
      const Float acc = piece_.acc[r * value_dim_ + c];
      AscendC::Add(acc, acc, products_, static_cast<int32_t>(width));
      Barrier();
    }
  }

  // The first of products_: some columns of the weighted sum of values. Only values of keys that
  // the row sees are multiplied: others may be NaN. Keys k, k + 16, k + 32, ... share a partial
  // sum; the 16 partial sums are added pairwise, always in this order.
  __aicore__ inline void SumValues(const Float& values, int64_t pitch, const Range& seen,
                                   uint64_t mask, int64_t width) {
    AscendC::Duplicate(products_, 0.0f, static_cast<int32_t>(kSumRows * width));
    Barrier();
    for (int64_t begin = 0; begin < tiling_->tile; begin += kSumRows) {
      const int64_t first = Larger(seen.first, begin);
      const int64_t last = Smaller(seen.last, begin + kSumRows);
      if (first < last) {
        AddSeenValues(values, pitch, {first, last}, mask, begin, width);
        Barrier();
      }
    }
    for (int64_t half = kSumRows / 2; half > 0; half /= 2) {
      AscendC::Add(products_, products_, products_[half * width],
                   static_cast<int32_t>(half * width));
      Barrier();
    }
  }

  // The values of the keys among `keys` that are in the mask, each to its partial sum.
  __aicore__ inline void AddSeenValues(const Float& values, int64_t pitch, const Range& keys,
                                       uint64_t mask, int64_t begin, int64_t width) {
    int64_t first = keys.first;
    while (first < keys.last) {
      if ((mask >> first & 1) == 0) {
        ++first;
        continue;
      }
      int64_t last = keys.last;
      if ((MaskOf({first, last}) & ~mask) != 0) {
        last = first + 1;
        while ((mask >> last & 1) != 0) {
          ++last;
        }
      }
      AddWeighted(products_[(first - begin) * width], values[first * pitch],
                  weights_[first * kGranule], last - first, width, pitch);
      first = last;
    }
  }

  // sums[k] += values[k] * weights[k]
  __aicore__ inline void AddWeighted(const Float& sums, const Float& values, const Float& weights,
                                     int64_t count, int64_t width, int64_t pitch) {
    const AscendC::BinaryRepeatParams params(1, 1, 0, static_cast<uint8_t>(width / kGranule),
                                             static_cast<uint8_t>(pitch / kGranule), 1);
    for (int64_t c = 0; c < width; c += kRepeatLanes) {
      AscendC::MulAddDst(sums[c], values[c], weights, ColumnMask(width, c),
                         static_cast<uint8_t>(count), params);
    }
  }

  // ---- pieces

  __aicore__ inline void ClosePiece(const TileStep& step) {
    if (tiling_->split == 0) {
      Fold(total_, piece_, scratch_, step.unit.num_rows, value_dim_);
    } else if (step.seen.first < step.seen.last) {
      piece_states_.Store(step.unit, piece_);
    }
  }

  static constexpr int64_t kNumLaneBuffers = 8;

  const AttentionTilingData* tiling_;
  int64_t key_dim_;
  int64_t value_dim_;
  int64_t num_products_;
  int64_t scales_at_;  // in a buffer of key_in_, in elements
  int64_t tree_at_;
  Sequences sequences_;
  BlockTables tables_;
  WorkUnits units_;
  RowOutput<T> row_output_;
  PieceStates<> piece_states_;
  TreeMaskBits tree_mask_;
  FirstLanes first_lanes_;
  TileScales key_scales_;
  TileScales value_scales_;
  bool has_unit_;
  int64_t next_begin_;

  AscendC::GlobalTensor<T> query_;
  AscendC::GlobalTensor<C> key_cache_;
  AscendC::GlobalTensor<C> value_cache_;
  AscendC::GlobalTensor<float> alibi_slopes_;

  AscendC::TQue<AscendC::TPosition::VECIN, 2> query_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> key_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> value_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> output_out_;
  Float queries_;      // [row][key_dim], scaled
  Float wide_;         // a tile of keys or values in float32
  Float products_;     // of one row with a tile of keys or values
  Float scores_;       // [row][64]
  Float distances_;    // of one row
  Float cap_granule_;  // -2 softcap, over a granule
  Float slopes_;       // [row][8]
  Float weights_;      // [64][8]: one row's weights, each over a granule
  Float indices_;      // 0 to 63
  Float tile_lanes_;   // a lane per row
  RowState piece_;
  RowState total_;
  RowScratch scratch_;
};
