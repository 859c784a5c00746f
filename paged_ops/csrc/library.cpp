// The schemas of torch.ops.paged and their registration for the CPU: the only CPU file that knows
// torch.
//
// Each op is: check, fill params, call. What torch must know besides (fake functions, the autograd
// rule, attention.out's schema) is in paged_ops/ops/registration.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace paged {
namespace {

cpu::ThreadPool thread_pool() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
            torch::stable::parallel_for(
                0, count, 1, [&](int64_t begin, int64_t end) { body(begin, end, context); });
          }};
}

// A new contiguous tensor on the device of `like`.
Tensor new_tensor(const Tensor& like, std::vector<int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

Tensor attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& block_tables, const Tensor& seq_lens,
                 const OptionalTensor& query_start_loc, std::optional<double> scale, bool causal,
                 std::optional<int64_t> sliding_window, double softcap,
                 const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                 const OptionalTensor& key_scale, const OptionalTensor& value_scale,
                 const OptionalTensor& tree_mask) {
  AttentionCall call = check_attention(Checks("attention"), query, key_cache, value_cache,
                                       block_tables, seq_lens, query_start_loc,
                                       {scale, causal, sliding_window, softcap, alibi_slopes, sinks,
                                        key_scale, value_scale, tree_mask});
  Tensor output =
      new_tensor(query, {query.size(0), query.size(1), value_cache.size(3)}, query.scalar_type());
  call.params.output = written_rows_of(Argument("output", output));
  cpu::attention(call.params, thread_pool());
  return output;
}

// Two of its arguments stand in another order than in attention: see paged_ops/ops/registration.py.
Tensor attention_out(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_tables, const Tensor& seq_lens,
                     const OptionalTensor& query_start_loc, bool causal,
                     std::optional<double> scale, std::optional<int64_t> sliding_window,
                     double softcap, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& key_scale,
                     const OptionalTensor& value_scale, const OptionalTensor& tree_mask,
                     Tensor out) {
  const Checks checks("attention");
  const AttentionOptions options = {scale, causal,    sliding_window, softcap,  alibi_slopes,
                                    sinks, key_scale, value_scale,    tree_mask};
  AttentionCall call = check_attention(checks, query, key_cache, value_cache, block_tables,
                                       seq_lens, query_start_loc, options);
  call.params.output = check_out(checks, out, query, key_cache, value_cache, block_tables, seq_lens,
                                 query_start_loc, options, call.params);
  cpu::attention(call.params, thread_pool());
  return out;
}

std::tuple<Tensor, Tensor> attention_with_lse(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& block_tables, const Tensor& seq_lens, const OptionalTensor& query_start_loc,
    std::optional<double> scale, bool causal, std::optional<int64_t> sliding_window, double softcap,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& key_scale, const OptionalTensor& value_scale,
    const OptionalTensor& tree_mask) {
  AttentionCall call = check_attention(Checks("attention_with_lse"), query, key_cache, value_cache,
                                       block_tables, seq_lens, query_start_loc,
                                       {scale, causal, sliding_window, softcap, alibi_slopes, sinks,
                                        key_scale, value_scale, tree_mask});
  Tensor output =
      new_tensor(query, {query.size(0), query.size(1), value_cache.size(3)}, query.scalar_type());
  Tensor lse = new_tensor(query, {query.size(0), query.size(1)}, ScalarType::Float);
  call.params.output = written_rows_of(Argument("output", output));
  call.params.lse = static_cast<float*>(lse.mutable_data_ptr());
  cpu::attention(call.params, thread_pool());
  return {output, lse};
}

void write_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
              const Tensor& slot_mapping, const OptionalTensor& key_scale,
              const OptionalTensor& value_scale) {
  const WriteKvCall call = check_write_kv(Checks("write_kv"), key, value, key_cache, value_cache,
                                          slot_mapping, {key_scale, value_scale});
  cpu::write_kv(call.params, thread_pool());
}

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  MergeStatesParams params = check_merge_states(Checks("merge_states"), out_a, lse_a, out_b, lse_b);
  Tensor out = new_tensor(out_a, {params.num_tokens, params.num_heads, params.head_dim},
                          out_a.scalar_type());
  Tensor lse = new_tensor(out_a, {params.num_tokens, params.num_heads}, ScalarType::Float);
  params.out = written_rows_of(Argument("out", out));
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  cpu::merge_states(params, thread_pool());
  return {out, lse};
}

void copy_blocks(Tensor key_cache, Tensor value_cache, const Tensor& block_mapping,
                 const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  const CopyBlocksCall call = check_copy_blocks(Checks("copy_blocks"), key_cache, value_cache,
                                                block_mapping, {key_scale, value_scale});
  cpu::copy_blocks(call.params, thread_pool());
}

std::tuple<Tensor, Tensor> gather_kv(const Tensor& key_cache, const Tensor& value_cache,
                                     const Tensor& block_tables, const Tensor& seq_lens,
                                     std::optional<int64_t> num_tokens,
                                     const OptionalTensor& key_scale,
                                     const OptionalTensor& value_scale) {
  GatherKvCall call = check_gather_kv(Checks("gather_kv"), key_cache, value_cache, block_tables,
                                      seq_lens, num_tokens, {key_scale, value_scale});
  const Pool& pool = call.params.pool;
  const ScalarType dtype = is_quantised(pool.dtype) ? ScalarType::Float : key_cache.scalar_type();
  Tensor key =
      new_tensor(key_cache, {call.num_tokens, pool.num_kv_heads, pool.key.head_dim}, dtype);
  Tensor value =
      new_tensor(key_cache, {call.num_tokens, pool.num_kv_heads, pool.value.head_dim}, dtype);
  call.params.key = written_rows_of(Argument("key", key));
  call.params.value = written_rows_of(Argument("value", value));
  cpu::gather_kv(call.params, thread_pool());
  return {key, value};
}

std::string cpu_isa() { return cpu::selected_isa().name; }

}  // namespace
}  // namespace paged

// Everything attention takes: one text, so that the forms of the op can't drift apart.
// paged_ops/ops/registration.py reads attention's schema to define attention.out.
#define PAGED_ATTENTION_ARGUMENTS                                                              \
  "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, " \
  "Tensor? query_start_loc=None, *, float? scale=None, bool causal=True, "                     \
  "SymInt? sliding_window=None, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? "        \
  "sinks=None, Tensor? key_scale=None, Tensor? value_scale=None, Tensor? tree_mask=None"

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
  m.def("_npu_attention_kernel(str dtype, int head_dim, int head_dim_v) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(paged, CPU, m) {
  m.impl("attention", TORCH_BOX(&paged::attention));
  m.impl("attention.out", TORCH_BOX(&paged::attention_out));
  m.impl("attention_with_lse", TORCH_BOX(&paged::attention_with_lse));
  m.impl("write_kv", TORCH_BOX(&paged::write_kv));
  m.impl("merge_states", TORCH_BOX(&paged::merge_states));
  m.impl("copy_blocks", TORCH_BOX(&paged::copy_blocks));
  m.impl("gather_kv", TORCH_BOX(&paged::gather_kv));
}

STABLE_TORCH_LIBRARY_IMPL(paged, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isa", TORCH_BOX(&paged::cpu_isa));
}
