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
#include "mixed/part_ring.h"
#include "mixed/piece_steps.h"
#include "mixed/score_chunk.h"
#include "mixed/share_stream.h"
#include "mixed/verdict.h"

// With kWidth rows of values are so wide, and the compiler knows it. With 0 that is the tiling's.
template <typename T, int64_t kWidth>
class SoftmaxHalf {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    most_rows_ = FirstShare(tiling.max_rows);
    const int64_t group = AscendC::GetBlockIdx() / 2;
    has_options_ = !MayScaleLate(tiling);
    late_scale_ = has_options_ ? 1.0f : tiling.scale;
    sequences_.Init(tiling, tensors.seq_lens, tensors.query_start_loc);
    exchange_.Init(tiling, tensors.workspace, group);
    stream_.Init(tiling, sequences_, exchange_, group, has_options_, pipe);
    InitBuffers(pipe);
    finiteness_.Init(pipe, ValueDim());
    alibi_[0].Init(tiling, tensors.alibi_slopes, pipe);
    alibi_[1].Init(tiling, tensors.alibi_slopes, pipe);
    // Rows of output that leave at a time.
    const int64_t rows =
        Smaller(tiling.part_elements / ValueDim() / kGranule * kGranule, kRepeatLanes);
    row_output_.Init(tensors, tiling, pipe, &rows_out_, rows);
    GM_ADDR states = tensors.workspace + AscendC::GetBlockNum() * tiling.exchange_bytes;
    piece_states_.Init(tiling, states, pipe, kGranule);
    FillConstants();
  }

  __aicore__ inline void Process() {
    rows_out_.Open();
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
    rows_out_.Close();
  }

 private:
  PAGED_INLINE int64_t ValueDim() const { return kWidth != 0 ? kWidth : tiling_->value.head_dim; }

  // op_host's UB budget counts these buffers and those of the members: attention_tiling.cpp,
  // softmax_ub_bytes. Two operands of an instruction that are equal modulo 512 bytes come from one
  // bank, one after the other: chunks begin at even multiples of 256 bytes, and what meets them in
  // every round at odd ones.
  __aicore__ inline void InitBuffers(AscendC::TPipe* pipe) {
    shift_lanes_ = NewBuffer<float>(pipe, kRepeatLanes);
    maxima_.Init(NewBuffer<float>(pipe, kMaximaLanes));
    sums_.Init(NewBuffer<float>(pipe, kSlabKeys * most_rows_));
    const int64_t bands = tiling_->unit_rows > tiling_->max_rows ? kMostBands : 1;
    for (int64_t i = 0; i < bands; ++i) {
      totals_[i].acc = NewBuffer<float>(pipe, most_rows_ * ValueDim());
    }
    scale_granule_ = NewBuffer<float>(pipe, 2 * kGranule);
    cap_granule_ = scale_granule_[kGranule];
    lanes_ = NewBuffer<float>(pipe, kNumLaneBuffers * kRepeatLanes);
    for (int64_t i = 0; i < kMostBands; ++i) {
      totals_[i].max = lanes_[2 * i * kRepeatLanes];
      totals_[i].sum = lanes_[(2 * i + 1) * kRepeatLanes];
    }
    scratch_ = {lanes_[4 * kRepeatLanes], lanes_[5 * kRepeatLanes], lanes_[6 * kRepeatLanes],
                NewBuffer<float>(pipe, kRepeatLanes * kGranule)};
    for (int64_t i = 0; i < kExchangeBuffers; ++i) {
      max_[i] = lanes_[(7 + 2 * i) * kRepeatLanes];
      sum_[i] = lanes_[(8 + 2 * i) * kRepeatLanes];
    }
    rows_out_.Init(pipe, tiling_->part_elements);
  }

  // Lanes beyond a share's rows are computed along and must hold numbers.
  __aicore__ inline void FillConstants() {
    AscendC::Duplicate(scale_granule_, late_scale_, kGranule);
    AscendC::Duplicate(cap_granule_, -2.0f * tiling_->softcap, kGranule);
    AscendC::Duplicate(shift_lanes_, 0.0f, kRepeatLanes);
    AscendC::Duplicate(lanes_, 0.0f, static_cast<int32_t>(kNumLaneBuffers * kRepeatLanes));
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
    const Share& scored = *pass.scored;
    const Share& weighed = *pass.weighed;
    const Share& summed = *pass.summed;
    parity_ = stream_.PassNumber() & 1;
    if (tiling_->has_alibi_slopes != 0 && scored.chunks > 0) {
      AlibiOf(1).Open(scored.step.unit, scored.rows, scored.step.begin);
    }
    if (scored.chunks > 0) {
      maxima_.Open(static_cast<uint32_t>(scored.rows), scored.maxima_slab);
    }
    if (weighed.chunks > 0) {
      sums_.Open(static_cast<uint32_t>(weighed.rows),
                 static_cast<uint32_t>(kSlabKeys * weighed.rows));
    }
    weights_ = exchange_.Weights(weighed.step.buffer, weighed.first_row);
    written_rows_ = kRepeatLanes;  // there are none yet
    RunRounds(pass);
    while (written_rows_ < summed.num_rows) {
      WriteRows(summed);
    }
    if (weighed.step.has_keys) {
      TellWeights(weighed);
    }
    if (!summed.step.has_keys) {
      WriteZeros(summed.step);
    }
    ClosePass(scored, weighed, stream_.NextSummed());
  }

  // The weights of a step are there, and what this core read from its buffers of the exchange has
  // been read. Without rows there is nothing that MTE3 would have waited for.
  __aicore__ inline void TellWeights(const Share& weighed) {
    if (weighed.rows > 0) {
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);
    } else {
      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_V>(kWeightsReady);
    }
  }

  // ---- scores become weights

  // A round is dealt to two intervals between barriers. What an interval works on doesn't depend on
  // what else it does, so the vector unit waits for results twice in a round. The first interval
  // ends the round before; the second one begins with what has come in since.
  //
  // A round has a chunk whose maxima are taken, one on its way to weights, and one that became
  // weights in the round before and isn't summed to the end: buffers, or kNothing.
  __aicore__ inline void RunRounds(const Pass& pass) {
    int32_t scored = kNothing;
    int32_t summed = kNothing;
    int32_t weighed = TakeWeighed(pass, 0);
    bool scored_stays = false;
    Shift(weighed);
    for (int64_t round = 0; round < pass.rounds; ++round) {
      Barrier();
      if (weighed != kNothing) {
        ExpScores(stream_.In(weighed), stream_.Held(weighed).repeats);
      }
      AddLastSlabs(scored, scored_stays, summed);
      stream_.Refill();
      if (written_rows_ < pass.summed->num_rows) {
        WriteRows(*pass.summed);
      }
      Barrier();
      const int64_t chunk = pass.last_chunk - round;
      scored = TakeScored(pass, chunk);
      scored_stays = chunk < stream_.Kept();
      const int32_t next = TakeWeighed(pass, round + 1);
      const int64_t slice = pass.first_slice + round;
      const bool has_products = IsBelow(slice, pass.slices);
      const int32_t products = has_products ? stream_.Take() : kNothing;
      bool has_inner = false;
      if (weighed != kNothing) {
        StoreWeights(*pass.weighed, weighed);
        has_inner = sums_.AddFirst(stream_.In(weighed), stream_.Held(weighed).lanes);
      }
      if (scored != kNothing) {
        has_inner = maxima_.AddFirst(stream_.In(scored), stream_.Held(scored).lanes) || has_inner;
      }
      Shift(next);
      if (has_products) {
        Fold(*pass.summed, slice * stream_.SliceRows(), products);
      }
      if (has_inner) {
        AddInnerSlabs(scored, weighed);
      }
      if (has_products) {
        Close(*pass.summed, slice * stream_.SliceRows(), products);
      }
      summed = weighed;
      weighed = next;
    }
    Barrier();
    AddLastSlabs(scored, scored_stays, summed);
    stream_.Refill();
  }

  // The scores of a round for the maxima.
  PAGED_INLINE int32_t TakeScored(const Pass& pass, int64_t index) {
    if (!IsBelow(index, pass.scored_chunks)) {
      return kNothing;
    }
    const int32_t taken = TakeScores(*pass.scored, 1);
    if (index < stream_.Kept()) {
      KeptOf(1, index) = taken;
    }
    return taken;
  }

  // The scores that become weights in a round.
  PAGED_INLINE int32_t TakeWeighed(const Pass& pass, int64_t round) {
    if (round >= pass.weighed_chunks) {
      return kNothing;
    }
    return round < stream_.Kept() ? KeptOf(0, round) : TakeScores(*pass.weighed, 0);
  }

  // The loaded scores of a chunk with all options, -inf where a row doesn't see a key: of the step
  // that is weighed (0), or of the one after it (1).
  PAGED_INLINE int32_t TakeScores(const Share& share, int64_t ahead) {
    const int32_t taken = stream_.Take();
    if (!stream_.Held(taken).is_plain) {
      FinishScores(share, taken, ahead);
    }
    return taken;
  }

  __aicore__ inline void FinishScores(const Share& share, int32_t taken, int64_t ahead) {
    const HeldChunk& held = stream_.Held(taken);
    const int64_t keys = Smaller(1 << share.chunk_shift, share.last_key - held.first);
    const ScoreChunk chunk = {stream_.In(taken), keys, share.rows};
    if (has_options_) {
      ApplyOptions(chunk, held, AlibiOf(ahead));
    }
    if (held.hides) {
      HideScores(*tiling_, share.seen, chunk, held.first);
    }
  }

  PAGED_INLINE void Shift(int32_t buffer) {
    if (buffer != kNothing) {
      ShiftScores(stream_.In(buffer), stream_.Held(buffer).repeats, scale_granule_, shift_lanes_);
    }
  }

  // All but the first and the last slabs of a round's chunks.
  __aicore__ inline void AddInnerSlabs(int32_t scored, int32_t weighed) {
    bool has_maximum = scored != kNothing && maxima_.HasInner();
    bool has_sum = weighed != kNothing && sums_.HasInner();
    while (has_maximum || has_sum) {
      Barrier();
      if (has_maximum) {
        has_maximum = maxima_.AddInner(stream_.In(scored));
      }
      if (has_sum) {
        has_sum = sums_.AddInner(stream_.In(weighed));
      }
    }
  }

  // Ends the round before this one: its chunks are used up, but for scores that stay in UB until
  // they become weights.
  PAGED_INLINE void AddLastSlabs(int32_t scored, bool scored_stays, int32_t summed) {
    if (summed != kNothing) {
      sums_.AddLast(stream_.In(summed));
      stream_.Free(summed);
    }
    if (scored != kNothing) {
      maxima_.AddLast(stream_.In(scored));
      if (!scored_stays) {
        stream_.Free(scored);
      }
    }
  }

  // Writes the weights of the chunk that a round has weighed.
  PAGED_INLINE void StoreWeights(const Share& share, int32_t buffer) {
    const HeldChunk& chunk = stream_.Held(buffer);
    if (share.is_half && !chunk.hides) {
      StoreColumns(share, chunk.first, stream_.In(buffer), kHalfRows, kHalfKeys);
    } else {
      const uint32_t rows = static_cast<uint32_t>(share.rows);
      StoreColumns(share, chunk.first + chunk.span_first,
                   stream_.In(buffer)[static_cast<uint32_t>(chunk.span_first) * rows], rows,
                   chunk.span_keys);
    }
  }

  // Writes the weights of `keys` keys from key `first` of the piece on, in columns of 16 rows: a
  // repeat casts the rows of a key, each 16 of them into a column, with a granule between two
  // columns so that they don't come from one bank.
  PAGED_INLINE void StoreColumns(const Share& share, int32_t first, const Float& from,
                                 uint32_t rows, uint32_t keys) {
    const uint32_t pitch = rows > kFractal ? keys + 1 : keys;  // granules of a column
    const AscendC::LocalTensor<T> weights = rows_out_.template AllocTensor<T>();
    if (rows > kFractal) {
      AscendC::Cast(weights, from, AscendC::RoundMode::CAST_RINT, static_cast<uint64_t>(rows),
                    static_cast<uint8_t>(keys),
                    AscendC::UnaryRepeatParams(static_cast<uint16_t>(pitch), 1, 1,
                                               static_cast<uint8_t>(rows / kGranule)));
    } else {
      AscendC::Cast(weights, from, AscendC::RoundMode::CAST_RINT, keys * kFractal);
    }
    rows_out_.EnQue(weights);
    const AscendC::DataCopyParams params(
        static_cast<uint16_t>(rows / kFractal), static_cast<uint16_t>(keys),
        static_cast<uint16_t>(pitch - keys), static_cast<uint16_t>(tiling_->exchange_keys - keys));
    rows_out_.template DeQue<T>();
    AscendC::DataCopy(weights_[first * kFractal], weights, params);
    rows_out_.FreeTensor(weights);
  }

  // Ends a pass: the maxima over all keys of a step, the sums over those of the one before; and
  // prepares the total for the products of the next pass.
  __aicore__ inline void ClosePass(const Share& scored, const Share& weighed,
                                   const Share& next_summed) {
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
  PAGED_INLINE int32_t& KeptOf(int64_t ahead, int64_t index) {
    return kept_[parity_ ^ ahead][index];
  }
  __aicore__ inline Alibi& AlibiOf(int64_t ahead) { return alibi_[parity_ ^ ahead]; }

  // ---- options

  // What lies beside the span is computed along and must hold numbers.
  __aicore__ inline void ApplyOptions(const ScoreChunk& taken, const HeldChunk& held,
                                      Alibi& alibi) {
    SetKeys(taken, 0, held.span_first, 0.0f);
    SetKeys(taken, held.span_first + held.span_keys, taken.keys, 0.0f);
    Barrier();
    AscendC::Muls(taken.scores, taken.scores, tiling_->scale, CountOf(taken));
    Barrier();
    if (tiling_->softcap > 0.0f) {
      CapScores(taken.scores, CountOf(taken), cap_granule_, tiling_->softcap);
    }
    if (tiling_->has_alibi_slopes != 0) {
      alibi.Add(taken, held.first);
    }
  }

  // ---- products become output

  PAGED_INLINE const RowState& TotalOf(const Share& share) const {
    return totals_[share.step.band];
  }

  // Prepares the total for a step's products, stage by stage, in the intervals of ClosePass.
  __aicore__ inline void OpenTotal(int64_t stage, const Share& share) {
    const int64_t buffer = share.step.buffer;
    if (!share.step.opens_band) {
      RescaleStage(stage, TotalOf(share), max_[buffer], sum_[buffer], scratch_, share.num_rows,
                   ValueDim());
    } else if (stage == 0) {
      CopyLanes(TotalOf(share), max_[buffer], sum_[buffer], share.num_rows);
    }
  }

  // Folds the rows of products in a buffer, from `begin` on of the share's.
  PAGED_INLINE void Fold(const Share& share, int64_t begin, int32_t buffer) {
    const Float& products = stream_.In(buffer);
    if (begin == 0 && share.mixes) {
      // The first row tells of all.
      finiteness_.Look(products);
    }
    if (tiling_->split != 0) {
      return;
    }
    const int64_t rows = Smaller(stream_.SliceRows(), share.num_rows - begin);
    const Float acc = TotalOf(share).acc[begin * ValueDim()];
    if (share.step.opens_band) {
      AscendC::Adds(acc, products, 0.0f, static_cast<int32_t>(rows * ValueDim()));
    } else {
      AddScaledRows(acc, products, scratch_.factor[begin * kGranule], rows, ValueDim());
    }
  }

  // Lets go of products that are folded, and ends the band with its last ones.
  PAGED_INLINE void Close(const Share& share, int64_t begin, int32_t buffer) {
    if (tiling_->split != 0) {
      StoreStates(share, begin, buffer);
    }
    stream_.Free(buffer);
    const bool are_last = begin + stream_.SliceRows() >= share.num_rows;
    if (tiling_->split == 0 && share.step.closes_band && are_last) {
      Barrier();
      row_output_.Finish(share.step.unit, TotalOf(share), scratch_);
      written_rows_ = 0;
    }
  }

  __aicore__ inline void StoreStates(const Share& share, int64_t begin, int32_t buffer) {
    Unit unit = share.step.unit;
    unit.row_begin += begin;
    unit.num_rows = Smaller(stream_.SliceRows(), share.num_rows - begin);
    const int64_t place = share.step.buffer;
    piece_states_.Store(unit, {max_[place][begin], sum_[place][begin], stream_.In(buffer)});
  }

  // Writes the next rows of a band that has ended in this pass.
  __aicore__ inline void WriteRows(const Share& share) {
    row_output_.WriteRows(share.step.unit, TotalOf(share), written_rows_);
    written_rows_ += row_output_.RowsAtOnce();
  }

  // Ends a band without keys.
  __aicore__ inline void WriteZeros(const PieceStep& step) {
    if (step.unit.num_rows > 0 && tiling_->split == 0) {
      const RowState& total = totals_[step.band];
      Clear(total, step.unit.num_rows, ValueDim());
      row_output_.Write(step.unit, total, scratch_);
    }
  }

  // Tells the group what this core has seen, and whether any has seen trouble.
  __aicore__ inline bool TellsTrouble() {
    finiteness_.Tell(exchange_.Verdict(AscendC::GetSubBlockIdx()), rows_out_);
    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kVerdictReady);
    AscendC::CrossCoreWaitFlag(kVerdictShared);
    return ReadTrouble(exchange_);
  }

  // Of the bands' totals, the scratch, and the steps in flight.
  static constexpr int64_t kNumLaneBuffers = 2 * kMostBands + 3 + 2 * kExchangeBuffers;

  static constexpr int32_t kNothing = -1;  // in place of a buffer

  const AttentionTilingData* tiling_;
  int64_t most_rows_;  // of this core's share
  float late_scale_;
  bool has_options_;  // that change scores before their maxima
  Sequences sequences_;
  Exchange<T> exchange_;
  ShareStream<T> stream_;
  Finiteness finiteness_;
  Alibi alibi_[2];
  RowOutput<T, PartRing<T>> row_output_;
  PieceStates<kWidth> piece_states_;

  PartRing<T> rows_out_;              // weights, and rows of output
  AscendC::GlobalTensor<T> weights_;  // of the share that is weighed
  Float lanes_;
  Float max_[kExchangeBuffers];  // of the pieces in flight, a lane per row
  Float sum_[kExchangeBuffers];
  Float shift_lanes_;     // of the step that is weighed
  Float scale_granule_;   // the late scale, over a granule
  Float cap_granule_;     // -2 softcap, over a granule
  int64_t parity_;        // of the pass
  int64_t written_rows_;  // of the band that has ended in this pass
  KeyFold<TakeLarger> maxima_;
  KeyFold<TakeSum> sums_;
  int32_t kept_[2][8];  // at most kMostChunkBuffers - 2
  RowState totals_[kMostBands];
  RowScratch scratch_;
};

// A vector core's half, for all widths.
template <typename T>
class AttentionSoftmax {
 public:
  __aicore__ inline void Init(const AttentionTensors& tensors, const AttentionTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tensors_ = &tensors;
    tiling_ = &tiling;
    pipe_ = pipe;
  }

  __aicore__ inline void Process() {
    if (tiling_->value.head_dim == kUsualWidth) {
      Run<kUsualWidth>();
    } else {
      Run<0>();
    }
  }

 private:
  static constexpr int64_t kUsualWidth = 128;

  template <int64_t kWidth>
  __aicore__ inline void Run() {
    SoftmaxHalf<T, kWidth> half;
    half.Init(*tensors_, *tiling_, pipe_);
    half.Process();
  }

  const AttentionTensors* tensors_;
  const AttentionTilingData* tiling_;
  AscendC::TPipe* pipe_;
};
