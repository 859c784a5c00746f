// Where the keys and values of a sequence lie, by its block table.
#pragma once

#include "attention_tiling_data.h"
#include "common/scalar.h"
#include "kernel_operator.h"

class BlockTables {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR block_tables) {
    tiling_ = &tiling;
    ids_.SetGlobalBuffer((__gm__ int32_t*)block_tables);
  }

  // The element of a cache at which a key (or value) of a sequence and KV head begins.
  __aicore__ inline int64_t Find(const CacheLayout& layout, int64_t sequence, int64_t kv_head,
                                 int64_t key) const {
    return IdAt(sequence, key / tiling_->block_size) * layout.block_stride +
           key % tiling_->block_size * layout.token_stride + kv_head * layout.head_stride;
  }

  // Keys of one block, token_stride apart, from a key on.
  __aicore__ inline int64_t CountFrom(int64_t key) const {
    return tiling_->block_size - key % tiling_->block_size;
  }

 private:
  // Clamped into the pool: no table can make the kernel read outside the cache.
  __aicore__ inline int64_t IdAt(int64_t sequence, int64_t column) const {
    const int64_t at = sequence * tiling_->table_row_stride + column * tiling_->table_column_stride;
    return Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);
  }

  const AttentionTilingData* tiling_;
  AscendC::GlobalTensor<int32_t> ids_;
};
