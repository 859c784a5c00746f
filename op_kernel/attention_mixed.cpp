// Entry points of the attention kernel on groups of one cube core and two vector cores, one per
// dtype. The device compiler compiles the function once for each kind of core.
#include "mixed/attention_cube.h"
#include "mixed/attention_softmax.h"

#define PAGED_ATTENTION_MIXED_ENTRY(name, type)                                               \
  extern "C" __global__ __aicore__ void name(                                                 \
      GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables,            \
      GM_ADDR seq_lens, GM_ADDR query_start_loc, GM_ADDR alibi_slopes, GM_ADDR sinks,         \
      GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR tree_mask, GM_ADDR output, GM_ADDR lse, \
      GM_ADDR workspace, GM_ADDR tiling) {                                                    \
    const AttentionTilingData data = *(__gm__ AttentionTilingData*)tiling;                    \
    const AttentionTensors tensors = {query,     key_cache,       value_cache,  block_tables, \
                                      seq_lens,  query_start_loc, alibi_slopes, sinks,        \
                                      key_scale, value_scale,     tree_mask,    output,       \
                                      lse,       workspace};                                  \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                                        \
    AscendC::TPipe pipe;                                                                      \
    if ASCEND_IS_AIC {                                                                        \
      AttentionCube<type> attention;                                                          \
      attention.Init(tensors, data, &pipe);                                                   \
      attention.Process();                                                                    \
    }                                                                                         \
    if ASCEND_IS_AIV {                                                                        \
      AttentionSoftmax<type> attention;                                                       \
      attention.Init(tensors, data, &pipe);                                                   \
      attention.Process();                                                                    \
    }                                                                                         \
  }

PAGED_ATTENTION_MIXED_ENTRY(paged_attention_mixed_float16, half)
PAGED_ATTENTION_MIXED_ENTRY(paged_attention_mixed_bfloat16, bfloat16_t)
