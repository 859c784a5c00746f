// Runs an attention call: its tasks, on the threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <thread>

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

// One row of the state of a span: its numbers, `stride` apart, and its accumulator.
struct RowState {
  float* numbers;
  int64_t stride;
  float* acc;
};

// A call under way: its plan, and the states of its rows that outlive a task.
class Call {
 public:
  Call(const AttentionParams& params, Plan& plan, float* states)
      : params_(params),
        plan_(plan),
        columns_(columns_of(params)),
        kept_(states),
        split_(states + kept_floats(params, plan)) {}

  static int64_t state_bytes(const AttentionParams& params, const Plan& plan) {
    return (kept_floats(params, plan) + plan.state_floats()) * int64_t{sizeof(float)};
  }
  // Scratch memory that comes before that of the kernels: the state of a stretch.
  static int64_t stretch_bytes(const AttentionParams& params, const Plan& plan) {
    return floats_per_state(params, plan.most_kept_rows()) * int64_t{sizeof(float)};
  }

  void run(const Task& task, char* scratch) {
    char* kernel_scratch = scratch + stretch_bytes(params_, plan_);
    if (task.split != kWhole) return run_part(task, kernel_scratch);
    if (task.stretch == Stretch::kAll) return kernels_.attend(params_, task.span, kernel_scratch);
    float* state = reinterpret_cast<float*>(scratch);
    fetch(task.span, task.pieces.begin, state);
    kernels_.extend(params_, task.span, task.pieces, state, kernel_scratch);
    leave(task.span, task.stretch, task.pieces.end, state);
  }

 private:
  // A row that is kept has its numbers, on a cache line, and its accumulator behind them.
  static constexpr int64_t kKeptNumbers = 16;

  static int64_t kept_floats(const AttentionParams& params, const Plan& plan) {
    return plan.num_kept_tokens() * params.num_heads * (kKeptNumbers + columns_of(params));
  }

  // Whoever finishes last sees the states of all others (acquire) and folds them.
  void run_part(const Task& task, char* scratch) {
    SplitSpan& whole = plan_.split(task.split);
    const int64_t per_state = floats_per_state(params_, task.span.num_rows);
    float* first = split_ + whole.states;
    for (int64_t piece = task.pieces.begin; piece < task.pieces.end; ++piece) {
      float* state = first + (piece - whole.pieces.begin) * per_state;
      for (int64_t r = 0; r < task.span.num_rows; ++r) clear(row_state(task.span, r, state));
      kernels_.extend(params_, task.span, {piece, piece + 1}, state, scratch);
    }
    std::atomic_ref<int64_t> tasks_left(whole.tasks_left);
    if (tasks_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    int64_t num_states = whole.pieces.end - whole.pieces.begin;
    if (whole.stretch != Stretch::kAll) {
      first -= per_state;
      ++num_states;
      fetch(whole.span, whole.pieces.begin, first);
    }
    kernels_.fold(params_, whole.span, num_states, first);
    leave(whole.span, whole.stretch, whole.pieces.end, first);
  }

  // Copies the states of the rows when they are over all pieces before `piece`. Whoever they wait
  // for is at work already: it stands earlier in the list of tasks.
  void fetch(const RowSpan& span, int64_t piece, float* state) {
    for (int64_t r = 0; r < span.num_rows; ++r) {
      const int64_t index = plan_.kept_index(params_, span, r);
      const std::atomic_ref<int64_t> done(plan_.pieces_done(params_, index, span.kv_head));
      while (done.load(std::memory_order_acquire) != piece) std::this_thread::yield();
      const RowState to = row_state(span, r, state);
      if (piece == plan_.first_piece(index)) {
        clear(to);
      } else {
        copy(kept_state(span, r), to);
      }
    }
  }

  // What becomes of states that are over all pieces before `piece`.
  void leave(const RowSpan& span, Stretch stretch, int64_t piece, float* state) {
    if (stretch != Stretch::kPart) return kernels_.finish(params_, span, state);
    for (int64_t r = 0; r < span.num_rows; ++r) {
      copy(row_state(span, r, state), kept_state(span, r));
    }
    for (int64_t r = 0; r < span.num_rows; r += group_size(params_)) {
      const int64_t index = plan_.kept_index(params_, span, r);
      const std::atomic_ref<int64_t> done(plan_.pieces_done(params_, index, span.kv_head));
      done.store(piece, std::memory_order_release);
    }
  }

  RowState row_state(const RowSpan& span, int64_t row, float* state) const {
    const int64_t stride = numbers_stride(span.num_rows);
    return {state + row, stride, state + kNumbersPerRow * stride + row * columns_};
  }

  RowState kept_state(const RowSpan& span, int64_t row) const {
    const int64_t index = plan_.kept_index(params_, span, row) * params_.num_heads +
                          query_row(params_, span, row).head;
    float* state = kept_ + index * (kKeptNumbers + columns_);
    return {state, 1, state + kKeptNumbers};
  }

  void clear(const RowState& to) const {
    to.numbers[0] = -std::numeric_limits<float>::infinity();
    for (int64_t i = 1; i < kNumbersPerRow; ++i) to.numbers[i * to.stride] = 0.0f;
    std::fill_n(to.acc, columns_, 0.0f);
  }

  void copy(const RowState& from, const RowState& to) const {
    for (int64_t i = 0; i < kNumbersPerRow; ++i) {
      to.numbers[i * to.stride] = from.numbers[i * from.stride];
    }
    std::copy_n(from.acc, columns_, to.acc);
  }

  const AttentionKernels& kernels_ = *selected_isa().attention;
  const AttentionParams& params_;
  Plan& plan_;
  int64_t columns_;
  float* kept_;
  float* split_;
};

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
  const int64_t scratch_bytes = Buffer::padded(Call::stretch_bytes(params, plan) +
                                               kernels.scratch_bytes(params, plan.most_rows()));
  Call call(params, plan,
            reinterpret_cast<float*>(state_buffer.at_least(Call::state_bytes(params, plan))));
  char* scratch = scratch_buffer.at_least(plan.num_threads() * scratch_bytes);
  const std::vector<Task>& tasks = plan.tasks();
  std::atomic<size_t> next{0};
  pool.for_each(plan.num_threads(), [&](int64_t thread) {
    for (size_t i = next.fetch_add(1); i < tasks.size(); i = next.fetch_add(1)) {
      call.run(tasks[i], scratch + thread * scratch_bytes);
    }
  });
}

}  // namespace paged::cpu
