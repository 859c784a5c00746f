// A vector core's half of attention on a group of cores: from scores to weights, and from the
// products of weights and values to rows of output.
//
// The two vector cores of a group share a band's rows. Each piece has a softmax of its own;
// where the cube has multiplied its weights with the values, the state is folded into that of the
// band's pieces before, in float32. The order in which all this comes is that of share_stream.h.
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
    has_options_ = !MayScaleLate(tiling);
    late_scale_ = has_options_ ? 1.0f : tiling.scale;
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
                            row_output_, totals_[0], scratch_);
    }
  }

 private:
  // op_host's UB budget counts these buffers and those of the members: attention_tiling.cpp,
  // softmax_ub_bytes. The chunks that come in begin at even multiples of 256 bytes, what they are
  // folded into at odd ones.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    const int64_t sum_lanes = kSlabKeys * most_rows_;
    const Float folds = NewBuffer<float>(pipe, kOtherBank + kMaximaLanes + sum_lanes);
    maxima_.Init(folds[kOtherBank]);
    sums_.Init(folds[kOtherBank + kMaximaLanes]);
    const int64_t bands = tiling_->unit_rows > tiling_->max_rows ? kMostBands : 1;
    const Float lanes = NewBuffer<float>(pipe, kNumLaneBuffers * kRepeatLanes);
    for (int64_t i = 0; i < bands; ++i) {
      totals_[i] = {lanes[2 * i * kRepeatLanes], lanes[(2 * i + 1) * kRepeatLanes],
                    NewBuffer<float>(pipe, most_rows_ * value_dim_)};
    }
    scratch_ = {lanes[4 * kRepeatLanes], lanes[5 * kRepeatLanes], lanes[6 * kRepeatLanes],
                NewBuffer<float>(pipe, kRepeatLanes * kGranule)};
    shift_lanes_ = lanes[7 * kRepeatLanes];
    for (int64_t i = 0; i < kExchangeBuffers; ++i) {
      max_[i] = lanes[(8 + 2 * i) * kRepeatLanes];
      sum_[i] = lanes[(9 + 2 * i) * kRepeatLanes];
    }
    scale_granule_ = NewBuffer<float>(pipe, 2 * kGranule);
    cap_granule_ = scale_granule_[kGranule];
    pipe->InitBuffer(rows_out_, kPartBuffers, tiling_->part_elements * sizeof(T));
  }

  // Lanes beyond a share's rows are computed along and must hold numbers.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(scale_granule_, late_scale_, kGranule);
    AscendC::Duplicate(cap_granule_, -2.0f * tiling_->softcap, kGranule);
    AscendC::Duplicate(totals_[0].max, 0.0f, static_cast<int32_t>(kNumLaneBuffers * kRepeatLanes));
    Barrier();
  }

  __aicore__ inline void Walk(bool by_token) {
    stream_.Open(by_token);
    while (stream_.Next()) {
      RunPass(stream_.Current());
    }
    stream_.Close();
  }

  __aicore__ inline void RunPass(const Pass& pass) {
    OpenPass(pass);
    for (int64_t i = 0; i < pass.rounds; ++i) {
      RunRound(pass, i);
    }
    Barrier();
    AddLastSlabs();
    while (written_rows_ < pass.summed->num_rows) {
      WriteRows(pass);
    }
    if (pass.weighed->step.has_keys) {
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);
    }
    if (!pass.summed->step.has_keys) {
      WriteZeros(pass.summed->step);
    }
    ClosePass(pass, stream_.NextSummed());
  }

  __aicore__ inline void OpenPass(const Pass& pass) {
    const Share& scored = *pass.scored;
    parity_ = stream_.PassNumber() & 1;
    if (tiling_->has_alibi_slopes != 0 && scored.chunks > 0) {
      AlibiOf(1).Open(scored.step.unit, scored.rows, scored.step.begin);
    }
    maxima_.Open(scored.rows, Smaller(kMaximaLanes, kSlabKeys * scored.rows));
    sums_.Open(pass.weighed->rows, kSlabKeys * pass.weighed->rows);
    summed_ = Nothing();
    scored_ = Nothing();
    written_rows_ = kRepeatLanes;  // there are none yet
    is_looked_at_ = false;
    weighed_ = TakeWeighed(pass, 0);
    Shift(weighed_);
  }

  // ---- scores become weights

  // A round is dealt to two intervals between barriers. What an interval works on doesn't depend on
  // what else it does, so the vector unit waits for results twice in a round. The first interval
  // ends the round before; the second one begins with what has come in since.
  __aicore__ inline void RunRound(const Pass& pass, int64_t round) {
    Barrier();
    if (weighed_.keys > 0) {
      AscendC::Exp(weighed_.scores, weighed_.scores, CountOf(weighed_));
    }
    AddLastSlabs();
    if (written_rows_ < pass.summed->num_rows) {
      WriteRows(pass);
    }
    Barrier();
    TakeScored(pass, pass.last_chunk - round);
    const ScoreChunk next = TakeWeighed(pass, round + 1);
    const Products products = TakeProducts(pass, round);
    if (weighed_.keys > 0) {
      StoreWeights(*pass.weighed, round);
    }
    const int64_t maxima = scored_.keys > 0 ? maxima_.CountSlabs(scored_) - 1 : 0;
    const int64_t sums = weighed_.keys > 0 ? sums_.CountSlabs(weighed_) - 1 : 0;
    AddInnerSlabs(0, maxima, sums);
    Shift(next);
    Fold(*pass.summed, products);
    for (int64_t i = 1; i < Larger(maxima, sums); ++i) {
      Barrier();
      AddInnerSlabs(i, maxima, sums);
    }
    Close(*pass.summed, products);
    last_slabs_ = {maxima, sums};
    summed_ = weighed_;
    weighed_ = next;
  }

  __aicore__ inline ScoreChunk Nothing() const { return {shift_lanes_, 0, 0, 0}; }

  // The scores of a round for the maxima.
  __aicore__ inline void TakeScored(const Pass& pass, int64_t index) {
    scored_ = Nothing();
    if (index < 0 || index >= pass.scored->chunks) {
      return;
    }
    scored_ = TakeScores(*pass.scored, index, AlibiOf(1));
    scored_stays_ = index < stream_.Kept();
    if (scored_stays_) {
      KeptOf(1, index) = scored_;
    }
  }

  // The scores that become weights in a round.
  __aicore__ inline ScoreChunk TakeWeighed(const Pass& pass, int64_t round) {
    if (round >= pass.weighed->chunks) {
      return Nothing();
    }
    return round < stream_.Kept() ? KeptOf(0, round) : TakeScores(*pass.weighed, round, AlibiOf(0));
  }

  // The loaded scores of a chunk with all options, -inf where a row doesn't see a key.
  __aicore__ inline ScoreChunk TakeScores(const Share& share, int64_t index, Alibi& alibi) {
    const ChunkKeys chunk = ChunkAt(share, index);
    const Chunk loaded = stream_.Take();
    const ScoreChunk taken = {loaded.data, loaded.buffer, chunk.last - chunk.first, share.rows};
    if (has_options_) {
      ApplyOptions(taken, chunk, alibi);
    }
    if (chunk.first < share.seen_by_all.first || share.seen_by_all.last < chunk.last) {
      HideScores(*tiling_, share.step.unit, taken, share.step.begin + chunk.first);
    }
    return taken;
  }

  __aicore__ inline void Shift(const ScoreChunk& chunk) {
    if (chunk.keys > 0) {
      ShiftScores(chunk, scale_granule_, shift_lanes_);
    }
  }

  // All but the last ones, which AddLastSlabs adds.
  __aicore__ inline void AddInnerSlabs(int64_t i, int64_t maxima, int64_t sums) {
    if (i < maxima) {
      maxima_.AddSlab(scored_, i);
    }
    if (i < sums) {
      sums_.AddSlab(weighed_, i);
    }
  }

  // Ends the round before this one: its chunks are used up, but for scores that stay.
  __aicore__ inline void AddLastSlabs() {
    if (summed_.keys > 0) {
      sums_.AddSlab(summed_, last_slabs_.sums);
      stream_.Free(summed_.buffer);
    }
    if (scored_.keys > 0) {
      maxima_.AddSlab(scored_, last_slabs_.maxima);
      if (!scored_stays_) {
        stream_.Free(scored_.buffer);
      }
    }
    if (is_looked_at_) {
      finiteness_.Keep();
      is_looked_at_ = false;
    }
  }

  // Writes the weights of the chunk that a round has weighed, in columns of 16 rows: a repeat casts
  // the rows of a key, each 16 of them into a column, with a granule between two columns so that
  // they don't come from one bank.
  __aicore__ inline void StoreWeights(const Share& share, int64_t round) {
    const ChunkKeys chunk = ChunkAt(share, round);
    const int64_t first = chunk.span.first;
    const int64_t keys = chunk.span.last - first;
    const int64_t columns = share.rows / kFractal;
    const int64_t pitch = columns > 1 ? keys + 1 : keys;  // granules of a column
    const Float from = weighed_.scores[first * share.rows];
    AscendC::LocalTensor<T> weights = rows_out_.template AllocTensor<T>();
    if (columns > 1) {
      AscendC::Cast(weights, from, AscendC::RoundMode::CAST_RINT, static_cast<uint64_t>(share.rows),
                    static_cast<uint8_t>(keys),
                    AscendC::UnaryRepeatParams(static_cast<uint16_t>(pitch), 1, 1,
                                               static_cast<uint8_t>(share.rows / kGranule)));
    } else {
      AscendC::Cast(weights, from, AscendC::RoundMode::CAST_RINT,
                    static_cast<uint32_t>(keys * kFractal));
    }
    rows_out_.EnQue(weights);
    weights = rows_out_.template DeQue<T>();
    const AscendC::DataCopyParams params(
        static_cast<uint16_t>(columns), static_cast<uint16_t>(keys),
        static_cast<uint16_t>(pitch - keys), static_cast<uint16_t>(tiling_->exchange_keys - keys));
    const AscendC::GlobalTensor<T> to = exchange_.Weights(share.step.buffer, share.first_row);
    AscendC::DataCopy(to[(chunk.first + first) * kFractal], weights, params);
    rows_out_.FreeTensor(weights);
  }

  // Ends a pass: the maxima over all keys of a step, the sums over those of the one before; and
  // prepares the total for the products of the next pass.
  __aicore__ inline void ClosePass(const Pass& pass, const Share& next_summed) {
    const Share& scored = *pass.scored;
    const Share& weighed = *pass.weighed;
    const bool has_maxima = scored.chunks > 0;
    const bool has_sums = weighed.chunks > 0;
    const bool has_total = next_summed.num_rows > 0 && tiling_->split == 0;
    int64_t stage = 0;
    Barrier();
    while ((has_maxima && !maxima_.IsFolded()) || (has_sums && !sums_.IsFolded())) {
      if (has_maxima && !maxima_.IsFolded()) {
        maxima_.Halve();
      }
      if (has_sums && !sums_.IsFolded()) {
        sums_.Halve();
      }
      if (has_total) {
        OpenTotal(stage++, next_summed);
      }
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
    for (; has_total && stage < kRescaleStages; ++stage) {
      OpenTotal(stage, next_summed);
      Barrier();
    }
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
    return kept_[parity_ ^ ahead][index];
  }
  __aicore__ inline Alibi& AlibiOf(int64_t ahead) { return alibi_[parity_ ^ ahead]; }

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
    int32_t buffer;
    int64_t begin;
    int64_t rows;  // 0: there are none
  };

  // The products that are folded in a round.
  __aicore__ inline Products TakeProducts(const Pass& pass, int64_t round) {
    const int64_t slice = pass.first_slice + round;
    if (slice < 0 || slice >= pass.summed->slices) {
      return {shift_lanes_, 0, 0, 0};
    }
    const int64_t begin = slice * stream_.SliceRows();
    const Chunk loaded = stream_.Take();
    return {loaded.data, loaded.buffer, begin,
            Smaller(stream_.SliceRows(), pass.summed->num_rows - begin)};
  }

  __aicore__ inline const RowState& TotalOf(const Share& share) const {
    return totals_[share.step.band];
  }

  // Prepares the total for a step's products, stage by stage, in the intervals of ClosePass.
  __aicore__ inline void OpenTotal(int64_t stage, const Share& share) {
    const int64_t buffer = share.step.buffer;
    if (!share.step.opens_band) {
      RescaleStage(stage, TotalOf(share), max_[buffer], sum_[buffer], scratch_, share.num_rows,
                   value_dim_);
    } else if (stage == 0) {
      CopyLanes(TotalOf(share), max_[buffer], sum_[buffer], share.num_rows);
    }
  }

  __aicore__ inline void Fold(const Share& share, const Products& products) {
    if (products.rows == 0) {
      return;
    }
    if (products.begin == 0 && share.mixes) {
      // The first row tells of all.
      finiteness_.Look(products.acc);
      is_looked_at_ = true;
    }
    if (tiling_->split != 0) {
      return;
    }
    const Float acc = TotalOf(share).acc[products.begin * value_dim_];
    if (share.step.opens_band) {
      AscendC::Adds(acc, products.acc, 0.0f, static_cast<int32_t>(products.rows * value_dim_));
    } else {
      AddScaledRows(acc, products.acc, scratch_.factor[products.begin * kGranule], products.rows,
                    value_dim_);
    }
  }

  // Lets go of products that are folded, and ends the band with its last ones.
  __aicore__ inline void Close(const Share& share, const Products& products) {
    if (products.rows == 0) {
      return;
    }
    if (tiling_->split != 0) {
      StoreStates(share, products);
    }
    stream_.Free(products.buffer);
    const bool are_last = products.begin + products.rows == share.num_rows;
    if (tiling_->split == 0 && share.step.closes_band && are_last) {
      Barrier();
      row_output_.Finish(share.step.unit, TotalOf(share), scratch_);
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

  // Writes the next rows of a band that has ended in this pass.
  __aicore__ inline void WriteRows(const Pass& pass) {
    row_output_.WriteRows(pass.summed->step.unit, TotalOf(*pass.summed), written_rows_);
    written_rows_ += row_output_.RowsAtOnce();
  }

  // Ends a band without keys.
  __aicore__ inline void WriteZeros(const PieceStep& step) {
    if (step.unit.num_rows > 0 && tiling_->split == 0) {
      const RowState& total = totals_[step.band];
      Clear(total, step.unit.num_rows, value_dim_);
      row_output_.Write(step.unit, total, scratch_);
    }
  }

  // Tells the group what this core has seen, and whether any has seen trouble.
  __aicore__ inline bool TellsTrouble() {
    finiteness_.Tell(exchange_.Verdict(AscendC::GetSubBlockIdx()));
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kVerdictReady);
    AscendC::CrossCoreWaitFlag(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  // Of the bands' totals, the scratch, the shift, and the steps in flight.
  static constexpr int64_t kNumLaneBuffers = 2 * kMostBands + 4 + 2 * kExchangeBuffers;

  // The slabs of a round's chunks that AddLastSlabs adds.
  struct LastSlabs {
    int64_t maxima;
    int64_t sums;
  };

  const AttentionTilingData* tiling_;
  int64_t value_dim_;
  int64_t most_rows_;  // of this core's share
  float late_scale_;
  bool has_options_;  // that change scores before their maxima
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
  Float shift_lanes_;    // of the step that is weighed
  Float scale_granule_;  // the late scale, over a granule
  Float cap_granule_;    // -2 softcap, over a granule
  int64_t parity_;       // of the pass
  ScoreChunk scored_;    // whose maxima are taken
  bool scored_stays_;    // in UB, until they become weights
  ScoreChunk weighed_;   // on its way to weights
  ScoreChunk summed_;    // that became weights, and isn't summed to the end
  LastSlabs last_slabs_;
  bool is_looked_at_;     // in this round
  int64_t written_rows_;  // of the band that has ended in this pass
  KeyFold<TakeLarger> maxima_;
  KeyFold<TakeSum> sums_;
  ScoreChunk kept_[2][kMostChunkBuffers];
  RowState totals_[kMostBands];
  RowScratch scratch_;
};
