// Cuts an attention call into tasks: a function of the call's shape, lengths and options, of the
// kernel's limits and of the number of threads, of nothing else.
//
// A task is a row span against all the keys it sees, or against a few of their pieces where one
// span alone would keep the other threads waiting. Threads take tasks from a common list, so that
// ragged batches balance. Which thread does what changes no bit: a row's result doesn't depend on
// the span it is in, and pieces are cut and folded the same way in either case.
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace paged::cpu {

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

// The tasks of one call. Its memory is kept from call to call.
class Plan {
 public:
  void make(const AttentionParams& params, const SpanLimits& limits, int64_t max_threads);

  int64_t num_threads() const { return num_threads_; }
  int64_t most_rows() const { return most_rows_; }        // of a task
  int64_t state_floats() const { return state_floats_; }  // of all split spans
  const std::vector<Task>& tasks() const { return tasks_; }
  SplitSpan& split(int64_t index) { return splits_[index]; }

 private:
  // All rows of one sequence and KV head, or some of them, and the keys that at least one sees.
  struct Work {
    RowSpan span;
    Visible keys;
  };

  static int64_t cost_of(const AttentionParams& params, const Work& work);
  int64_t num_parts(int64_t cost) const;
  void cut_rows(const AttentionParams& params, const Work& work);
  void cut_keys(const AttentionParams& params, const Work& work);

  SpanLimits limits_ = kSpansOfPieces;
  int64_t num_threads_ = 1;
  int64_t share_ = 0;  // the cost that falls to each thread
  int64_t most_rows_ = 0;
  int64_t state_floats_ = 0;
  std::vector<Work> work_;
  std::vector<Task> tasks_;
  std::vector<SplitSpan> splits_;
};

}  // namespace paged::cpu
