// What a vector core of a group reads, in the order in which it uses it.
//
// A core works on three steps at a time. In pass n it takes the maxima of step n + 1, turns the
// scores of step n into weights and folds the products of step n - kAhead: a round on one chunk of
// each, then on the next one. The results that one of them would wait for come while another one is
// computed. Scores come in for the maxima, and again for the weights, but for Kept() chunks of a
// step, which stay.
//
// All go through one ring of buffers, filled as soon as one is free, up to a pass ahead. What a
// load needs to know of its step and of its pass is computed once for each.
#pragma once

#include "attention/sequence.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/chunk_ring.h"
#include "mixed/exchange.h"
#include "mixed/hide_scores.h"
#include "mixed/piece_steps.h"
#include "mixed/score_chunk.h"
#include "mixed/verdict.h"

// This core's share of a step: some of the band's rows, with those that fill it up. The unit is
// that of the share's rows alone.
struct Share {
  PieceStep step;
  int64_t first_row;  // of the step's band
  int64_t rows;       // lanes: a power of two from 16 to 64, or 0
  int64_t num_rows;   // of them, those that the band has; 0 without keys
  bool mixes;         // rows of what the cube multiplies together may see different keys
  int64_t chunks;     // of its scores
  int64_t slices;     // of its products
  Visibility seen;
  // Of the chunks.
  uint32_t chunk_shift;  // a whole one has 2^chunk_shift keys
  int32_t first_key;     // of the piece, where the first one begins: a multiple of kSlabPair
  int32_t last_key;      // where the last one ends
  uint32_t plain_first;  // chunks that come in whole, all keys of which all rows see
  uint32_t num_plain;
  uint32_t maxima_slab;
  AscendC::GlobalTensor<float> scores;  // of the first chunk's first key
  int64_t apart;                        // from one chunk's to the next one's
  bool is_half;                         // of a band as wide as there is: 64 of 128 rows
};

// Rows of such a band, and keys of a chunk of it: most chunks of a long prefill are of these.
constexpr uint32_t kHalfRows = 64;
constexpr uint32_t kHalfKeys = 64;
static_assert(kHalfRows * kHalfKeys == kChunkScores && kHalfKeys == kSlabPair, "one chunk");

// The scores in a buffer: some keys of a share.
struct HeldChunk {
  int32_t first;    // key of the piece, a multiple of kSlabPair
  uint32_t lanes;   // scores of whole slabs, in pairs
  uint8_t repeats;  // of these
  // Keys with scores, from so many after `first` on.
  int32_t span_first;
  uint32_t span_keys;
  bool hides;     // some row doesn't see some key
  bool is_plain;  // no row hides, and no option changes scores
};

// The shares that a pass works on, and its rounds.
struct Pass {
  const Share* scored;   // whose maxima are taken
  const Share* weighed;  // whose scores become weights
  const Share* summed;   // whose products are folded
  int64_t rounds;
  int64_t scored_chunks;
  int64_t weighed_chunks;
  int64_t slices;
  int64_t last_chunk;   // the chunk of maxima of round 0, if there are so many
  int64_t first_slice;  // of round 0: in the first rounds there may be none
};

template <typename T>
class ShareStream {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, const Sequences& sequences,
                              const Exchange<T>& exchange, int64_t group, bool has_options,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    sequences_ = &sequences;
    exchange_ = &exchange;
    group_ = group;
    has_options_ = has_options;
    width_ = tiling.value.head_dim;
    slice_rows_ = kGranule;
    slice_shift_ = 3;
    while (2 * slice_rows_ * width_ <= kChunkScores && slice_rows_ < kRepeatLanes) {
      slice_rows_ *= 2;
      ++slice_shift_;
    }
    mixes_visibility_ = MayMixVisibility(tiling);
    is_second_ = AscendC::GetSubBlockIdx() != 0;
    kept_ = tiling.chunk_buffers - 2;
    nothing_ = {};
    steps_.StartRing();
    ring_.Init(pipe, tiling.chunk_buffers);
  }

  // Begins with the group's first step, before the first pass.
  __aicore__ inline void Open(bool by_token) {
    steps_.Init(*tiling_, *sequences_, group_, AscendC::GetBlockNum(), by_token);
    ring_.Open();
    has_ended_ = false;
    num_steps_ = 0;
    pass_number_ = -2;
    load_number_ = -2;
    load_pass_ = {&nothing_, &nothing_, &nothing_, 0, 0, 0, 0, -1, 0};
    round_ = 0;
    kind_ = 0;
  }

  __aicore__ inline void Close() { ring_.Close(); }

  // Moves to the next pass. False: there is none.
  __aicore__ inline bool Next() {
    if (!HasPass(pass_number_ + 1)) {
      return false;
    }
    ++pass_number_;
    if (load_number_ < pass_number_) {
      OpenLoads();
    }
    pass_ = load_pass_;
    Refill();
    return true;
  }

  __aicore__ inline const Pass& Current() const { return pass_; }
  __aicore__ inline const Share& NextSummed() const { return ShareAt(pass_number_ + 1 - kAhead); }

  __aicore__ inline int64_t PassNumber() const { return pass_number_; }

  // Rows of products that come in at a time.
  __aicore__ inline int64_t SliceRows() const { return slice_rows_; }

  // Chunks of a step that stay in UB from their maxima to their weights. The other buffers are for
  // what comes in meanwhile, one for maxima and one for weights at least.
  __aicore__ inline int64_t Kept() const { return kept_; }

  // What comes next: in each round scores for the maxima, scores for the next round's weights,
  // products.
  PAGED_INLINE int32_t Take() { return ring_.Take(); }

  PAGED_INLINE const Float& In(int32_t buffer) const { return ring_.At(buffer); }
  PAGED_INLINE const HeldChunk& Held(int32_t buffer) const { return held_[buffer]; }

  // Lets go of what was taken; the next Refill begins loads in its place.
  PAGED_INLINE void Free(int32_t buffer) { ring_.Free(buffer); }

  // Begins loads while there are buffers for them, up to the end of the next pass, which is begun
  // where there is room for its loads.
  __aicore__ inline void Refill() {
    while (ring_.HasIdle()) {
      if (round_ != load_pass_.rounds) {
        LoadRound();
      } else if (load_number_ > pass_number_ || !HasPass(load_number_ + 1)) {
        return;
      } else {
        OpenLoads();
      }
    }
  }

 private:
  static constexpr int64_t kWindow = 8;  // steps remembered, a power of two over kAhead + 2

  // In the first rounds of a long pass the kept chunks leave no room for products.
  static constexpr int64_t kLateSlices = 2;

  __aicore__ inline const Share& ShareAt(int64_t n) const {
    return 0 <= n && n < num_steps_ ? shares_[n & (kWindow - 1)] : nothing_;
  }

  // A pass has something to do while there are products to fold.
  __aicore__ inline bool HasPass(int64_t n) const { return !has_ended_ || n - kAhead < num_steps_; }

  // Begins the loads of the next pass: the cube has what they read.
  __aicore__ inline void OpenLoads() {
    ++load_number_;
    round_ = 0;
    kind_ = 0;
    if (!has_ended_) {
      Share& share = shares_[num_steps_ & (kWindow - 1)];
      if (steps_.Next(share.step)) {
        FillShare(share);
        ++num_steps_;
      } else {
        has_ended_ = true;
      }
    }
    const Share& scored = ShareAt(load_number_ + 1);
    const Share& weighed = ShareAt(load_number_);
    const Share& summed = ShareAt(load_number_ - kAhead);
    const int64_t chunks = Larger(scored.chunks, weighed.chunks);
    load_pass_ = {&scored,
                  &weighed,
                  &summed,
                  Larger(chunks, summed.slices),
                  scored.chunks,
                  weighed.chunks,
                  summed.slices,
                  chunks - 1,
                  -Clamp(chunks - summed.slices, 0, kLateSlices)};
    if (scored.step.has_keys) {
      AscendC::CrossCoreWaitFlag(kScoresReady);
    }
    if (summed.step.has_keys) {
      AscendC::CrossCoreWaitFlag(kProductsReady);
    }
  }

  // The next loads of a round, while there are buffers: a chunk for the maxima (0), one for the
  // next round's weights (1), products (2). The last rounds take maxima, down to those of the
  // chunks that are weighed first: what stays in UB comes late.
  PAGED_INLINE void LoadRound() {
    const int64_t round = round_;
    if (kind_ == 0) {
      const int64_t chunk = load_pass_.last_chunk - round;
      if (IsBelow(chunk, load_pass_.scored_chunks)) {
        LoadScores(*load_pass_.scored, static_cast<uint32_t>(chunk));
        if (!ring_.HasIdle()) {
          kind_ = 1;
          return;
        }
      }
    }
    if (kind_ <= 1) {
      const int64_t chunk = round + 1;
      if (kept_ <= chunk && chunk < load_pass_.weighed_chunks) {
        LoadScores(*load_pass_.weighed, static_cast<uint32_t>(chunk));
        if (!ring_.HasIdle()) {
          kind_ = 2;
          return;
        }
      }
    }
    const int64_t slice = load_pass_.first_slice + round;
    kind_ = 0;
    round_ = round + 1;
    if (IsBelow(slice, load_pass_.slices)) {
      LoadProducts(*load_pass_.summed, slice * slice_rows_);
    }
  }

  PAGED_INLINE void LoadScores(const Share& share, uint32_t chunk) {
    const int32_t buffer = ring_.Begin();
    if (chunk - share.plain_first >= share.num_plain) {
      LoadPart(share, chunk, buffer);
    } else {
      LoadWhole(share, chunk, buffer);
    }
    ring_.End(buffer);
  }

  PAGED_INLINE void LoadWhole(const Share& share, uint32_t chunk, int32_t buffer) {
    HeldChunk& held = held_[buffer];
    held.first = share.first_key + static_cast<int32_t>(chunk << share.chunk_shift);
    held.lanes = static_cast<uint32_t>(kChunkScores);
    held.span_first = 0;
    held.span_keys = 1U << share.chunk_shift;
    held.repeats = static_cast<uint8_t>(kChunkScores / kRepeatLanes);
    held.hides = false;
    held.is_plain = !has_options_;
    const AscendC::GlobalTensor<float> from = share.scores[chunk * share.apart];
    if (share.is_half) {
      AscendC::DataCopy(
          ring_.At(buffer), from,
          AscendC::DataCopyParams(kHalfKeys, kHalfRows / kGranule, kHalfRows / kGranule, 0));
    } else {
      AscendC::DataCopy(ring_.At(buffer), from, CopyOf(share, held.span_keys));
    }
  }

  // The scores of a chunk that may be cut at its ends.
  __aicore__ inline void LoadPart(const Share& share, uint32_t chunk, int32_t buffer) {
    HeldChunk& held = held_[buffer];
    held.first = share.first_key + static_cast<int32_t>(chunk << share.chunk_shift);
    held.hides = true;
    held.is_plain = false;
    const AscendC::GlobalTensor<float> from = share.scores[chunk * share.apart];
    const uint32_t rows = static_cast<uint32_t>(share.rows);
    const int32_t last = held.first + (1 << share.chunk_shift);
    const int64_t end = Smaller(last, share.last_key);
    const int64_t span_first = Larger(share.step.span.first, held.first);
    const int64_t span_last = Smaller(share.step.span.last, end);
    held.lanes = static_cast<uint32_t>(end - held.first) * rows;
    held.repeats = static_cast<uint8_t>(held.lanes / kRepeatLanes);
    held.span_first = static_cast<int32_t>(span_first) - held.first;
    held.span_keys = static_cast<uint32_t>(span_last - span_first);
    AscendC::DataCopy(ring_.At(buffer)[static_cast<uint32_t>(held.span_first) * rows],
                      from[held.span_first * share.step.pitch], CopyOf(share, held.span_keys));
  }

  // How the scores of `keys` keys come in. Those of a core that has all rows lie side by side.
  __aicore__ static inline AscendC::DataCopyParams CopyOf(const Share& share, uint32_t keys) {
    const uint32_t rows = static_cast<uint32_t>(share.rows);
    const uint32_t others = static_cast<uint32_t>(share.step.pitch) - rows;
    const bool dense = others == 0;
    return AscendC::DataCopyParams(static_cast<uint16_t>(dense ? 1 : keys),
                                   static_cast<uint16_t>((dense ? keys * rows : rows) / kGranule),
                                   static_cast<uint16_t>(others / kGranule), 0);
  }

  __aicore__ inline void LoadProducts(const Share& share, int64_t begin) {
    const int32_t buffer = ring_.Begin();
    const int64_t rows = Smaller(slice_rows_, share.num_rows - begin);
    AscendC::DataCopy(ring_.At(buffer),
                      exchange_->Products(share.step.buffer)[(share.first_row + begin) * width_],
                      static_cast<uint32_t>(rows * width_));
    ring_.End(buffer);
  }

  // This core's share of the step that it holds.
  __aicore__ inline void FillShare(Share& share) const {
    PieceStep& step = share.step;
    Unit& unit = step.unit;
    int64_t first = FirstShare(step.pitch);
    if (first == step.pitch && step.is_odd) {
      first = 0;
    }
    share.mixes =
        mixes_visibility_ && (step.shares_piece || RowsOfToken(*tiling_, unit, 0) < unit.num_rows);
    share.first_row = is_second_ ? first : 0;
    share.rows = is_second_ ? step.pitch - first : first;
    unit.row_begin += share.first_row;
    unit.num_rows = Clamp(unit.num_rows - share.first_row, 0, share.rows);
    share.num_rows = step.has_keys ? unit.num_rows : 0;
    share.chunks = 0;
    share.slices = 0;
    if (share.rows == 0 || !step.has_keys) {
      return;
    }
    share.chunk_shift = 6;  // kSlabPair
    for (int64_t rows = share.rows; rows < kRepeatLanes; rows *= 2) {
      ++share.chunk_shift;
    }
    const int32_t chunk_keys = 1 << share.chunk_shift;
    share.first_key = static_cast<int32_t>(step.span.first & -kSlabPair);
    share.last_key = static_cast<int32_t>((step.span.last + kSlabPair - 1) & -kSlabPair);
    const int32_t keys = share.last_key - share.first_key;
    share.chunks = (keys + chunk_keys - 1) >> share.chunk_shift;
    const bool all_whole = (keys & (chunk_keys - 1)) == 0;
    const int64_t slab = all_whole ? kMaximaLanes : kSlabKeys * share.rows;
    share.maxima_slab = static_cast<uint32_t>(slab);
    share.scores = exchange_->Scores(step.buffer)[share.first_key * step.pitch + share.first_row];
    share.apart = step.pitch << share.chunk_shift;
    share.is_half = share.rows == kHalfRows && step.pitch == 2 * kHalfRows;
    share.slices = (share.num_rows + slice_rows_ - 1) >> slice_shift_;
    share.seen = {};
    share.num_plain = 0;
    if (unit.num_rows > 0) {
      share.seen = VisibilityOf(*tiling_, unit, step.begin);
      FindPlainChunks(share);
    }
  }

  __aicore__ static inline void FindPlainChunks(Share& share) {
    const int64_t to_first = share.seen.by_all.first - share.first_key;
    const int64_t to_last = Smaller(share.seen.by_all.last, share.last_key) - share.first_key;
    const int64_t more = (1 << share.chunk_shift) - 1;
    const int64_t first = Clamp((to_first + more) >> share.chunk_shift, 0, share.chunks);
    share.plain_first = static_cast<uint32_t>(first);
    share.num_plain = static_cast<uint32_t>(Larger((to_last >> share.chunk_shift) - first, 0));
  }

  const AttentionTilingData* tiling_;
  const Sequences* sequences_;
  const Exchange<T>* exchange_;
  int64_t group_;
  bool has_options_;
  int64_t width_;  // of a row of products
  int64_t slice_rows_;
  int64_t slice_shift_;  // its binary logarithm
  int64_t kept_;
  bool mixes_visibility_;
  bool is_second_;
  PieceSteps steps_;
  Share shares_[kWindow];
  Share nothing_;  // stands for the steps before the first one and after the last one
  bool has_ended_;
  int64_t num_steps_;
  int64_t pass_number_;
  int64_t load_number_;  // of the pass whose loads come next, this one or the one after it
  Pass pass_;
  Pass load_pass_;
  int64_t round_;  // of the next load
  int64_t kind_;
  ChunkRing ring_;
  HeldChunk held_[kMostChunkBuffers];
};
