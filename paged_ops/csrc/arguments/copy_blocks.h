// What copy_blocks takes.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments/argument.h"
#include "arguments/pool.h"

namespace paged {

// Members are taken in their order, which is that of the schema.
struct CopyBlocksInputs {
  Stack& stack;
  Argument key_cache = stack.tensor("key_cache");
  Argument value_cache = stack.tensor("value_cache");
  Argument block_mapping = stack.tensor("block_mapping");
  Argument key_scale = stack.optional_tensor("key_scale");
  Argument value_scale = stack.optional_tensor("value_scale");

  PoolArguments pool() const { return {key_cache, value_cache, key_scale, value_scale}; }
};

// Everything but the values of block_mapping.
inline CopyBlocksShape check_copy_blocks_shapes(const Checks& checks, const CopyBlocksInputs& in) {
  for (const Argument* arg : {&in.key_cache, &in.value_cache, &in.block_mapping}) {
    checks.readable(*arg);
  }
  const PoolArguments caches = in.pool();
  Pool pool = check_pool(checks, caches, in.key_cache);
  checks.rank(in.block_mapping, 2, "[num_copies, 2]");
  checks.size(in.block_mapping, 1, 2, "(source, destination)");
  check_index_dtype(checks, in.block_mapping);
  checks.same_device(in.block_mapping, in.key_cache);
  check_written_pool(checks, caches, pool);
  check_read_beside(checks, caches, pool, in.block_mapping);
  return {pool, in.block_mapping.size(0), in.block_mapping.dtype == ScalarType::Long,
          in.block_mapping.stride(0), in.block_mapping.stride(1)};
}

// The pairs of block_mapping as int64, row after row.
inline std::vector<int64_t> pairs_of(const Argument& block_mapping) {
  std::vector<int64_t> pairs;
  pairs.reserve(2 * block_mapping.size(0));
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t at = i * block_mapping.stride(0) + j * block_mapping.stride(1);
      pairs.push_back(block_mapping.dtype == ScalarType::Int
                          ? static_cast<const int32_t*>(block_mapping.data())[at]
                          : static_cast<const int64_t*>(block_mapping.data())[at]);
    }
  }
  return pairs;
}

// `block_mapping` is that of the inputs, on the host.
inline std::vector<int64_t> check_copy_blocks_values(const Checks& checks, const Pool& pool,
                                                     const Argument& block_mapping) {
  std::vector<int64_t> pairs = pairs_of(block_mapping);
  std::vector<int64_t> destinations;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] < 0 || pairs[i] >= pool.num_blocks) {
      checks.refuse("block_mapping[", i / 2, ", ", i % 2, "] is ", pairs[i], ", expected 0 to ",
                    pool.num_blocks - 1, ": key_cache has ", pool.num_blocks, " blocks");
    }
    if (i % 2 == 1) destinations.push_back(pairs[i]);
  }
  std::sort(destinations.begin(), destinations.end());
  const auto twice = std::adjacent_find(destinations.begin(), destinations.end());
  if (twice != destinations.end()) {
    checks.refuse("block_mapping has destination ", *twice,
                  " more than once, expected distinct destinations");
  }
  return pairs;
}

}  // namespace paged
