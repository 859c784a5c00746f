// Cuts an attention call into tasks and runs them on the threads.
//
// A task is a row span against all the keys it sees, or against a few of their pieces where one
// span alone would keep the other threads waiting. Threads take tasks from a common list, so that
// ragged batches balance. Which thread does what changes no bit: a row's result doesn't depend on
// the span it is in, and pieces are cut and folded the same way in either case.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

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

  static int64_t padded(int64_t bytes) {
    return std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  int64_t size_ = 0;
};

// A span cut into tasks of several pieces.
struct SplitSpan {
  RowSpan span;
  PieceRange pieces;
  int64_t states;      // offset of one state per piece, in floats
  int64_t tasks_left;  // counted down by all threads
};

constexpr int64_t kWhole = -1;

struct Task {
  RowSpan span;
  PieceRange pieces;
  int64_t split;  // index of the split span it belongs to, or kWhole
};

// All rows of one sequence and KV head, and the keys that at least one of them sees.
struct Work {
  RowSpan span;
  Visible keys;
};

// Rows of a span share the packing of their keys, so more are better; but their states (half a
// megabyte at head_dim 128) have to stay in a cache, and threads need tasks to share.
constexpr int64_t kMostRows = 1024;
constexpr int64_t kFewRows = 128;

// The measure of a span's time: multiplications, where packing a key costs as many as some rows.
int64_t cost_of(const AttentionParams& params, const Work& work) {
  constexpr int64_t kPackingRows = 16;
  const int64_t per_key = params.pool.key.head_dim + params.pool.value.head_dim;
  const int64_t keys = work.keys.last - work.keys.first;
  return (keys + 16) * (work.span.num_rows + kPackingRows) * per_key;
}

// The tasks of one call. Its memory is kept from call to call.
class Plan {
 public:
  void make(const AttentionParams& params, int64_t max_threads) {
    work_.clear();
    tasks_.clear();
    splits_.clear();
    state_floats_ = 0;
    most_rows_ = 0;
    int64_t total = 0;
    for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
      const int64_t rows = num_query_tokens(params, sequence) * group_size(params);
      if (rows == 0) continue;
      for (int64_t kv_head = 0; kv_head < params.pool.num_kv_heads; ++kv_head) {
        const RowSpan span = {sequence, kv_head, 0, rows};
        work_.push_back({span, span_visible(params, span)});
        total += cost_of(params, work_.back());
      }
    }
    // Waking the other threads takes as long as some hundred thousand multiplications.
    constexpr int64_t kCostPerThread = 256 * 1024;
    num_threads_ = std::clamp<int64_t>(total / kCostPerThread, 1, max_threads);
    const int64_t share = total / num_threads_ + 1;
    for (const Work& work : work_) cut(params, work, share);
    num_threads_ = std::min<int64_t>(num_threads_, tasks_.size());
  }

  int64_t num_threads() const { return num_threads_; }
  int64_t most_rows() const { return most_rows_; }
  int64_t state_floats() const { return state_floats_; }
  const std::vector<Task>& tasks() const { return tasks_; }
  SplitSpan& split(int64_t index) { return splits_[index]; }

 private:
  // Work of more than half a thread's share is cut, into spans of about an eighth of the share. The
  // last rows come first: under the causal mask they take longest.
  void cut(const AttentionParams& params, const Work& work, int64_t share) {
    const int64_t rows = work.span.num_rows;
    int64_t num_spans = (rows + kMostRows - 1) / kMostRows;
    if (num_threads_ > 1 && 2 * cost_of(params, work) > share) {
      const int64_t wanted = 8 * cost_of(params, work) / share + 1;
      num_spans = std::clamp(std::min(wanted, rows / kFewRows), num_spans, rows);
    }
    const int64_t step =
        ((rows + num_spans - 1) / num_spans + kBlockRows - 1) / kBlockRows * kBlockRows;
    for (int64_t begin = (rows - 1) / step * step; begin >= 0; begin -= step) {
      const RowSpan span = {work.span.sequence, work.span.kv_head, begin,
                            std::min(step, rows - begin)};
      add(params, {span, span_visible(params, span)}, share);
    }
  }

  void add(const AttentionParams& params, const Work& work, int64_t share) {
    const PieceRange pieces = pieces_of(work.keys);
    const int64_t num_pieces = pieces.end - pieces.begin;
    const int64_t cost = cost_of(params, work);
    most_rows_ = std::max(most_rows_, work.span.num_rows);
    const bool is_small = num_threads_ == 1 || 2 * cost <= share;
    if (is_small || num_pieces < 2 || work.span.num_rows > kFewRows) {
      tasks_.push_back({work.span, pieces, kWhole});
      return;
    }
    const int64_t wanted = std::min(num_pieces, 8 * cost / share + 1);
    const int64_t step = (num_pieces + wanted - 1) / wanted;
    const int64_t split = static_cast<int64_t>(splits_.size());
    splits_.push_back({work.span, pieces, state_floats_, (num_pieces + step - 1) / step});
    for (int64_t begin = pieces.begin; begin < pieces.end; begin += step) {
      tasks_.push_back({work.span, {begin, std::min(begin + step, pieces.end)}, split});
    }
    state_floats_ +=
        num_pieces * selected_isa().attention->state_floats(params, work.span.num_rows);
  }

  int64_t num_threads_ = 1;
  int64_t most_rows_ = 0;
  int64_t state_floats_ = 0;
  std::vector<Work> work_;
  std::vector<Task> tasks_;
  std::vector<SplitSpan> splits_;
};

void run_task(const AttentionParams& params, Plan& plan, const Task& task, float* states,
              void* scratch) {
  const AttentionKernels& kernels = *selected_isa().attention;
  if (task.split == kWhole) return kernels.attend(params, task.span, scratch);
  SplitSpan& whole = plan.split(task.split);
  const int64_t per_piece = kernels.state_floats(params, task.span.num_rows);
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
  plan.make(params, pool.num_threads);
  if (plan.tasks().empty()) return;
  const int64_t scratch_bytes =
      Buffer::padded(selected_isa().attention->scratch_bytes(params, plan.most_rows()));
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
