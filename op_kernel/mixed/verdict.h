// What a group does about a product that isn't a number.
//
// The cube multiplies a whole band's weights with a tile's values. Where a row doesn't see a
// key, its weight is 0, and so is the product, unless the value is NaN or infinite: then it spoils
// a row that has nothing to do with it. It spoils all rows of the band alike, so where they see
// different keys, the vector cores look whether the sums of one of them are finite, and tell at the
// end. If one isn't, the group walks through its units a second time, one token at a time: the rows
// of a token see the same keys, and nobody looks at another one. The other rows come out with the
// bits that they had.
#pragma once

#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "kernel_operator.h"
#include "mixed/exchange.h"
#include "mixed/part_ring.h"

// Whether rows of one band can see different keys. A group then has a verdict.
__aicore__ inline bool MayMixVisibility(const AttentionTilingData& tiling) {
  return tiling.has_query_start_loc != 0 && (tiling.causal != 0 || tiling.sliding_window > 0);
}

// Whether a vector core of the group found trouble. Both have written, and the cores have met.
template <typename T>
__aicore__ inline bool ReadTrouble(const Exchange<T>& exchange) {
  bool trouble = false;
  for (int64_t i = 0; i < 2; ++i) {
    const AscendC::GlobalTensor<float> verdict = exchange.Verdict(i);
    AscendC::DataCacheCleanAndInvalid<float, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                      AscendC::DcciDst::CACHELINE_OUT>(verdict);
    const float value = verdict.GetValue(0);
    trouble = trouble || !(value == 0.0f);
  }
  return trouble;
}

// A vector core's search for sums that aren't finite.
class Finiteness {
 public:
  // Rows of `width` sums.
  __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t width) {
    width_ = static_cast<int32_t>(width);
    columns_ = (width + kRepeatLanes - 1) / kRepeatLanes;
    zeros_ = NewBuffer<float>(pipe, columns_ * kRepeatLanes);
    AscendC::Duplicate(zeros_, 0.0f, static_cast<int32_t>(columns_ * kRepeatLanes));
    Barrier();
  }

  // Looks at a row's sums. A barrier lies between two looks.
  __aicore__ inline void Look(const Float& sums) {
    // 0 * x is 0 or, for an x that isn't finite, NaN, which stays in every sum.
    AscendC::Axpy(zeros_, sums, 0.0f, width_);
  }

  // Writes the verdict, 0 or NaN, through a buffer of `parts`.
  template <typename T>
  __aicore__ inline void Tell(const AscendC::GlobalTensor<float>& to, PartRing<T>& parts) {
    const AscendC::LocalTensor<T> part = parts.template AllocTensor<T>();
    const Float verdict = part.template ReinterpretCast<float>();
    AscendC::Duplicate(verdict, 0.0f, kGranule);
    Barrier();
    for (int64_t c = 1; c < columns_; ++c) {
      AscendC::Add(zeros_, zeros_, zeros_[c * kRepeatLanes], kRepeatLanes);
      Barrier();
    }
    AscendC::WholeReduceSum(verdict, zeros_, kRepeatLanes, 1, 1, 1, kGranule);
    parts.EnQue(part);
    parts.template DeQue<T>();
    CopyRowsOut(to, verdict, 1, kGranule, kGranule);
    parts.FreeTensor(part);
  }

 private:
  Float zeros_;  // sums of products with 0
  int32_t width_;
  int64_t columns_;  // of 64 lanes
};
