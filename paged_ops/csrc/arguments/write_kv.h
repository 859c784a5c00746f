// What write_kv takes.
#pragma once

#include <vector>

#include "arguments/argument.h"
#include "arguments/pool.h"

namespace paged {

// Members are taken in their order, which is that of the schema.
struct WriteKvInputs {
  Stack& stack;
  Argument key = stack.tensor("key");
  Argument value = stack.tensor("value");
  Argument key_cache = stack.tensor("key_cache");
  Argument value_cache = stack.tensor("value_cache");
  Argument slot_mapping = stack.tensor("slot_mapping");
  Argument key_scale = stack.optional_tensor("key_scale");
  Argument value_scale = stack.optional_tensor("value_scale");

  PoolArguments pool() const { return {key_cache, value_cache, key_scale, value_scale}; }
};

inline void check_new_rows(const Checks& checks, const Argument& rows, const Argument& cache) {
  checks.rank(rows, 3, "[num_tokens, num_kv_heads, head_dim]");
  checks.dense_last(rows);
  if (rows.size(1) != cache.size(2)) {
    checks.refuse(rows.name, ".shape[1] is ", rows.size(1), ", expected ", cache.size(2),
                  ": num_kv_heads of ", cache.name);
  }
  if (rows.size(2) != cache.size(3)) {
    checks.refuse(rows.name, ".shape[2] is ", rows.size(2), ", expected ", cache.size(3),
                  ": head_dim of ", cache.name);
  }
}

// Where V is a view of K, a quantised row has one scale and is written once: value must be the same
// view of key, and value_scale be key_scale.
inline void check_written_once(const Checks& checks, const WriteKvShape& shape) {
  const Pool& pool = shape.pool;
  if (!is_quantised(pool.dtype) || !shares_rows(pool)) return;
  if (!values_are_keys(pool)) {
    checks.refuse(
        "value_cache starts within the rows of key_cache, expected the same start: a quantised row "
        "is written once");
  }
  if (shape.value.data != shape.key.data || shape.value.token_stride != shape.key.token_stride ||
      shape.value.head_stride != shape.key.head_stride) {
    checks.refuse(
        "value is no view of key, expected key[..., :head_dim_v] itself: value_cache is a view of "
        "key_cache, whose quantised rows are written once");
  }
  if (pool.value.scales.data != pool.key.scales.data) {
    checks.refuse(
        "value_scale is another tensor than key_scale, expected the same: value_cache is a view of "
        "key_cache");
  }
}

// Everything but the values of slot_mapping.
inline WriteKvShape check_write_kv_shapes(const Checks& checks, const WriteKvInputs& in) {
  for (const Argument* arg :
       {&in.key, &in.value, &in.key_cache, &in.value_cache, &in.slot_mapping}) {
    checks.readable(*arg);
  }
  checks.rank(in.key, 3, "[num_tokens, num_kv_heads, head_dim]");
  const Dtype dtype = checks.element(in.key);
  const PoolArguments caches = in.pool();
  Pool pool = check_pool(checks, caches, in.key);
  checks.dtype(in.value, in.key.dtype, " like key");
  checks.same_device(in.value, in.key);
  check_new_rows(checks, in.key, in.key_cache);
  check_new_rows(checks, in.value, in.value_cache);
  checks.size(in.value, 0, in.key.size(0), "num_tokens of key");
  checks.rank(in.slot_mapping, 1, "[num_tokens]");
  check_index_dtype(checks, in.slot_mapping);
  checks.same_device(in.slot_mapping, in.key);
  checks.size(in.slot_mapping, 0, in.key.size(0), "num_tokens of key");
  check_written_pool(checks, caches, pool);
  for (const Argument* read : {&in.key, &in.value, &in.slot_mapping}) {
    check_read_beside(checks, caches, pool, *read);
  }
  const WriteKvShape shape = {dtype,           pool,
                              rows_of(in.key), rows_of(in.value),
                              in.key.size(0),  in.slot_mapping.dtype == ScalarType::Long};
  check_written_once(checks, shape);
  return shape;
}

// `slot_mapping` is that of the inputs, on the host.
inline std::vector<int64_t> check_write_kv_values(const Checks& checks, const Pool& pool,
                                                  const Argument& slot_mapping) {
  std::vector<int64_t> slots = slot_mapping.dtype == ScalarType::Int
                                   ? copy_of<int64_t, int32_t>(slot_mapping)
                                   : copy_of<int64_t>(slot_mapping);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    if (slot < -1 || (slot >= 0 && slot / pool.block_size >= pool.num_blocks)) {
      checks.refuse("slot_mapping[", i, "] is ", slot, ", expected -1 (write nothing) or 0 to ",
                    pool.num_blocks * pool.block_size - 1, ": the pool has ", pool.num_blocks,
                    " blocks of ", pool.block_size, " tokens");
    }
  }
  return slots;
}

}  // namespace paged
