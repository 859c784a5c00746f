// Tiling of gather_kv.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/gather_kv_tiling_data.h"

namespace paged {

// Plans a call. Throws Unsupported.
inline LaunchPlan<GatherKvTilingData> plan_gather_kv(const GatherKvShape& shape, const Soc& soc) {
  const Pool& pool = shape.pool;
  const bool dequantises = is_quantised(pool.dtype);
  const int64_t row_bytes = dequantised_row_bytes(widest_row(pool));
  const GatherKvTilingData tiling = {
      .num_tokens = shape.num_tokens,
      .batch = shape.batch,
      .num_kv_heads = pool.num_kv_heads,
      .num_blocks = pool.num_blocks,
      .block_size = pool.block_size,
      .max_blocks_per_seq = shape.max_blocks_per_seq,
      .table_row_stride = shape.block_tables.row_stride,
      .table_column_stride = shape.block_tables.column_stride,
      .key = layout_of(pool.key),
      .value = layout_of(pool.value),
      .key_scale = layout_of(pool.key.scales),
      .value_scale = layout_of(pool.value.scales),
      .tokens_per_copy = dequantises ? rows_at_once(pool, row_bytes, pool.block_size)
                                     : rows_per_copy(pool, pool.block_size),
  };
  // Blocks that the sequences fill, at least: a core for each and KV head.
  const int64_t blocks = (shape.num_tokens + pool.block_size - 1) / pool.block_size;
  const std::string suffix = dequantises ? kernel_suffix(pool.dtype) : copy_suffix(pool.dtype);
  return {"gather_kv", "paged_gather_kv_" + suffix, tiling,
          std::clamp<int64_t>(blocks * pool.num_kv_heads, 1, soc.vector_cores), 0};
}

}  // namespace paged
