// Tiling of copy_blocks.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/copy_blocks_tiling_data.h"

namespace paged {

// Only scales per token go with their blocks, those that K and V share once.
inline CacheLayout copied_scales(const Scales& scales, bool is_copied) {
  return is_copied && scales.are_per_token ? layout_of(scales) : CacheLayout{};
}

// Plans a call. The workspace holds all sources. Throws Unsupported.
inline LaunchPlan<CopyBlocksTilingData> plan_copy_blocks(const CopyBlocksShape& shape,
                                                         const Soc& soc) {
  const Pool& pool = shape.pool;
  const int64_t parts = shape.num_copies * pool.num_kv_heads;
  const int64_t rows = parts * pool.block_size;
  const int64_t element_bytes =
      rows * (pool.key.head_dim + pool.value.head_dim) * element_size(pool.dtype);
  const int64_t scales_at = round_up(element_bytes, sizeof(float));
  const CopyBlocksTilingData tiling = {
      .num_copies = shape.num_copies,
      .num_kv_heads = pool.num_kv_heads,
      .num_blocks = pool.num_blocks,
      .block_size = pool.block_size,
      .key = layout_of(pool.key),
      .value = layout_of(pool.value),
      .key_scale = copied_scales(pool.key.scales, true),
      .value_scale =
          copied_scales(pool.value.scales, pool.value.scales.data != pool.key.scales.data),
      .values_are_keys = values_are_keys(pool),
      .scales_at = scales_at,
      .has_int64_ids = shape.has_int64_ids,
      .id_row_stride = shape.id_row_stride,
      .id_column_stride = shape.id_column_stride,
      .tokens_per_copy = rows_per_copy(pool, pool.block_size),
  };
  const int64_t scale_bytes = rows * (tiling.key_scale.head_dim + tiling.value_scale.head_dim) * 4;
  return {"copy_blocks", "paged_copy_blocks_" + copy_suffix(pool.dtype), tiling,
          std::clamp<int64_t>(parts, 1, soc.vector_cores), scales_at + scale_bytes};
}

}  // namespace paged
