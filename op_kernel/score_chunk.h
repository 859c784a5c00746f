// From scores to weights, for a chunk of scores in UB: keys one after the other, and for each key
// the rows side by side in the lanes.
//
// So maxima and sums over the keys are plain vector instructions, and what belongs to a row (its
// maximum, its slope) is a vector that every key meets. Sums run over blocks of 128 keys at fixed
// places of the piece, folded at 64, 32 and 16, then one block after the other, then 16 to 1; a key
// that a row doesn't see adds 0. What else the piece holds doesn't reach a row's bits.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "row_state.h"

constexpr int64_t kKeyBlock = 128;
constexpr int64_t kFoldedKeys = 16;  // that are left of a block before blocks are added up

struct ScoreChunk {
  AscendC::LocalTensor<float> scores;  // [keys][rows]
  int64_t keys;                        // a multiple of kKeyBlock
  int64_t rows;                        // 16, 32 or 64
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

// softcap * tanh(s / softcap), by tanh(x) = 1 - 2 / (e^2x + 1), which needs no sign and no limit.
// `numerator` holds a block of -2 softcap.
__aicore__ inline void CapScores(const ScoreChunk& chunk,
                                 const AscendC::LocalTensor<float>& numerator, float softcap) {
  const int32_t count = CountOf(chunk);
  AscendC::Muls(chunk.scores, chunk.scores, 2.0f / softcap, count);
  Barrier();
  AscendC::Exp(chunk.scores, chunk.scores, count);
  Barrier();
  AscendC::Adds(chunk.scores, chunk.scores, 1.0f, count);
  Barrier();
  AscendC::Div(chunk.scores, numerator, chunk.scores, static_cast<uint64_t>(kRepeatLanes),
               static_cast<uint8_t>(count / kRepeatLanes),
               AscendC::BinaryRepeatParams(1, 0, 1, kBlockLanes, 0, kBlockLanes));
  Barrier();
  AscendC::Adds(chunk.scores, chunk.scores, softcap, count);
  Barrier();
}

// What a fold does with two vectors.
struct TakeLarger {
  __aicore__ static inline void Apply(const AscendC::LocalTensor<float>& to,
                                      const AscendC::LocalTensor<float>& a,
                                      const AscendC::LocalTensor<float>& b, int64_t count) {
    AscendC::Max(to, a, b, static_cast<int32_t>(count));
  }
};
struct TakeSum {
  __aicore__ static inline void Apply(const AscendC::LocalTensor<float>& to,
                                      const AscendC::LocalTensor<float>& a,
                                      const AscendC::LocalTensor<float>& b, int64_t count) {
    AscendC::Add(to, a, b, static_cast<int32_t>(count));
  }
};

// Folds a chunk into `folded`, [kFoldedKeys][rows]. `work` has room for half a block of keys every
// `pitch` elements; it may be the scores, which are then used up.
template <typename Take>
__aicore__ inline void FoldChunk(const AscendC::LocalTensor<float>& folded, const ScoreChunk& chunk,
                                 const AscendC::LocalTensor<float>& work, int64_t pitch) {
  const int64_t block = kKeyBlock * chunk.rows;
  const int64_t blocks = chunk.keys / kKeyBlock;
  for (int64_t i = 0; i < blocks; ++i) {
    const AscendC::LocalTensor<float> scores = chunk.scores[i * block];
    Take::Apply(work[i * pitch], scores, scores[block / 2], block / 2);
  }
  Barrier();
  for (int64_t half = block / 4; half >= kFoldedKeys * chunk.rows; half /= 2) {
    for (int64_t i = 0; i < blocks; ++i) {
      const AscendC::LocalTensor<float> part = work[i * pitch];
      Take::Apply(part, part, part[half], half);
    }
    Barrier();
  }
  for (int64_t i = 0; i < blocks; ++i) {
    Take::Apply(folded, folded, work[i * pitch], kFoldedKeys * chunk.rows);
    Barrier();
  }
}

// The first `rows` lanes of `folded` become the result over all keys.
template <typename Take>
__aicore__ inline void FoldKeys(const AscendC::LocalTensor<float>& folded, int64_t rows) {
  for (int64_t half = kFoldedKeys / 2 * rows; half >= rows; half /= 2) {
    Take::Apply(folded, folded, folded[half], half);
    Barrier();
  }
}

// Repeats the first `rows` lanes over the 64 of a repeat.
__aicore__ inline void RepeatLanes(const AscendC::LocalTensor<float>& lanes, int64_t rows) {
  for (int64_t filled = rows; filled < kRepeatLanes; filled *= 2) {
    AscendC::Adds(lanes[filled], lanes, 0.0f, static_cast<int32_t>(filled));
    Barrier();
  }
}

// scores[k][r] = e^(scores[k][r] * factor + shift[r]), with factor over a block and shift repeated
// over 64 lanes.
__aicore__ inline void WeighScores(const ScoreChunk& chunk,
                                   const AscendC::LocalTensor<float>& factor,
                                   const AscendC::LocalTensor<float>& shift) {
  const int32_t count = CountOf(chunk);
  AscendC::FusedMulAdd(chunk.scores, factor, shift, static_cast<uint64_t>(kRepeatLanes),
                       static_cast<uint8_t>(count / kRepeatLanes),
                       AscendC::BinaryRepeatParams(1, 0, 1, kBlockLanes, 0, 0));
  Barrier();
  AscendC::Exp(chunk.scores, chunk.scores, count);
  Barrier();
}
