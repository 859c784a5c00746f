// The scales of a tile's keys, or values, as lanes: of a cache of int8 elements.
//
// They come in beside the tile's keys, in the same buffer of a queue: a position has eight buffers.
#pragma once

#include "attention/block_tables.h"
#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/int8_rows.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "common/scalar.h"
#include "kernel_operator.h"

class TileScales {
 public:
  // Bytes that the scales of a tile take where they come in.
  static __aicore__ inline int64_t BytesIn(int64_t tile) { return tile * kGranuleBytes; }

  // op_host counts this buffer in attention_ub_bytes.
  __aicore__ inline void Init(const AttentionTilingData& tiling, const CacheLayout& layout,
                              GM_ADDR scales, const FirstLanes& first_lanes, AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    layout_ = &layout;
    first_lanes_ = &first_lanes;
    scales_.SetGlobalBuffer((__gm__ float*)scales);
    lanes_ = NewBuffer<float>(pipe, kRepeatLanes);
    AscendC::Duplicate(lanes_, 0.0f, kRepeatLanes);
    Barrier();
  }

  // The lanes hold what was there before where nothing was loaded.
  __aicore__ inline const Float& Lanes() const { return lanes_; }

  // Sets the lanes for a unit whose KV head has one scale.
  __aicore__ inline void OpenUnit(const Unit& unit) {
    if (AreShared()) {
      AscendC::Duplicate(lanes_, scales_.GetValue(unit.kv_head * layout_->head_stride),
                         kRepeatLanes);
      Barrier();
    }
  }

  // Brings the scales of the keys `seen` of the tile from `begin` on to `in`.
  __aicore__ inline void Load(const Float& in, const BlockTables& tables, const Unit& unit,
                              int64_t begin, const Range& seen) const {
    if (AreShared()) {
      return;
    }
    for (int64_t k = seen.first; k < seen.last;) {
      const int64_t count = Smaller(tables.CountFrom(begin + k), seen.last - k);
      // A block, too, begins at a whole granule of lanes: those before k are in the same block.
      const int64_t before = AreDense() ? k % kGranule : 0;
      const int64_t at = tables.Find(*layout_, unit.index, unit.kv_head, begin + k - before);
      if (AreDense()) {
        CopyRowsIn(in[k - before], scales_[at], 1, before + count, before + count);
      } else {
        CopyRowsIn(in[k * kGranule], scales_[at], count, 1, layout_->token_stride);
      }
      k += count;
    }
  }

  // Puts what is in `in` into the lanes. The barrier after it is left to the caller.
  __aicore__ inline void Take(const Float& in, const Range& seen) {
    if (AreShared()) {
      return;
    }
    const int64_t before = seen.first % kGranule;
    const int64_t first = seen.first - before;
    const int64_t count = seen.last - first;
    if (AreDense()) {
      AscendC::Adds(lanes_[first], in[first], 0.0f, static_cast<int32_t>(count));
    } else {
      if (before > 0) {
        AscendC::Duplicate(in[first * kGranule], 0.0f, static_cast<int32_t>(before * kGranule));
        Barrier();
      }
      first_lanes_->Take(lanes_[first], in[first * kGranule], count);
    }
  }

 private:
  // One scale serves all tokens of a KV head.
  __aicore__ inline bool AreShared() const {
    return layout_->block_stride == 0 && layout_->token_stride == 0;
  }

  // Those of a block lie side by side, and come in as they are.
  __aicore__ inline bool AreDense() const {
    return layout_->token_stride == 1 && tiling_->block_size % kGranule == 0;
  }

  const AttentionTilingData* tiling_;
  const CacheLayout* layout_;
  const FirstLanes* first_lanes_;
  AscendC::GlobalTensor<float> scales_;
  Float lanes_;
};
