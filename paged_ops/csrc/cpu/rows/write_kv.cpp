// Writes the K and V of new tokens into their slots.
#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "cpu/rows/row_copy.h"

namespace paged::cpu {
namespace {

void copy_token(const Pool& pool, const Cache& cache, const Rows& rows, int64_t token,
                int64_t slot) {
  const int64_t element = element_size(pool.dtype);
  const int64_t bytes = cache.head_dim * element;
  for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
    std::memcpy(at(cache, slot / pool.block_size, slot % pool.block_size, head, element),
                at(rows, token, head, element), bytes);
  }
}

void quantise_token(const WriteKvParams& params, const Cache& cache, const Rows& rows,
                    int64_t token, int64_t slot) {
  const int64_t block = slot / params.pool.block_size;
  const int64_t offset = slot % params.pool.block_size;
  for (int64_t head = 0; head < params.pool.num_kv_heads; ++head) {
    selected_isa().write_kv->quantise_row(
        params, cache, at(rows, token, head, element_size(params.dtype)),
        cache.scales.at(block, offset, head),
        at(cache, block, offset, head, element_size(params.pool.dtype)));
  }
}

void write_token(const WriteKvParams& params, int64_t token, int64_t slot) {
  const Pool& pool = params.pool;
  if (!is_quantised(pool.dtype)) {
    copy_token(pool, pool.key, params.key, token, slot);
    copy_token(pool, pool.value, params.value, token, slot);
    return;
  }
  quantise_token(params, pool.key, params.key, token, slot);
  if (!values_are_keys(pool)) quantise_token(params, pool.value, params.value, token, slot);
}

}  // namespace

void write_kv(const WriteKvParams& params, const ThreadPool& pool) {
  // Slots, not tokens, are dealt to the threads, a few neighbours at a time: a slot given twice is
  // then written by one thread in order, so the last row wins, whole.
  constexpr int64_t kNeighbours = 8;
  const int64_t num_threads = pool.threads_for(params.num_tokens * token_bytes(params.pool));
  pool.for_each(num_threads, [&](int64_t thread) {
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      const int64_t slot = params.slot_mapping[token];
      if (slot < 0 || slot / kNeighbours % num_threads != thread) continue;
      write_token(params, token, slot);
    }
  });
}

}  // namespace paged::cpu
