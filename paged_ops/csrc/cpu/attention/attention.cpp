// Runs an attention call: its tasks, on the threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/attention/plan.h"
#include "cpu/attention/row_span.h"
#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace paged::cpu {
namespace {

constexpr int64_t kAlignment = 64;

// Memory that is kept from call to call, and only ever replaced by more.
class Buffer {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(std::aligned_alloc(kAlignment, padded(bytes)));
      size_ = memory_ == nullptr ? 0 : padded(bytes);
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    return static_cast<char*>(memory_.get());
  }

  static int64_t padded(int64_t bytes) { return std::max(round_up(bytes, kAlignment), kAlignment); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

void run_task(const AttentionParams& params, Plan& plan, const Task& task, float* states,
              void* scratch) {
  const AttentionKernels& kernels = *selected_isa().attention;
  if (task.split == kWhole) return kernels.attend(params, task.span, scratch);
  SplitSpan& whole = plan.split(task.split);
  const int64_t per_piece = floats_per_state(params, task.span.num_rows);
  float* first = states + whole.states;
  kernels.attend_pieces(params, task.span, task.pieces.begin, task.pieces.end,
                        first + (task.pieces.begin - whole.pieces.begin) * per_piece, scratch);
  // Whoever finishes last sees the states of all others (acquire) and folds them.
  std::atomic_ref<int64_t> tasks_left(whole.tasks_left);
  if (tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    kernels.combine(params, whole.span, whole.pieces.end - whole.pieces.begin, first);
  }
}

}  // namespace

void attention(const AttentionParams& params, const ThreadPool& pool) {
  // Each calling thread keeps its plan and its memory, so a call in the steady state allocates
  // nothing.
  thread_local Plan plan;
  thread_local Buffer state_buffer;
  thread_local Buffer scratch_buffer;
  const AttentionKernels& kernels = *selected_isa().attention;
  plan.make(params, kernels.span_limits(params), pool.num_threads);
  if (plan.tasks().empty()) return;
  const int64_t scratch_bytes = Buffer::padded(kernels.scratch_bytes(params, plan.most_rows()));
  float* states = reinterpret_cast<float*>(
      state_buffer.at_least(plan.state_floats() * static_cast<int64_t>(sizeof(float))));
  char* scratch = scratch_buffer.at_least(plan.num_threads() * scratch_bytes);
  Plan& shared = plan;  // the worker threads have a plan of their own by this name
  std::atomic<size_t> next{0};
  pool.for_each(plan.num_threads(), [&](int64_t thread) {
    const size_t num_tasks = shared.tasks().size();
    for (size_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) {
      run_task(params, shared, shared.tasks()[i], states, scratch + thread * scratch_bytes);
    }
  });
}

}  // namespace paged::cpu
