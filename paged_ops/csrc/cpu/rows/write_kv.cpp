// Deals the K and V of new tokens to the threads, which write them into their slots.
#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "cpu/rows/row_copy.h"

namespace paged::cpu {

void write_kv(const WriteKvParams& params, const ThreadPool& pool) {
  // Slots, not tokens, are dealt to the threads, a few neighbours at a time: a slot given twice is
  // then written by one thread in order, so the last row wins, whole.
  constexpr int64_t kNeighbours = 8;
  const int64_t num_threads = pool.threads_for(params.num_tokens * token_bytes(params.pool));
  const WriteKvKernels& kernels = *selected_isa().write_kv;
  pool.for_each(num_threads, [&](int64_t thread) {
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      const int64_t slot = params.slot_mapping[token];
      if (slot < 0 || slot / kNeighbours % num_threads != thread) continue;
      kernels.write_token(params, token, slot);
    }
  });
}

}  // namespace paged::cpu
