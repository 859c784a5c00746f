// The running softmax of up to kMaxRows rows, and how two of them fold into one.
//
// Invariant, with m = max, l = sum and o = acc over a set of keys:
//   l = sum of e^(score - m),  o = sum of e^(score - m) * value.
// The state of no keys is m = the lowest float, l = 0, o = 0. The lowest float stands in for -inf
// because lowest - lowest is 0 where -inf - -inf is NaN; no finite score lies below it, and a score
// of -inf still weighs 0.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

constexpr float kLowest = -3.40282347e+38f;

// Stands in for an infinite sink or lse, whose difference to itself is NaN, too: what is finite
// weighs nothing beside it.
constexpr float kHighest = 3.40282347e+38f;

struct RowState {
  Float max;  // a lane per row
  Float sum;  // a lane per row
  Float acc;  // [row][width]
};

// Working memory of the functions below.
struct RowScratch {
  Float new_max;  // kMaxRows lanes each
  Float keep;
  Float add;
  Float factor;  // [kMaxRows][kGranule]: a factor per row, broadcast
};

__aicore__ inline void Clear(const RowState& state, int64_t rows, int64_t width) {
  AscendC::Duplicate(state.max, kLowest, LanesOf(rows));
  AscendC::Duplicate(state.sum, 0.0f, LanesOf(rows));
  AscendC::Duplicate(state.acc, 0.0f, static_cast<int32_t>(rows * width));
  Barrier();
}

// The functions up to AddScaledRows leave the barrier after them to the caller.

// Repeats of one 64-lane column of `rows` rows of `width` floats; the second operand is a factor
// per row.
PAGED_INLINE AscendC::BinaryRepeatParams ByRow(int64_t width) {
  const uint8_t row = static_cast<uint8_t>(width / kGranule);
  return AscendC::BinaryRepeatParams(1, 1, 0, row, row, 1);
}

PAGED_INLINE uint64_t ColumnMask(int64_t width, int64_t column) {
  return static_cast<uint64_t>(width - column < kRepeatLanes ? width - column : kRepeatLanes);
}

// acc[r] *= factor[r]
PAGED_INLINE void MultiplyRows(const Float& acc, const Float& factor, int64_t rows, int64_t width) {
  for (int64_t c = 0; c < width; c += kRepeatLanes) {
    AscendC::Mul(acc[c], acc[c], factor, ColumnMask(width, c), static_cast<uint8_t>(rows),
                 ByRow(width));
  }
}

// acc[r] /= divisor[r]
PAGED_INLINE void DivideRows(const Float& acc, const Float& divisor, int64_t rows, int64_t width) {
  for (int64_t c = 0; c < width; c += kRepeatLanes) {
    AscendC::Div(acc[c], acc[c], divisor, ColumnMask(width, c), static_cast<uint8_t>(rows),
                 ByRow(width));
  }
}

// acc[r] += more[r] * factor[r]
PAGED_INLINE void AddScaledRows(const Float& acc, const Float& more, const Float& factor,
                                int64_t rows, int64_t width) {
  for (int64_t c = 0; c < width; c += kRepeatLanes) {
    AscendC::MulAddDst(acc[c], more[c], factor, ColumnMask(width, c), static_cast<uint8_t>(rows),
                       ByRow(width));
  }
}

// lanes = e^(from - to)
__aicore__ inline void WeightLanes(const Float& lanes, const Float& from, const Float& to,
                                   int32_t count) {
  AscendC::Sub(lanes, from, to, count);
  Barrier();
  AscendC::Exp(lanes, lanes, count);
  Barrier();
}

// The same as folding a state of that maximum and sum into the state of no keys, but for acc.
PAGED_INLINE void CopyLanes(const RowState& into, const Float& max, const Float& sum,
                            int64_t rows) {
  AscendC::Adds(into.max, max, 0.0f, LanesOf(rows));
  AscendC::Adds(into.sum, sum, 0.0f, LanesOf(rows));
}

// Folds the maximum and the sum of another state in, all but its acc: into.acc is what it weighs
// now, and scratch.factor holds the weight of the other acc. It takes kRescaleStages stages, each
// waiting for the one before; whoever has other work does it between a stage and the barrier.
constexpr int64_t kRescaleStages = 6;

PAGED_INLINE void RescaleStage(int64_t stage, const RowState& into, const Float& max,
                               const Float& sum, const RowScratch& scratch, int64_t rows,
                               int64_t width) {
  const int32_t lanes = LanesOf(rows);
  if (stage == 0) {
    AscendC::Max(scratch.new_max, into.max, max, lanes);
  } else if (stage == 1) {
    AscendC::Sub(scratch.keep, into.max, scratch.new_max, lanes);
    AscendC::Sub(scratch.add, max, scratch.new_max, lanes);
  } else if (stage == 2) {
    AscendC::Exp(scratch.keep, scratch.keep, lanes);
    AscendC::Exp(scratch.add, scratch.add, lanes);
  } else if (stage == 3) {
    AscendC::Mul(into.sum, into.sum, scratch.keep, lanes);
    AscendC::Adds(into.max, scratch.new_max, 0.0f, lanes);
    BroadcastLanes(scratch.factor, scratch.keep, rows);
  } else if (stage == 4) {
    AscendC::MulAddDst(into.sum, sum, scratch.add, lanes);
    MultiplyRows(into.acc, scratch.factor, rows, width);
  } else if (stage == 5) {
    BroadcastLanes(scratch.factor, scratch.add, rows);
  }
}

__aicore__ inline void Rescale(const RowState& into, const Float& max, const Float& sum,
                               const RowScratch& scratch, int64_t rows, int64_t width) {
  for (int64_t stage = 0; stage < kRescaleStages; ++stage) {
    RescaleStage(stage, into, max, sum, scratch, rows, width);
    Barrier();
  }
}

// Folds `from`, the state over later keys, into `into`. Folding into an empty state copies exactly.
__aicore__ inline void Fold(const RowState& into, const RowState& from, const RowScratch& scratch,
                            int64_t rows, int64_t width) {
  Rescale(into, from.max, from.sum, scratch, rows, width);
  AddScaledRows(into.acc, from.acc, scratch.factor, rows, width);
  Barrier();
}

// acc[r] /= sum[r], and max[r] becomes the log-sum-exp. A row without keys has acc 0 and stays 0.
__aicore__ inline void Normalise(const RowState& state, const RowScratch& scratch, int64_t rows,
                                 int64_t width) {
  const int32_t lanes = LanesOf(rows);
  AscendC::Ln(scratch.keep, state.sum, lanes);
  // The largest key's weight is 1, so a sum is 0 or about 1 at least: only 0 is replaced.
  AscendC::Maxs(scratch.add, state.sum, 1.0e-30f, lanes);
  Barrier();
  AscendC::Add(state.max, state.max, scratch.keep, lanes);
  BroadcastLanes(scratch.factor, scratch.add, rows);
  Barrier();
  DivideRows(state.acc, scratch.factor, rows, width);
  Barrier();
}
