// Tiling of write_kv.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/write_kv_tiling_data.h"

namespace paged {

// Plans a call. Throws Unsupported.
inline LaunchPlan<WriteKvTilingData> plan_write_kv(const WriteKvShape& shape, const Soc& soc) {
  const Pool& pool = shape.pool;
  const WriteKvTilingData tiling = {
      .num_tokens = shape.num_tokens,
      .num_kv_heads = pool.num_kv_heads,
      .num_blocks = pool.num_blocks,
      .block_size = pool.block_size,
      .key_rows = layout_of(shape.key),
      .value_rows = layout_of(shape.value),
      .key = layout_of(pool.key),
      .value = layout_of(pool.value),
      .has_int64_slots = shape.has_int64_slots,
      .heads_per_copy = rows_per_copy(pool, pool.num_kv_heads),
  };
  return {"write_kv", "paged_write_kv_" + copy_suffix(pool.dtype), tiling,
          std::clamp<int64_t>(shape.num_tokens, 1, soc.vector_cores), 0};
}

}  // namespace paged
