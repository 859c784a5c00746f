// The pool, and the lengths and tables that say what of it belongs to whom.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "arguments/argument.h"

namespace paged {

// The arguments that are the pool.
struct PoolArguments {
  const Argument& key_cache;
  const Argument& value_cache;
  const Argument& key_scale;
  const Argument& value_scale;
};

// The scale of a float8 cache that is given none.
inline constexpr float kUnitScale = 1.0f;

// key_scale or value_scale, the scales of `cache`: one, one per head, or one per token and head.
inline Scales check_scale(const Checks& checks, const Argument& scale, const Argument& cache,
                          bool is_cache_quantised) {
  if (!is_cache_quantised) {
    if (!scale.is_given()) return {};
    checks.refuse(scale.name, " is a tensor, expected None: ", cache.name, " is ",
                  dtype_name(cache.dtype), ", which has no scales");
  }
  if (!scale.is_given()) {
    if (cache.dtype == ScalarType::Char) {
      checks.refuse(scale.name, " is None, expected a tensor: ", cache.name,
                    " is torch.int8, which means nothing without its scales");
    }
    return {const_cast<float*>(&kUnitScale), 0, 0, 0, false};
  }
  checks.readable(scale);
  checks.dtype(scale, ScalarType::Float);
  checks.same_device(scale, cache);
  float* data = static_cast<float*>(scale.data());
  if (scale.rank() == 0) return {data, 0, 0, 0, false};
  if (scale.rank() == 1) {
    checks.size(scale, 0, cache.size(2), "num_kv_heads of the cache");
    return {data, 0, 0, scale.stride(0), false};
  }
  if (scale.rank() != 3) {
    checks.refuse(scale.name, " has ", scale.rank(),
                  " dimensions, expected 0, 1 or 3: [], [num_kv_heads] or [num_blocks, block_size, "
                  "num_kv_heads]");
  }
  checks.size(scale, 0, cache.size(0), "num_blocks of the cache");
  checks.size(scale, 1, cache.size(1), "block_size of the cache");
  checks.size(scale, 2, cache.size(2), "num_kv_heads of the cache");
  return {data, scale.stride(0), scale.stride(1), scale.stride(2), true};
}

// Shapes, dtype, device, scales. `like` is what the caches are used with: floats of their dtype, or
// any floats where they are quantised.
inline Pool check_pool(const Checks& checks, const PoolArguments& in, const Argument& like) {
  for (const Argument* cache : {&in.key_cache, &in.value_cache}) {
    checks.rank(*cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim]");
    checks.cache_element(*cache, like);
    checks.same_device(*cache, like);
    checks.dense_last(*cache);
    checks.at_least_one(*cache, 1, "block_size");
    checks.at_least_one(*cache, 2, "num_kv_heads");
    checks.at_least_one(*cache, 3, "head_dim");
  }
  checks.dtype(in.value_cache, in.key_cache.dtype, " like key_cache");
  checks.size(in.value_cache, 0, in.key_cache.size(0), "num_blocks of key_cache");
  checks.size(in.value_cache, 1, in.key_cache.size(1), "block_size of key_cache");
  checks.size(in.value_cache, 2, in.key_cache.size(2), "num_kv_heads of key_cache");
  const Dtype dtype = checks.cache_element(in.key_cache, like);
  const auto half = [&](const Argument& cache, const Argument& scale) -> Cache {
    return {cache.data(),    cache.size(3),
            cache.stride(0), cache.stride(1),
            cache.stride(2), check_scale(checks, scale, cache, is_quantised(dtype))};
  };
  const Pool pool = {dtype,
                     in.key_cache.size(0),
                     in.key_cache.size(1),
                     in.key_cache.size(2),
                     half(in.key_cache, in.key_scale),
                     half(in.value_cache, in.value_scale)};
  if (in.key_scale.is_given() != in.value_scale.is_given()) {
    checks.refuse(in.key_scale.is_given() ? "value_scale" : "key_scale",
                  " is None, expected a tensor: the other scale is given");
  }
  return pool;
}

// Whether K and V share memory in no other way than row by row: a row of V with no row of K but its
// own. Such rows are read and written one after the other, by one thread.
inline bool share_rows_alone(const Argument& key, const Argument& value) {
  for (int64_t dim = 0; dim < 3; ++dim) {
    if (key.size(dim) > 1 && key.stride(dim) != value.stride(dim)) return false;
  }
  // Then rows of K and V that meet lie in one row that spans both, and no two of these may meet.
  const auto begin_of = [](const Argument& arg) { return static_cast<const char*>(arg.data()); };
  const auto bytes = static_cast<int64_t>(key.tensor().element_size());
  const char* begin = std::min(begin_of(key), begin_of(value));
  const char* end =
      std::max(begin_of(key) + key.size(3) * bytes, begin_of(value) + value.size(3) * bytes);
  const std::array<int64_t, 3> sizes = {key.size(0), key.size(1), key.size(2)};
  const std::array<int64_t, 3> strides = {key.stride(0) * bytes, key.stride(1) * bytes,
                                          key.stride(2) * bytes};
  return !Memory(begin, end - begin, sizes, strides, 1).shares_with_itself();
}

inline bool are_same_elements(const Argument& a, const Argument& b) {
  if (a.data() != b.data() || a.rank() != b.rank()) return false;
  for (int64_t dim = 0; dim < a.rank(); ++dim) {
    if (a.size(dim) != b.size(dim) || (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)))
      return false;
  }
  return true;
}

// Makes `pool` one that is written: its caches, and the scales that come with each token. None of
// them may share memory with anything else that the call reads or writes; but V may be a view of K,
// which a quantised row, having one scale, is only with the same scales.
inline void check_written_pool(const Checks& checks, const PoolArguments& in, Pool& pool) {
  checks.no_overlap(in.key_cache);
  checks.no_overlap(in.value_cache);
  pool.key.data = in.key_cache.mutable_data();
  pool.value.data = in.value_cache.mutable_data();
  const bool by_rows = share_rows_alone(in.key_cache, in.value_cache);
  const bool is_one = by_rows && is_quantised(pool.dtype) && shares_rows(pool);
  if (!by_rows || (is_quantised(pool.dtype) && !is_one)) {
    checks.no_shared_memory(in.key_cache, in.value_cache);
  }
  const auto check_written_scale = [&](const Argument& scale, Scales& scales,
                                       const Argument& other) {
    if (!scale.is_given()) return;
    checks.no_shared_memory(in.key_cache, scale);
    checks.no_shared_memory(in.value_cache, scale);
    if (!scales.are_per_token) return;
    checks.no_overlap(scale);
    if (!is_one || !are_same_elements(scale, other)) checks.no_shared_memory(scale, other);
    scales.data = static_cast<float*>(scale.mutable_data());
  };
  check_written_scale(in.key_scale, pool.key.scales, in.value_scale);
  check_written_scale(in.value_scale, pool.value.scales, in.key_scale);
}

// What is only read beside a pool that is written.
inline void check_read_beside(const Checks& checks, const PoolArguments& in, const Pool& pool,
                              const Argument& read) {
  checks.no_shared_memory(in.key_cache, read);
  checks.no_shared_memory(in.value_cache, read);
  if (pool.key.scales.are_per_token) checks.no_shared_memory(in.key_scale, read);
  if (pool.value.scales.are_per_token) checks.no_shared_memory(in.value_scale, read);
}

inline void check_length_shapes(const Checks& checks, const Argument& block_tables,
                                const Argument& seq_lens, const Argument& like) {
  checks.rank(block_tables, 2, "[batch, max_blocks_per_seq]");
  checks.rank(seq_lens, 1, "[batch]");
  checks.dtype(block_tables, ScalarType::Int);
  checks.dtype(seq_lens, ScalarType::Int);
  checks.same_device(block_tables, like);
  checks.same_device(seq_lens, like);
  checks.size(block_tables, 0, seq_lens.size(0), "batch, the length of seq_lens");
}

// Lengths that fit the table.
inline std::vector<int32_t> check_length_values(const Checks& checks, const Pool& pool,
                                                const Argument& block_tables,
                                                const Argument& seq_lens) {
  std::vector<int32_t> lengths = copy_of<int32_t>(seq_lens);
  const int64_t columns = block_tables.size(1);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t length = lengths[i];
    if (length < 0) checks.refuse("seq_lens[", i, "] is ", length, ", expected 0 or more");
    if (length > 0 && (length - 1) / pool.block_size >= columns) {
      checks.refuse("seq_lens[", i, "] is ", length, ", expected at most ",
                    columns * pool.block_size, ": block_tables has ", columns, " blocks of ",
                    pool.block_size, " tokens in a row");
    }
  }
  return lengths;
}

inline BlockTables tables_of(const Argument& arg) {
  return {static_cast<const int32_t*>(arg.data()), arg.stride(0), arg.stride(1)};
}

// The ids of the blocks that hold keys [first, last) of a sequence.
inline void check_block_ids(const Checks& checks, const Pool& pool, const BlockTables& tables,
                            int64_t sequence, const Visible& keys) {
  if (keys.first >= keys.last) return;
  const int64_t end = (keys.last - 1) / pool.block_size + 1;
  for (int64_t column = keys.first / pool.block_size; column < end; ++column) {
    const int64_t id = tables.at(sequence, column);
    if (id < 0 || id >= pool.num_blocks) {
      checks.refuse("block_tables[", sequence, ", ", column, "] is ", id, ", expected 0 to ",
                    pool.num_blocks - 1, ": key_cache has ", pool.num_blocks, " blocks");
    }
  }
}

// slot_mapping or block_mapping.
inline void check_index_dtype(const Checks& checks, const Argument& arg) {
  if (arg.dtype != ScalarType::Long && arg.dtype != ScalarType::Int) {
    checks.refuse(arg.name, " is ", dtype_name(arg.dtype), ", expected torch.int64 or torch.int32");
  }
}

}  // namespace paged
