// Walks one sequence's keys or values through its block table, from GM to UB.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"
#include "row_copy.h"
#include "visible.h"

class BlockTables {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR block_tables) {
    tiling_ = &tiling;
    ids_.SetGlobalBuffer((__gm__ int32_t*)block_tables);
  }

  // The id of a block, clamped into the pool: no table can make the kernel read outside the cache.
  __aicore__ inline int64_t At(int64_t sequence, int64_t column) const {
    const int64_t at = sequence * tiling_->table_row_stride + column * tiling_->table_column_stride;
    return Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);
  }

 private:
  const AttentionTilingData* tiling_;
  AscendC::GlobalTensor<int32_t> ids_;
};

// Copies keys (or values) [begin + lanes.first, begin + lanes.last) of a sequence and KV head to
// the rows lanes.first to lanes.last of `to`. A block's part of the tile is one copy.
template <typename T>
__aicore__ inline void CopyTileIn(const AscendC::LocalTensor<T>& to,
                                  const AscendC::GlobalTensor<T>& cache, const CacheLayout& layout,
                                  const BlockTables& tables, int64_t block_size, int64_t sequence,
                                  int64_t kv_head, int64_t begin, const Visible& lanes) {
  int64_t lane = lanes.first;
  while (lane < lanes.last) {
    const int64_t key = begin + lane;
    const int64_t offset = key % block_size;
    const int64_t count = Smaller(block_size - offset, lanes.last - lane);
    const int64_t at = tables.At(sequence, key / block_size) * layout.block_stride +
                       offset * layout.token_stride + kv_head * layout.head_stride;
    CopyRowsIn(to[lane * layout.head_dim], cache[at], count, layout.head_dim, layout.token_stride);
    lane += count;
  }
}
