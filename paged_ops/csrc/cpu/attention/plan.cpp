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

RowSpan span_of(const AttentionParams& params, int64_t sequence, int64_t kv_head) {
  return {sequence, kv_head, 0, num_query_tokens(params, sequence) * group_size(params)};
}

}  // namespace

void Plan::make(const AttentionParams& params, const SpanLimits& limits, int64_t max_threads) {
  limits_ = limits;
  work_.clear();
  tasks_.clear();
  splits_.clear();
  state_floats_ = 0;
  most_rows_ = 0;
  most_kept_rows_ = 0;
  shared_.find(params, limits.piece_keys);
  list_work(params);
  int64_t total = 0;
  for (const Work& work : work_) total += cost_of(params, work);
  // Waking the other threads takes as long as some hundred thousand multiplications.
  constexpr int64_t kCostPerThread = 256 * 1024;
  num_threads_ = std::clamp<int64_t>(total / kCostPerThread, 1, max_threads);
  share_ = total / num_threads_ + 1;
  for (const Work& work : work_) cut_rows(params, work);
  num_threads_ = std::min<int64_t>(num_threads_, tasks_.size());
}

int64_t Plan::kept_index(const AttentionParams& params, const RowSpan& span, int64_t row) const {
  const int64_t token = (span.row_begin + row) / group_size(params);
  if (span.shared != nullptr) return span.shared->tokens[token].index;
  return shared_.first_index(span.sequence) + token;
}

// What shares keys comes first, and its last stretches last: others stand between a state and those
// who wait for it.
void Plan::list_work(const AttentionParams& params) {
  if (!shared_.runs().empty()) list_stretches(params);
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    if (num_query_tokens(params, sequence) == 0 || shared_.has(sequence)) continue;
    for (int64_t kv_head = 0; kv_head < params.pool.num_kv_heads; ++kv_head) {
      const RowSpan span = span_of(params, sequence, kv_head);
      const Visible keys = span_visible(params, span);
      work_.push_back({span, keys, pieces_of(keys, limits_.piece_keys), Stretch::kAll});
    }
  }
  if (shared_.runs().empty()) return;
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    if (!shared_.has(sequence)) continue;
    const Visible keys = span_visible(params, span_of(params, sequence, 0));
    add_stretch(params, sequence, pieces_of(keys, limits_.piece_keys).end, Stretch::kLast);
  }
}

// All but the last stretches of sequences that share keys.
void Plan::list_stretches(const AttentionParams& params) {
  const int64_t num_kv_heads = params.pool.num_kv_heads;
  const int64_t num_tokens = shared_.num_tokens();
  first_pieces_.resize(num_tokens);
  pieces_done_.resize(num_tokens * num_kv_heads);
  next_piece_.resize(params.batch);
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    if (!shared_.has(sequence)) continue;
    const Visible keys = span_visible(params, span_of(params, sequence, 0));
    const int64_t first = pieces_of(keys, limits_.piece_keys).begin;
    next_piece_[sequence] = first;
    for (int64_t t = 0; t < num_query_tokens(params, sequence); ++t) {
      const int64_t index = shared_.first_index(sequence) + t;
      first_pieces_[index] = first;
      std::fill_n(&pieces_done_[index * num_kv_heads], num_kv_heads, first);
    }
  }
  shared_tokens_.clear();
  for (const SharedRun& run : shared_.runs()) {
    shared_tokens_.push_back(
        {shared_.tokens(run),
         {run.pieces.begin * limits_.piece_keys, run.pieces.end * limits_.piece_keys}});
  }
  for (size_t i = 0; i < shared_tokens_.size(); ++i) {
    const SharedRun& run = shared_.runs()[i];
    const int64_t* members = shared_.members(run);
    for (int64_t m = 0; m < run.num_members; ++m) {
      if (next_piece_[members[m]] < run.pieces.begin) {
        add_stretch(params, members[m], run.pieces.begin, Stretch::kPart);
      }
      next_piece_[members[m]] = run.pieces.end;
    }
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      const RowSpan span = {members[0], kv_head, 0, run.num_tokens * group_size(params),
                            &shared_tokens_[i]};
      work_.push_back({span, shared_tokens_[i].keys, run.pieces, Stretch::kPart});
    }
  }
}

// The keys of one sequence from where its next stretch begins up to piece `end`.
void Plan::add_stretch(const AttentionParams& params, int64_t sequence, int64_t end,
                       Stretch stretch) {
  const PieceRange pieces = {next_piece_[sequence], end};
  for (int64_t kv_head = 0; kv_head < params.pool.num_kv_heads; ++kv_head) {
    const RowSpan span = span_of(params, sequence, kv_head);
    Visible keys = span_visible(params, span);
    keys.first = std::max(keys.first, pieces.begin * limits_.piece_keys);
    keys.last = std::max(keys.first, std::min(keys.last, pieces.end * limits_.piece_keys));
    work_.push_back({span, keys, pieces, stretch});
  }
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
  return divide_up(8 * cost, share_);
}

// Cuts between rows. The last rows come first: under the causal mask they take longest. Rows that
// share keys are cut between tokens, all others between blocks of rows.
void Plan::cut_rows(const AttentionParams& params, const Work& work) {
  const int64_t rows = work.span.num_rows;
  const int64_t wanted = std::min(num_parts(cost_of(params, work)), rows / kFewRows);
  const int64_t num_spans = std::clamp(wanted, divide_up(rows, limits_.most_rows), rows);
  int64_t step = round_up(divide_up(rows, num_spans), kBlockRows);
  if (work.span.shared != nullptr) {
    const int64_t group = group_size(params);
    step = std::max(std::min(step, limits_.most_rows) / group, int64_t{1}) * group;
  }
  for (int64_t begin = (rows - 1) / step * step; begin >= 0; begin -= step) {
    Work part = work;
    part.span = rows_of(work.span, begin, std::min(step, rows - begin));
    if (work.stretch == Stretch::kAll) {
      part.keys = span_visible(params, part.span);
      part.pieces = pieces_of(part.keys, limits_.piece_keys);
    }
    cut_keys(params, part);
  }
}

// Cuts between the pieces of few rows' keys, whose states are small, and adds the tasks.
void Plan::cut_keys(const AttentionParams& params, const Work& work) {
  const PieceRange pieces = work.pieces;
  const int64_t rows = work.span.num_rows;
  const bool is_kept = work.stretch != Stretch::kAll;
  const int64_t num_pieces = pieces.end - pieces.begin;
  const int64_t wanted = std::min(num_parts(cost_of(params, work)), num_pieces);
  most_rows_ = std::max(most_rows_, rows);
  if (is_kept) most_kept_rows_ = std::max(most_kept_rows_, rows);
  if (wanted < 2 || rows > kFewRows) {
    tasks_.push_back({work.span, pieces, kWhole, work.stretch});
    return;
  }
  const int64_t step = divide_up(num_pieces, wanted);
  const int64_t split = static_cast<int64_t>(splits_.size());
  const int64_t per_state = floats_per_state(params, rows);
  if (is_kept) state_floats_ += per_state;
  splits_.push_back({work.span, pieces, work.stretch, state_floats_, divide_up(num_pieces, step)});
  for (int64_t begin = pieces.begin; begin < pieces.end; begin += step) {
    const PieceRange part = {begin, std::min(begin + step, pieces.end)};
    tasks_.push_back({work.span, part, split, work.stretch});
  }
  state_floats_ += num_pieces * per_state;
}

}  // namespace paged::cpu
