// What the host needs to launch a kernel, decided from shapes alone.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

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

}  // namespace paged
