// Tiling of write_kv.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/write_kv_tiling_data.h"

namespace paged {

// Plans a call. Throws Unsupported.
inline LaunchPlan<WriteKvTilingData> plan_write_kv(const WriteKvShape& shape, const Soc& soc) {
  const Pool& pool = shape.pool;
  const bool quantises = is_quantised(pool.dtype);
  const int64_t row_bytes = quantised_row_bytes(widest_row(pool), element_size(shape.dtype));
  const WriteKvTilingData tiling = {
      .num_tokens = shape.num_tokens,
      .num_kv_heads = pool.num_kv_heads,
      .num_blocks = pool.num_blocks,
      .block_size = pool.block_size,
      .key_rows = layout_of(shape.key),
      .value_rows = layout_of(shape.value),
      .key = layout_of(pool.key),
      .value = layout_of(pool.value),
      .key_scale = layout_of(pool.key.scales),
      .value_scale = layout_of(pool.value.scales),
      .chooses_key_scales = pool.key.scales.are_per_token,
      .chooses_value_scales = pool.value.scales.are_per_token,
      .values_are_keys = values_are_keys(pool),
      .has_int64_slots = shape.has_int64_slots,
      .heads_per_copy = quantises ? rows_at_once(pool, row_bytes, pool.num_kv_heads)
                                  : rows_per_copy(pool, pool.num_kv_heads),
  };
  const std::string suffix = quantises
                                 ? kernel_suffix(shape.dtype) + "_" + kernel_suffix(pool.dtype)
                                 : copy_suffix(pool.dtype);
  return {"write_kv", "paged_write_kv_" + suffix, tiling,
          std::clamp<int64_t>(shape.num_tokens, 1, soc.vector_cores), 0};
}

}  // namespace paged
