// The registration of torch.ops.paged for npu tensors: the only NPU file that knows torch.
//
// Each op is: check shapes, plan, launch. Lengths, tables, slots and mappings stay on the device,
// so nothing waits for it and a captured graph may be replayed after they have changed; the kernels
// clamp what they read. With PAGED_CHECK=1 these values are copied to the host first and refused as
// the CPU op refuses them.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "npu/launch.h"
#include "op_host/attention_tiling.h"
#include "op_host/copy_blocks_tiling.h"
#include "op_host/merge_states_tiling.h"
#include "op_host/write_kv_tiling.h"

// Torch's own from 2.13 on; null in older ones, which have no other way to the handle of a stream
// that needs no header of torch_npu.
extern "C" __attribute__((weak)) AOTITorchError torch_stream_native_handle(StreamHandle stream,
                                                                           void** handle);

namespace paged {
namespace {

// The stream of torch on that device, which must be current. torch_npu empties its queue of
// operators before it hands out the handle, so what is launched into the stream next comes after
// everything that was called before.
npu::Stream current_stream(int device) {
  if (torch_stream_native_handle == nullptr) {
    throw std::runtime_error("npu tensors need torch 2.13 or later");
  }
  StreamHandle stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_stream(device, &stream));
  const std::unique_ptr<StreamOpaque, AOTITorchError (*)(StreamHandle)> owner(
      stream, aoti_torch_delete_stream);
  void* handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_stream_native_handle(stream, &handle));
  return handle;
}

bool checks_values() {
  const char* wanted = std::getenv("PAGED_CHECK");
  return wanted != nullptr && std::string(wanted) == "1";
}

// PAGED_NPU_KERNEL=vector or mixed asks for a kernel of attention, to test or compare it.
std::optional<AttentionKernel> wanted_kernel() {
  const char* name = std::getenv("PAGED_NPU_KERNEL");
  return name == nullptr ? std::nullopt : named_kernel(name);
}

Tensor on_host(const Checks& checks, const char* name, const Tensor& tensor) {
  using torch::headeronly::DeviceType;
  try {
    return torch::stable::to(tensor, torch::stable::Device(DeviceType::CPU));
  } catch (const std::runtime_error& error) {
    checks.refuse(name,
                  " can't be copied to the host, which PAGED_CHECK=1 asks for and a captured "
                  "graph can't do: ",
                  error.what());
  }
}

OptionalTensor on_host(const Checks& checks, const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(on_host(checks, name, *tensor)) : std::nullopt;
}

// The kernels read one-dimensional tensors without a stride.
Tensor dense(const Tensor& tensor) {
  return tensor.size(0) > 1 && tensor.stride(0) != 1 ? torch::stable::contiguous(tensor) : tensor;
}

OptionalTensor dense(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(dense(*tensor)) : std::nullopt;
}

const void* pointer_to(const Tensor& tensor) { return tensor.const_data_ptr(); }

const void* pointer_to(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

std::string kernel_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kBFloat16:
      return "bfloat16";
    default:
      throw std::runtime_error("no NPU kernel takes this dtype");
  }
}

void refuse_quantised(const Checks& checks, const Pool& pool, const Tensor& key_cache) {
  if (!is_quantised(pool.dtype)) return;
  checks.refuse("key_cache is ", dtype_name(key_cache.scalar_type()),
                " on an NPU, expected torch.float32, torch.float16 or torch.bfloat16: only the CPU "
                "has kernels for quantised caches");
}

RowLayout layout_of(const Rows& rows) { return {rows.token_stride, rows.head_stride}; }

CacheLayout layout_of(const Cache& cache) {
  return {cache.head_dim, cache.block_stride, cache.token_stride, cache.head_stride};
}

// The name, dtype and shape of each tensor, for a message.
std::string described(std::initializer_list<Argument> arguments) {
  std::ostringstream text;
  const char* separator = "";
  for (const Argument& argument : arguments) {
    text << separator << argument.name << " " << dtype_name(argument.dtype) << " [";
    for (int64_t dim = 0; dim < argument.rank(); ++dim) {
      text << (dim == 0 ? "" : ", ") << argument.size(dim);
    }
    text << "]";
    separator = ", ";
  }
  return text.str();
}

// One call of an op on the device of its first tensor, which is current while the call lives.
class NpuCall {
 public:
  NpuCall(const Checks& checks, const Tensor& first)
      : checks_(checks), first_(first), guard_(first.get_device()) {}

  // Plans with `make_plan`, a function of the chip, and launches the kernel that the plan names.
  // Its parameters are `pointers`, then the workspace where `takes_workspace`, then the tiling.
  template <class MakePlan>
  void run(const MakePlan& make_plan, std::vector<const void*> pointers, bool takes_workspace,
           std::initializer_list<Argument> arguments) const {
    try {
      const auto plan = make_plan(npu::this_soc());
      // Freed when this call returns, but reused by nothing that runs before the kernel: torch
      // hands it out again only to work in the same stream.
      OptionalTensor workspace;
      if (plan.workspace_bytes > 0) {
        workspace = torch::stable::new_empty(first_, {plan.workspace_bytes}, ScalarType::Byte);
      }
      if (takes_workspace) pointers.push_back(pointer_to(workspace));
      const int device = first_.get_device();
      npu::launch({device, current_stream(device)}, {plan.stem, plan.kernel}, plan.num_cores,
                  pointers, std::as_bytes(std::span(&plan.tiling, 1)));
    } catch (const Unsupported& unsupported) {
      checks_.refuse(unsupported.what());
    } catch (const std::runtime_error& error) {
      checks_.refuse(error.what(), "; called with ", described(arguments));
    }
  }

 private:
  const Checks& checks_;
  const Tensor& first_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// What the forms of attention take.
struct AttentionInputs {
  const Tensor& query;
  const Tensor& key_cache;
  const Tensor& value_cache;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  const OptionalTensor& query_start_loc;
  const AttentionOptions options;
};

AttentionParams check_attention_on_npu(const Checks& checks, const AttentionInputs& in) {
  AttentionParams params =
      check_attention_shapes(checks, in.query, in.key_cache, in.value_cache, in.block_tables,
                             in.seq_lens, in.query_start_loc, in.options);
  refuse_quantised(checks, params.pool, in.key_cache);
  if (in.options.tree_mask.has_value()) {
    checks.refuse("tree_mask is a tensor on an NPU, expected None: only the CPU kernel takes it");
  }
  if (checks_values()) {
    const Tensor block_tables = on_host(checks, "block_tables", in.block_tables);
    const Tensor seq_lens = on_host(checks, "seq_lens", in.seq_lens);
    const OptionalTensor starts = on_host(checks, "query_start_loc", in.query_start_loc);
    AttentionCall call;
    call.params = params;
    check_attention_values(checks, block_tables, seq_lens, starts, in.query.size(0), call);
  }
  return params;
}

void run_attention(const Checks& checks, const AttentionInputs& in, const AttentionParams& params,
                   const Tensor& output, const OptionalTensor& lse) {
  if (in.query.size(0) == 0) return;
  const NpuCall call(checks, in.query);
  const OptionalTensor query_start_loc = dense(in.query_start_loc);
  const OptionalTensor alibi_slopes = dense(in.options.alibi_slopes);
  const OptionalTensor sinks = dense(in.options.sinks);
  const Tensor seq_lens = dense(in.seq_lens);
  const AttentionTilingData shape = {
      .num_tokens = in.query.size(0),
      .batch = params.batch,
      .num_heads = params.num_heads,
      .num_kv_heads = params.pool.num_kv_heads,
      .num_blocks = params.pool.num_blocks,
      .block_size = params.pool.block_size,
      .max_blocks_per_seq = in.block_tables.size(1),
      .table_row_stride = params.block_tables.row_stride,
      .table_column_stride = params.block_tables.column_stride,
      .query = layout_of(params.query),
      .output = layout_of(params.output),
      .key = layout_of(params.pool.key),
      .value = layout_of(params.pool.value),
      .sliding_window = params.sliding_window,
      .causal = params.causal,
      .has_query_start_loc = query_start_loc.has_value(),
      .has_alibi_slopes = alibi_slopes.has_value(),
      .has_sinks = sinks.has_value(),
      .has_lse = lse.has_value(),
      .tile = 0,
      .max_rows = 0,
      .piece = 0,
      .split = 0,
      .max_pieces = 0,
      .key_columns = 0,
      .value_columns = 0,
      .chunk_buffers = 0,
      .part_elements = 0,
      .exchange_keys = 0,
      .exchange_bytes = 0,
      .scale = params.scale,
      .softcap = params.softcap,
  };
  call.run(
      [&](const Soc& soc) {
        return plan_attention(shape, kernel_dtype(params.pool.dtype), soc, wanted_kernel());
      },
      {pointer_to(in.query), pointer_to(in.key_cache), pointer_to(in.value_cache),
       pointer_to(in.block_tables), pointer_to(seq_lens), pointer_to(query_start_loc),
       pointer_to(alibi_slopes), pointer_to(sinks), pointer_to(output), pointer_to(lse)},
      true,
      {Argument("query", in.query), Argument("key_cache", in.key_cache),
       Argument("value_cache", in.value_cache), Argument("block_tables", in.block_tables)});
}

Tensor new_attention_output(const AttentionInputs& in) {
  return torch::stable::new_empty(in.query,
                                  {in.query.size(0), in.query.size(1), in.value_cache.size(3)});
}

Tensor attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                 const Tensor& block_tables, const Tensor& seq_lens,
                 const OptionalTensor& query_start_loc, std::optional<double> scale, bool causal,
                 std::optional<int64_t> sliding_window, double softcap,
                 const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                 const OptionalTensor& key_scale, const OptionalTensor& value_scale,
                 const OptionalTensor& tree_mask) {
  const Checks checks("attention");
  const AttentionInputs in = {query,
                              key_cache,
                              value_cache,
                              block_tables,
                              seq_lens,
                              query_start_loc,
                              {scale, causal, sliding_window, softcap, alibi_slopes, sinks,
                               key_scale, value_scale, tree_mask}};
  AttentionParams params = check_attention_on_npu(checks, in);
  Tensor output = new_attention_output(in);
  params.output = written_rows_of(Argument("output", output));
  run_attention(checks, in, params, output, std::nullopt);
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
  const AttentionInputs in = {query,
                              key_cache,
                              value_cache,
                              block_tables,
                              seq_lens,
                              query_start_loc,
                              {scale, causal, sliding_window, softcap, alibi_slopes, sinks,
                               key_scale, value_scale, tree_mask}};
  AttentionParams params = check_attention_on_npu(checks, in);
  params.output = check_out(checks, out, query, key_cache, value_cache, block_tables, seq_lens,
                            query_start_loc, in.options, params);
  run_attention(checks, in, params, out, std::nullopt);
  return out;
}

std::tuple<Tensor, Tensor> attention_with_lse(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& block_tables, const Tensor& seq_lens, const OptionalTensor& query_start_loc,
    std::optional<double> scale, bool causal, std::optional<int64_t> sliding_window, double softcap,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& key_scale, const OptionalTensor& value_scale,
    const OptionalTensor& tree_mask) {
  const Checks checks("attention_with_lse");
  const AttentionInputs in = {query,
                              key_cache,
                              value_cache,
                              block_tables,
                              seq_lens,
                              query_start_loc,
                              {scale, causal, sliding_window, softcap, alibi_slopes, sinks,
                               key_scale, value_scale, tree_mask}};
  AttentionParams params = check_attention_on_npu(checks, in);
  Tensor output = new_attention_output(in);
  Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1)}, ScalarType::Float);
  params.output = written_rows_of(Argument("output", output));
  run_attention(checks, in, params, output, lse);
  return {output, lse};
}

void write_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
              const Tensor& slot_mapping, const OptionalTensor& key_scale,
              const OptionalTensor& value_scale) {
  const Checks checks("write_kv");
  const WriteKvParams params = check_write_kv_shapes(checks, key, value, key_cache, value_cache,
                                                     slot_mapping, {key_scale, value_scale});
  refuse_quantised(checks, params.pool, key_cache);
  if (checks_values()) {
    check_write_kv_values(checks, params.pool, on_host(checks, "slot_mapping", slot_mapping));
  }
  if (params.num_tokens == 0) return;
  const NpuCall call(checks, key);
  const Tensor slots = dense(slot_mapping);
  const WriteKvTilingData shape = {
      .num_tokens = params.num_tokens,
      .num_kv_heads = params.pool.num_kv_heads,
      .num_blocks = params.pool.num_blocks,
      .block_size = params.pool.block_size,
      .key_rows = layout_of(params.key),
      .value_rows = layout_of(params.value),
      .key = layout_of(params.pool.key),
      .value = layout_of(params.pool.value),
      .has_int64_slots = slot_mapping.scalar_type() == ScalarType::Long,
      .heads_per_copy = 0,
  };
  call.run(
      [&](const Soc& soc) { return plan_write_kv(shape, element_size(params.pool.dtype), soc); },
      {pointer_to(key), pointer_to(value), pointer_to(key_cache), pointer_to(value_cache),
       pointer_to(slots)},
      false,
      {Argument("key", key), Argument("value", value), Argument("key_cache", key_cache),
       Argument("value_cache", value_cache)});
}

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  const Checks checks("merge_states");
  const MergeStatesParams params = check_merge_states(checks, out_a, lse_a, out_b, lse_b);
  Tensor out =
      torch::stable::new_empty(out_a, {params.num_tokens, params.num_heads, params.head_dim});
  Tensor lse = torch::stable::new_empty(lse_a, {params.num_tokens, params.num_heads});
  if (params.num_tokens == 0 || params.num_heads == 0) return {out, lse};
  const NpuCall call(checks, out_a);
  const MergeStatesTilingData shape = {
      .num_tokens = params.num_tokens,
      .num_heads = params.num_heads,
      .head_dim = params.head_dim,
      .out_a = layout_of(params.out_a),
      .out_b = layout_of(params.out_b),
      .out = layout_of(rows_of(Argument("out", out))),
      .lse_a = layout_of(params.lse_a),
      .lse_b = layout_of(params.lse_b),
  };
  call.run(
      [&](const Soc& soc) { return plan_merge_states(shape, kernel_dtype(params.dtype), soc); },
      {pointer_to(out_a), pointer_to(lse_a), pointer_to(out_b), pointer_to(lse_b), pointer_to(out),
       pointer_to(lse)},
      false, {Argument("out_a", out_a), Argument("out_b", out_b)});
  return {out, lse};
}

void copy_blocks(Tensor key_cache, Tensor value_cache, const Tensor& block_mapping,
                 const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  const Checks checks("copy_blocks");
  const CopyBlocksParams params = check_copy_blocks_shapes(checks, key_cache, value_cache,
                                                           block_mapping, {key_scale, value_scale});
  refuse_quantised(checks, params.pool, key_cache);
  if (checks_values()) {
    check_copy_blocks_values(checks, params.pool, on_host(checks, "block_mapping", block_mapping));
  }
  if (params.num_copies == 0) return;
  const NpuCall call(checks, key_cache);
  const CopyBlocksTilingData shape = {
      .num_copies = params.num_copies,
      .num_kv_heads = params.pool.num_kv_heads,
      .num_blocks = params.pool.num_blocks,
      .block_size = params.pool.block_size,
      .key = layout_of(params.pool.key),
      .value = layout_of(params.pool.value),
      .has_int64_ids = block_mapping.scalar_type() == ScalarType::Long,
      .id_row_stride = block_mapping.stride(0),
      .id_column_stride = block_mapping.stride(1),
      .tokens_per_copy = 0,
  };
  call.run(
      [&](const Soc& soc) { return plan_copy_blocks(shape, element_size(params.pool.dtype), soc); },
      {pointer_to(key_cache), pointer_to(value_cache), pointer_to(block_mapping)}, true,
      {Argument("key_cache", key_cache), Argument("value_cache", value_cache),
       Argument("block_mapping", block_mapping)});
}

std::string npu_attention_kernel(std::string dtype, int64_t head_dim, int64_t head_dim_v) {
  const AttentionKernel kernel =
      choose_attention_kernel(head_dim, head_dim_v, dtype, wanted_kernel());
  return kernel == AttentionKernel::kMixed ? "mixed" : "vector";
}

// The result's size is in seq_lens, which is on the device, and no step of inference needs this op.
std::tuple<Tensor, Tensor> gather_kv(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                     std::optional<int64_t>, const OptionalTensor&,
                                     const OptionalTensor&) {
  Checks("gather_kv")
      .refuse("key_cache is on an NPU, expected a CPU tensor: no NPU kernel gathers");
}

}  // namespace
}  // namespace paged

STABLE_TORCH_LIBRARY_IMPL(paged, PrivateUse1, m) {
  m.impl("attention", TORCH_BOX(&paged::attention));
  m.impl("attention.out", TORCH_BOX(&paged::attention_out));
  m.impl("attention_with_lse", TORCH_BOX(&paged::attention_with_lse));
  m.impl("write_kv", TORCH_BOX(&paged::write_kv));
  m.impl("merge_states", TORCH_BOX(&paged::merge_states));
  m.impl("copy_blocks", TORCH_BOX(&paged::copy_blocks));
  m.impl("gather_kv", TORCH_BOX(&paged::gather_kv));
}

STABLE_TORCH_LIBRARY_IMPL(paged, CompositeExplicitAutograd, m) {
  m.impl("_npu_attention_kernel", TORCH_BOX(&paged::npu_attention_kernel));
}
