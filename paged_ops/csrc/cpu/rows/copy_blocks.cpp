// Copies whole blocks inside the pool, as if every block were read before any is written.
#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <vector>

#include "cpu/ops.h"

namespace paged::cpu {
namespace {

// What belongs to each token and head of the pool: its row of K, of V, or one of their scales.
// Strides count bytes.
struct Part {
  char* data;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t row_bytes;

  char* at(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * token_stride + head * head_stride;
  }
};

Part rows_part(const Cache& cache, int64_t element) {
  return {static_cast<char*>(cache.data), cache.block_stride * element,
          cache.token_stride * element, cache.head_stride * element, cache.head_dim * element};
}

Part scales_part(const Scales& scales) {
  constexpr int64_t kElement = sizeof(float);
  return {reinterpret_cast<char*>(scales.data), scales.block_stride * kElement,
          scales.token_stride * kElement, scales.head_stride * kElement, kElement};
}

// All that a copy of a block copies.
std::vector<Part> parts_of(const Pool& pool) {
  std::vector<Part> parts = {rows_part(pool.key, element_size(pool.dtype))};
  if (!values_are_keys(pool)) parts.push_back(rows_part(pool.value, element_size(pool.dtype)));
  for (const Cache* cache : {&pool.key, &pool.value}) {
    if (cache->scales.are_per_token) parts.push_back(scales_part(cache->scales));
  }
  return parts;
}

// Calls f(row, offset, head) for each row of the block, in a fixed order.
template <class F>
void for_each_row(const Pool& pool, const Part& part, int64_t block, F f) {
  for (int64_t offset = 0; offset < pool.block_size; ++offset) {
    for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
      f(part.at(block, offset, head), offset, head);
    }
  }
}

void copy_part(const Pool& pool, const Part& part, int64_t source, int64_t destination) {
  for_each_row(pool, part, source, [&](const char* row, int64_t offset, int64_t head) {
    std::memcpy(part.at(destination, offset, head), row, part.row_bytes);
  });
}

void stage_part(const Pool& pool, const Part& part, int64_t source, char*& to) {
  for_each_row(pool, part, source, [&](const char* row, int64_t, int64_t) {
    std::memcpy(to, row, part.row_bytes);
    to += part.row_bytes;
  });
}

void unstage_part(const Pool& pool, const Part& part, int64_t destination, const char*& from) {
  for_each_row(pool, part, destination, [&](char* row, int64_t, int64_t) {
    std::memcpy(row, from, part.row_bytes);
    from += part.row_bytes;
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
  const std::vector<Part> parts = parts_of(pool);
  int64_t row_bytes = 0;
  for (const Part& part : parts) row_bytes += part.row_bytes;
  const int64_t block_bytes = pool.block_size * pool.num_kv_heads * row_bytes;
  std::vector<char> stage(staged.size() * block_bytes);
  const int64_t num_threads = threads.threads_for((staged.size() + direct.size()) * block_bytes);
  threads.for_each(num_threads, [&](int64_t thread) {
    const Range mine = part_of(staged.size(), num_threads, thread);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      char* to = stage.data() + i * block_bytes;
      for (const Part& part : parts) stage_part(pool, part, staged[i].source, to);
    }
  });
  threads.for_each(num_threads, [&](int64_t thread) {
    const Range to_copy = part_of(direct.size(), num_threads, thread);
    for (int64_t i = to_copy.begin; i < to_copy.end; ++i) {
      for (const Part& part : parts) {
        copy_part(pool, part, direct[i].source, direct[i].destination);
      }
    }
    const Range to_unstage = part_of(staged.size(), num_threads, thread);
    for (int64_t i = to_unstage.begin; i < to_unstage.end; ++i) {
      const char* from = stage.data() + i * block_bytes;
      for (const Part& part : parts) unstage_part(pool, part, staged[i].destination, from);
    }
  });
}

}  // namespace paged::cpu
