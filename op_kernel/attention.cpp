// Entry points of the attention kernel, one per dtype of the query and of the caches.
#include "common/entry.h"
#include "vector/attention_vector.h"

template <typename T, typename C>
__aicore__ inline void Attend(const AttentionTensors& tensors, GM_ADDR tiling) {
  const auto data = TilingAt<AttentionTilingData>(tiling);
  AscendC::TPipe pipe;
  AttentionVector<T, C> attention;
  attention.Init(tensors, data, &pipe);
  attention.Process();
}

#define PAGED_ATTENTION_ENTRY(name, type, cached)                                                  \
  PAGED_KERNEL(PAGED_MEETING_VECTOR_CORES, name,                                                   \
               (GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables,       \
                GM_ADDR seq_lens, GM_ADDR query_start_loc, GM_ADDR alibi_slopes, GM_ADDR sinks,    \
                GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR tree_mask, GM_ADDR output,         \
                GM_ADDR lse, GM_ADDR workspace, GM_ADDR tiling),                                   \
               Attend<type, cached>({query, key_cache, value_cache, block_tables, seq_lens,        \
                                     query_start_loc, alibi_slopes, sinks, key_scale, value_scale, \
                                     tree_mask, output, lse, workspace},                           \
                                    tiling))

PAGED_ATTENTION_ENTRY(paged_attention_float16, half, half)
PAGED_ATTENTION_ENTRY(paged_attention_bfloat16, bfloat16_t, bfloat16_t)
PAGED_ATTENTION_ENTRY(paged_attention_float32, float, float)
PAGED_ATTENTION_ENTRY(paged_attention_float16_int8, half, int8_t)
PAGED_ATTENTION_ENTRY(paged_attention_bfloat16_int8, bfloat16_t, int8_t)
PAGED_ATTENTION_ENTRY(paged_attention_float32_int8, float, int8_t)
