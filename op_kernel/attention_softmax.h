// A vector core's half of attention on a group of cores: from scores to weights, and from the
// products of weights and values to rows of output.
//
// The two vector cores of a group share a row block's rows. A step's rows go through UB in blocks
// of softmax_rows, the next block coming in while one is computed. Each piece has a softmax of its
// own; where the cube has multiplied its weights with the values, the state is folded into that of
// the pieces before, in float32.
#pragma once

#include "attention_tensors.h"
#include "attention_tiling_data.h"
#include "exchange.h"
#include "kernel_operator.h"
#include "piece_states.h"
#include "piece_steps.h"
#include "row_copy.h"
#include "row_output.h"
#include "row_state.h"
#include "score_rows.h"
#include "sequence.h"
#include "verdict.h"
#include "visible.h"
#include "work_units.h"

template <typename T>
class AttentionSoftmax {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    value_dim_ = tiling.value.head_dim;
    most_rows_ = tiling.max_rows / 2;
    group_ = AscendC::GetBlockIdx() / 2;
    InitScale();
    if (tiling.has_alibi_slopes != 0) {
      alibi_slopes_.SetGlobalBuffer((__gm__ float*)tensors.alibi_slopes);
    }
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    exchange_.Init(tiling, tensors.workspace, group_);
    steps_.StartSlots();
    InitBuffers(pipe);
    finiteness_.Init(pipe, value_dim_);
    row_output_.Init(tensors, tiling, pipe, &rows_out_, RowsInBuffer(value_dim_));
    GM_ADDR states = tensors.workspace + AscendC::GetBlockNum() * tiling.exchange_bytes;
    piece_states_.Init(tiling, states, pipe, tiling.softmax_rows);
    FillConstants();
  }

  __aicore__ inline void Process() {
    Walk(tiling_->num_tokens);
    if (MayMixVisibility(*tiling_) && TellsTrouble()) {
      Walk(1);
    }
    if (tiling_->split != 0) {
      AscendC::PipeBarrier<PIPE_ALL>();
      AscendC::SyncAll();
      piece_states_.Combine(sequences_, AscendC::GetBlockIdx(), 2 * AscendC::GetBlockNum(),
                            row_output_, total_, scratch_);
    }
  }

 private:
  using Float = AscendC::LocalTensor<float>;

  // This core's share of a step: half of the unit's rows.
  struct Share {
    PieceStep step;
    int64_t first_row;  // of the unit
    bool mixes;         // rows of the unit may see different keys
  };

  // The scale is applied on the way to the exponent where nothing comes between: e^(scale * s -
  // scale * max). That holds while scaling keeps the order and stays finite.
  __aicore__ inline void InitScale() {
    scales_first_ = tiling_->softcap > 0.0f || tiling_->has_alibi_slopes != 0 ||
                    !(tiling_->scale > 0.0f && tiling_->scale <= 1.0f);
    late_scale_ = scales_first_ ? 1.0f : tiling_->scale;
  }

  // op_host's UB budget counts these buffers and those of the members: attention_tiling.cpp,
  // softmax_ub_bytes.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    const int64_t rows = tiling_->softmax_rows;
    pipe->InitBuffer(scores_in_, 2, rows * kCubePiece * sizeof(float));
    pipe->InitBuffer(rows_out_, 2, rows * kCubePiece * sizeof(T));
    pipe->InitBuffer(products_in_, 1, most_rows_ * value_dim_ * sizeof(float));
    pipe->InitBuffer(total_buffer_, most_rows_ * value_dim_ * sizeof(float));
    pipe->InitBuffer(lanes_buffer_, kNumLaneBuffers * kRepeatLanes * sizeof(float));
    pipe->InitBuffer(factor_buffer_, kRepeatLanes * kBlockLanes * sizeof(float));
    pipe->InitBuffer(constants_buffer_, (2 * kBlockLanes + 2 * kCubePiece) * sizeof(float));
    const Float lanes = lanes_buffer_.template Get<float>();
    total_ = {lanes, lanes[kRepeatLanes], total_buffer_.template Get<float>()};
    scratch_ = {lanes[2 * kRepeatLanes], lanes[3 * kRepeatLanes], lanes[4 * kRepeatLanes],
                factor_buffer_.template Get<float>()};
    shift_lanes_ = lanes[5 * kRepeatLanes];
    for (int64_t i = 0; i < kSlots; ++i) {
      max_[i] = lanes[(6 + 2 * i) * kRepeatLanes];
      sum_[i] = lanes[(7 + 2 * i) * kRepeatLanes];
    }
    const Float constants = constants_buffer_.template Get<float>();
    scale_block_ = constants;
    cap_block_ = constants[kBlockLanes];
    indices_ = constants[2 * kBlockLanes];
    distances_ = constants[2 * kBlockLanes + kCubePiece];
  }

  // Lanes beyond a step's rows are computed along and must hold numbers; 0, 1, 2, ... serve ALiBi.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(total_.max, 0.0f, static_cast<int32_t>(kNumLaneBuffers * kRepeatLanes));
    AscendC::Duplicate(scale_block_, late_scale_, kBlockLanes);
    AscendC::Duplicate(cap_block_, -2.0f * tiling_->softcap, kBlockLanes);
    if (tiling_->has_alibi_slopes != 0) {
      AscendC::CreateVecIndex(indices_, 0.0f, static_cast<uint32_t>(kCubePiece));
    }
    Barrier();
  }

  // ---- which rows

  __aicore__ inline Share ShareOf(const PieceStep& step) const {
    Share share = {step, 0, MayMixVisibility(*tiling_) && SpansTokens(step.unit)};
    Unit& unit = share.step.unit;
    const int64_t half = (unit.num_rows + 1) / 2;
    if (AscendC::GetSubBlockIdx() == 0) {
      unit.num_rows = half;
    } else {
      share.first_row = half;
      unit.row_begin += half;
      unit.num_rows -= half;
    }
    return share;
  }

  __aicore__ inline bool SpansTokens(const Unit& unit) const {
    return RowsOfToken(*tiling_, unit, 0) < unit.num_rows;
  }

  __aicore__ inline void Walk(int64_t most_tokens) {
    steps_.Init(*tiling_, sequences_, group_, AscendC::GetBlockNum(), most_tokens);
    in_flight_.Clear();
    PieceStep step;
    while (steps_.Next(step)) {
      const Share share = ShareOf(step);
      const bool ends_one = in_flight_.IsFull();
      if (HasKeys(step)) {
        Weigh(share, ends_one);
      } else if (ends_one) {
        LoadProducts(in_flight_.Oldest());
      }
      if (ends_one) {
        FinishOldest();
      }
      in_flight_.Add(share);
    }
    while (!in_flight_.IsEmpty()) {
      LoadProducts(in_flight_.Oldest());
      FinishOldest();
    }
  }

  __aicore__ inline void FinishOldest() {
    Finish(in_flight_.Oldest());
    in_flight_.DropOldest();
  }

  // ---- scores become weights

  // The products of the oldest step in flight, if it ends after this, come in during the last block
  // of rows: the cube has them ready by then.
  __aicore__ inline void Weigh(const Share& share, bool ends_one) {
    AscendC::CrossCoreWaitFlag(kScoresReady);
    const int64_t rows = share.step.unit.num_rows;
    const int64_t pace = RowsInBuffer(WidthOf(share));
    if (rows > 0) {
      LoadScores(share, 0, Smaller(pace, rows));
    }
    for (int64_t begin = 0; begin < rows; begin += pace) {
      const int64_t end = Smaller(begin + pace, rows);
      if (end < rows) {
        LoadScores(share, end, Smaller(end + pace, rows));
      } else if (ends_one) {
        LoadProducts(in_flight_.Oldest());
      }
      WeighRows(share, begin, end);
    }
    if (rows == 0 && ends_one) {
      LoadProducts(in_flight_.Oldest());
    }
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);
  }

  // Rows of that many elements that fit a buffer of scores, and one of rows_out_: more where the
  // causal mask leaves a piece few lanes.
  __aicore__ inline int64_t RowsInBuffer(int64_t width) const {
    const int64_t whole = RoundUp(width, 2 * kRepeatLanes);
    const int64_t rows = tiling_->softmax_rows * kCubePiece / whole / kBlockLanes * kBlockLanes;
    return Smaller(rows, kRepeatLanes);
  }

  // Lanes of a row that are computed: whole columns up to the end of the span.
  __aicore__ inline int64_t WidthOf(const Share& share) const {
    return RoundUp(share.step.span.last, kRepeatLanes);
  }

  __aicore__ inline void LoadScores(const Share& share, int64_t begin, int64_t end) {
    Float scores = scores_in_.template AllocTensor<float>();
    const Visible& span = share.step.span;
    const int64_t lanes = span.last - span.first;
    const AscendC::DataCopyExtParams rows(
        static_cast<uint16_t>(end - begin), static_cast<uint32_t>(lanes * sizeof(float)),
        static_cast<uint32_t>((kCubePiece - lanes) * sizeof(float)),
        static_cast<uint32_t>((WidthOf(share) - lanes) / kBlockLanes), 0);
    const AscendC::DataCopyPadExtParams<float> no_padding(false, 0, 0, 0);
    const int64_t at = (share.first_row + begin) * kCubePiece + span.first;
    AscendC::DataCopyPad(scores[span.first], exchange_.Scores(share.step.slot)[at], rows,
                         no_padding);
    scores_in_.EnQue(scores);
  }

  __aicore__ inline void WeighRows(const Share& share, int64_t begin, int64_t end) {
    Float scores = scores_in_.template DeQue<float>();
    AscendC::LocalTensor<T> weights = rows_out_.template AllocTensor<T>();
    const int64_t slot = share.step.slot;
    const ScoreRows block = {scores, end - begin, WidthOf(share)};
    const int32_t lanes = LanesOf(block.rows);
    if (scales_first_) {
      ApplyOptions(share, block, begin);
    }
    HideScores(share, block, begin);

    const Float max = max_[slot][begin];
    MaxOfScores(block, max, weights.template ReinterpretCast<float>());
    AscendC::Maxs(max, max, kLowest, lanes);
    Barrier();
    AscendC::Muls(shift_lanes_, max, -late_scale_, lanes);
    Barrier();
    BroadcastLanes(scratch_.factor, shift_lanes_, block.rows);
    AscendC::Muls(max, max, late_scale_, lanes);
    WeighScores(block, scale_block_, scratch_.factor);
    AscendC::Cast(weights, scores, AscendC::RoundMode::CAST_RINT,
                  static_cast<uint32_t>(CountOf(block)));
    Barrier();
    SumOfScores(block, sum_[slot][begin]);
    scores_in_.FreeTensor(scores);
    StoreWeights(share, weights, begin, end);
  }

  // A copy for each tile of the cube.
  __aicore__ inline void StoreWeights(const Share& share, AscendC::LocalTensor<T> weights,
                                      int64_t begin, int64_t end) {
    rows_out_.EnQue(weights);
    weights = rows_out_.template DeQue<T>();
    const int64_t tile = tiling_->tile;
    for (int64_t first = 0; first < kCubePiece; first += tile) {
      const Visible span = InTile(share.step.span, first, tile);
      const int64_t lanes = span.last - span.first;
      if (lanes == 0) {
        continue;
      }
      const AscendC::DataCopyExtParams rows(
          static_cast<uint16_t>(end - begin), static_cast<uint32_t>(lanes * sizeof(T)),
          static_cast<uint32_t>((WidthOf(share) - lanes) * sizeof(T) / kBlockBytes),
          static_cast<uint32_t>((tile - lanes) * sizeof(T)), 0);
      const int64_t at = (share.first_row + begin) * tile + span.first;
      AscendC::DataCopyPad(exchange_.WeightsOfTile(share.step.slot, first)[at],
                           weights[first + span.first], rows);
    }
    rows_out_.FreeTensor(weights);
  }

  // ---- options

  // What lies beside the span is computed along and must hold numbers.
  __aicore__ inline void ApplyOptions(const Share& share, const ScoreRows& block, int64_t begin) {
    SetBeside(block, 0, block.rows, share.step.span, 0.0f);
    Barrier();
    AscendC::Muls(block.scores, block.scores, tiling_->scale, CountOf(block));
    Barrier();
    if (tiling_->softcap > 0.0f) {
      CapScores(block, cap_block_, tiling_->softcap);
    }
    if (tiling_->has_alibi_slopes != 0) {
      for (int64_t r = 0; r < block.rows; ++r) {
        AddAlibi(share, block, begin, r);
      }
    }
  }

  // + slope * (key position - query position)
  __aicore__ inline void AddAlibi(const Share& share, const ScoreRows& block, int64_t begin,
                                  int64_t r) {
    const Row row = RowAt(*tiling_, share.step.unit, begin + r);
    const float slope = alibi_slopes_.GetValue(row.head);
    const float distance = static_cast<float>(share.step.begin - row.position);
    const int32_t width = static_cast<int32_t>(block.width);
    AscendC::Adds(distances_, indices_, distance, width);
    Barrier();
    AscendC::Axpy(block.scores[r * block.width], distances_, slope, width);
    Barrier();
  }

  // -inf where a row doesn't see a key. The rows of a token see the same ones.
  __aicore__ inline void HideScores(const Share& share, const ScoreRows& block, int64_t begin) {
    const Unit& unit = share.step.unit;
    for (int64_t r = 0; r < block.rows;) {
      const Row row = RowAt(*tiling_, unit, begin + r);
      const int64_t rows = Smaller(RowsOfToken(*tiling_, unit, begin + r), block.rows - r);
      const Visible keys = VisibleKeys(*tiling_, unit.sequence.length, row.position);
      const Visible lanes = InTile(keys, share.step.begin, kCubePiece);
      SetBeside(block, r, rows, lanes, kMinusInf);
      r += rows;
    }
    Barrier();
  }

  // ---- products become output

  __aicore__ inline void LoadProducts(const Share& share) {
    if (!HasKeys(share.step)) {
      return;
    }
    AscendC::CrossCoreWaitFlag(kProductsReady);
    const int64_t rows = share.step.unit.num_rows;
    if (rows == 0) {
      return;
    }
    Float products = products_in_.template AllocTensor<float>();
    const AscendC::GlobalTensor<float> from = exchange_.Products(share.step.slot);
    AscendC::DataCopy(products, from[share.first_row * value_dim_],
                      static_cast<uint32_t>(rows * value_dim_));
    products_in_.EnQue(products);
  }

  // Brings the state of the unit up to date with a step's products, and ends the unit.
  __aicore__ inline void Finish(const Share& share) {
    const Unit& unit = share.step.unit;
    if (unit.num_rows == 0) {
      return;
    }
    if (HasKeys(share.step)) {
      TakeProducts(share);
    } else if (tiling_->split == 0) {
      Clear(total_, unit.num_rows, value_dim_);
      row_output_.Write(unit, total_, scratch_);
    }
  }

  __aicore__ inline void TakeProducts(const Share& share) {
    const Unit& unit = share.step.unit;
    Float products = products_in_.template DeQue<float>();
    const RowState piece = {max_[share.step.slot], sum_[share.step.slot], products};
    if (share.mixes) {
      finiteness_.Look(products);
    }
    if (tiling_->split != 0) {
      piece_states_.Store(unit, piece);
      Barrier();
    } else if (share.step.opens_unit && share.step.closes_unit) {
      row_output_.Write(unit, piece, scratch_);
    } else {
      FoldPiece(share, piece);
    }
    products_in_.FreeTensor(products);
  }

  __aicore__ inline void FoldPiece(const Share& share, const RowState& piece) {
    const int64_t rows = share.step.unit.num_rows;
    if (share.step.opens_unit) {
      Copy(total_, piece, rows, value_dim_);
    } else {
      Fold(total_, piece, scratch_, rows, value_dim_);
    }
    if (share.step.closes_unit) {
      row_output_.Write(share.step.unit, total_, scratch_);
    }
  }

  // Tells the group what this core has seen, and whether any has seen trouble.
  __aicore__ inline bool TellsTrouble() {
    finiteness_.Tell(exchange_.Verdict(AscendC::GetSubBlockIdx()));
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kVerdictReady);
    AscendC::CrossCoreWaitFlag(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  static constexpr int64_t kNumLaneBuffers = 6 + 2 * kSlots;

  const AttentionTilingData* tiling_;
  int64_t value_dim_;
  int64_t most_rows_;  // of this core's share
  int64_t group_;
  bool scales_first_;
  float late_scale_;
  Sequences sequences_;
  Exchange<T> exchange_;
  PieceSteps steps_;
  StepsInFlight<Share> in_flight_;
  Finiteness finiteness_;
  RowOutput<T> row_output_;
  PieceStates piece_states_;

  AscendC::GlobalTensor<float> alibi_slopes_;

  AscendC::TQue<AscendC::TPosition::VECIN, 2> scores_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> products_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> rows_out_;  // weights, and rows of output
  AscendC::TBuf<AscendC::TPosition::VECCALC> total_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> lanes_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> factor_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> constants_buffer_;
  Float max_[kSlots];  // of the pieces in flight, a lane per row
  Float sum_[kSlots];
  Float shift_lanes_;
  Float scale_block_;  // the late scale, over a block
  Float cap_block_;    // -2 softcap, over a block
  Float indices_;      // 0 to kCubePiece - 1
  Float distances_;    // from a query to the keys of a piece
  RowState total_;
  RowScratch scratch_;
};
