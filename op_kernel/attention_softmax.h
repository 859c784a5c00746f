// A vector core's half of attention on a group of cores: from scores to weights, and from the
// products of weights and values to rows of output.
//
// The two vector cores of a group share a row block's rows. A step's scores go through UB in
// chunks, the next chunk coming in while one is computed. Each piece has a softmax of its own;
// where the cube has multiplied its weights with the values, the state is folded into that of the
// pieces before, in float32.
#pragma once

#include "alibi.h"
#include "attention_tensors.h"
#include "attention_tiling_data.h"
#include "exchange.h"
#include "kernel_operator.h"
#include "piece_states.h"
#include "piece_steps.h"
#include "row_copy.h"
#include "row_output.h"
#include "row_state.h"
#include "score_chunk.h"
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
    most_rows_ = FirstShare(tiling.max_rows);
    group_ = AscendC::GetBlockIdx() / 2;
    output_rows_ =
        Smaller(tiling.chunk_scores / value_dim_ / kBlockLanes * kBlockLanes, kRepeatLanes);
    InitScale();
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    exchange_.Init(tiling, tensors.workspace, group_);
    steps_.StartSlots();
    InitBuffers(pipe);
    finiteness_.Init(pipe, value_dim_);
    alibi_.Init(tiling, tensors.alibi_slopes, pipe);
    row_output_.Init(tensors, tiling, pipe, &rows_out_, output_rows_);
    GM_ADDR states = tensors.workspace + AscendC::GetBlockNum() * tiling.exchange_bytes;
    piece_states_.Init(tiling, states, pipe, kBlockLanes);
    FillConstants();
  }

  __aicore__ inline void Process() {
    Walk(false);
    if (MayMixVisibility(*tiling_) && TellsTrouble()) {
      Walk(true);
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

  // This core's share of a step: some of the unit's rows, with those that fill it up.
  struct Share {
    PieceStep step;
    int64_t first_row;  // of the unit
    int64_t rows;       // lanes: a power of two up to 64, or 0
    int64_t pitch;      // rows of both shares
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
    pipe->InitBuffer(scores_in_, 2, tiling_->chunk_scores * sizeof(float));
    pipe->InitBuffer(rows_out_, 2, tiling_->chunk_scores * sizeof(T));
    pipe->InitBuffer(folded_buffer_, kFoldedKeys * most_rows_ * sizeof(float));
    pipe->InitBuffer(products_in_, 1, most_rows_ * value_dim_ * sizeof(float));
    pipe->InitBuffer(total_buffer_, most_rows_ * value_dim_ * sizeof(float));
    pipe->InitBuffer(lanes_buffer_, kNumLaneBuffers * kRepeatLanes * sizeof(float));
    pipe->InitBuffer(factor_buffer_, kRepeatLanes * kBlockLanes * sizeof(float));
    pipe->InitBuffer(constants_buffer_, 2 * kBlockLanes * sizeof(float));
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
    folded_ = folded_buffer_.template Get<float>();
  }

  // Lanes beyond a step's rows are computed along and must hold numbers.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(total_.max, 0.0f, static_cast<int32_t>(kNumLaneBuffers * kRepeatLanes));
    AscendC::Duplicate(scale_block_, late_scale_, kBlockLanes);
    AscendC::Duplicate(cap_block_, -2.0f * tiling_->softcap, kBlockLanes);
    Barrier();
  }

  // ---- which rows

  __aicore__ inline Share ShareOf(const PieceStep& step) const {
    const int64_t pitch = RowPitch(step.unit.num_rows);
    const int64_t first = FirstShare(pitch);
    Share share = {step, 0, first, pitch, MayMixVisibility(*tiling_) && SpansTokens(step.unit)};
    if (AscendC::GetSubBlockIdx() != 0) {
      share.first_row = first;
      share.rows = pitch - first;
    }
    Unit& unit = share.step.unit;
    unit.row_begin += share.first_row;
    unit.num_rows = Clamp(unit.num_rows - share.first_row, 0, share.rows);
    return share;
  }

  __aicore__ inline bool SpansTokens(const Unit& unit) const {
    return RowsOfToken(*tiling_, unit, 0) < unit.num_rows;
  }

  __aicore__ inline void Walk(bool by_token) {
    steps_.Init(*tiling_, sequences_, group_, AscendC::GetBlockNum(), by_token);
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

  // The keys of a piece whose scores are in UB at a time.
  struct Chunk {
    int64_t first;  // of the piece, a multiple of kKeyBlock
    int64_t last;
    Visible span;  // keys with scores, counted from `first`
  };

  __aicore__ inline Chunk ChunkAt(const Share& share, int64_t index) const {
    const Visible& span = share.step.span;
    const int64_t keys = tiling_->chunk_scores / share.rows;
    const int64_t first = span.first / kKeyBlock * kKeyBlock + index * keys;
    const int64_t last = Smaller(first + keys, RoundUp(span.last, kKeyBlock));
    return {first, last, InTile(span, first, last - first)};
  }

  __aicore__ inline int64_t CountChunks(const Share& share) const {
    const Visible& span = share.step.span;
    const int64_t keys = span.last - span.first / kKeyBlock * kKeyBlock;
    return (keys * share.rows + tiling_->chunk_scores - 1) / tiling_->chunk_scores;
  }

  // Scores come in twice, for the maxima and for the weights, but for the first kKept chunks: they
  // are the last ones whose maxima are taken, and stay. The products of the oldest step in flight,
  // if it ends after this, come in during the last chunk: the cube has them ready by then.
  __aicore__ inline void Weigh(const Share& share, bool ends_one) {
    AscendC::CrossCoreWaitFlag(kScoresReady);
    if (share.rows > 0) {
      WeighShare(share, ends_one);
    } else if (ends_one) {
      LoadProducts(in_flight_.Oldest());
    }
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);
  }

  __aicore__ inline void WeighShare(const Share& share, bool ends_one) {
    const int64_t chunks = CountChunks(share);
    if (tiling_->has_alibi_slopes != 0) {
      alibi_.Open(share.step.unit, share.rows, share.step.begin);
    }
    OpenFold(share, kLowest);
    LoadScores(share, ChunkAt(share, chunks - 1));
    for (int64_t i = chunks - 1; i >= 0; --i) {
      if (i > 0) {
        LoadScores(share, ChunkAt(share, i - 1));
      }
      TakeMaxima(share, i);
    }
    CloseMaxima(share);
    OpenFold(share, 0.0f);
    for (int64_t i = 0; i < chunks; ++i) {
      if (i + 1 == chunks && ends_one) {
        LoadProducts(in_flight_.Oldest());
      }
      TakeWeights(share, i);
      if (i + kKept < chunks) {
        LoadScores(share, ChunkAt(share, i + kKept));
      }
    }
    FoldKeys<TakeSum>(folded_, share.rows);
    AscendC::Adds(sum_[share.step.slot], folded_, 0.0f, static_cast<int32_t>(share.rows));
    Barrier();
  }

  __aicore__ inline void LoadScores(const Share& share, const Chunk& chunk) {
    Float scores = scores_in_.template AllocTensor<float>();
    const int64_t keys = chunk.span.last - chunk.span.first;
    const bool dense = share.rows == share.pitch;
    const AscendC::DataCopyExtParams params(
        static_cast<uint16_t>(dense ? 1 : keys),
        static_cast<uint32_t>((dense ? keys : 1) * share.rows * sizeof(float)),
        static_cast<uint32_t>((share.pitch - share.rows) * sizeof(float)), 0, 0);
    const AscendC::DataCopyPadExtParams<float> no_padding(false, 0, 0, 0);
    const int64_t at = (chunk.first + chunk.span.first) * share.pitch + share.first_row;
    AscendC::DataCopyPad(scores[chunk.span.first * share.rows],
                         exchange_.Scores(share.step.slot)[at], params, no_padding);
    scores_in_.EnQue(scores);
  }

  __aicore__ inline void OpenFold(const Share& share, float value) {
    AscendC::Duplicate(folded_, value, static_cast<int32_t>(kFoldedKeys * share.rows));
    Barrier();
  }

  // The loaded scores of a chunk with all options, -inf where a row doesn't see a key.
  __aicore__ inline ScoreChunk TakeScores(const Share& share, const Chunk& chunk) {
    const Float scores = scores_in_.template DeQue<float>();
    const ScoreChunk taken = {scores, chunk.last - chunk.first, share.rows};
    if (scales_first_) {
      ApplyOptions(taken, chunk);
    }
    HideScores(share, taken, chunk);
    return taken;
  }

  __aicore__ inline void TakeMaxima(const Share& share, int64_t index) {
    ScoreChunk taken = TakeScores(share, ChunkAt(share, index));
    AscendC::LocalTensor<float> work = rows_out_.template AllocTensor<float>();
    FoldChunk<TakeLarger>(folded_, taken, work, kKeyBlock / 2 * taken.rows);
    rows_out_.FreeTensor(work);
    if (index < kKept) {
      kept_[index] = taken;
    } else {
      scores_in_.FreeTensor(taken.scores);
    }
  }

  __aicore__ inline void CloseMaxima(const Share& share) {
    const int32_t lanes = static_cast<int32_t>(share.rows);
    FoldKeys<TakeLarger>(folded_, share.rows);
    AscendC::Muls(max_[share.step.slot], folded_, late_scale_, lanes);
    AscendC::Muls(shift_lanes_, folded_, -late_scale_, lanes);
    Barrier();
    RepeatLanes(shift_lanes_, share.rows);
  }

  __aicore__ inline void TakeWeights(const Share& share, int64_t index) {
    const Chunk chunk = ChunkAt(share, index);
    ScoreChunk taken = index < kKept ? kept_[index] : TakeScores(share, chunk);
    AscendC::LocalTensor<T> weights = rows_out_.template AllocTensor<T>();
    WeighScores(taken, scale_block_, shift_lanes_);
    AscendC::Cast(weights, taken.scores, AscendC::RoundMode::CAST_RINT,
                  static_cast<uint32_t>(CountOf(taken)));
    Barrier();
    FoldChunk<TakeSum>(folded_, taken, taken.scores, kKeyBlock * taken.rows);
    scores_in_.FreeTensor(taken.scores);
    StoreWeights(share, chunk, weights);
  }

  __aicore__ inline void StoreWeights(const Share& share, const Chunk& chunk,
                                      AscendC::LocalTensor<T> weights) {
    rows_out_.EnQue(weights);
    weights = rows_out_.template DeQue<T>();
    const int64_t keys = chunk.span.last - chunk.span.first;
    const AscendC::GlobalTensor<T> to = exchange_.Weights(share.step.slot, share.first_row);
    AscendC::DataCopy(to[(chunk.first + chunk.span.first) * share.rows],
                      weights[chunk.span.first * share.rows],
                      static_cast<uint32_t>(keys * share.rows));
    rows_out_.FreeTensor(weights);
  }

  // ---- options

  // What lies beside the span is computed along and must hold numbers.
  __aicore__ inline void ApplyOptions(const ScoreChunk& taken, const Chunk& chunk) {
    SetKeys(taken, 0, chunk.span.first, 0.0f);
    SetKeys(taken, chunk.span.last, taken.keys, 0.0f);
    Barrier();
    AscendC::Muls(taken.scores, taken.scores, tiling_->scale, CountOf(taken));
    Barrier();
    if (tiling_->softcap > 0.0f) {
      CapScores(taken, cap_block_, tiling_->softcap);
    }
    if (tiling_->has_alibi_slopes != 0) {
      alibi_.Add(taken, chunk.first);
    }
  }

  // Both ends of what a row sees grow with the row, so a key is seen by neighbouring rows: by all
  // of the share from where the last row begins to see to where the first one ends.
  __aicore__ inline void HideScores(const Share& share, const ScoreChunk& taken,
                                    const Chunk& chunk) {
    const Unit& unit = share.step.unit;
    const int64_t origin = share.step.begin + chunk.first;
    const Visible seen = InTile(KeysOfRow(unit, 0), origin, taken.keys);
    const Visible seen_last = InTile(KeysOfRow(unit, unit.num_rows - 1), origin, taken.keys);
    SetKeys(taken, 0, seen.first, kMinusInf);
    SetKeys(taken, seen_last.last, taken.keys, kMinusInf);
    const int64_t all_first = Larger(seen.first, seen_last.first);
    const int64_t all_last = Larger(all_first, Smaller(seen.last, seen_last.last));
    for (int64_t k = seen.first; k < Smaller(all_first, seen_last.last); ++k) {
      HideKey(unit, taken, origin, k);
    }
    for (int64_t k = all_last; k < seen_last.last; ++k) {
      HideKey(unit, taken, origin, k);
    }
    Barrier();
  }

  __aicore__ inline Visible KeysOfRow(const Unit& unit, int64_t r) const {
    return VisibleKeys(*tiling_, unit.sequence.length, RowAt(*tiling_, unit, r).position);
  }

  // Hides key k of a chunk that begins with key `origin` from the rows that don't see it.
  __aicore__ inline void HideKey(const Unit& unit, const ScoreChunk& taken, int64_t origin,
                                 int64_t k) {
    const int64_t group = tiling_->num_heads / tiling_->num_kv_heads;
    // The token that stands where the key stands.
    const int64_t token = origin + k - (unit.sequence.length - unit.sequence.new_tokens);
    const int64_t rows = unit.num_rows;
    const int64_t first = tiling_->causal != 0 ? Clamp(token * group - unit.row_begin, 0, rows) : 0;
    const int64_t last =
        tiling_->sliding_window > 0
            ? Clamp((token + tiling_->sliding_window) * group - unit.row_begin, first, rows)
            : rows;
    const uint64_t lanes = MaskOf({0, taken.rows});
    uint64_t mask[2] = {lanes & ~MaskOf({first, last}), 0};
    if (mask[0] != 0) {
      AscendC::Duplicate(taken.scores[k * taken.rows], kMinusInf, mask, 1, 1, kBlockLanes);
    }
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

  static constexpr int64_t kKept = 2;  // all buffers of scores_in_
  static constexpr int64_t kNumLaneBuffers = 6 + 2 * kSlots;

  const AttentionTilingData* tiling_;
  int64_t value_dim_;
  int64_t most_rows_;    // of this core's share
  int64_t output_rows_;  // that fit a buffer of rows_out_
  int64_t group_;
  bool scales_first_;
  float late_scale_;
  Sequences sequences_;
  Exchange<T> exchange_;
  PieceSteps steps_;
  StepsInFlight<Share> in_flight_;
  Finiteness finiteness_;
  Alibi alibi_;
  RowOutput<T> row_output_;
  PieceStates piece_states_;

  AscendC::TQue<AscendC::TPosition::VECIN, 2> scores_in_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> products_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> rows_out_;  // weights, and rows of output
  AscendC::TBuf<AscendC::TPosition::VECCALC> total_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> lanes_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> factor_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> constants_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> folded_buffer_;
  Float max_[kSlots];  // of the pieces in flight, a lane per row
  Float sum_[kSlots];
  Float shift_lanes_;
  Float scale_block_;  // the late scale, over a block
  Float cap_block_;    // -2 softcap, over a block
  Float folded_;       // maxima or sums of rows over some of their keys
  ScoreChunk kept_[kKept];
  RowState total_;
  RowScratch scratch_;
};
