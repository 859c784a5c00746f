// Copies of head_dim vectors between rows and the pool: plain bytes, no dtype but its size.
#pragma once

#include <cstring>

#include "params.h"

namespace paged::cpu {

inline char* at(const Rows& rows, int64_t token, int64_t head, int64_t element) {
  return static_cast<char*>(rows.data) +
         (token * rows.token_stride + head * rows.head_stride) * element;
}

inline char* at(const Cache& cache, int64_t block, int64_t offset, int64_t head, int64_t element) {
  const int64_t index =
      block * cache.block_stride + offset * cache.token_stride + head * cache.head_stride;
  return static_cast<char*>(cache.data) + index * element;
}

// Bytes of the K and V of one token.
inline int64_t token_bytes(const Pool& pool) {
  return pool.num_kv_heads * (pool.key.head_dim + pool.value.head_dim) * element_size(pool.dtype);
}

}  // namespace paged::cpu
