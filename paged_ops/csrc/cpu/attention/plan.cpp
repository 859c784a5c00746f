// Where a call is cut: by an estimate of what each part costs, so that threads finish together.
#include "cpu/attention/plan.h"

#include <algorithm>

#include "cpu/attention/row_span.h"

namespace paged::cpu {
namespace {

// Spans of no more rows than these aren't cut between rows for the sake of threads, but between
// keys.
constexpr int64_t kFewRows = 128;

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace

void Plan::make(const AttentionParams& params, const SpanLimits& limits, int64_t max_threads) {
  limits_ = limits;
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
  share_ = total / num_threads_ + 1;
  for (const Work& work : work_) cut_rows(params, work);
  num_threads_ = std::min<int64_t>(num_threads_, tasks_.size());
}

// The measure of a span's time: multiplications. Packing a key costs as many as some rows; what a
// row costs beside its keys (its query is prepared, its state cleared, folded and written), as many
// as some keys.
int64_t Plan::cost_of(const AttentionParams& params, const Work& work) {
  constexpr int64_t kPackingRows = 16;
  constexpr int64_t kKeysBeside = 16;
  const int64_t per_key = params.pool.key.head_dim + params.pool.value.head_dim;
  const int64_t keys = work.keys.last - work.keys.first;
  return (keys + kKeysBeside) * (work.span.num_rows + kPackingRows) * per_key;
}

// How many tasks there should be of work of that cost. More than half a thread's share is cut, into
// eighths of the share, so that no thread waits for longer than one of these at the end.
int64_t Plan::num_parts(int64_t cost) const {
  if (num_threads_ == 1 || 2 * cost <= share_) return 1;
  return 8 * cost / share_ + 1;
}

// Cuts between rows. The last rows come first: under the causal mask they take longest.
void Plan::cut_rows(const AttentionParams& params, const Work& work) {
  const int64_t rows = work.span.num_rows;
  const int64_t wanted = std::min(num_parts(cost_of(params, work)), rows / kFewRows);
  const int64_t num_spans = std::clamp(wanted, divide_up(rows, limits_.most_rows), rows);
  const int64_t step = round_up(divide_up(rows, num_spans), kBlockRows);
  for (int64_t begin = (rows - 1) / step * step; begin >= 0; begin -= step) {
    const RowSpan span = {work.span.sequence, work.span.kv_head, begin,
                          std::min(step, rows - begin)};
    cut_keys(params, {span, span_visible(params, span)});
  }
}

// Cuts between the pieces of few rows' keys, whose states are small, and adds the tasks.
void Plan::cut_keys(const AttentionParams& params, const Work& work) {
  const PieceRange pieces = pieces_of(work.keys, limits_.piece_keys);
  const int64_t num_pieces = pieces.end - pieces.begin;
  const int64_t wanted = std::min(num_parts(cost_of(params, work)), num_pieces);
  most_rows_ = std::max(most_rows_, work.span.num_rows);
  if (wanted < 2 || work.span.num_rows > kFewRows) {
    tasks_.push_back({work.span, pieces, kWhole});
    return;
  }
  const int64_t step = divide_up(num_pieces, wanted);
  const int64_t split = static_cast<int64_t>(splits_.size());
  splits_.push_back({work.span, pieces, state_floats_, divide_up(num_pieces, step)});
  for (int64_t begin = pieces.begin; begin < pieces.end; begin += step) {
    tasks_.push_back({work.span, {begin, std::min(begin + step, pieces.end)}, split});
  }
  state_floats_ += num_pieces * floats_per_state(params, work.span.num_rows);
}

}  // namespace paged::cpu
