// Gathers the K and V of whole sequences out of the pool, one sequence after another.
#include <vector>

#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "cpu/rows/row_copy.h"

namespace paged::cpu {
namespace {

void gather_token(const GatherKvParams& params, const Cache& cache, const Rows& rows, int64_t block,
                  int64_t offset, int64_t token) {
  const int64_t element = element_size(params.pool.dtype);
  for (int64_t head = 0; head < params.pool.num_kv_heads; ++head) {
    const char* from = at(cache, block, offset, head, element);
    char* to = at(rows, token, head, element_size(params.dtype));
    if (is_quantised(params.pool.dtype)) {
      selected_isa().gather_kv->dequantise_row(
          params, cache, from, *cache.scales.at(block, offset, head), reinterpret_cast<float*>(to));
    } else {
      std::memcpy(to, from, cache.head_dim * element);
    }
  }
}

}  // namespace

void gather_kv(const GatherKvParams& params, const ThreadPool& pool) {
  // first_token[i]: the row of the result where sequence i begins.
  std::vector<int64_t> first_token(params.batch + 1, 0);
  for (int64_t i = 0; i < params.batch; ++i)
    first_token[i + 1] = first_token[i] + params.seq_lens[i];
  const int64_t num_tokens = first_token[params.batch];
  const int64_t num_threads = pool.threads_for(num_tokens * token_bytes(params.pool));
  pool.for_each(num_threads, [&](int64_t thread) {
    const Range mine = part_of(num_tokens, num_threads, thread);
    int64_t sequence = 0;
    for (int64_t token = mine.begin; token < mine.end; ++token) {
      while (token >= first_token[sequence + 1]) ++sequence;
      const int64_t position = token - first_token[sequence];
      const int64_t block = params.block_tables.at(sequence, position / params.pool.block_size);
      const int64_t offset = position % params.pool.block_size;
      gather_token(params, params.pool.key, params.key, block, offset, token);
      gather_token(params, params.pool.value, params.value, block, offset, token);
    }
  });
}

}  // namespace paged::cpu
