// The schemas of torch.ops.paged, and one binding of each op: it takes the arguments, checks them
// and lets the backend of their device run the call.
//
// What torch must know besides (fake functions, the autograd rule, attention.out's schema) is in
// Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "backend.h"

namespace paged {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// The device of a call is that of its first tensor: the checks hold all others to it.
const Backend& backend_of(const Checks& checks, const Argument& first) {
  checks.readable(first);
  return first.device.type() == DeviceType::CPU ? cpu::backend : npu::backend;
}

void check_limits(const Checks& checks, const Backend& backend, const Argument& key_cache,
                  const Pool& pool) {
  if (backend.takes_float8 || !is_quantised(pool.dtype) || pool.dtype == Dtype::kInt8) return;
  checks.refuse("key_cache is ", dtype_name(key_cache.dtype), " on an ", backend.name,
                ", expected torch.float32, torch.float16, torch.bfloat16 or torch.int8: a 910B has "
                "no float8");
}

// The argument itself, or a copy, where the host can read its values.
Argument on_host(const Checks& checks, const Argument& arg) {
  if (!arg.is_given() || arg.device.type() == DeviceType::CPU) return arg;
  try {
    return {arg.name, torch::stable::to(arg.tensor(), torch::stable::Device(DeviceType::CPU))};
  } catch (const std::runtime_error& error) {
    checks.refuse(arg.name,
                  " can't be copied to the host, which PAGED_CHECK=1 asks for and a captured "
                  "graph can't do: ",
                  error.what());
  }
}

// Tells autograd that a tensor was written, as torch's own ops in place do: no backward then uses
// it for what it was. Tensors made in inference mode count no versions, and torch throws where they
// should outside of it.
void count_write(const Backend& backend, const Argument& written) {
  std::array<StableIValue, 1> stack = {from(written.tensor())};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::is_inference", "", stack.data(), TORCH_ABI_VERSION));
  if (!to<bool>(stack[0])) backend.touch(written.tensor());
}

// The caches, and the scales that come with each token.
void count_pool_write(const Backend& backend, const PoolArguments& in, const Pool& pool) {
  count_write(backend, in.key_cache);
  count_write(backend, in.value_cache);
  if (pool.key.scales.are_per_token) count_write(backend, in.key_scale);
  if (pool.value.scales.are_per_token) count_write(backend, in.value_scale);
}

// A new contiguous tensor on the device of `like`. torch::stable::new_empty asks `like` for all
// that is known here, and takes three times as long.
template <size_t kRank>
Tensor new_tensor(const Argument& like, const std::array<int64_t, kRank>& sizes, ScalarType dtype) {
  std::array<int64_t, kRank> strides;
  int64_t stride = 1;
  for (size_t dim = kRank; dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) {
    strides[dim] = stride;
  }
  AtenTensorHandle tensor = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      kRank, sizes.data(), strides.data(), to<int32_t>(from(dtype)),
      to<int32_t>(from(like.device.type())), like.device.index(), &tensor));
  return Tensor(tensor);
}

Tensor new_rows(const Argument& like, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                ScalarType dtype) {
  return new_tensor<3>(like, {num_tokens, num_heads, head_dim}, dtype);
}

Rows rows_of_new(const Tensor& tensor, int64_t num_heads, int64_t head_dim) {
  return {tensor.mutable_data_ptr(), num_heads * head_dim, head_dim};
}

Tensor new_lse(const Argument& like, int64_t num_tokens, int64_t num_heads) {
  return new_tensor<2>(like, {num_tokens, num_heads}, ScalarType::Float);
}

enum class Form { kOutput, kOutputAndLse, kOut };

void run_attention(Form form, StableIValue* stack, uint64_t num_inputs) {
  const Checks checks(form == Form::kOutputAndLse ? "attention_with_lse" : "attention");
  // attention.out has scale and causal in the other order: see the definition of its schema.
  if (form == Form::kOut) std::swap(stack[6], stack[7]);
  Stack arguments(stack, num_inputs);
  const AttentionInputs in{arguments};
  const Argument out = form == Form::kOut ? arguments.tensor("out") : Argument("out", std::nullopt);
  arguments.check_end();

  const Backend& backend = backend_of(checks, in.query);
  AttentionShape shape = check_attention_shapes(checks, in);
  check_limits(checks, backend, in.key_cache, shape.pool);
  if (in.key_ranges.is_given() && !backend.takes_key_ranges) {
    checks.refuse("key_ranges is a tensor, expected None: no kernel for an ", backend.name,
                  " reads them");
  }
  AttentionValues values;
  if (backend.reads_values()) {
    const Argument block_tables = on_host(checks, in.block_tables);
    const Argument seq_lens = on_host(checks, in.seq_lens);
    const Argument starts = on_host(checks, in.query_start_loc);
    values = check_attention_values(checks, in, shape, block_tables, seq_lens, starts);
  }

  OptionalTensor output, lse;
  if (form == Form::kOut) {
    output = out.tensor();
    shape.output = check_out(checks, out, in);
  } else {
    const int64_t head_dim_v = shape.pool.value.head_dim;
    output = new_rows(in.query, shape.num_tokens, shape.num_heads, head_dim_v, in.query.dtype);
    shape.output = rows_of_new(*output, shape.num_heads, head_dim_v);
  }
  if (form == Form::kOutputAndLse) {
    lse = new_lse(in.query, shape.num_tokens, shape.num_heads);
    shape.lse = static_cast<float*>(lse->mutable_data_ptr());
  }
  backend.attention(checks, in, shape, values);
  if (form == Form::kOut) count_write(backend, out);
  stack[0] = from(*output);
  if (lse.has_value()) stack[1] = from(*lse);
}

template <Form form>
void attention(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  run_attention(form, stack, num_inputs);
}

void write_kv(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  const Checks checks("write_kv");
  Stack arguments(stack, num_inputs);
  const WriteKvInputs in{arguments};
  arguments.check_end();
  const Backend& backend = backend_of(checks, in.key);
  const WriteKvShape shape = check_write_kv_shapes(checks, in);
  check_limits(checks, backend, in.key_cache, shape.pool);
  std::vector<int64_t> slots;
  if (backend.reads_values()) {
    slots = check_write_kv_values(checks, shape.pool, on_host(checks, in.slot_mapping));
  }
  backend.write_kv(checks, in, shape, slots);
  count_pool_write(backend, in.pool(), shape.pool);
}

void merge_states(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  const Checks checks("merge_states");
  Stack arguments(stack, num_inputs);
  const MergeStatesInputs in{arguments};
  arguments.check_end();
  const Backend& backend = backend_of(checks, in.out_a);
  MergeStatesParams params = check_merge_states(checks, in);
  const Tensor out =
      new_rows(in.out_a, params.num_tokens, params.num_heads, params.head_dim, in.out_a.dtype);
  const Tensor lse = new_lse(in.out_a, params.num_tokens, params.num_heads);
  params.out = rows_of_new(out, params.num_heads, params.head_dim);
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  backend.merge_states(checks, in, params);
  stack[0] = from(out);
  stack[1] = from(lse);
}

void copy_blocks(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  const Checks checks("copy_blocks");
  Stack arguments(stack, num_inputs);
  const CopyBlocksInputs in{arguments};
  arguments.check_end();
  const Backend& backend = backend_of(checks, in.key_cache);
  const CopyBlocksShape shape = check_copy_blocks_shapes(checks, in);
  check_limits(checks, backend, in.key_cache, shape.pool);
  std::vector<int64_t> pairs;
  if (backend.reads_values()) {
    pairs = check_copy_blocks_values(checks, shape.pool, on_host(checks, in.block_mapping));
  }
  backend.copy_blocks(checks, in, shape, pairs);
  count_pool_write(backend, in.pool(), shape.pool);
}

// The size of the result is in seq_lens, so their values are always read.
void gather_kv(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  const Checks checks("gather_kv");
  Stack arguments(stack, num_inputs);
  const GatherKvInputs in{arguments};
  arguments.check_end();
  const Backend& backend = backend_of(checks, in.key_cache);
  GatherKvShape shape = check_gather_kv_shapes(checks, in);
  check_limits(checks, backend, in.key_cache, shape.pool);
  const Argument block_tables = on_host(checks, in.block_tables);
  const std::vector<int32_t> lengths =
      check_gather_kv_values(checks, in, shape, block_tables, on_host(checks, in.seq_lens));
  const int64_t num_tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  shape.num_tokens = num_tokens;
  const Pool& pool = shape.pool;
  const ScalarType dtype = is_quantised(pool.dtype) ? ScalarType::Float : in.key_cache.dtype;
  const Tensor key =
      new_rows(in.key_cache, num_tokens, pool.num_kv_heads, pool.key.head_dim, dtype);
  const Tensor value =
      new_rows(in.key_cache, num_tokens, pool.num_kv_heads, pool.value.head_dim, dtype);
  backend.gather_kv(checks, in,
                    {shape, lengths.data(), rows_of_new(key, pool.num_kv_heads, pool.key.head_dim),
                     rows_of_new(value, pool.num_kv_heads, pool.value.head_dim)});
  stack[0] = from(key);
  stack[1] = from(value);
}

void register_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("attention", attention<Form::kOutput>);
  library.impl("attention.out", attention<Form::kOut>);
  library.impl("attention_with_lse", attention<Form::kOutputAndLse>);
  library.impl("write_kv", write_kv);
  library.impl("merge_states", merge_states);
  library.impl("copy_blocks", copy_blocks);
  library.impl("gather_kv", gather_kv);
}

}  // namespace
}  // namespace paged

// Everything attention takes: one text, so that the forms of the op can't drift apart.
// paged_ops/ops/registration.py reads attention's schema to define attention.out.
#define PAGED_ATTENTION_ARGUMENTS                                                              \
  "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, " \
  "Tensor? query_start_loc=None, *, float? scale=None, bool causal=True, "                     \
  "SymInt? sliding_window=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? "        \
  "sinks=None, Tensor? key_scale=None, Tensor? value_scale=None, Tensor? tree_mask=None, "     \
  "Tensor? key_ranges=None"

STABLE_TORCH_LIBRARY(paged, m) {
  m.def("attention(" PAGED_ATTENTION_ARGUMENTS ") -> Tensor");
  m.def("attention_with_lse(" PAGED_ATTENTION_ARGUMENTS ") -> (Tensor output, Tensor lse)");
  m.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, *, Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()");
  m.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor "
      "lse)");
  m.def(
      "copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_mapping, *, "
      "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()");
  m.def(
      "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, "
      "SymInt? num_tokens=None, Tensor? key_scale=None, Tensor? value_scale=None) "
      "-> (Tensor key, Tensor value)");
  m.def("_cpu_isa() -> str");
  m.def("_npu_echo_arguments(Tensor(a!) answers, int word) -> int");
  m.def(
      "_npu_attention_kernel(str dtype, str cache_dtype, int head_dim, int head_dim_v, bool "
      "tree_mask) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(paged, CPU, m) { paged::register_kernels(m); }

STABLE_TORCH_LIBRARY_IMPL(paged, PrivateUse1, m) { paged::register_kernels(m); }
