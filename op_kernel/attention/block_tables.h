// Where the keys and values of a sequence lie, by its block table.
#pragma once

#include "attention/visible.h"
#include "attention_tiling_data.h"
#include "common/scalar.h"
#include "kernel_operator.h"

class BlockTables {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR block_tables) {
    tiling_ = &tiling;
    ids_.SetGlobalBuffer((__gm__ int32_t*)block_tables);
  }

  // Keys (or values) of one block, token_stride apart, from one on.
  struct Run {
    int64_t at;     // the element of the cache at which the first one begins
    int64_t count;  // to the end of the block
  };

  __aicore__ inline Run RunFrom(const CacheLayout& layout, int64_t sequence, int64_t kv_head,
                                int64_t key) const {
    const int64_t column = Divide(key, tiling_->per_block);
    const int64_t slot = key - column * tiling_->block_size;
    return {BlockAt(RowOf(sequence), column) * layout.block_stride + slot * layout.token_stride +
                kv_head * layout.head_stride,
            tiling_->block_size - slot};
  }

  // The element of a cache at which a key (or value) of a sequence and KV head begins.
  __aicore__ inline int64_t Find(const CacheLayout& layout, int64_t sequence, int64_t kv_head,
                                 int64_t key) const {
    return RunFrom(layout, sequence, kv_head, key).at;
  }

  // By columns of a sequence's row of the tables.
  __aicore__ inline int64_t RowOf(int64_t sequence) const {
    return sequence * tiling_->table_row_stride;
  }
  // Clamped into the pool: no table can make the kernel read outside the cache.
  __aicore__ inline int64_t BlockAt(int64_t row, int64_t column) const {
    const int64_t at = row + column * tiling_->table_column_stride;
    return Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);
  }

  // Keys of one block, token_stride apart, from a key on.
  __aicore__ inline int64_t CountFrom(int64_t key) const {
    return tiling_->block_size - (key - Divide(key, tiling_->per_block) * tiling_->block_size);
  }

 private:
  const AttentionTilingData* tiling_;
  AscendC::GlobalTensor<int32_t> ids_;
};
