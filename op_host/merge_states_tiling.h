// Tiling of merge_states.
#pragma once

#include <algorithm>

#include "op_host/launch_plan.h"
#include "op_host/soc.h"
#include "op_kernel/attention_tiling_data.h"
#include "op_kernel/merge_states_tiling_data.h"

namespace paged {

// Plans a call. Throws Unsupported.
inline LaunchPlan<MergeStatesTilingData> plan_merge_states(const MergeStatesParams& params,
                                                           const Soc& soc) {
  // Of kMaxRows rows: two buffers in, two out, two accumulators in float32; and some lanes of
  // factors.
  constexpr int64_t kLanes = 4 * 1024;
  const int64_t row_element = 4 * element_size(params.dtype) + 2 * 4;
  const int64_t widest = (kUsableUb - kLanes) / (kMaxRows * row_element) / 16 * 16;
  if (params.head_dim % 16 != 0 || params.head_dim < 16 || params.head_dim > widest) {
    throw Unsupported("head_dim of out_a is " + std::to_string(params.head_dim) +
                      ", expected a multiple of 16 from 16 to " + std::to_string(widest) +
                      " on the NPU");
  }
  const MergeStatesTilingData tiling = {
      .num_tokens = params.num_tokens,
      .num_heads = params.num_heads,
      .head_dim = params.head_dim,
      .out_a = layout_of(params.out_a),
      .out_b = layout_of(params.out_b),
      .out = layout_of(params.out),
      .lse_a = layout_of(params.lse_a),
      .lse_b = layout_of(params.lse_b),
  };
  const int64_t units = params.num_tokens * ((params.num_heads + kMaxRows - 1) / kMaxRows);
  return {"merge_states", "paged_merge_states_" + kernel_suffix(params.dtype), tiling,
          std::clamp<int64_t>(units, 1, soc.vector_cores), 0};
}

}  // namespace paged
