// Cuts an attention call into tasks: a function of the call's shape, lengths, tables and options,
// of the kernel's limits and of the number of threads, of nothing else.
//
// A task is a row span against all the keys it sees, or against a few of their pieces where one
// span alone would keep the other threads waiting. Threads take tasks from a common list, so that
// ragged batches balance. Which thread does what changes no bit: a row's result doesn't depend on
// the span it is in, and pieces are cut and folded the same way in either case.
//
// Where sequences share keys (shared_keys.h), their rows are a span over these, and each sequence
// is a span over its own keys before, between and after them: stretches. Rows keep their states
// from stretch to stretch, in the order of their keys. In the list a stretch comes after those that
// it follows, so that a thread which waits for a state waits for a task that is under way.
#pragma once

#include <vector>

#include "cpu/attention/shared_keys.h"
#include "cpu/kernels.h"

namespace paged::cpu {

// What becomes of the states of a span.
enum class Stretch {
  kAll,   // all that its rows see: the states begin and end here
  kPart,  // rows' states are fetched, and kept for what follows
  kLast,  // they are fetched, and the output is written
};

// A span cut into tasks of several pieces.
struct SplitSpan {
  RowSpan span;
  PieceRange pieces;
  Stretch stretch;
  int64_t states;      // offset of one state per piece, in floats; one more before them, if kept
  int64_t tasks_left;  // counted down by all threads
};

constexpr int64_t kWhole = -1;

struct Task {
  RowSpan span;
  PieceRange pieces;
  int64_t split;  // index of the split span it belongs to, or kWhole
  Stretch stretch;
};

// The tasks of one call. Its memory is kept from call to call.
class Plan {
 public:
  void make(const AttentionParams& params, const SpanLimits& limits, int64_t max_threads);

  int64_t num_threads() const { return num_threads_; }
  int64_t most_rows() const { return most_rows_; }            // of a task
  int64_t most_kept_rows() const { return most_kept_rows_; }  // of one whose states are kept
  int64_t state_floats() const { return state_floats_; }      // of all split spans
  const std::vector<Task>& tasks() const { return tasks_; }
  SplitSpan& split(int64_t index) { return splits_[index]; }

  // Tokens whose states are kept, and the index of that of a row.
  int64_t num_kept_tokens() const { return shared_.num_tokens(); }
  int64_t kept_index(const AttentionParams& params, const RowSpan& span, int64_t row) const;
  // The first piece of the sequence of a token whose states are kept, and how many pieces its
  // states are over already, for each KV head.
  int64_t first_piece(int64_t index) const { return first_pieces_[index]; }
  int64_t& pieces_done(const AttentionParams& params, int64_t index, int64_t kv_head) {
    return pieces_done_[index * params.pool.num_kv_heads + kv_head];
  }

 private:
  // Rows of one sequence and KV head, or of several that share keys, and keys to attend to.
  struct Work {
    RowSpan span;
    Visible keys;  // that at least one of the rows sees
    PieceRange pieces;
    Stretch stretch;
  };

  static int64_t cost_of(const AttentionParams& params, const Work& work);
  int64_t num_parts(int64_t cost) const;
  void list_work(const AttentionParams& params);
  void list_stretches(const AttentionParams& params);
  void add_stretch(const AttentionParams& params, int64_t sequence, int64_t end, Stretch stretch);
  void cut_rows(const AttentionParams& params, const Work& work);
  void cut_keys(const AttentionParams& params, const Work& work);

  SpanLimits limits_ = kSpansOfPieces;
  int64_t num_threads_ = 1;
  int64_t share_ = 0;  // the cost that falls to each thread
  int64_t most_rows_ = 0;
  int64_t most_kept_rows_ = 0;
  int64_t state_floats_ = 0;
  SharedKeys shared_;
  std::vector<SharedTokens> shared_tokens_;  // of each run
  std::vector<int64_t> next_piece_;          // of each sequence: where its next stretch begins
  std::vector<int64_t> first_pieces_;
  std::vector<int64_t> pieces_done_;
  std::vector<Work> work_;
  std::vector<Task> tasks_;
  std::vector<SplitSpan> splits_;
};

}  // namespace paged::cpu
