// From scores to weights: the options, the hidden keys, the softmax of one piece, for some rows of
// kPiece floats each in UB.
//
// The rows' sums are trees over lanes at fixed places of the piece, and a lane that a row doesn't
// see adds 0: what else the piece holds doesn't reach a row's bits.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "row_copy.h"
#include "row_state.h"
#include "visible.h"

constexpr uint8_t kScoreBlocks = kPiece / kBlockLanes;  // 32-byte blocks of a row of scores

struct ScoreRows {
  AscendC::LocalTensor<float> scores;  // [rows][kPiece]
  int64_t rows;
  int64_t width;  // lanes that are computed: 64, 128, 256 or 512, the span among them
};

// The lanes that trees over [0, last) take.
__aicore__ inline int64_t TreeWidth(int64_t last) {
  int64_t width = kRepeatLanes;
  while (width < last) {
    width *= 2;
  }
  return width;
}

// scores[r][k] = value for all rows and the lanes of `lanes`.
__aicore__ inline void SetLanes(const AscendC::LocalTensor<float>& scores, int64_t rows,
                                const Visible& lanes, float value) {
  for (int64_t c = lanes.first / kRepeatLanes * kRepeatLanes; c < lanes.last; c += kRepeatLanes) {
    uint64_t mask[2] = {MaskOf(InTile(lanes, c, kRepeatLanes)), 0};
    AscendC::Duplicate(scores[c], value, mask, static_cast<uint8_t>(rows), 1, kScoreBlocks);
  }
}

// scores[r][k] = scores[r][k] * factor
__aicore__ inline void MultiplyScores(const ScoreRows& block, float factor) {
  const AscendC::UnaryRepeatParams by_row(1, 1, kScoreBlocks, kScoreBlocks);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Muls(block.scores[c], block.scores[c], factor, static_cast<uint64_t>(kRepeatLanes),
                  static_cast<uint8_t>(block.rows), by_row);
  }
  Barrier();
}

// scores[r][k] = e^scores[r][k]
__aicore__ inline void ExpScores(const ScoreRows& block) {
  const AscendC::UnaryRepeatParams by_row(1, 1, kScoreBlocks, kScoreBlocks);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Exp(block.scores[c], block.scores[c], static_cast<uint64_t>(kRepeatLanes),
                 static_cast<uint8_t>(block.rows), by_row);
  }
  Barrier();
}

// softcap * tanh(s / softcap), by tanh(x) = 1 - 2 / (e^2x + 1), which needs no sign and no limit.
// `numerator` holds a block of -2 softcap.
__aicore__ inline void CapScores(const ScoreRows& block,
                                 const AscendC::LocalTensor<float>& numerator, float softcap) {
  const AscendC::UnaryRepeatParams by_row(1, 1, kScoreBlocks, kScoreBlocks);
  const AscendC::BinaryRepeatParams over_row(1, 0, 1, kScoreBlocks, 0, kScoreBlocks);
  const uint64_t lanes = static_cast<uint64_t>(kRepeatLanes);
  const uint8_t rows = static_cast<uint8_t>(block.rows);
  MultiplyScores(block, 2.0f / softcap);
  ExpScores(block);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Adds(block.scores[c], block.scores[c], 1.0f, lanes, rows, by_row);
  }
  Barrier();
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Div(block.scores[c], numerator, block.scores[c], lanes, rows, over_row);
  }
  Barrier();
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Adds(block.scores[c], block.scores[c], softcap, lanes, rows, by_row);
  }
  Barrier();
}

// lanes[r] = max over k of scores[r][k]. `work` holds half as much as the scores.
__aicore__ inline void MaxOfScores(const ScoreRows& block, const AscendC::LocalTensor<float>& lanes,
                                   const AscendC::LocalTensor<float>& work) {
  const uint8_t rows = static_cast<uint8_t>(block.rows);
  int64_t half = block.width / 2;
  if (half < kRepeatLanes) {
    AscendC::WholeReduceMax(lanes, block.scores, kRepeatLanes, static_cast<int32_t>(rows), 1, 1,
                            kScoreBlocks, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    Barrier();
    return;
  }
  const uint8_t pitch = static_cast<uint8_t>(half / kBlockLanes);
  const AscendC::BinaryRepeatParams first(1, 1, 1, pitch, kScoreBlocks, kScoreBlocks);
  const AscendC::BinaryRepeatParams next(1, 1, 1, pitch, pitch, pitch);
  for (int64_t c = 0; c < half; c += kRepeatLanes) {
    AscendC::Max(work[c], block.scores[c], block.scores[half + c],
                 static_cast<uint64_t>(kRepeatLanes), rows, first);
  }
  Barrier();
  for (half /= 2; half >= kRepeatLanes; half /= 2) {
    for (int64_t c = 0; c < half; c += kRepeatLanes) {
      AscendC::Max(work[c], work[c], work[half + c], static_cast<uint64_t>(kRepeatLanes), rows,
                   next);
    }
    Barrier();
  }
  AscendC::WholeReduceMax(lanes, work, kRepeatLanes, static_cast<int32_t>(rows), 1, 1, pitch,
                          AscendC::ReduceOrder::ORDER_ONLY_VALUE);
  Barrier();
}

// lanes[r] = sum over k of scores[r][k]. The scores are used up.
__aicore__ inline void SumOfScores(const ScoreRows& block,
                                   const AscendC::LocalTensor<float>& lanes) {
  const uint8_t rows = static_cast<uint8_t>(block.rows);
  const AscendC::BinaryRepeatParams by_row(1, 1, 1, kScoreBlocks, kScoreBlocks, kScoreBlocks);
  for (int64_t half = block.width / 2; half >= kRepeatLanes; half /= 2) {
    for (int64_t c = 0; c < half; c += kRepeatLanes) {
      AscendC::Add(block.scores[c], block.scores[c], block.scores[half + c],
                   static_cast<uint64_t>(kRepeatLanes), rows, by_row);
    }
    Barrier();
  }
  AscendC::WholeReduceSum(lanes, block.scores, kRepeatLanes, static_cast<int32_t>(rows), 1, 1,
                          kScoreBlocks);
  Barrier();
}

// scores[r][k] = e^(scores[r][k] * factor + shift[r]), with factor over one block and shift over a
// block for each row.
__aicore__ inline void WeighScores(const ScoreRows& block,
                                   const AscendC::LocalTensor<float>& factor,
                                   const AscendC::LocalTensor<float>& shift) {
  const AscendC::BinaryRepeatParams by_row(1, 0, 0, kScoreBlocks, 0, 1);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::FusedMulAdd(block.scores[c], factor, shift, static_cast<uint64_t>(kRepeatLanes),
                         static_cast<uint8_t>(block.rows), by_row);
  }
  Barrier();
  ExpScores(block);
}

// weights[r][k] = scores[r][k], rounded. Both have rows of kPiece elements.
template <typename T>
__aicore__ inline void RoundScores(const AscendC::LocalTensor<T>& weights, const ScoreRows& block) {
  constexpr uint8_t kWeightBlocks = kPiece * sizeof(T) / kBlockBytes;
  const AscendC::UnaryRepeatParams by_row(1, 1, kWeightBlocks, kScoreBlocks);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    AscendC::Cast(weights[c], block.scores[c], AscendC::RoundMode::CAST_RINT,
                  static_cast<uint64_t>(kRepeatLanes), static_cast<uint8_t>(block.rows), by_row);
  }
  Barrier();
}
