// Tiling of copy_blocks.
#pragma once

#include "op_host/row_buffers.h"
#include "op_kernel/copy_blocks_tiling_data.h"

namespace paged {

// Plans a call; tokens_per_copy is decided here. The workspace holds all sources. Throws
// Unsupported.
inline LaunchPlan<CopyBlocksTilingData> plan_copy_blocks(const CopyBlocksTilingData& shape,
                                                         int64_t element_size, const Soc& soc) {
  CopyBlocksTilingData tiling = shape;
  const int64_t widest = std::max(shape.key.head_dim, shape.value.head_dim);
  tiling.tokens_per_copy = rows_per_copy(widest, element_size, shape.block_size);
  const int64_t parts = shape.num_copies * shape.num_kv_heads;
  const int64_t elements = parts * shape.block_size * (shape.key.head_dim + shape.value.head_dim);
  return {"copy_blocks", element_size == 4 ? "paged_copy_blocks_32bit" : "paged_copy_blocks_16bit",
          tiling, std::clamp<int64_t>(parts, 1, soc.vector_cores), elements * element_size};
}

}  // namespace paged
