// A C interface to the plan of a call of attention, for tests that call it through ctypes.
#include "cpu/attention/plan.h"

namespace {

struct Call {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t causal;
  int64_t sliding_window;
  int64_t most_rows;
  int64_t piece_keys;
  int64_t batch;
  int64_t block_size;
  int64_t max_blocks_per_seq;
  const int32_t* block_tables;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
};

struct Summary {
  int64_t num_threads;
  int64_t most_rows;
  int64_t state_floats;
  int64_t num_tasks;
};

// A task; where the query tokens whose rows share its keys are among all such; and of the split
// span that it belongs to, where its states are and its number of tasks.
struct Task {
  int64_t sequence;
  int64_t kv_head;
  int64_t row_begin;
  int64_t num_rows;
  int64_t piece_begin;
  int64_t piece_end;
  int64_t split;
  int64_t states;
  int64_t tasks_left;
  int64_t first_shared;
  int64_t num_shared;
  int64_t stretch;
};

paged::AttentionParams params_of(const Call& call) {
  paged::AttentionParams params = {};
  params.pool.num_kv_heads = call.num_kv_heads;
  params.pool.key.head_dim = call.head_dim;
  params.pool.value.head_dim = call.head_dim_v;
  params.num_heads = call.num_heads;
  params.causal = call.causal != 0;
  params.sliding_window = call.sliding_window;
  params.batch = call.batch;
  params.pool.block_size = call.block_size;
  params.max_blocks_per_seq = call.max_blocks_per_seq;
  params.block_tables = {call.block_tables, call.max_blocks_per_seq, 1};
  params.seq_lens = call.seq_lens;
  params.query_start_loc = call.query_start_loc;
  return params;
}

}  // namespace

// Writes the first `capacity` tasks, and as many of the query tokens that share keys.
extern "C" Summary plan_attention(const Call* call, int64_t max_threads, Task* tasks,
                                  int64_t* shared_tokens, int64_t capacity) {
  const int64_t group = call->num_heads / call->num_kv_heads;
  int64_t num_shared = 0;
  paged::cpu::Plan plan;
  plan.make(params_of(*call), {call->most_rows, call->piece_keys}, max_threads);
  const auto num_tasks = static_cast<int64_t>(plan.tasks().size());
  for (int64_t i = 0; i < num_tasks && i < capacity; ++i) {
    const auto& [span, pieces, split, stretch] = plan.tasks()[i];
    tasks[i] = {span.sequence,
                span.kv_head,
                span.row_begin,
                span.num_rows,
                pieces.begin,
                pieces.end,
                split,
                0,
                0,
                num_shared,
                0,
                static_cast<int64_t>(stretch)};
    for (int64_t row = 0; span.shared != nullptr && row < span.num_rows; row += group) {
      if (num_shared == capacity) break;
      ++tasks[i].num_shared;
      shared_tokens[num_shared++] = span.shared->tokens[(span.row_begin + row) / group].token;
    }
    if (split == paged::cpu::kWhole) continue;
    tasks[i].states = plan.split(split).states;
    tasks[i].tasks_left = plan.split(split).tasks_left;
  }
  return {plan.num_threads(), plan.most_rows(), plan.state_floats(), num_tasks};
}
