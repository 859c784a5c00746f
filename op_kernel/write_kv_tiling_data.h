// What op_host decides for write_kv: plain data, the same bytes on host and device.
#pragma once

#include <cstdint>

#include "layout.h"

struct WriteKvTilingData {
  int64_t num_tokens;
  int64_t num_kv_heads;
  int64_t num_blocks;
  int64_t block_size;
  RowLayout key_rows;
  RowLayout value_rows;
  CacheLayout key;
  CacheLayout value;
  // Of an int8 cache: its scales, head_dim 1.
  CacheLayout key_scale;
  CacheLayout value_scale;
  int64_t chooses_key_scales;  // they are written, one per token and head, else read
  int64_t chooses_value_scales;
  int64_t values_are_keys;  // a row of V is the begin of that row of K, and written with it
  int64_t has_int64_slots;  // slot_mapping is int64, not int32
  int64_t heads_per_copy;   // vectors that fit a UB buffer
};
