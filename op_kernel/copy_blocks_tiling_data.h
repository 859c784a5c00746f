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
  int64_t has_int64_ids;  // block_mapping is int64, not int32
  int64_t id_row_stride;  // strides of block_mapping in elements
  int64_t id_column_stride;
  int64_t tokens_per_copy;  // vectors that fit a UB buffer
};
