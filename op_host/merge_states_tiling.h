// Tiling of merge_states.
#pragma once

#include <algorithm>

#include "op_host/launch_plan.h"
#include "op_host/soc.h"
#include "op_kernel/attention_tiling_data.h"
#include "op_kernel/merge_states_tiling_data.h"

namespace paged {

// Plans a call. `dtype` is "float16", "bfloat16" or "float32". Throws Unsupported.
inline LaunchPlan<MergeStatesTilingData> plan_merge_states(const MergeStatesTilingData& shape,
                                                           const std::string& dtype,
                                                           const Soc& soc) {
  // Of kMaxRows rows: two buffers in, two out, two accumulators in float32; and some lanes of
  // factors.
  constexpr int64_t kLanes = 4 * 1024;
  const int64_t element_size = dtype == "float32" ? 4 : 2;
  const int64_t widest = (kUsableUb - kLanes) / (kMaxRows * (4 * element_size + 2 * 4)) / 16 * 16;
  if (shape.head_dim % 16 != 0 || shape.head_dim < 16 || shape.head_dim > widest) {
    throw Unsupported("head_dim of out_a is " + std::to_string(shape.head_dim) +
                      ", expected a multiple of 16 from 16 to " + std::to_string(widest) +
                      " on the NPU");
  }
  const int64_t units = shape.num_tokens * ((shape.num_heads + kMaxRows - 1) / kMaxRows);
  return {"merge_states", "paged_merge_states_" + dtype, shape,
          std::clamp<int64_t>(units, 1, soc.vector_cores), 0};
}

}  // namespace paged
