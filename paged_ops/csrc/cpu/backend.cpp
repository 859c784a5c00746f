// The CPU as a device of the ops: torch's threads, and values copied to where kernels expect them.
#include "backend.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace paged::cpu {
namespace {

ThreadPool thread_pool() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t count, void (*body)(int64_t, int64_t, void*), void* context) {
            torch::stable::parallel_for(
                0, count, 1, [&](int64_t begin, int64_t end) { body(begin, end, context); });
          }};
}

void run_attention(const Checks&, const AttentionInputs& in, const AttentionShape& shape,
                   const AttentionValues& values) {
  const std::vector<float> alibi_slopes = per_head_values(in.alibi_slopes);
  const std::vector<float> sinks = per_head_values(in.sinks);
  AttentionParams params = {shape, values.seq_lens.data(), values.query_start_loc.data(),
                            shape.has_alibi_slopes ? alibi_slopes.data() : nullptr,
                            shape.has_sinks ? sinks.data() : nullptr};
  params.batch = static_cast<int64_t>(values.seq_lens.size());
  attention(params, thread_pool());
}

std::string isa() { return selected_isa().name; }

}  // namespace

const Backend backend = {
    .name = "CPU",
    .takes_float8 = true,
    .takes_key_ranges = true,
    .reads_values = [] { return true; },
    // A copy of a tensor to itself returns at once.
    .touch =
        [](const Tensor& written) {
          STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_tensor_copy_(written.get(), written.get()));
        },
    .attention = run_attention,
    .write_kv =
        [](const Checks&, const WriteKvInputs&, const WriteKvShape& shape,
           const std::vector<int64_t>& slots) { write_kv({shape, slots.data()}, thread_pool()); },
    .copy_blocks =
        [](const Checks&, const CopyBlocksInputs&, const CopyBlocksShape& shape,
           const std::vector<int64_t>& pairs) {
          copy_blocks({shape, pairs.data()}, thread_pool());
        },
    .gather_kv = [](const Checks&, const GatherKvInputs&,
                    const GatherKvParams& params) { gather_kv(params, thread_pool()); },
    .merge_states = [](const Checks&, const MergeStatesInputs&,
                       const MergeStatesParams& params) { merge_states(params, thread_pool()); },
};

}  // namespace paged::cpu

STABLE_TORCH_LIBRARY_IMPL(paged, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isa", TORCH_BOX(&paged::cpu::isa));
}
