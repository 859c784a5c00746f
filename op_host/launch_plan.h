// What the host needs to launch a kernel, decided from shapes alone.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "op_kernel/layout.h"
#include "params.h"

namespace paged {

template <class TilingData>
struct LaunchPlan {
  std::string stem;    // the source, op_kernel/<stem>.cpp
  std::string kernel;  // the entry point's name
  TilingData tiling;
  int64_t num_cores;  // blocks to launch: vector cores, or groups of one cube core and two vector
                      // cores. Never more than the chip has, as the kernels may meet.
  int64_t workspace_bytes;  // 0: none
};

// A shape that the Ascend kernels don't serve; the message says which limit it meets.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The end of the name of a kernel that computes with elements of that type.
inline std::string kernel_suffix(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kBFloat16:
      return "bfloat16";
    case Dtype::kInt8:
      return "int8";
    default:
      throw Unsupported("a 910B has no float8");
  }
}

// The same of a kernel that only moves them.
inline std::string copy_suffix(Dtype dtype) {
  return std::to_string(8 * element_size(dtype)) + "bit";
}

inline RowLayout layout_of(const Rows& rows) { return {rows.token_stride, rows.head_stride}; }

inline CacheLayout layout_of(const Cache& cache) {
  return {cache.head_dim, cache.block_stride, cache.token_stride, cache.head_stride};
}

// The scales of a cache are one whose rows are one float.
inline CacheLayout layout_of(const Scales& scales) {
  return {1, scales.block_stride, scales.token_stride, scales.head_stride};
}

}  // namespace paged
