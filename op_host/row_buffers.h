// How many head_dim vectors a core moves at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "op_host/launch_plan.h"
#include "op_host/soc.h"

namespace paged {

// Vectors of a key or a value that fit one of two UB buffers, at least 1 and at most `wanted`. One
// DataCopyPad moves up to 4095 vectors.
inline int64_t rows_per_copy(const Pool& pool, int64_t wanted) {
  constexpr int64_t kBlockBytes = 32;
  constexpr int64_t kMostRows = 4095;
  const int64_t width = std::max(pool.key.head_dim, pool.value.head_dim);
  const int64_t bytes = width * element_size(pool.dtype);
  const int64_t pitch = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  const int64_t fitting = std::min(kUsableUb / (2 * pitch), kMostRows);
  if (fitting < 1) {
    throw Unsupported("head_dim is " + std::to_string(width) +
                      ", expected less: two vectors don't fit the unified buffer of a vector core");
  }
  return std::clamp<int64_t>(wanted, 1, fitting);
}

}  // namespace paged
