// What op_host decides for copy_blocks: plain data, the same bytes on host and device.
#pragma once

#include <cstdint>

#include "layout.h"

struct CopyBlocksTilingData {
  int64_t num_copies;
  int64_t num_kv_heads;
  int64_t num_blocks;
  int64_t block_size;
  CacheLayout key;
  CacheLayout value;
  // Scales of an int8 cache, head_dim 1. Those with head_dim 0 stay where they are.
  CacheLayout key_scale;
  CacheLayout value_scale;
  int64_t values_are_keys;  // a row of V is the begin of that row of K, and copied with it
  int64_t scales_at;        // bytes of workspace before the scales
  int64_t has_int64_ids;    // block_mapping is int64, not int32
  int64_t id_row_stride;    // strides of block_mapping in elements
  int64_t id_column_stride;
  int64_t tokens_per_copy;  // vectors that fit a UB buffer
};
