// What a vector core of a group reads, in the order in which it uses it.
//
// A core works on three steps at a time. In pass n it takes the maxima of step n + 1, turns the
// scores of step n into weights and folds the products of step n - kAhead: a round on one chunk of
// each, then on the next one. The results that one of them would wait for come while another one is
// computed. Scores come in for the maxima, and again for the weights, but for kKept chunks of a
// step, which stay.
//
// All go through one ring of buffers, filled as soon as one is free, up to a pass ahead.
#pragma once

#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/exchange.h"
#include "mixed/piece_steps.h"
#include "mixed/score_chunk.h"
#include "mixed/verdict.h"

// This core's share of a step: some of the unit's rows, with those that fill it up. The unit is
// that of the share's rows alone.
struct Share {
  PieceStep step;
  int64_t first_row;  // of the step's unit
  int64_t rows;       // lanes: a power of two from 16 to 64, or 0
  int64_t pitch;      // rows of both shares
  bool mixes;         // rows of the unit may see different keys
};

// The keys of a piece whose scores are in UB at a time.
struct ChunkKeys {
  int64_t first;  // of the piece, a multiple of kSlabPair
  int64_t last;
  Range span;  // keys with scores, counted from `first`
};

__aicore__ inline ChunkKeys ChunkAt(const Share& share, int64_t index) {
  const Range& span = share.step.span;
  const int64_t keys = kChunkScores / share.rows;
  const int64_t first = span.first / kSlabPair * kSlabPair + index * keys;
  const int64_t last = Smaller(first + keys, RoundUp(span.last, kSlabPair));
  return {first, last, Within(span, first, last - first)};
}

__aicore__ inline int64_t CountChunks(const Share& share) {
  if (share.rows == 0 || !HasKeys(share.step)) {
    return 0;
  }
  const Range& span = share.step.span;
  const int64_t keys = span.last - span.first / kSlabPair * kSlabPair;
  return (keys * share.rows + kChunkScores - 1) / kChunkScores;
}

template <typename T>
class ShareStream {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, const Sequences& sequences,
                              const Exchange<T>& exchange, int64_t group, AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    sequences_ = &sequences;
    exchange_ = &exchange;
    group_ = group;
    slice_rows_ = Smaller(kChunkScores / tiling.value.head_dim / kGranule * kGranule, kRepeatLanes);
    nothing_ = {};
    steps_.StartRing();
    pipe->InitBuffer(ring_, tiling.chunk_buffers, kChunkScores * sizeof(float));
    idle_ = tiling.chunk_buffers;
  }

  // Begins with the group's first step, before the first pass.
  __aicore__ inline void Open(bool by_token) {
    steps_.Init(*tiling_, *sequences_, group_, AscendC::GetBlockNum(), by_token);
    has_ended_ = false;
    num_steps_ = 0;
    pass_ = -2;
    load_pass_ = -2;
    load_ = 0;
  }

  // Moves to the next pass. False: there is none.
  __aicore__ inline bool Next() {
    if (!HasPass(pass_ + 1)) {
      return false;
    }
    ++pass_;
    if (load_pass_ < pass_) {
      OpenLoads();
    }
    Refill();
    return true;
  }

  // The shares of the pass: whose maxima are taken, whose scores become weights, whose products are
  // folded.
  __aicore__ inline const Share& Scored() const { return ShareAt(pass_ + 1); }
  __aicore__ inline const Share& Weighed() const { return ShareAt(pass_); }
  __aicore__ inline const Share& Summed() const { return ShareAt(pass_ - kAhead); }
  __aicore__ inline const Share& NextSummed() const { return ShareAt(pass_ + 1 - kAhead); }

  __aicore__ inline int64_t Pass() const { return pass_; }
  __aicore__ inline int64_t CountRounds() const { return RoundsOf(pass_); }

  // Rows of products that come in at a time; and the first of those that a round folds, of the
  // step's. There may be none.
  __aicore__ inline int64_t SliceRows() const { return slice_rows_; }
  __aicore__ inline int64_t SliceBegin(int64_t round) const {
    return SliceOf(pass_, round) * slice_rows_;
  }

  // Chunks of a step that stay in UB from their maxima to their weights. The other buffers are for
  // what comes in meanwhile, one for maxima and one for weights at least.
  __aicore__ inline int64_t Kept() const { return tiling_->chunk_buffers - 2; }

  // The chunk whose maxima a round takes, or -1.
  __aicore__ inline int64_t ScoredChunk(int64_t round) const { return ScoredChunkOf(pass_, round); }

  // What comes next: in each round scores for the maxima, scores for the next round's weights,
  // products.
  __aicore__ inline Float Take() { return ring_.template DeQue<float>(); }

  // Lets go of what was taken; the next load begins in its place.
  __aicore__ inline void Free(Float used) {
    ring_.FreeTensor(used);
    ++idle_;
    Refill();
  }

 private:
  __aicore__ inline void Refill() {
    while (FindLoad() && idle_ > 0) {
      StartLoad(load_ / kLoads, load_ % kLoads);
      ++load_;
      --idle_;
    }
  }

  static constexpr int64_t kWindow = 8;  // steps remembered, a power of two over kAhead + 2
  static constexpr int64_t kLoads = 3;   // of a round

  // In the first rounds of a long pass the kept chunks leave no room for products.
  static constexpr int64_t kLateSlices = 2;

  __aicore__ inline const Share& ShareAt(int64_t n) const {
    return 0 <= n && n < num_steps_ ? shares_[n % kWindow] : nothing_;
  }

  // A pass has something to do while there are products to fold.
  __aicore__ inline bool HasPass(int64_t n) const { return !has_ended_ || n - kAhead < num_steps_; }

  __aicore__ inline int64_t CountSlices(const Share& share) const {
    const int64_t rows = HasKeys(share.step) ? share.step.unit.num_rows : 0;
    return (rows + slice_rows_ - 1) / slice_rows_;
  }

  __aicore__ inline int64_t RoundsOf(int64_t n) const {
    const int64_t chunks = Larger(CountChunks(ShareAt(n + 1)), CountChunks(ShareAt(n)));
    return Larger(chunks, CountSlices(ShareAt(n - kAhead)));
  }

  // Begins the loads of the next pass: the cube has what they read.
  __aicore__ inline void OpenLoads() {
    ++load_pass_;
    load_ = 0;
    PieceStep step;
    if (!has_ended_ && steps_.Next(step)) {
      shares_[num_steps_ % kWindow] = ShareOf(step);
      ++num_steps_;
    } else {
      has_ended_ = true;
    }
    if (HasKeys(ShareAt(load_pass_ + 1).step)) {
      AscendC::CrossCoreWaitFlag(kScoresReady);
    }
    if (HasKeys(ShareAt(load_pass_ - kAhead).step)) {
      AscendC::CrossCoreWaitFlag(kProductsReady);
    }
  }

  // Finds the next load, up to the end of the next pass, which is begun where there is room for
  // its loads. False: there is none.
  __aicore__ inline bool FindLoad() {
    while (true) {
      if (load_ == kLoads * RoundsOf(load_pass_)) {
        if (idle_ == 0 || load_pass_ > pass_ || !HasPass(load_pass_ + 1)) {
          return false;
        }
        OpenLoads();
      } else if (HasLoad(load_ / kLoads, load_ % kLoads)) {
        return true;
      } else {
        ++load_;
      }
    }
  }

  // The last rounds of a pass take maxima, down to those of the chunks that are weighed first: what
  // stays in UB comes late.
  __aicore__ inline int64_t ScoredChunkOf(int64_t n, int64_t round) const {
    const int64_t chunks = CountChunks(ShareAt(n + 1));
    const int64_t last_round = Larger(CountChunks(ShareAt(n)), chunks) - 1;
    const int64_t chunk = last_round - round;
    return chunk < chunks ? Larger(chunk, -1) : -1;
  }

  // The slice of products that a round folds; in rounds without products there is no such slice.
  __aicore__ inline int64_t SliceOf(int64_t n, int64_t round) const {
    const int64_t chunks = Larger(CountChunks(ShareAt(n + 1)), CountChunks(ShareAt(n)));
    return round - Clamp(chunks - CountSlices(ShareAt(n - kAhead)), 0, kLateSlices);
  }

  // What a round loads: chunks for the maxima (0), for the next round's weights (1), products (2).
  __aicore__ inline bool HasLoad(int64_t round, int64_t kind) const {
    if (kind == 0) {
      return ScoredChunkOf(load_pass_, round) >= 0;
    }
    if (kind == 1) {
      return Kept() <= round + 1 && round + 1 < CountChunks(ShareAt(load_pass_));
    }
    const int64_t slice = SliceOf(load_pass_, round);
    return 0 <= slice && slice < CountSlices(ShareAt(load_pass_ - kAhead));
  }

  __aicore__ inline void StartLoad(int64_t round, int64_t kind) {
    if (kind == 0) {
      const Share& scored = ShareAt(load_pass_ + 1);
      LoadScores(scored, ChunkAt(scored, ScoredChunkOf(load_pass_, round)));
    } else if (kind == 1) {
      const Share& weighed = ShareAt(load_pass_);
      LoadScores(weighed, ChunkAt(weighed, round + 1));
    } else {
      LoadProducts(ShareAt(load_pass_ - kAhead), SliceOf(load_pass_, round) * slice_rows_);
    }
  }

  __aicore__ inline void LoadScores(const Share& share, const ChunkKeys& chunk) {
    Float scores = ring_.template AllocTensor<float>();
    const int64_t keys = chunk.span.last - chunk.span.first;
    const bool dense = share.rows == share.pitch;
    const AscendC::DataCopyExtParams params(
        static_cast<uint16_t>(dense ? 1 : keys),
        static_cast<uint32_t>((dense ? keys : 1) * share.rows * sizeof(float)),
        static_cast<uint32_t>((share.pitch - share.rows) * sizeof(float)), 0, 0);
    const AscendC::DataCopyPadExtParams<float> no_padding(false, 0, 0, 0);
    const int64_t at = (chunk.first + chunk.span.first) * share.pitch + share.first_row;
    AscendC::DataCopyPad(scores[chunk.span.first * share.rows],
                         exchange_->Scores(share.step.buffer)[at], params, no_padding);
    ring_.EnQue(scores);
  }

  __aicore__ inline void LoadProducts(const Share& share, int64_t begin) {
    Float products = ring_.template AllocTensor<float>();
    const int64_t width = tiling_->value.head_dim;
    const int64_t rows = Smaller(slice_rows_, share.step.unit.num_rows - begin);
    const AscendC::GlobalTensor<float> from = exchange_->Products(share.step.buffer);
    AscendC::DataCopy(products, from[(share.first_row + begin) * width],
                      static_cast<uint32_t>(rows * width));
    ring_.EnQue(products);
  }

  __aicore__ inline Share ShareOf(const PieceStep& step) const {
    const int64_t pitch = RowPitch(step.unit.num_rows);
    const int64_t first = FirstShare(pitch);
    const bool spans_tokens = RowsOfToken(*tiling_, step.unit, 0) < step.unit.num_rows;
    Share share = {step, 0, first, pitch, MayMixVisibility(*tiling_) && spans_tokens};
    if (AscendC::GetSubBlockIdx() != 0) {
      share.first_row = first;
      share.rows = pitch - first;
    }
    Unit& unit = share.step.unit;
    unit.row_begin += share.first_row;
    unit.num_rows = Clamp(unit.num_rows - share.first_row, 0, share.rows);
    return share;
  }

  const AttentionTilingData* tiling_;
  const Sequences* sequences_;
  const Exchange<T>* exchange_;
  int64_t group_;
  int64_t slice_rows_;
  PieceSteps steps_;
  Share shares_[kWindow];
  Share nothing_;  // stands for the steps before the first one and after the last one
  bool has_ended_;
  int64_t num_steps_;
  int64_t pass_;
  int64_t load_pass_;  // whose loads come next, pass_ or the one after it
  int64_t load_;       // of its rounds, the next one
  int64_t idle_;       // buffers of the ring
  AscendC::TQue<AscendC::TPosition::VECIN, kMostChunkBuffers> ring_;
};
