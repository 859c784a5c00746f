// Entry points of the attention kernel, one per dtype. SyncAll meets on the hardware's flags, which
// need the mixed task type even though the cube cores do nothing.
#include "vector/attention_vector.h"

#define PAGED_ATTENTION_ENTRY(name, type)                                                   \
  extern "C" __global__ __aicore__ void name(                                               \
      GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables,          \
      GM_ADDR seq_lens, GM_ADDR query_start_loc, GM_ADDR alibi_slopes, GM_ADDR sinks,       \
      GM_ADDR output, GM_ADDR lse, GM_ADDR workspace, GM_ADDR tiling) {                     \
    const AttentionTilingData data = *(__gm__ AttentionTilingData*)tiling;                  \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);                                      \
    AscendC::TPipe pipe;                                                                    \
    AttentionVector<type> attention;                                                        \
    attention.Init({query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, \
                    alibi_slopes, sinks, output, lse, workspace},                           \
                   data, &pipe);                                                            \
    attention.Process();                                                                    \
  }

PAGED_ATTENTION_ENTRY(paged_attention_float16, half)
PAGED_ATTENTION_ENTRY(paged_attention_bfloat16, bfloat16_t)
PAGED_ATTENTION_ENTRY(paged_attention_float32, float)
