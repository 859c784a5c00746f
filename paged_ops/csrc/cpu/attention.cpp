// Cuts an attention call into tasks and runs them on the threads.
//
// A task is one row block against all the keys it sees, or against a few of their pieces where one
// row block alone would keep the other threads waiting. Threads take tasks from a common list, so
// that ragged batches balance. Which thread does what changes no bit: pieces are cut and folded the
// same way in either case.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/ops.h"
#include "cpu/row_block.h"

namespace paged::cpu {
namespace {

constexpr size_t kAlignment = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  Memory memory(std::aligned_alloc(kAlignment, std::max(size, kAlignment)));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// A row block cut into tasks of several pieces. `states` holds one state per piece.
struct SplitBlock {
  RowBlock block;
  PieceRange pieces;
  Memory states;
  std::atomic<int64_t> tasks_left{0};
};

struct Task {
  RowBlock block;
  PieceRange pieces;
  SplitBlock* split;  // null: the whole row block
};

// A row block and the keys that at least one of its rows sees.
struct Work {
  RowBlock block;
  Visible keys;
};

// Multiplications of one row block, the measure of its time; a task costs some even without keys.
int64_t cost_of(const AttentionParams& params, const Work& work) {
  const int64_t per_key = params.pool.key.head_dim + params.pool.value.head_dim;
  return (work.keys.last - work.keys.first + 16) * work.block.num_rows * per_key;
}

// All row blocks of the call, those of one sequence and KV head together and the longest first.
std::vector<Work> row_blocks(const AttentionParams& params) {
  std::vector<Work> blocks;
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    const int64_t rows = num_query_tokens(params, sequence) * group_size(params);
    const int64_t num_blocks = (rows + kMaxRows - 1) / kMaxRows;
    for (int64_t kv_head = 0; kv_head < params.pool.num_kv_heads; ++kv_head) {
      for (int64_t i = num_blocks - 1; i >= 0; --i) {
        const int64_t begin = i * kMaxRows;
        const RowBlock block = {sequence, kv_head, begin, std::min(kMaxRows, rows - begin)};
        blocks.push_back({block, block_visible(params, block)});
      }
    }
  }
  return blocks;
}

class Plan {
 public:
  Plan(const AttentionParams& params, int64_t num_threads) {
    const std::vector<Work> blocks = row_blocks(params);
    int64_t total = 0;
    for (const Work& work : blocks) total += cost_of(params, work);
    // Waking the other threads takes as long as some hundred thousand multiplications.
    constexpr int64_t kCostPerThread = 256 * 1024;
    num_threads_ = std::clamp<int64_t>(total / kCostPerThread, 1, num_threads);
    // A row block of more than half a thread's share is cut into tasks of about an eighth of it. At
    // most 2 * num_threads blocks can be that large, which bounds the memory for their states.
    const int64_t share = total / num_threads_ + 1;
    tasks_.reserve(blocks.size());
    for (const Work& work : blocks) {
      const RowBlock& block = work.block;
      const PieceRange pieces = pieces_of(work.keys);
      const int64_t num_pieces = pieces.end - pieces.begin;
      const int64_t cost = cost_of(params, work);
      if (num_threads_ == 1 || num_pieces < 2 || 2 * cost <= share) {
        tasks_.push_back({block, pieces, nullptr});
      } else {
        const int64_t wanted = std::min(num_pieces, 8 * cost / share + 1);
        split(params, block, pieces, (num_pieces + wanted - 1) / wanted);
      }
    }
  }

  int64_t num_threads() const { return std::min<int64_t>(num_threads_, tasks_.size()); }
  const std::vector<Task>& tasks() const { return tasks_; }

 private:
  void split(const AttentionParams& params, const RowBlock& block, PieceRange pieces,
             int64_t pieces_per_task) {
    const int64_t state_bytes = selected_isa().attention->state_floats(params) * sizeof(float);
    auto whole = std::make_unique<SplitBlock>();
    whole->block = block;
    whole->pieces = pieces;
    whole->states = allocate((pieces.end - pieces.begin) * state_bytes);
    for (int64_t begin = pieces.begin; begin < pieces.end; begin += pieces_per_task) {
      tasks_.push_back(
          {block, {begin, std::min(begin + pieces_per_task, pieces.end)}, whole.get()});
      whole->tasks_left.fetch_add(1, std::memory_order_relaxed);
    }
    splits_.push_back(std::move(whole));
  }

  int64_t num_threads_ = 1;
  std::vector<Task> tasks_;
  std::vector<std::unique_ptr<SplitBlock>> splits_;
};

void run_task(const AttentionParams& params, const Task& task, void* scratch) {
  const AttentionKernels& kernels = *selected_isa().attention;
  if (task.split == nullptr) return kernels.attend(params, task.block, scratch);
  SplitBlock& whole = *task.split;
  float* states = static_cast<float*>(whole.states.get());
  float* mine = states + (task.pieces.begin - whole.pieces.begin) * kernels.state_floats(params);
  kernels.attend_pieces(params, task.block, task.pieces.begin, task.pieces.end, mine, scratch);
  // Whoever finishes last sees the states of all others (acquire) and folds them.
  if (whole.tasks_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    kernels.combine(params, whole.block, whole.pieces.end - whole.pieces.begin, states);
  }
}

}  // namespace

void attention(const AttentionParams& params, const ThreadPool& pool) {
  const Plan plan(params, pool.num_threads);
  if (plan.tasks().empty()) return;
  const int64_t scratch_bytes =
      (selected_isa().attention->scratch_bytes(params) + kAlignment - 1) / kAlignment * kAlignment;
  const Memory scratch = allocate(plan.num_threads() * scratch_bytes);
  std::atomic<size_t> next{0};
  pool.for_each(plan.num_threads(), [&](int64_t thread) {
    char* mine = static_cast<char*>(scratch.get()) + thread * scratch_bytes;
    for (size_t i = next.fetch_add(1); i < plan.tasks().size(); i = next.fetch_add(1)) {
      run_task(params, plan.tasks()[i], mine);
    }
  });
}

}  // namespace paged::cpu
