// From scores to weights, for a chunk of scores in UB: keys one after the other, and for each key
// the rows side by side in the lanes.
//
// So maxima and sums over the keys are plain vector instructions, and what belongs to a row (its
// maximum, its slope) is a vector that every key meets. Sums run over slabs of 32 keys at fixed
// places of the piece, one slab after the other, and then over the 32: a key that a row doesn't see
// adds 0. What else the piece holds doesn't reach a row's bits.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

constexpr int64_t kSlabKeys = 32;
constexpr int64_t kSlabPair = 2 * kSlabKeys;  // chunks are whole pairs

struct ScoreChunk {
  Float scores;  // [keys][rows]
  int64_t keys;  // a multiple of kSlabPair
  int64_t rows;  // 16, 32 or 64
};

__aicore__ inline int32_t CountOf(const ScoreChunk& chunk) {
  return static_cast<int32_t>(chunk.keys * chunk.rows);
}

// scores[k][r] = value for all rows and the keys [first, last).
__aicore__ inline void SetKeys(const ScoreChunk& chunk, int64_t first, int64_t last, float value) {
  if (first < last) {
    AscendC::Duplicate(chunk.scores[first * chunk.rows], value,
                       static_cast<int32_t>((last - first) * chunk.rows));
  }
}

// What a fold does with two vectors, of whole repeats or of some lanes, and what changes nothing:
// weights aren't negative, so 0 is added to none of them that would become another one.
struct TakeLarger {
  static constexpr float kNothing = kMinusInf;
  PAGED_INLINE static void Apply(const Float& to, const Float& a, const Float& b, uint8_t repeats) {
    AscendC::Max(to, a, b, static_cast<uint64_t>(kRepeatLanes), repeats,
                 AscendC::BinaryRepeatParams(1, 1, 1, kGranule, kGranule, kGranule));
  }
  PAGED_INLINE static void ApplyLanes(const Float& to, const Float& a, const Float& b,
                                      int32_t lanes) {
    AscendC::Max(to, a, b, lanes);
  }
};
struct TakeSum {
  static constexpr float kNothing = 0.0f;
  PAGED_INLINE static void Apply(const Float& to, const Float& a, const Float& b, uint8_t repeats) {
    AscendC::Add(to, a, b, static_cast<uint64_t>(kRepeatLanes), repeats,
                 AscendC::BinaryRepeatParams(1, 1, 1, kGranule, kGranule, kGranule));
  }
  PAGED_INLINE static void ApplyLanes(const Float& to, const Float& a, const Float& b,
                                      int32_t lanes) {
    AscendC::Add(to, a, b, lanes);
  }
};

// Folds chunks of a piece over their keys, slab after slab. Between two calls lies a barrier, and
// whoever calls has other work to do before it: a vector unit that waits for each result works half
// of the time.
//
// A sum is always of slabs of 32 keys. A maximum is the same in every order, so its slabs are as
// many lanes as there is room for.
template <typename Take>
class KeyFold {
 public:
  // `lanes` has room for the lanes of a slab.
  PAGED_INLINE void Init(const Float& lanes) { lanes_ = lanes; }

  // For chunks of `rows` rows, in slabs of `slab` lanes: whole repeats, a power of two, at most
  // half of a chunk.
  PAGED_INLINE void Open(uint32_t rows, uint32_t slab) {
    rows_ = rows;
    slab_ = slab;
    repeats_ = static_cast<uint8_t>(slab / kRepeatLanes);
    left_ = slab;
    AscendC::Duplicate(lanes_, Take::kNothing, static_cast<uint64_t>(kRepeatLanes), repeats_, 1,
                       kGranule);
  }

  // A chunk's slabs go in one after the other: the first one, some inner ones, the last one.
  // Whether inner ones come next.
  PAGED_INLINE bool AddFirst(const Float& scores, uint32_t lanes) {
    last_first_ = lanes - slab_;
    next_first_ = slab_;
    AddSlab(scores, 0);
    return HasInner();
  }
  PAGED_INLINE bool HasInner() const { return next_first_ < last_first_; }
  PAGED_INLINE bool AddInner(const Float& scores) {
    AddSlab(scores, next_first_);
    next_first_ += slab_;
    return HasInner();
  }
  PAGED_INLINE void AddLast(const Float& scores) { AddSlab(scores, last_first_); }

  // Halves what is left, down to a lane for each row.
  PAGED_INLINE bool IsFolded() const { return left_ <= rows_; }
  PAGED_INLINE void Halve() {
    left_ /= 2;
    Take::ApplyLanes(lanes_, lanes_, lanes_[left_], static_cast<int32_t>(left_));
  }

  PAGED_INLINE const Float& Lanes() const { return lanes_; }

 private:
  // Folds the slab that begins with lane `first` in.
  PAGED_INLINE void AddSlab(const Float& scores, uint32_t first) {
    Take::Apply(lanes_, lanes_, scores[first], repeats_);
  }

  Float lanes_;
  uint32_t rows_;
  uint32_t slab_;        // lanes
  uint8_t repeats_;      // of a slab
  uint32_t left_;        // lanes
  uint32_t next_first_;  // of the chunk's slabs, the next inner one
  uint32_t last_first_;  // and the last one
};

// In whole repeats: scores[k][r] = scores[k][r] * factor + shift[r], with factor over a granule and
// shift repeated over 64 lanes.
PAGED_INLINE void ShiftScores(const Float& scores, uint8_t repeats, const Float& factor,
                              const Float& shift) {
  AscendC::FusedMulAdd(scores, factor, shift, static_cast<uint64_t>(kRepeatLanes), repeats,
                       AscendC::BinaryRepeatParams(1, 0, 1, kGranule, 0, 0));
}

// scores = e^scores, in whole repeats
PAGED_INLINE void ExpScores(const Float& scores, uint8_t repeats) {
  AscendC::Exp(scores, scores, static_cast<uint64_t>(kRepeatLanes), repeats,
               AscendC::UnaryRepeatParams(1, 1, kGranule, kGranule));
}
