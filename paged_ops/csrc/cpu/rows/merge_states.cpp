// Deals the rows of merge_states to the threads.
#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace paged::cpu {

void merge_states(const MergeStatesParams& params, const ThreadPool& pool) {
  const int64_t num_rows = params.num_tokens * params.num_heads;
  const int64_t num_threads =
      pool.threads_for(3 * num_rows * params.head_dim * element_size(params.dtype));
  pool.for_each(num_threads, [&](int64_t thread) {
    const Range mine = part_of(num_rows, num_threads, thread);
    selected_isa().merge_states->merge(params, mine.begin, mine.end);
  });
}

}  // namespace paged::cpu
