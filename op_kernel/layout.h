// How tensors lie in GM, as op_host passes it on. Strides count elements; head_dim is dense.
#pragma once

#include <cstdint>

// [num_blocks, block_size, num_kv_heads, head_dim]: key_cache or value_cache.
struct CacheLayout {
  int64_t head_dim;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
};

// [num_tokens, num_heads, head_dim]
struct RowLayout {
  int64_t token_stride;
  int64_t head_stride;
};
