// Tiling of copy_blocks.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/copy_blocks_tiling_data.h"

namespace paged {

// Plans a call. The workspace holds all sources. Throws Unsupported.
inline LaunchPlan<CopyBlocksTilingData> plan_copy_blocks(const CopyBlocksShape& shape,
                                                         const Soc& soc) {
  const Pool& pool = shape.pool;
  const CopyBlocksTilingData tiling = {
      .num_copies = shape.num_copies,
      .num_kv_heads = pool.num_kv_heads,
      .num_blocks = pool.num_blocks,
      .block_size = pool.block_size,
      .key = layout_of(pool.key),
      .value = layout_of(pool.value),
      .has_int64_ids = shape.has_int64_ids,
      .id_row_stride = shape.id_row_stride,
      .id_column_stride = shape.id_column_stride,
      .tokens_per_copy = rows_per_copy(pool, pool.block_size),
  };
  const int64_t parts = shape.num_copies * pool.num_kv_heads;
  const int64_t elements = parts * pool.block_size * (pool.key.head_dim + pool.value.head_dim);
  return {"copy_blocks", "paged_copy_blocks_" + copy_suffix(pool.dtype), tiling,
          std::clamp<int64_t>(parts, 1, soc.vector_cores), elements * element_size(pool.dtype)};
}

}  // namespace paged
