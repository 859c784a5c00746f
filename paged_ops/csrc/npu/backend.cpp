// An NPU as a device of the ops: plans from shapes, and launches into torch's stream.
//
// Lengths, tables, slots and mappings stay on the device, so nothing waits for it and a captured
// graph may be replayed after they have changed; the kernels clamp what they read. With
// PAGED_CHECK=1 these values are copied to the host first and refused as the CPU op refuses them.
#include "backend.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "npu/launch.h"
#include "op_host/attention_tiling.h"
#include "op_host/copy_blocks_tiling.h"
#include "op_host/echo_arguments_tiling.h"
#include "op_host/gather_kv_tiling.h"
#include "op_host/merge_states_tiling.h"
#include "op_host/write_kv_tiling.h"

// Torch's own from 2.13 on; null in older ones, which have no other way to the handle of a stream
// that needs no header of torch_npu.
extern "C" __attribute__((weak)) AOTITorchError torch_stream_native_handle(StreamHandle stream,
                                                                           void** handle);

namespace paged::npu {
namespace {

using torch::stable::detail::from;

// The stream of torch on that device, which must be current. torch_npu empties its queue of
// operators before it hands out the handle, so what is launched into the stream next comes after
// everything that was called before.
Stream current_stream(int device) {
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

// One-dimensional memory without a stride, as the kernels read it: a tensor's own, or a copy.
class Dense {
 public:
  explicit Dense(const Argument& arg) {
    if (!arg.is_given()) return;
    const bool is_dense = arg.size(0) <= 1 || arg.stride(0) == 1;
    tensor_ = is_dense ? arg.tensor() : torch::stable::contiguous(arg.tensor());
  }

  // The same in another dtype.
  Dense(const Argument& arg, ScalarType dtype) : Dense(arg) {
    if (arg.is_given() && arg.dtype != dtype) tensor_ = torch::stable::to(*tensor_, dtype);
  }

  // Null for an argument that isn't given.
  const void* data() const { return tensor_.has_value() ? tensor_->const_data_ptr() : nullptr; }

 private:
  OptionalTensor tensor_;
};

// The name, dtype and shape of each tensor, for a message.
std::string described(std::initializer_list<const Argument*> arguments) {
  std::ostringstream text;
  const char* separator = "";
  for (const Argument* arg : arguments) {
    text << separator << arg->name << " " << dtype_name(arg->dtype) << " [";
    for (int64_t dim = 0; dim < arg->rank(); ++dim) {
      text << (dim == 0 ? "" : ", ") << arg->size(dim);
    }
    text << "]";
    separator = ", ";
  }
  return text.str();
}

// One call of an op on the device of its first tensor, which is current while the call lives.
class Call {
 public:
  Call(const Checks& checks, const Argument& first)
      : checks_(checks), first_(first.tensor()), guard_(first_.get_device()) {}

  // Plans with `make_plan`, a function of the chip, and launches the kernel that the plan names.
  // Its parameters are `pointers`, then the workspace where `takes_workspace`, then the tiling.
  template <class MakePlan>
  void run(const MakePlan& make_plan, std::vector<const void*> pointers, bool takes_workspace,
           std::initializer_list<const Argument*> arguments) const {
    try {
      const auto plan = make_plan(this_soc(first_.get_device()));
      // Freed when this call returns, but reused by nothing that runs before the kernel: torch
      // hands it out again only to work in the same stream.
      OptionalTensor workspace;
      if (plan.workspace_bytes > 0) {
        workspace = torch::stable::new_empty(first_, {plan.workspace_bytes}, ScalarType::Byte);
      }
      if (takes_workspace) {
        pointers.push_back(workspace.has_value() ? workspace->const_data_ptr() : nullptr);
      }
      const int device = first_.get_device();
      launch({device, current_stream(device)}, {plan.stem, plan.kernel}, plan.num_cores, pointers,
             std::as_bytes(std::span(&plan.tiling, 1)));
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

// The mask with the columns of a token side by side, as the kernels read it: the tensor's own, or
// a copy, which lives as long as this.
class DenseMask {
 public:
  DenseMask(const Argument& arg, const TreeMask& mask) : mask_(mask) {
    const bool is_dense = (mask.column_stride == 1 || mask.num_columns <= 1) &&
                          (mask.token_stride >= mask.num_columns || arg.size(0) <= 1);
    if (is_dense) return;
    copy_ = torch::stable::contiguous(arg.tensor());
    mask_ = {static_cast<const uint8_t*>(copy_->const_data_ptr()), mask.num_columns, 1,
             mask.num_columns};
  }

  const TreeMask& mask() const { return mask_; }

 private:
  OptionalTensor copy_;
  TreeMask mask_;
};

void attention(const Checks& checks, const AttentionInputs& in, const AttentionShape& given,
               const AttentionValues&) {
  if (given.num_tokens == 0) return;
  const Call call(checks, in.query);
  AttentionShape shape = given;
  std::optional<DenseMask> tree_mask;
  if (in.tree_mask.is_given()) {
    tree_mask.emplace(in.tree_mask, given.tree_mask);
    shape.tree_mask = tree_mask->mask();
  }
  const Dense seq_lens(in.seq_lens), query_start_loc(in.query_start_loc);
  const Dense alibi_slopes(in.alibi_slopes, ScalarType::Float);
  const Dense sinks(in.sinks, ScalarType::Float);
  call.run([&](const Soc& soc) { return plan_attention(shape, soc, wanted_kernel()); },
           {shape.query.data, shape.pool.key.data, shape.pool.value.data, shape.block_tables.data,
            seq_lens.data(), query_start_loc.data(), alibi_slopes.data(), sinks.data(),
            shape.pool.key.scales.data, shape.pool.value.scales.data, shape.tree_mask.data,
            shape.output.data, shape.lse},
           true, {&in.query, &in.key_cache, &in.value_cache, &in.block_tables});
}

void write_kv(const Checks& checks, const WriteKvInputs& in, const WriteKvShape& shape,
              const std::vector<int64_t>&) {
  if (shape.num_tokens == 0) return;
  const Call call(checks, in.key);
  const Dense slots(in.slot_mapping);
  const Cache &key_cache = shape.pool.key, &value_cache = shape.pool.value;
  std::vector<const void*> pointers = {shape.key.data, shape.value.data, key_cache.data,
                                       value_cache.data};
  if (is_quantised(shape.pool.dtype)) {
    pointers.insert(pointers.end(), {key_cache.scales.data, value_cache.scales.data});
  }
  pointers.push_back(slots.data());
  call.run([&](const Soc& soc) { return plan_write_kv(shape, soc); }, std::move(pointers), false,
           {&in.key, &in.value, &in.key_cache, &in.value_cache});
}

void merge_states(const Checks& checks, const MergeStatesInputs& in,
                  const MergeStatesParams& params) {
  if (params.num_tokens == 0 || params.num_heads == 0) return;
  const Call call(checks, in.out_a);
  call.run([&](const Soc& soc) { return plan_merge_states(params, soc); },
           {params.out_a.data, params.lse_a.data, params.out_b.data, params.lse_b.data,
            params.out.data, params.lse},
           false, {&in.out_a, &in.out_b});
}

void copy_blocks(const Checks& checks, const CopyBlocksInputs& in, const CopyBlocksShape& shape,
                 const std::vector<int64_t>&) {
  if (shape.num_copies == 0) return;
  const Call call(checks, in.key_cache);
  const Cache &key_cache = shape.pool.key, &value_cache = shape.pool.value;
  call.run([&](const Soc& soc) { return plan_copy_blocks(shape, soc); },
           {key_cache.data, value_cache.data, key_cache.scales.data, value_cache.scales.data,
            in.block_mapping.data()},
           true, {&in.key_cache, &in.value_cache, &in.block_mapping});
}

// A dimension changes places with itself: nothing is launched, so a captured graph has nothing of
// it. torch_npu's copy_ would copy.
void touch(const Tensor& written) {
  std::array<StableIValue, 3> stack = {from(written), from(int64_t{0}), from(int64_t{0})};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::transpose_", "", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

// The size of the result is in seq_lens, so this one waits for the device.
void gather_kv(const Checks& checks, const GatherKvInputs& in, const GatherKvParams& params) {
  if (params.num_tokens == 0) return;
  const Call call(checks, in.key_cache);
  const Dense seq_lens(in.seq_lens);
  const Cache &key_cache = params.pool.key, &value_cache = params.pool.value;
  call.run([&](const Soc& soc) { return plan_gather_kv(params, soc); },
           {key_cache.data, value_cache.data, key_cache.scales.data, value_cache.scales.data,
            params.block_tables.data, seq_lens.data(), params.key.data, params.value.data},
           false, {&in.key_cache, &in.value_cache, &in.block_tables});
}

// Lets each vector core write what it was given into `answers`, int64 of the kernel's buffers by
// cores by words; returns how many cores were launched. The tiling is `word` and its successors.
int64_t echo_arguments(Tensor answers, int64_t word) {
  const Checks checks("_npu_echo_arguments");
  const Argument out("answers", answers);
  checks.dtype(out, ScalarType::Long);
  checks.rank(out, 3, "[buffers, cores, words]");
  constexpr int64_t sizes[] = {kEchoBuffers, kEchoMostCores, kEchoWords};
  for (int64_t dim = 0; dim < 3; ++dim) checks.size(out, dim, sizes[dim], "the kernel's");
  if (out.stride(0) != kEchoMostCores * kEchoWords || out.stride(1) != kEchoWords) {
    checks.refuse("answers has gaps, expected a contiguous tensor");
  }
  std::vector<const void*> buffers;
  for (int64_t i = 0; i < kEchoBuffers; ++i) {
    buffers.push_back(static_cast<int64_t*>(answers.mutable_data_ptr()) + i * out.stride(0));
  }
  int64_t num_cores = 0;
  const auto plan = [&](const Soc& soc) {
    num_cores = soc.vector_cores;
    return plan_echo_arguments({{word, word + 1, word + 2}}, soc);
  };
  Call(checks, out).run(plan, buffers, false, {&out});
  return num_cores;
}

// Both dtypes are names of torch's: float16, bfloat16, float32, and int8 for caches.
std::string attention_kernel(std::string dtype, std::string cache_dtype, int64_t head_dim,
                             int64_t head_dim_v, bool tree_mask) {
  const auto element = [](const std::string& name) {
    return name == "float32"   ? Dtype::kFloat32
           : name == "float16" ? Dtype::kFloat16
           : name == "int8"    ? Dtype::kInt8
                               : Dtype::kBFloat16;
  };
  const AttentionKernel kernel = choose_attention_kernel({.dtype = element(dtype),
                                                          .cache_dtype = element(cache_dtype),
                                                          .head_dim = head_dim,
                                                          .head_dim_v = head_dim_v,
                                                          .values_are_keys = false,
                                                          .has_tree_mask = tree_mask},
                                                         wanted_kernel());
  return kernel == AttentionKernel::kMixed ? "mixed" : "vector";
}

}  // namespace

const Backend backend = {
    .name = "NPU",
    .takes_float8 = false,
    .takes_key_ranges = false,
    .reads_values = checks_values,
    .touch = touch,
    .attention = attention,
    .write_kv = write_kv,
    .copy_blocks = copy_blocks,
    .gather_kv = gather_kv,
    .merge_states = merge_states,
};

}  // namespace paged::npu

STABLE_TORCH_LIBRARY_IMPL(paged, PrivateUse1, m) {
  m.impl("_npu_echo_arguments", TORCH_BOX(&paged::npu::echo_arguments));
}

STABLE_TORCH_LIBRARY_IMPL(paged, CompositeExplicitAutograd, m) {
  m.impl("_npu_attention_kernel", TORCH_BOX(&paged::npu::attention_kernel));
}
