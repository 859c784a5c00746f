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
#include "kernel_operator.h"

constexpr int64_t kSlabKeys = 32;
constexpr int64_t kSlabPair = 2 * kSlabKeys;  // chunks are whole pairs

struct ScoreChunk {
  Float scores;    // [keys][rows]
  int32_t buffer;  // that holds them
  int64_t keys;    // a multiple of kSlabPair; 0: there is no chunk
  int64_t rows;    // 16, 32 or 64
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

// What a fold does with two vectors.
struct TakeLarger {
  __aicore__ static inline void Apply(const Float& to, const Float& a, const Float& b,
                                      int64_t count) {
    AscendC::Max(to, a, b, static_cast<int32_t>(count));
  }
};
struct TakeSum {
  __aicore__ static inline void Apply(const Float& to, const Float& a, const Float& b,
                                      int64_t count) {
    AscendC::Add(to, a, b, static_cast<int32_t>(count));
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
  __aicore__ inline void Init(const Float& lanes) { lanes_ = lanes; }

  // For chunks of `rows` rows, in slabs of `slab` lanes, at most half of a chunk.
  __aicore__ inline void Open(int64_t rows, int64_t slab) {
    rows_ = rows;
    slab_ = slab;
    left_ = slab;
    is_empty_ = true;
  }

  __aicore__ inline int64_t CountSlabs(const ScoreChunk& chunk) const {
    int64_t slabs = 0;
    for (int64_t lane = 0; lane < chunk.keys * rows_; lane += slab_) {
      ++slabs;
    }
    return slabs;
  }

  // Folds slab `i` of a chunk in. The first two slabs go together, with the second one.
  __aicore__ inline void AddSlab(const ScoreChunk& chunk, int64_t i) {
    if (!is_empty_) {
      Take::Apply(lanes_, lanes_, chunk.scores[i * slab_], slab_);
    } else if (i == 1) {
      Take::Apply(lanes_, chunk.scores, chunk.scores[slab_], slab_);
      is_empty_ = false;
    }
  }

  // Halves what is left, down to a lane for each row.
  __aicore__ inline bool IsFolded() const { return left_ <= rows_; }
  __aicore__ inline void Halve() {
    left_ /= 2;
    Take::Apply(lanes_, lanes_, lanes_[left_], left_);
  }

  __aicore__ inline const Float& Lanes() const { return lanes_; }

 private:
  Float lanes_;
  int64_t rows_;
  int64_t slab_;  // lanes
  int64_t left_;  // lanes
  bool is_empty_;
};

// scores[k][r] = scores[k][r] * factor + shift[r], with factor over a granule and shift repeated
// over 64 lanes.
__aicore__ inline void ShiftScores(const ScoreChunk& chunk, const Float& factor,
                                   const Float& shift) {
  AscendC::FusedMulAdd(chunk.scores, factor, shift, static_cast<uint64_t>(kRepeatLanes),
                       static_cast<uint8_t>(CountOf(chunk) / kRepeatLanes),
                       AscendC::BinaryRepeatParams(1, 0, 1, kGranule, 0, 0));
}
