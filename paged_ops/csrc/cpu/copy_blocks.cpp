// Copies whole blocks inside the pool, as if every block were read before any is written.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "cpu/ops.h"
#include "cpu/row_copy.h"

namespace paged::cpu {
namespace {

// Calls f(pointer, bytes) for each vector of the block, in a fixed order.
template <class F>
void for_each_vector(const Pool& pool, const Cache& cache, int64_t block, F f) {
  const int64_t element = element_size(pool.dtype);
  for (int64_t offset = 0; offset < pool.block_size; ++offset) {
    for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
      f(at(cache, block, offset, head, element), cache.head_dim * element);
    }
  }
}

void copy_half(const Pool& pool, const Cache& cache, int64_t source, int64_t destination) {
  const int64_t shift = (destination - source) * cache.block_stride * element_size(pool.dtype);
  for_each_vector(pool, cache, source,
                  [&](char* vector, int64_t bytes) { std::memcpy(vector + shift, vector, bytes); });
}

void stage_half(const Pool& pool, const Cache& cache, int64_t source, char*& to) {
  for_each_vector(pool, cache, source, [&](char* vector, int64_t bytes) {
    std::memcpy(to, vector, bytes);
    to += bytes;
  });
}

void unstage_half(const Pool& pool, const Cache& cache, int64_t destination, const char*& from) {
  for_each_vector(pool, cache, destination, [&](char* vector, int64_t bytes) {
    std::memcpy(vector, from, bytes);
    from += bytes;
  });
}

struct Copy {
  int64_t source;
  int64_t destination;
};

}  // namespace

void copy_blocks(const CopyBlocksParams& params, const ThreadPool& threads) {
  const Pool& pool = params.pool;
  std::unordered_set<int64_t> destinations;
  for (int64_t i = 0; i < params.num_copies; ++i)
    destinations.insert(params.block_mapping[2 * i + 1]);
  // A source that some copy overwrites is set aside first; the rest is copied straight.
  std::vector<Copy> staged;
  std::vector<Copy> direct;
  for (int64_t i = 0; i < params.num_copies; ++i) {
    const Copy copy = {params.block_mapping[2 * i], params.block_mapping[2 * i + 1]};
    if (copy.source == copy.destination) continue;
    (destinations.count(copy.source) != 0 ? staged : direct).push_back(copy);
  }
  const int64_t block_bytes = pool.block_size * token_bytes(pool);
  std::vector<char> stage(staged.size() * block_bytes);
  const int64_t num_threads = threads.threads_for((staged.size() + direct.size()) * block_bytes);
  threads.for_each(num_threads, [&](int64_t thread) {
    const Range mine = part_of(staged.size(), num_threads, thread);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      char* to = stage.data() + i * block_bytes;
      stage_half(pool, pool.key, staged[i].source, to);
      stage_half(pool, pool.value, staged[i].source, to);
    }
  });
  threads.for_each(num_threads, [&](int64_t thread) {
    const Range to_copy = part_of(direct.size(), num_threads, thread);
    for (int64_t i = to_copy.begin; i < to_copy.end; ++i) {
      copy_half(pool, pool.key, direct[i].source, direct[i].destination);
      copy_half(pool, pool.value, direct[i].source, direct[i].destination);
    }
    const Range to_unstage = part_of(staged.size(), num_threads, thread);
    for (int64_t i = to_unstage.begin; i < to_unstage.end; ++i) {
      const char* from = stage.data() + i * block_bytes;
      unstage_half(pool, pool.key, staged[i].destination, from);
      unstage_half(pool, pool.value, staged[i].destination, from);
    }
  });
}

}  // namespace paged::cpu
