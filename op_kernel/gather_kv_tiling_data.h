// What op_host decides for gather_kv: plain data, the same bytes on host and device.
#pragma once

#include <cstdint>

#include "layout.h"

struct GatherKvTilingData {
  int64_t num_tokens;  // of the result
  int64_t batch;
  int64_t num_kv_heads;
  int64_t num_blocks;
  int64_t block_size;
  int64_t max_blocks_per_seq;
  int64_t table_row_stride;
  int64_t table_column_stride;
  CacheLayout key;
  CacheLayout value;
  CacheLayout key_scale;  // head_dim 1
  CacheLayout value_scale;
  int64_t tokens_per_copy;  // vectors that fit a UB buffer
};
