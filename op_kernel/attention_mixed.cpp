// Entry points of the attention kernel on groups of one cube core and two vector cores, one per
// dtype.
#include "common/entry.h"
#include "mixed/attention_cube.h"
#include "mixed/attention_softmax.h"

template <typename T>
__aicore__ inline void Attend(const AttentionTensors& tensors, GM_ADDR tiling) {
  const auto data = TilingAt<AttentionTilingData>(tiling);
  AscendC::TPipe pipe;
  if ASCEND_IS_AIC {
    AttentionCube<T> attention;
    attention.Init(tensors, data, &pipe);
    attention.Process();
  }
  if ASCEND_IS_AIV {
    AttentionSoftmax<T> attention;
    attention.Init(tensors, data, &pipe);
    attention.Process();
  }
}

#define PAGED_ATTENTION_MIXED_ENTRY(name, type)                                                 \
  PAGED_KERNEL(PAGED_GROUPS, name,                                                              \
               (GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables,    \
                GM_ADDR seq_lens, GM_ADDR query_start_loc, GM_ADDR alibi_slopes, GM_ADDR sinks, \
                GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR tree_mask, GM_ADDR output,      \
                GM_ADDR lse, GM_ADDR workspace, GM_ADDR tiling),                                \
               Attend<type>({query, key_cache, value_cache, block_tables, seq_lens,             \
                             query_start_loc, alibi_slopes, sinks, key_scale, value_scale,      \
                             tree_mask, output, lse, workspace},                                \
                            tiling))

PAGED_ATTENTION_MIXED_ENTRY(paged_attention_mixed_float16, half)
PAGED_ATTENTION_MIXED_ENTRY(paged_attention_mixed_bfloat16, bfloat16_t)
