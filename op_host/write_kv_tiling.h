// Tiling of write_kv.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/write_kv_tiling_data.h"

namespace paged {

// Plans a call; heads_per_copy is decided here. Throws Unsupported.
inline LaunchPlan<WriteKvTilingData> plan_write_kv(const WriteKvTilingData& shape,
                                                   int64_t element_size, const Soc& soc) {
  WriteKvTilingData tiling = shape;
  const int64_t widest = std::max(shape.key.head_dim, shape.value.head_dim);
  tiling.heads_per_copy = rows_per_copy(widest, element_size, shape.num_kv_heads);
  return {"write_kv", element_size == 4 ? "paged_write_kv_32bit" : "paged_write_kv_16bit", tiling,
          std::clamp<int64_t>(shape.num_tokens, 1, soc.vector_cores), 0};
}

}  // namespace paged
