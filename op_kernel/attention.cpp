// Entry points of the attention kernel, one per dtype.
#include "common/entry.h"
#include "vector/attention_vector.h"

template <typename T>
__aicore__ inline void Attend(const AttentionTensors& tensors, GM_ADDR tiling) {
  const auto data = TilingAt<AttentionTilingData>(tiling);
  AscendC::TPipe pipe;
  AttentionVector<T> attention;
  attention.Init(tensors, data, &pipe);
  attention.Process();
}

#define PAGED_ATTENTION_ENTRY(name, type)                                                       \
  PAGED_KERNEL(PAGED_MEETING_VECTOR_CORES, name,                                                \
               (GM_ADDR query, GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR block_tables,    \
                GM_ADDR seq_lens, GM_ADDR query_start_loc, GM_ADDR alibi_slopes, GM_ADDR sinks, \
                GM_ADDR output, GM_ADDR lse, GM_ADDR workspace, GM_ADDR tiling),                \
               Attend<type>({query, key_cache, value_cache, block_tables, seq_lens,             \
                             query_start_loc, alibi_slopes, sinks, output, lse, workspace},     \
                            tiling))

PAGED_ATTENTION_ENTRY(paged_attention_float16, half)
PAGED_ATTENTION_ENTRY(paged_attention_bfloat16, bfloat16_t)
PAGED_ATTENTION_ENTRY(paged_attention_float32, float)
