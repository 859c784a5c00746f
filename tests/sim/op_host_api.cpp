// A C interface to the tiling functions, for tests that call them through ctypes.
#include <algorithm>
#include <cstdio>

#include "op_host/attention_tiling.h"
#include "op_host/copy_blocks_tiling.h"
#include "op_host/merge_states_tiling.h"
#include "op_host/write_kv_tiling.h"

namespace {

struct Answer {
  int64_t num_cores;
  int64_t workspace_bytes;
  char stem[64];
  char kernel[64];
  char refusal[256];  // empty: planned
};

// Runs `plan`, which returns a LaunchPlan of the type of *tiling, and stores what it says.
template <class Tiling, class Plan>
void answer(Tiling* tiling, Answer* to, Plan plan) {
  *to = {};
  try {
    const auto planned = plan();
    *tiling = planned.tiling;
    to->num_cores = planned.num_cores;
    to->workspace_bytes = planned.workspace_bytes;
    std::snprintf(to->stem, sizeof(to->stem), "%s", planned.stem.c_str());
    std::snprintf(to->kernel, sizeof(to->kernel), "%s", planned.kernel.c_str());
  } catch (const paged::Unsupported& unsupported) {
    std::snprintf(to->refusal, sizeof(to->refusal), "%s", unsupported.what());
  }
}

paged::Soc chip(int64_t vector_cores) {
  return {"test", std::max<int64_t>(1, vector_cores / 2), vector_cores};
}

}  // namespace

extern "C" {

// Cores of the chip, 0 if it is unknown.
int64_t soc_cube_cores(const char* name) {
  const paged::Soc* soc = paged::find_soc(name);
  return soc == nullptr ? 0 : soc->cube_cores;
}

int64_t soc_vector_cores(const char* name) {
  const paged::Soc* soc = paged::find_soc(name);
  return soc == nullptr ? 0 : soc->vector_cores;
}

int64_t usable_ub() { return paged::kUsableUb; }

int64_t usable_l1() { return paged::kUsableL1; }

int64_t attention_ub_bytes(int64_t head_dim, int64_t head_dim_v, int64_t element_size, int64_t rows,
                           int64_t tile) {
  return paged::attention_ub_bytes(head_dim, head_dim_v, element_size, {rows, tile});
}

int64_t attention_l1_bytes(int64_t head_dim, int64_t head_dim_v, int64_t rows, int64_t tile) {
  return paged::attention_l1_bytes(head_dim, head_dim_v, {rows, tile});
}

int64_t softmax_ub_bytes(int64_t head_dim_v, int64_t rows, int64_t tile, int64_t buffers,
                         int64_t has_alibi, int64_t split) {
  return paged::softmax_ub_bytes(head_dim_v, {rows, tile}, buffers, has_alibi != 0, split != 0);
}

// `wanted` is "vector", "mixed", or empty for the usual kernel.
void plan_attention(AttentionTilingData* tiling, const char* dtype, int64_t cores,
                    const char* wanted, Answer* to) {
  answer(tiling, to, [&] {
    return paged::plan_attention(*tiling, dtype, chip(cores), paged::named_kernel(wanted));
  });
}

void plan_write_kv(WriteKvTilingData* tiling, int64_t element_size, int64_t cores, Answer* to) {
  answer(tiling, to, [&] { return paged::plan_write_kv(*tiling, element_size, chip(cores)); });
}

void plan_copy_blocks(CopyBlocksTilingData* tiling, int64_t element_size, int64_t cores,
                      Answer* to) {
  answer(tiling, to, [&] { return paged::plan_copy_blocks(*tiling, element_size, chip(cores)); });
}

void plan_merge_states(MergeStatesTilingData* tiling, const char* dtype, int64_t cores,
                       Answer* to) {
  answer(tiling, to, [&] { return paged::plan_merge_states(*tiling, dtype, chip(cores)); });
}

}  // extern "C"
