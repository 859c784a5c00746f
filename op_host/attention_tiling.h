// Tiling of the attention kernel: which cores do what, in how large steps.
//
// Functions of shapes, strides, dtype and options only. Lengths and block ids stay on the device,
// so a captured graph may be replayed for ever.
#pragma once

#include <optional>

#include "op_host/launch_plan.h"
#include "op_host/soc.h"
#include "op_kernel/attention_tiling_data.h"
#include "params.h"

namespace paged {

// The kernels of attention. Their results differ in the last bits.
enum class AttentionKernel {
  kVector,  // on vector cores alone
  kMixed,   // on groups of one cube core and two vector cores
};

// The kernel called "vector" or "mixed"; nothing for an empty name. Throws Unsupported for others.
std::optional<AttentionKernel> named_kernel(const std::string& name);

// What decides which kernel a call takes, and in how large steps.
struct AttentionKind {
  Dtype dtype;        // of query and output
  Dtype cache_dtype;  // the same, or int8
  int64_t head_dim;
  int64_t head_dim_v;
  bool values_are_keys;  // a row of V is the begin of that row of K
  bool has_tree_mask;
};

// Which kernel a call takes: the mixed one for 16-bit dtypes whose head_dim fits its memories. The
// cube reads keys and values as fast as two vector cores, and multiplies them hundreds of times
// faster, so there is no phase in which vector cores alone are quicker; and a row has the same bits
// in decode and in prefill only if one kernel serves both. In float32 the cube runs at a quarter of
// its speed or less, and weights and values would take twice the memory: the vector kernel serves
// it. It also serves what the mixed one can't read: int8 caches and tree masks.
//
// `wanted` asks for a kernel; what the mixed one can't serve takes the vector one all the same.
// Throws Unsupported where neither serves.
AttentionKernel choose_attention_kernel(const AttentionKind& kind,
                                        std::optional<AttentionKernel> wanted = {});

// How much of a call one step covers: of a vector core, or of a group, which takes kPiece keys
// in tiles.
struct AttentionStep {
  int64_t rows;  // query rows
  int64_t tile;  // keys that are loaded at a time
};

// Bytes of unified buffer that the vector kernel allocates for steps of that size.
int64_t attention_ub_bytes(const AttentionKind& kind, const AttentionStep& step);

// Bytes of L1, and of unified buffer, that the mixed kernel allocates for steps of that size and
// units of so many bands. `buffers` are those of scores and products on their way in.
int64_t attention_l1_bytes(int64_t head_dim, int64_t head_dim_v, const AttentionStep& step,
                           int64_t bands);
int64_t softmax_ub_bytes(int64_t head_dim_v, const AttentionStep& step, int64_t bands,
                         int64_t buffers, bool has_alibi, bool split);

// Plans a call. `wanted` asks for a kernel; a call that the mixed one can't serve takes the vector
// one all the same. Throws Unsupported.
LaunchPlan<AttentionTilingData> plan_attention(const AttentionShape& shape, const Soc& soc,
                                               std::optional<AttentionKernel> wanted = {});

}  // namespace paged
