// What options do to a score before the softmax: scale, cap, bias, in this order. What a row
// doesn't see is hidden afterwards: visible.h.
//
// Scores are whole repeats of 64 lanes; which key and row a lane belongs to is the kernel's affair.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "kernel_operator.h"

// Whether the scale may be applied on the way to the exponent, e^(scale * s - scale * max): nothing
// comes between, and scaling keeps the order and stays finite.
__aicore__ inline bool MayScaleLate(const AttentionTilingData& tiling) {
  return !(tiling.softcap > 0.0f) && tiling.has_alibi_slopes == 0 && tiling.scale > 0.0f &&
         tiling.scale <= 1.0f;
}

// softcap * tanh(s / softcap), by tanh(x) = 1 - 2 / (e^2x + 1), which needs no sign and no limit.
// `numerator` holds a granule of -2 softcap.
__aicore__ inline void CapScores(const Float& scores, int32_t count, const Float& numerator,
                                 float softcap) {
  AscendC::Muls(scores, scores, 2.0f / softcap, count);
  Barrier();
  AscendC::Exp(scores, scores, count);
  Barrier();
  AscendC::Adds(scores, scores, 1.0f, count);
  Barrier();
  AscendC::Div(scores, numerator, scores, static_cast<uint64_t>(kRepeatLanes),
               static_cast<uint8_t>(count / kRepeatLanes),
               AscendC::BinaryRepeatParams(1, 0, 1, kGranule, 0, kGranule));
  Barrier();
  AscendC::Adds(scores, scores, softcap, count);
  Barrier();
}

// + slope * (key position - query position): scores += slopes * (distances + shift). `distances`
// are those of `repeats` repeats, `work` is as large. `slopes` are the lanes of each of these
// repeats or, with `one_slope`, a granule of the slope of all lanes.
__aicore__ inline void AddBias(const Float& scores, const Float& distances, float shift,
                               const Float& slopes, bool one_slope, const Float& work,
                               int64_t repeats) {
  AscendC::Adds(work, distances, shift, static_cast<int32_t>(repeats * kRepeatLanes));
  Barrier();
  AscendC::MulAddDst(scores, work, slopes, static_cast<uint64_t>(kRepeatLanes),
                     static_cast<uint8_t>(repeats),
                     AscendC::BinaryRepeatParams(1, 1, one_slope ? 0 : 1, kGranule, kGranule, 0));
  Barrier();
}
