// What the forms of attention take.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "arguments/argument.h"
#include "arguments/pool.h"

namespace paged {

// Members are taken in their order, which is that of the schema.
struct AttentionInputs {
  Stack& stack;
  Argument query = stack.tensor("query");
  Argument key_cache = stack.tensor("key_cache");
  Argument value_cache = stack.tensor("value_cache");
  Argument block_tables = stack.tensor("block_tables");
  Argument seq_lens = stack.tensor("seq_lens");
  Argument query_start_loc = stack.optional_tensor("query_start_loc");
  std::optional<double> scale = stack.take<std::optional<double>>();
  bool causal = stack.take<bool>();
  std::optional<int64_t> sliding_window = stack.take<std::optional<int64_t>>();
  double softcap = stack.take<double>();
  Argument alibi_slopes = stack.optional_tensor("alibi_slopes");
  Argument sinks = stack.optional_tensor("sinks");
  Argument key_scale = stack.optional_tensor("key_scale");
  Argument value_scale = stack.optional_tensor("value_scale");
  Argument tree_mask = stack.optional_tensor("tree_mask");
  Argument key_ranges = stack.optional_tensor("key_ranges");
};

// The values among them that are checked: of the sequences, and one more if there are rows past the
// last start.
struct AttentionValues {
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> query_start_loc;
};

inline void check_query(const Checks& checks, const Argument& query, const Pool& pool) {
  if (query.size(2) != pool.key.head_dim) {
    checks.refuse("query.shape[2] is ", query.size(2), ", expected ", pool.key.head_dim,
                  ": head_dim of key_cache");
  }
  if (query.size(1) < 1 || query.size(1) % pool.num_kv_heads != 0) {
    checks.refuse("query.shape[1] (num_heads) is ", query.size(1), ", expected a multiple of ",
                  pool.num_kv_heads, ": num_kv_heads of key_cache");
  }
}

inline float check_softmax_scale(const Checks& checks, std::optional<double> given,
                                 int64_t head_dim) {
  const double scale = given.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!std::isfinite(static_cast<float>(scale)))
    checks.refuse("scale is ", scale, ", expected a finite float32");
  return static_cast<float>(scale);
}

inline float check_softcap(const Checks& checks, double softcap) {
  if (!(softcap >= 0.0) || !std::isfinite(static_cast<float>(softcap))) {
    checks.refuse("softcap is ", softcap, ", expected a finite float32, 0 (off) or more");
  }
  // A cap too small for float32 is still a cap, which makes all scores equal, and not 0, which is
  // off.
  constexpr float kSmallest = std::numeric_limits<float>::min();
  return softcap > 0.0 ? std::max(static_cast<float>(softcap), kSmallest) : 0.0f;
}

// 0 where there is none.
inline int64_t check_sliding_window(const Checks& checks, std::optional<int64_t> window) {
  if (!window.has_value()) return 0;
  if (*window < 1) {
    checks.refuse("sliding_window is ", *window, ", expected 1 or more, or None");
  }
  // Lengths have 31 bits: a larger window hides nothing, and sums with it must not overflow.
  constexpr int64_t kLargest = int64_t{1} << 40;
  return std::min(*window, kLargest);
}

// alibi_slopes or sinks.
inline void check_per_head_shape(const Checks& checks, const Argument& arg, const Argument& query) {
  if (!arg.is_given()) return;
  checks.readable(arg);
  checks.rank(arg, 1, "[num_heads]");
  if (arg.dtype != query.dtype) checks.dtype(arg, ScalarType::Float, " or query's dtype");
  checks.same_device(arg, query);
  checks.size(arg, 0, query.size(1), "num_heads of query");
}

inline void check_query_start_loc_shape(const Checks& checks, const Argument& starts,
                                        const Argument& query, int64_t batch) {
  if (!starts.is_given()) {
    if (query.size(0) != batch) {
      checks.refuse("query.shape[0] is ", query.size(0), ", expected ", batch,
                    ": without query_start_loc every sequence has one query token");
    }
    return;
  }
  checks.readable(starts);
  checks.rank(starts, 1, "[batch + 1]");
  checks.dtype(starts, ScalarType::Int);
  checks.same_device(starts, query);
  checks.size(starts, 0, batch + 1, "batch + 1");
}

// Which new tokens a query token sees. Distances count positions, and in a tree a token's position
// is not its place among the new tokens: what goes by distance is refused.
inline TreeMask check_tree_mask_shape(const Checks& checks, const AttentionInputs& in) {
  const Argument& mask = in.tree_mask;
  if (!mask.is_given()) return {};
  checks.readable(mask);
  checks.rank(mask, 2, "[num_query_tokens, max_query_len]");
  checks.dtype(mask, ScalarType::Bool);
  checks.same_device(mask, in.query);
  checks.size(mask, 0, in.query.size(0), "num_tokens of query");
  if (in.sliding_window.has_value()) {
    checks.refuse("sliding_window is ", *in.sliding_window,
                  ", expected None: a window goes by position, which tree_mask leaves open");
  }
  if (in.alibi_slopes.is_given()) {
    checks.refuse(
        "alibi_slopes is a tensor, expected None: ALiBi goes by position, which tree_mask leaves "
        "open");
  }
  return {static_cast<const uint8_t*>(mask.data()), mask.stride(0), mask.stride(1), mask.size(1)};
}

inline KeyRanges check_key_ranges(const Checks& checks, const Argument& ranges,
                                  const Argument& query) {
  if (!ranges.is_given()) return {};
  checks.readable(ranges);
  checks.rank(ranges, 2, "[num_tokens, 2]");
  checks.dtype(ranges, ScalarType::Int);
  checks.same_device(ranges, query);
  checks.size(ranges, 0, query.size(0), "num_tokens of query");
  checks.size(ranges, 1, 2, "(first key, end)");
  return {static_cast<const int32_t*>(ranges.data()), ranges.stride(0), ranges.stride(1)};
}

// Everything but values and where the results go.
inline AttentionShape check_attention_shapes(const Checks& checks, const AttentionInputs& in) {
  for (const Argument* arg :
       {&in.query, &in.key_cache, &in.value_cache, &in.block_tables, &in.seq_lens}) {
    checks.readable(*arg);
  }
  AttentionShape shape = {};
  checks.rank(in.query, 3, "[num_tokens, num_heads, head_dim]");
  checks.dense_last(in.query);
  shape.dtype = checks.element(in.query);
  shape.pool =
      check_pool(checks, {in.key_cache, in.value_cache, in.key_scale, in.value_scale}, in.query);
  check_query(checks, in.query, shape.pool);
  shape.scale = check_softmax_scale(checks, in.scale, in.query.size(2));
  shape.softcap = check_softcap(checks, in.softcap);
  shape.causal = in.causal;
  shape.sliding_window = check_sliding_window(checks, in.sliding_window);
  check_per_head_shape(checks, in.alibi_slopes, in.query);
  check_per_head_shape(checks, in.sinks, in.query);
  check_length_shapes(checks, in.block_tables, in.seq_lens, in.query);
  shape.batch = in.seq_lens.size(0);
  check_query_start_loc_shape(checks, in.query_start_loc, in.query, shape.batch);
  shape.tree_mask = check_tree_mask_shape(checks, in);
  shape.key_ranges = check_key_ranges(checks, in.key_ranges, in.query);
  shape.block_tables = tables_of(in.block_tables);
  shape.max_blocks_per_seq = in.block_tables.size(1);
  shape.num_tokens = in.query.size(0);
  shape.num_heads = in.query.size(1);
  shape.query = rows_of(in.query);
  shape.has_query_start_loc = in.query_start_loc.is_given();
  shape.has_alibi_slopes = in.alibi_slopes.is_given();
  shape.has_sinks = in.sinks.is_given();
  return shape;
}

// query_start_loc, or one query token per sequence where it isn't given.
inline std::vector<int32_t> check_query_start_loc_values(const Checks& checks,
                                                         const Argument& query_start_loc,
                                                         int64_t num_tokens, int64_t batch) {
  if (!query_start_loc.is_given()) {
    std::vector<int32_t> starts(batch + 1);
    for (int64_t i = 0; i <= batch; ++i) starts[i] = static_cast<int32_t>(i);
    return starts;
  }
  std::vector<int32_t> starts = copy_of<int32_t>(query_start_loc);
  if (starts[0] != 0) checks.refuse("query_start_loc[0] is ", starts[0], ", expected 0");
  for (int64_t i = 0; i < batch; ++i) {
    if (starts[i + 1] < starts[i]) {
      checks.refuse("query_start_loc[", i + 1, "] is ", starts[i + 1], ", expected ", starts[i],
                    " or more: it must not decrease");
    }
  }
  if (starts[batch] > num_tokens) {
    checks.refuse("query_start_loc[", batch, "] is ", starts[batch], ", expected at most ",
                  num_tokens, ": the number of query tokens");
  }
  return starts;
}

inline void check_tree_mask_columns(const Checks& checks, const Argument& tree_mask,
                                    const std::vector<int32_t>& starts) {
  if (!tree_mask.is_given()) return;
  const int64_t columns = tree_mask.size(1);
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const int64_t new_tokens = starts[i + 1] - starts[i];
    if (new_tokens > columns) {
      checks.refuse("tree_mask.shape[1] is ", columns, ", expected ", new_tokens,
                    " or more: sequence ", i, " has ", new_tokens, " query tokens");
    }
  }
}

// Makes the rows past the last start, with which a graph of a fixed size is filled up, those of one
// more sequence: an empty one, of which nothing but its length is ever looked at.
inline void own_padding(const Checks& checks, int64_t num_tokens, AttentionValues& values) {
  if (values.query_start_loc.back() == num_tokens) return;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (num_tokens > kMost) {
    checks.refuse("query.shape[0] is ", num_tokens, ", expected at most ", kMost,
                  ": query_start_loc is torch.int32");
  }
  values.query_start_loc.push_back(static_cast<int32_t>(num_tokens));
  values.seq_lens.push_back(0);
}

// Lengths, starts and the block ids of what some row sees: only that is ever read, so only that is
// required to be valid. The tensors are those of `in`, on the host.
inline AttentionValues check_attention_values(const Checks& checks, const AttentionInputs& in,
                                              const AttentionShape& shape,
                                              const Argument& block_tables,
                                              const Argument& seq_lens,
                                              const Argument& query_start_loc) {
  AttentionValues values = {
      check_length_values(checks, shape.pool, block_tables, seq_lens),
      check_query_start_loc_values(checks, query_start_loc, shape.num_tokens, shape.batch)};
  const BlockTables tables = tables_of(block_tables);
  for (int64_t i = 0; i < shape.batch; ++i) {
    const int64_t new_tokens = values.query_start_loc[i + 1] - values.query_start_loc[i];
    if (new_tokens == 0) continue;
    const int64_t length = values.seq_lens[i];
    check_block_ids(
        checks, shape.pool, tables, i,
        visible_to_some(shape, length, length - new_tokens, values.query_start_loc[i], new_tokens));
  }
  check_tree_mask_columns(checks, in.tree_mask, values.query_start_loc);
  own_padding(checks, shape.num_tokens, values);
  return values;
}

// The out argument of attention.out. It shares memory with none of the inputs: some are read while
// it is written, and which ones is nothing that a caller should have to know.
inline Rows check_out(const Checks& checks, const Argument& out, const AttentionInputs& in) {
  checks.readable(out);
  checks.rank(out, 3, "[num_tokens, num_heads, head_dim_v]");
  checks.dtype(out, in.query.dtype, " like query");
  checks.same_device(out, in.query);
  checks.size(out, 0, in.query.size(0), "num_tokens of query");
  checks.size(out, 1, in.query.size(1), "num_heads of query");
  checks.size(out, 2, in.value_cache.size(3), "head_dim of value_cache");
  checks.dense_last(out);
  checks.no_overlap(out);
  for (const Argument* read : {&in.query, &in.key_cache, &in.value_cache, &in.block_tables,
                               &in.seq_lens, &in.query_start_loc, &in.alibi_slopes, &in.sinks,
                               &in.key_scale, &in.value_scale, &in.tree_mask, &in.key_ranges}) {
    checks.no_shared_memory(out, *read);
  }
  return {out.mutable_data(), out.stride(0), out.stride(1)};
}

}  // namespace paged
