// What gather_kv takes.
#pragma once

#include <vector>

#include "arguments/argument.h"
#include "arguments/pool.h"

namespace paged {

// Members are taken in their order, which is that of the schema.
struct GatherKvInputs {
  Stack& stack;
  Argument key_cache = stack.tensor("key_cache");
  Argument value_cache = stack.tensor("value_cache");
  Argument block_tables = stack.tensor("block_tables");
  Argument seq_lens = stack.tensor("seq_lens");
  std::optional<int64_t> num_tokens = stack.take<std::optional<int64_t>>();
  Argument key_scale = stack.optional_tensor("key_scale");
  Argument value_scale = stack.optional_tensor("value_scale");
};

// Everything but values and where the results go.
inline GatherKvShape check_gather_kv_shapes(const Checks& checks, const GatherKvInputs& in) {
  for (const Argument* arg : {&in.key_cache, &in.value_cache, &in.block_tables, &in.seq_lens}) {
    checks.readable(*arg);
  }
  const PoolArguments caches = {in.key_cache, in.value_cache, in.key_scale, in.value_scale};
  GatherKvShape shape = {};
  shape.pool = check_pool(checks, caches, in.key_cache);
  shape.dtype = is_quantised(shape.pool.dtype) ? Dtype::kFloat32 : shape.pool.dtype;
  check_length_shapes(checks, in.block_tables, in.seq_lens, in.key_cache);
  shape.block_tables = tables_of(in.block_tables);
  shape.max_blocks_per_seq = in.block_tables.size(1);
  shape.batch = in.seq_lens.size(0);
  return shape;
}

// The lengths, whose sum is `num_tokens` where that is given. The tensors are those of `in`, on the
// host.
inline std::vector<int32_t> check_gather_kv_values(const Checks& checks, const GatherKvInputs& in,
                                                   const GatherKvShape& shape,
                                                   const Argument& block_tables,
                                                   const Argument& seq_lens) {
  std::vector<int32_t> lengths = check_length_values(checks, shape.pool, block_tables, seq_lens);
  const BlockTables tables = tables_of(block_tables);
  int64_t sum = 0;
  for (int64_t i = 0; i < shape.batch; ++i) {
    sum += lengths[i];
    check_block_ids(checks, shape.pool, tables, i, {0, lengths[i]});
  }
  if (in.num_tokens.has_value() && *in.num_tokens != sum) {
    checks.refuse("num_tokens is ", *in.num_tokens, ", expected ", sum, ": the sum of seq_lens");
  }
  return lengths;
}

}  // namespace paged
