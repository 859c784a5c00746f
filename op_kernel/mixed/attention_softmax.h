// A vector core's half of attention on a group of cores: from scores to weights, and from the
// products of weights and values to rows of output.
//
// The two vector cores of a group share a band's rows. Each piece has a softmax of its own;
// where the cube has multiplied its weights with the values, the state is folded into that of the
// pieces before, in float32. The order in which all this comes is that of share_stream.h.
#pragma once

#include "attention/piece_states.h"
#include "attention/row_output.h"
#include "attention/row_state.h"
#include "attention/score_options.h"
#include "attention/sequence.h"
#include "attention/tensors.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/alibi.h"
#include "mixed/exchange.h"
#include "mixed/hide_scores.h"
#include "mixed/piece_steps.h"
#include "mixed/score_chunk.h"
#include "mixed/share_stream.h"
#include "mixed/verdict.h"

template <typename T>
class AttentionSoftmax {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    value_dim_ = tiling.value.head_dim;
    most_rows_ = FirstShare(tiling.max_rows);
    const int64_t group = AscendC::GetBlockIdx() / 2;
    late_scale_ = MayScaleLate(tiling) ? tiling.scale : 1.0f;
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    exchange_.Init(tiling, tensors.workspace, group);
    stream_.Init(tiling, sequences_, exchange_, group, pipe);
    InitBuffers(pipe);
    finiteness_.Init(pipe, value_dim_);
    alibi_[0].Init(tiling, tensors.alibi_slopes, pipe);
    alibi_[1].Init(tiling, tensors.alibi_slopes, pipe);
    // Rows of output that leave at a time.
    const int64_t rows =
        Smaller(tiling.part_elements / value_dim_ / kGranule * kGranule, kRepeatLanes);
    row_output_.Init(tensors, tiling, pipe, &rows_out_, rows, most_rows_);
    GM_ADDR states = tensors.workspace + AscendC::GetBlockNum() * tiling.exchange_bytes;
    piece_states_.Init(tiling, states, pipe, kGranule);
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
  // op_host's UB budget counts these buffers and those of the members: attention_tiling.cpp,
  // softmax_ub_bytes.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    pipe->InitBuffer(rows_out_, kPartBuffers, tiling_->part_elements * sizeof(T));
    const Float folds = NewBuffer<float>(pipe, 2 * kSlabKeys * most_rows_);
    const Float acc = NewBuffer<float>(pipe, most_rows_ * value_dim_);
    const Float lanes = NewBuffer<float>(pipe, kNumLaneBuffers * kRepeatLanes);
    total_ = {lanes, lanes[kRepeatLanes], acc};
    scratch_ = {lanes[2 * kRepeatLanes], lanes[3 * kRepeatLanes], lanes[4 * kRepeatLanes],
                NewBuffer<float>(pipe, kRepeatLanes * kGranule)};
    shift_lanes_ = lanes[5 * kRepeatLanes];
    for (int64_t i = 0; i < kExchangeBuffers; ++i) {
      max_[i] = lanes[(6 + 2 * i) * kRepeatLanes];
      sum_[i] = lanes[(7 + 2 * i) * kRepeatLanes];
    }
    scale_granule_ = NewBuffer<float>(pipe, 2 * kGranule);
    cap_granule_ = scale_granule_[kGranule];
    maxima_.Init(folds);
    sums_.Init(folds[kSlabKeys * most_rows_]);
  }

  // Lanes beyond a step's rows are computed along and must hold numbers.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(total_.max, 0.0f, static_cast<int32_t>(kNumLaneBuffers * kRepeatLanes));
    AscendC::Duplicate(scale_granule_, late_scale_, kGranule);
    AscendC::Duplicate(cap_granule_, -2.0f * tiling_->softcap, kGranule);
    Barrier();
  }

  __aicore__ inline void Walk(bool by_token) {
    stream_.Open(by_token);
    while (stream_.Next()) {
      RunPass();
    }
  }

  __aicore__ inline void RunPass() {
    const Share& scored = stream_.Scored();
    const Share& weighed = stream_.Weighed();
    if (tiling_->has_alibi_slopes != 0 && CountChunks(scored) > 0) {
      AlibiOf(1).Open(scored.step.unit, scored.rows, scored.step.begin);
    }
    maxima_.Open(scored.rows);
    sums_.Open(weighed.rows);
    const ScoreChunk nothing = {shift_lanes_, 0, 0};
    summed_ = nothing;
    scored_ = nothing;
    written_rows_ = kRepeatLanes;  // there are none yet
    weighed_ = TakeWeighed(0);
    Shift(weighed_);
    const int64_t rounds = stream_.CountRounds();
    for (int64_t i = 0; i < rounds; ++i) {
      RunRound(i);
    }
    Barrier();
    AddLastSlabs(rounds);
    while (written_rows_ < stream_.Summed().step.unit.num_rows) {
      WriteRows();
    }
    if (HasKeys(weighed.step)) {
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);
    }
    if (!HasKeys(stream_.Summed().step)) {
      WriteZeros(stream_.Summed().step.unit);
    }
    ClosePass(scored, weighed, stream_.NextSummed());
  }

  // ---- scores become weights

  // A round is dealt to two intervals between barriers. What an interval works on doesn't depend on
  // what else it does, so the vector unit waits for results twice in a round. The first interval
  // ends the round before; the second one begins with what has come in since.
  __aicore__ inline void RunRound(int64_t round) {
    Barrier();
    if (weighed_.keys > 0) {
      AscendC::Exp(weighed_.scores, weighed_.scores, CountOf(weighed_));
    }
    AddLastSlabs(round);
    WriteRows();
    Barrier();
    scored_ = TakeScored(round);
    const ScoreChunk next = TakeWeighed(round + 1);
    const Products products = TakeProducts(round);
    if (weighed_.keys > 0) {
      StoreWeights(weighed_, round);
    }
    AddInnerSlab(sums_, weighed_, 0);
    AddInnerSlab(maxima_, scored_, 0);
    Shift(next);
    Fold(products);
    for (int64_t i = 1; i < Larger(CountSlabs(scored_), CountSlabs(weighed_)) - 1; ++i) {
      Barrier();
      AddInnerSlab(maxima_, scored_, i);
      AddInnerSlab(sums_, weighed_, i);
    }
    Close(products);
    summed_ = weighed_;
    weighed_ = next;
  }

  // The scores of a round for the maxima.
  __aicore__ inline ScoreChunk TakeScored(int64_t round) {
    const Share& share = stream_.Scored();
    const int64_t index = stream_.ScoredChunk(round);
    if (index < 0) {
      return {shift_lanes_, 0, 0};
    }
    const ScoreChunk taken = TakeScores(share, ChunkAt(share, index), AlibiOf(1));
    if (index < stream_.Kept()) {
      KeptOf(1, index) = taken;
    }
    return taken;
  }

  // The scores that become weights in a round.
  __aicore__ inline ScoreChunk TakeWeighed(int64_t round) {
    const Share& share = stream_.Weighed();
    if (round >= CountChunks(share)) {
      return {shift_lanes_, 0, 0};
    }
    return round < stream_.Kept() ? KeptOf(0, round)
                                  : TakeScores(share, ChunkAt(share, round), AlibiOf(0));
  }

  // The loaded scores of a chunk with all options, -inf where a row doesn't see a key.
  __aicore__ inline ScoreChunk TakeScores(const Share& share, const ChunkKeys& chunk,
                                          Alibi& alibi) {
    const ScoreChunk taken = {stream_.Take(), chunk.last - chunk.first, share.rows};
    if (!MayScaleLate(*tiling_)) {
      ApplyOptions(taken, chunk, alibi);
    }
    HideScores(*tiling_, share.step.unit, taken, share.step.begin + chunk.first);
    return taken;
  }

  __aicore__ inline void Shift(const ScoreChunk& chunk) {
    if (chunk.keys > 0) {
      ShiftScores(chunk, scale_granule_, shift_lanes_);
    }
  }

  // All but the last one, which AddLastSlabs adds.
  template <typename Take>
  __aicore__ inline void AddInnerSlab(KeyFold<Take>& fold, const ScoreChunk& chunk, int64_t i) {
    if (i < CountSlabs(chunk) - 1) {
      fold.AddSlab(chunk, i);
    }
  }

  // Ends the round before `round`: its chunks are used up, but for scores that stay.
  __aicore__ inline void AddLastSlabs(int64_t round) {
    if (summed_.keys > 0) {
      sums_.AddSlab(summed_, CountSlabs(summed_) - 1);
      stream_.Free(summed_.scores);
    }
    if (scored_.keys > 0) {
      maxima_.AddSlab(scored_, CountSlabs(scored_) - 1);
      if (stream_.ScoredChunk(round - 1) >= stream_.Kept()) {
        stream_.Free(scored_.scores);
      }
    }
    if (stream_.SliceBegin(round - 1) == 0 && IsLookedAt()) {
      finiteness_.Keep();
    }
  }

  // Writes the weights of a chunk, part after part.
  __aicore__ inline void StoreWeights(const ScoreChunk& taken, int64_t round) {
    const Share& share = stream_.Weighed();
    const ChunkKeys chunk = ChunkAt(share, round);
    const int64_t keys = Smaller(kPartScores / share.rows, taken.keys);
    for (int64_t first = 0; first < taken.keys; first += keys) {
      const Range span = Within(chunk.span, first, Smaller(keys, taken.keys - first));
      if (span.first < span.last) {
        StorePart(taken.scores[first * share.rows], span, chunk.first + first);
      }
    }
  }

  // `span` of the keys that begin with key `first` of the piece.
  __aicore__ inline void StorePart(const Float& wide, const Range& span, int64_t first) {
    const Share& share = stream_.Weighed();
    AscendC::LocalTensor<T> weights = rows_out_.template AllocTensor<T>();
    AscendC::Cast(weights, wide, AscendC::RoundMode::CAST_RINT,
                  static_cast<uint32_t>(span.last * share.rows));
    rows_out_.EnQue(weights);
    weights = rows_out_.template DeQue<T>();
    const AscendC::GlobalTensor<T> to = exchange_.Weights(share.step.buffer, share.first_row);
    AscendC::DataCopy(to[(first + span.first) * share.rows], weights[span.first * share.rows],
                      static_cast<uint32_t>((span.last - span.first) * share.rows));
    rows_out_.FreeTensor(weights);
  }

  // Ends a pass: the maxima over all keys of a step, the sums over those of the one before; and
  // prepares the total for the products of the next pass.
  __aicore__ inline void ClosePass(const Share& scored, const Share& weighed,
                                   const Share& next_summed) {
    const bool has_maxima = CountChunks(scored) > 0;
    const bool has_sums = CountChunks(weighed) > 0;
    int64_t stage = 0;
    Barrier();
    for (int64_t keys = kSlabKeys; keys > 1; keys /= 2) {
      if (has_maxima) {
        maxima_.Halve(keys);
      }
      if (has_sums) {
        sums_.Halve(keys);
      }
      OpenTotal(stage++, next_summed);
      Barrier();
    }
    if (has_sums) {
      AscendC::Adds(sum_[weighed.step.buffer], sums_.Lanes(), 0.0f,
                    static_cast<int32_t>(weighed.rows));
    }
    if (has_maxima) {
      // Of a row that sees no key of the piece. Its weights would be NaN with -inf, and all its
      // group would walk again.
      AscendC::Maxs(maxima_.Lanes(), maxima_.Lanes(), kLowest, static_cast<int32_t>(scored.rows));
    }
    OpenTotal(stage, next_summed);
    Barrier();
    if (has_maxima) {
      CloseMaxima(scored);
    }
  }

  __aicore__ inline void CloseMaxima(const Share& share) {
    const int32_t lanes = static_cast<int32_t>(share.rows);
    AscendC::Muls(max_[share.step.buffer], maxima_.Lanes(), late_scale_, lanes);
    AscendC::Muls(shift_lanes_, maxima_.Lanes(), -late_scale_, lanes);
    Barrier();
    RepeatLanes(shift_lanes_, share.rows);
  }

  // What belongs to the step that is weighed (0) and to the one after it (1).
  __aicore__ inline ScoreChunk& KeptOf(int64_t ahead, int64_t index) {
    return kept_[(stream_.Pass() + ahead) & 1][index];
  }
  __aicore__ inline Alibi& AlibiOf(int64_t ahead) { return alibi_[(stream_.Pass() + ahead) & 1]; }

  // ---- options

  // What lies beside the span is computed along and must hold numbers.
  __aicore__ inline void ApplyOptions(const ScoreChunk& taken, const ChunkKeys& chunk,
                                      Alibi& alibi) {
    SetKeys(taken, 0, chunk.span.first, 0.0f);
    SetKeys(taken, chunk.span.last, taken.keys, 0.0f);
    Barrier();
    AscendC::Muls(taken.scores, taken.scores, tiling_->scale, CountOf(taken));
    Barrier();
    if (tiling_->softcap > 0.0f) {
      CapScores(taken.scores, CountOf(taken), cap_granule_, tiling_->softcap);
    }
    if (tiling_->has_alibi_slopes != 0) {
      alibi.Add(taken, chunk.first);
    }
  }

  // ---- products become output

  // Rows [begin, begin + rows) of a step's products.
  struct Products {
    Float acc;
    int64_t begin;
    int64_t rows;  // 0: there are none
  };

  // The products that are folded in a round.
  __aicore__ inline Products TakeProducts(int64_t round) {
    const Share& share = stream_.Summed();
    const int64_t begin = stream_.SliceBegin(round);
    const int64_t rows = HasKeys(share.step) ? share.step.unit.num_rows - begin : 0;
    if (begin < 0 || rows <= 0) {
      return {shift_lanes_, 0, 0};
    }
    return {stream_.Take(), begin, Smaller(stream_.SliceRows(), rows)};
  }

  // Whether the first row of the pass's products is looked at, which tells of all.
  __aicore__ inline bool IsLookedAt() const {
    const Share& share = stream_.Summed();
    return share.mixes && HasKeys(share.step) && share.step.unit.num_rows > 0;
  }

  // Prepares the total for a step's products, stage by stage, in the intervals of ClosePass.
  __aicore__ inline void OpenTotal(int64_t stage, const Share& share) {
    const int64_t rows = HasKeys(share.step) ? share.step.unit.num_rows : 0;
    if (rows == 0 || tiling_->split != 0) {
      return;
    }
    const int64_t buffer = share.step.buffer;
    if (!share.step.opens_unit) {
      RescaleStage(stage, total_, max_[buffer], sum_[buffer], scratch_, rows, value_dim_);
    } else if (stage == 0) {
      CopyLanes(total_, max_[buffer], sum_[buffer], rows);
    }
  }

  __aicore__ inline void Fold(const Products& products) {
    if (products.rows > 0 && products.begin == 0 && IsLookedAt()) {
      finiteness_.Look(products.acc);
    }
    if (products.rows == 0 || tiling_->split != 0) {
      return;
    }
    const Float acc = total_.acc[products.begin * value_dim_];
    if (stream_.Summed().step.opens_unit) {
      AscendC::Adds(acc, products.acc, 0.0f, static_cast<int32_t>(products.rows * value_dim_));
    } else {
      AddScaledRows(acc, products.acc, scratch_.factor[products.begin * kGranule], products.rows,
                    value_dim_);
    }
  }

  // Lets go of products that are folded, and ends the unit with its last ones.
  __aicore__ inline void Close(const Products& products) {
    if (products.rows == 0) {
      return;
    }
    const Share& share = stream_.Summed();
    if (tiling_->split != 0) {
      StoreStates(share, products);
    }
    stream_.Free(products.acc);
    const bool are_last = products.begin + products.rows == share.step.unit.num_rows;
    if (tiling_->split == 0 && share.step.closes_unit && are_last) {
      Barrier();
      row_output_.Finish(share.step.unit, total_, scratch_);
      written_rows_ = 0;
    }
  }

  __aicore__ inline void StoreStates(const Share& share, const Products& products) {
    Unit unit = share.step.unit;
    unit.row_begin += products.begin;
    unit.num_rows = products.rows;
    const int64_t buffer = share.step.buffer;
    piece_states_.Store(unit,
                        {max_[buffer][products.begin], sum_[buffer][products.begin], products.acc});
  }

  // Writes the next rows of a unit that has ended in this pass.
  __aicore__ inline void WriteRows() {
    const Unit& unit = stream_.Summed().step.unit;
    if (written_rows_ < unit.num_rows) {
      row_output_.WriteRows(unit, total_, written_rows_);
      written_rows_ += row_output_.RowsAtOnce();
    }
  }

  // Ends a unit without keys.
  __aicore__ inline void WriteZeros(const Unit& unit) {
    if (unit.num_rows > 0 && tiling_->split == 0) {
      Clear(total_, unit.num_rows, value_dim_);
      row_output_.Write(unit, total_, scratch_);
    }
  }

  // Tells the group what this core has seen, and whether any has seen trouble.
  __aicore__ inline bool TellsTrouble() {
    finiteness_.Tell(exchange_.Verdict(AscendC::GetSubBlockIdx()));
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kVerdictReady);
    AscendC::CrossCoreWaitFlag(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  static constexpr int64_t kNumLaneBuffers = 6 + 2 * kExchangeBuffers;

  const AttentionTilingData* tiling_;
  int64_t value_dim_;
  int64_t most_rows_;  // of this core's share
  float late_scale_;
  Sequences sequences_;
  Exchange<T> exchange_;
  ShareStream<T> stream_;
  Finiteness finiteness_;
  Alibi alibi_[2];
  RowOutput<T, kPartBuffers> row_output_;
  PieceStates piece_states_;

  AscendC::TQue<AscendC::TPosition::VECOUT, kPartBuffers> rows_out_;  // weights, and rows of output
  Float max_[kExchangeBuffers];  // of the pieces in flight, a lane per row
  Float sum_[kExchangeBuffers];
  Float shift_lanes_;     // of the step that is weighed
  Float scale_granule_;   // the late scale, over a granule
  Float cap_granule_;     // -2 softcap, over a granule
  ScoreChunk scored_;     // whose maxima are taken
  ScoreChunk weighed_;    // on its way to weights
  ScoreChunk summed_;     // that became weights, and isn't summed to the end
  int64_t written_rows_;  // of the unit that has ended in this pass
  KeyFold<TakeLarger> maxima_;
  KeyFold<TakeSum> sums_;
  ScoreChunk kept_[2][kMostChunkBuffers];
  RowState total_;
  RowScratch scratch_;
};
