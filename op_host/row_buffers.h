// How many head_dim vectors a core moves at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "op_host/launch_plan.h"
#include "op_host/soc.h"

namespace paged {

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Elements of the longer of a key and a value.
inline int64_t widest_row(const Pool& pool) {
  return std::max(pool.key.head_dim, pool.value.head_dim);
}

// Vectors of a key or a value that fit one of two UB buffers, at least 1 and at most `wanted`. One
// DataCopyPad moves up to 4095 vectors.
inline int64_t rows_per_copy(const Pool& pool, int64_t wanted) {
  constexpr int64_t kBlockBytes = 32;
  constexpr int64_t kMostRows = 4095;
  const int64_t width = widest_row(pool);
  // Beside the vectors of an int8 cache come their scales, each in a block.
  const int64_t scale_bytes = is_quantised(pool.dtype) ? kBlockBytes : 0;
  const int64_t pitch = round_up(width * element_size(pool.dtype), kBlockBytes) + scale_bytes;
  const int64_t fitting = std::min(kUsableUb / (2 * pitch), kMostRows);
  if (fitting < 1) {
    throw Unsupported("head_dim is " + std::to_string(width) +
                      ", expected less: two vectors don't fit the unified buffer of a vector core");
  }
  return std::clamp<int64_t>(wanted, 1, fitting);
}

// UB of one row of `width` elements on its way to int8 and from it: RowQuantiser, RowDequantiser.
inline int64_t quantised_row_bytes(int64_t width, int64_t element) {
  const int64_t pitch = round_up(width, 64);
  const int64_t in_and_out = round_up(width * element, 32) + 32 + round_up(width, 32) + 32;
  return 2 * in_and_out + 2 * 4 * pitch + pitch / 8;
}

inline int64_t dequantised_row_bytes(int64_t width) {
  const int64_t in_and_out = round_up(width, 32) + 32 + 4 * round_up(width, 8);
  return 2 * in_and_out + 2 * round_up(width, 16);
}

// Rows of an int8 cache that are computed at a time, each of `row_bytes`: as many as fit, at most
// `wanted`, and the 64 whose scales fill a vector.
inline int64_t rows_at_once(const Pool& pool, int64_t row_bytes, int64_t wanted) {
  // A repeat stride of 255 blocks of 8 floats bounds the row; it ends with a whole vector.
  constexpr int64_t kWidest = 255 * 8 / 64 * 64;
  const int64_t width = widest_row(pool);
  if (width > kWidest) {
    throw Unsupported("head_dim is " + std::to_string(width) + ", expected at most " +
                      std::to_string(kWidest) + " for a cache of torch.int8 on the NPU");
  }
  constexpr int64_t kScales = 8 * 1024;  // of 64 rows in several forms
  const int64_t fitting = std::min<int64_t>((kUsableUb - kScales) / row_bytes, 64);
  return std::clamp<int64_t>(wanted, 1, fitting);
}

}  // namespace paged
