// Tiling of the attention kernel: which cores do what, in how large steps.
//
// Functions of shapes, strides, dtype and options only. Lengths and block ids stay on the device,
// so a captured graph may be replayed for ever.
#pragma once

#include "op_host/launch_plan.h"
#include "op_host/soc.h"
#include "op_kernel/attention_tiling_data.h"

namespace paged {

// How much of a call one step of a core covers.
struct AttentionStep {
  int64_t rows;  // query rows
  int64_t tile;  // keys
};

// Bytes of unified buffer that the kernel allocates for steps of that size.
int64_t attention_ub_bytes(int64_t head_dim, int64_t head_dim_v, int64_t element_size,
                           const AttentionStep& step);

// Plans a call. `shape` holds the sizes, strides and options; the fields tile, split and max_pieces
// are decided here. `dtype` is "float16", "bfloat16" or "float32". Throws Unsupported.
LaunchPlan<AttentionTilingData> plan_attention(const AttentionTilingData& shape,
                                               const std::string& dtype, const Soc& soc);

}  // namespace paged
