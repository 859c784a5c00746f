// From scores to weights, for some rows of a piece in UB: options, maximum, exponents, sum.
//
// Maxima and sums are trees over columns of 64 lanes at fixed places of the piece, and a lane that
// a row doesn't see adds 0: what else the piece holds doesn't reach a row's bits.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "row_state.h"
#include "visible.h"

// The first `width` lanes of each row of scores, a multiple of 64; row after row.
struct ScoreRows {
  AscendC::LocalTensor<float> scores;  // [rows][width]
  int64_t rows;
  int64_t width;
};

__aicore__ inline int32_t CountOf(const ScoreRows& block) {
  return static_cast<int32_t>(block.rows * block.width);
}

// scores[r][k] = value for the rows from `row` on and the lanes beside `lanes`.
__aicore__ inline void SetBeside(const ScoreRows& block, int64_t row, int64_t rows,
                                 const Visible& lanes, float value) {
  const uint8_t row_blocks = static_cast<uint8_t>(block.width / kBlockLanes);
  for (int64_t c = 0; c < block.width; c += kRepeatLanes) {
    uint64_t mask[2] = {~MaskOf(InTile(lanes, c, kRepeatLanes)), 0};
    if (mask[0] != 0) {
      AscendC::Duplicate(block.scores[row * block.width + c], value, mask,
                         static_cast<uint8_t>(rows), 1, row_blocks);
    }
  }
}

// softcap * tanh(s / softcap), by tanh(x) = 1 - 2 / (e^2x + 1), which needs no sign and no limit.
// `numerator` holds a block of -2 softcap.
__aicore__ inline void CapScores(const ScoreRows& block,
                                 const AscendC::LocalTensor<float>& numerator, float softcap) {
  const int32_t count = CountOf(block);
  AscendC::Muls(block.scores, block.scores, 2.0f / softcap, count);
  Barrier();
  AscendC::Exp(block.scores, block.scores, count);
  Barrier();
  AscendC::Adds(block.scores, block.scores, 1.0f, count);
  Barrier();
  AscendC::Div(block.scores, numerator, block.scores, static_cast<uint64_t>(kRepeatLanes),
               static_cast<uint8_t>(count / kRepeatLanes),
               AscendC::BinaryRepeatParams(1, 0, 1, kBlockLanes, 0, kBlockLanes));
  Barrier();
  AscendC::Adds(block.scores, block.scores, softcap, count);
  Barrier();
}

// What a tree does with two columns.
struct TakeLarger {
  __aicore__ static inline void Apply(const AscendC::LocalTensor<float>& to,
                                      const AscendC::LocalTensor<float>& a,
                                      const AscendC::LocalTensor<float>& b, int64_t repeats,
                                      const AscendC::BinaryRepeatParams& params) {
    AscendC::Max(to, a, b, static_cast<uint64_t>(kRepeatLanes), static_cast<uint8_t>(repeats),
                 params);
  }
};
struct TakeSum {
  __aicore__ static inline void Apply(const AscendC::LocalTensor<float>& to,
                                      const AscendC::LocalTensor<float>& a,
                                      const AscendC::LocalTensor<float>& b, int64_t repeats,
                                      const AscendC::BinaryRepeatParams& params) {
    AscendC::Add(to, a, b, static_cast<uint64_t>(kRepeatLanes), static_cast<uint8_t>(repeats),
                 params);
  }
};

// Repeats over blocks of the given distances.
__aicore__ inline AscendC::BinaryRepeatParams Every(int64_t to_columns, int64_t from_columns) {
  const uint8_t from = static_cast<uint8_t>(from_columns * kBlockLanes);
  return AscendC::BinaryRepeatParams(1, 1, 1, static_cast<uint8_t>(to_columns * kBlockLanes), from,
                                     from);
}

// Column 0 of each row of `columns` columns becomes the result over all of them; the others are
// used up. Column p takes column p + step for steps 1, 2, 4, ... where there is one.
template <typename Take>
__aicore__ inline void FoldColumns(const AscendC::LocalTensor<float>& rows_of_columns, int64_t rows,
                                   int64_t columns) {
  for (int64_t step = 1; step < columns; step *= 2) {
    const AscendC::LocalTensor<float> others = rows_of_columns[step * kRepeatLanes];
    if (columns % (2 * step) == 0) {
      Take::Apply(rows_of_columns, rows_of_columns, others, rows * columns / (2 * step),
                  Every(2 * step, 2 * step));
    } else {
      for (int64_t p = 0; p + step < columns; p += 2 * step) {
        const int64_t at = p * kRepeatLanes;
        Take::Apply(rows_of_columns[at], rows_of_columns[at], others[at], rows,
                    Every(columns, columns));
      }
    }
    Barrier();
  }
}

// lanes[r] = max over k of scores[r][k]. `work` holds half as much as scores of kCubePiece lanes.
__aicore__ inline void MaxOfScores(const ScoreRows& block, const AscendC::LocalTensor<float>& lanes,
                                   const AscendC::LocalTensor<float>& work) {
  const int64_t columns = block.width / kRepeatLanes;
  const int64_t pairs = (columns + 1) / 2;
  if (columns % 2 == 0) {
    TakeLarger::Apply(work, block.scores, block.scores[kRepeatLanes], block.rows * pairs,
                      Every(1, 2));
  } else {
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t other = Smaller(2 * p + 1, columns - 1);
      TakeLarger::Apply(work[p * kRepeatLanes], block.scores[2 * p * kRepeatLanes],
                        block.scores[other * kRepeatLanes], block.rows, Every(pairs, columns));
    }
  }
  Barrier();
  FoldColumns<TakeLarger>(work, block.rows, pairs);
  AscendC::WholeReduceMax(lanes, work, kRepeatLanes, static_cast<int32_t>(block.rows), 1, 1,
                          static_cast<int32_t>(pairs * kBlockLanes),
                          AscendC::ReduceOrder::ORDER_ONLY_VALUE);
  Barrier();
}

// lanes[r] = sum over k of scores[r][k]. The scores are used up.
__aicore__ inline void SumOfScores(const ScoreRows& block,
                                   const AscendC::LocalTensor<float>& lanes) {
  FoldColumns<TakeSum>(block.scores, block.rows, block.width / kRepeatLanes);
  AscendC::WholeReduceSum(lanes, block.scores, kRepeatLanes, static_cast<int32_t>(block.rows), 1, 1,
                          static_cast<int32_t>(block.width / kBlockLanes));
  Barrier();
}

// scores[r][k] = e^(scores[r][k] * factor + shift[r]), with factor over one block and shift over a
// block for each row. Repeats run along the rows or down the columns, whichever are fewer.
__aicore__ inline void WeighScores(const ScoreRows& block,
                                   const AscendC::LocalTensor<float>& factor,
                                   const AscendC::LocalTensor<float>& shift) {
  const int64_t columns = block.width / kRepeatLanes;
  const uint64_t lanes = static_cast<uint64_t>(kRepeatLanes);
  if (block.rows < columns) {
    const AscendC::BinaryRepeatParams along(1, 0, 0, kBlockLanes, 0, 0);
    for (int64_t r = 0; r < block.rows; ++r) {
      AscendC::FusedMulAdd(block.scores[r * block.width], factor, shift[r * kBlockLanes], lanes,
                           static_cast<uint8_t>(columns), along);
    }
  } else {
    const AscendC::BinaryRepeatParams down(1, 0, 0, static_cast<uint8_t>(columns * kBlockLanes), 0,
                                           1);
    for (int64_t c = 0; c < columns; ++c) {
      AscendC::FusedMulAdd(block.scores[c * kRepeatLanes], factor, shift, lanes,
                           static_cast<uint8_t>(block.rows), down);
    }
  }
  Barrier();
  AscendC::Exp(block.scores, block.scores, CountOf(block));
  Barrier();
}
