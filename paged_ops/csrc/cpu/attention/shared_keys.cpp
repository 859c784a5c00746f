// Which sequences share which pieces. Where nothing is shared this is a few comparisons for each
// piece: of tables that differ, the first entries do.
#include "cpu/attention/shared_keys.h"

#include <algorithm>

#include "cpu/attention/row_span.h"

namespace paged::cpu {
namespace {

// How the blocks of a piece are ordered between two sequences: below 0, 0 or above, as usual.
int64_t compare_blocks(const AttentionParams& params, PieceRange columns, int64_t a, int64_t b) {
  for (int64_t column = columns.begin; column < columns.end; ++column) {
    const int64_t difference =
        static_cast<int64_t>(params.block_tables.at(a, column)) - params.block_tables.at(b, column);
    if (difference != 0) return difference;
  }
  return 0;
}

}  // namespace

// With a tree mask rows see all of the context only.
PieceRange SharedKeys::whole_pieces(const AttentionParams& params, int64_t sequence,
                                    int64_t piece_keys) {
  const int64_t seq_len = params.seq_lens[sequence];
  const int64_t new_tokens = num_query_tokens(params, sequence);
  if (new_tokens == 0 || new_tokens * group_size(params) > kMostSharingRows) return {0, 0};
  int64_t first = visible(params, seq_len, seq_len - 1).first;
  int64_t last = visible(params, seq_len, seq_len - new_tokens).last;
  if (params.key_ranges.data != nullptr) {
    for (int64_t t = 0; t < new_tokens; ++t) {
      const Visible keys = visible_to(params, seq_len, seq_len - new_tokens + t,
                                      params.query_start_loc[sequence] + t);
      first = std::max(first, keys.first);
      last = std::min(last, keys.last);
    }
  }
  if (params.tree_mask.data != nullptr) last = std::min(last, seq_len - new_tokens);
  return {(first + piece_keys - 1) / piece_keys, last / piece_keys};
}

void SharedKeys::find(const AttentionParams& params, int64_t piece_keys) {
  runs_.clear();
  candidates_.clear();
  num_tokens_ = 0;
  if (params.batch < 2) return;
  PieceRange all = {INT64_MAX, 0};
  for (int64_t sequence = 0; sequence < params.batch; ++sequence) {
    if (params.seq_lens[sequence] < piece_keys) continue;
    const PieceRange whole = whole_pieces(params, sequence, piece_keys);
    if (whole.begin >= whole.end) continue;
    candidates_.push_back({sequence, whole});
    all = {std::min(all.begin, whole.begin), std::max(all.end, whole.end)};
  }
  if (candidates_.size() < 2) return;
  members_.clear();
  last_run_.assign(params.batch, -1);
  first_index_.assign(params.batch, -1);
  for (int64_t piece = all.begin; piece < all.end; ++piece) group(params, piece, piece_keys);
  if (!runs_.empty()) list_tokens(params);
}

void SharedKeys::group(const AttentionParams& params, int64_t piece, int64_t piece_keys) {
  order_.clear();
  for (const Candidate& candidate : candidates_) {
    if (piece < candidate.whole.begin || piece >= candidate.whole.end) continue;
    order_.push_back(candidate.sequence);
  }
  if (order_.size() < 2) return;
  const int64_t block_size = params.pool.block_size;
  const PieceRange columns = {piece * piece_keys / block_size,
                              ((piece + 1) * piece_keys + block_size - 1) / block_size};
  const auto is_before = [&](int64_t a, int64_t b) {
    const int64_t difference = compare_blocks(params, columns, a, b);
    return difference != 0 ? difference < 0 : a < b;
  };
  // Where all share the piece, they are in order.
  if (!std::is_sorted(order_.begin(), order_.end(), is_before)) {
    std::sort(order_.begin(), order_.end(), is_before);
  }
  const auto count = static_cast<int64_t>(order_.size());
  for (int64_t begin = 0, end = 1; begin < count; begin = end, ++end) {
    while (end < count && compare_blocks(params, columns, order_[begin], order_[end]) == 0) ++end;
    if (end - begin > 1) add(piece, &order_[begin], end - begin);
  }
}

// Lengthens the run that ends where the piece begins, if it has the same members, or begins one.
void SharedKeys::add(int64_t piece, const int64_t* members, int64_t num_members) {
  const int64_t last = last_run_[members[0]];
  if (last >= 0 && runs_[last].pieces.end == piece && runs_[last].num_members == num_members &&
      std::equal(members, members + num_members, &members_[runs_[last].first_member])) {
    ++runs_[last].pieces.end;
    return;
  }
  const auto run = static_cast<int64_t>(runs_.size());
  runs_.push_back({{piece, piece + 1}, static_cast<int64_t>(members_.size()), num_members, 0, 0});
  members_.insert(members_.end(), members, members + num_members);
  for (int64_t i = 0; i < num_members; ++i) last_run_[members[i]] = run;
}

void SharedKeys::list_tokens(const AttentionParams& params) {
  tokens_.clear();
  for (SharedRun& run : runs_) {
    run.first_token = static_cast<int64_t>(tokens_.size());
    for (int64_t i = 0; i < run.num_members; ++i) {
      const int64_t sequence = members(run)[i];
      const int64_t count = num_query_tokens(params, sequence);
      int64_t& index = first_index_[sequence];
      if (index < 0) {
        index = num_tokens_;
        num_tokens_ += count;
      }
      for (int64_t t = 0; t < count; ++t) {
        tokens_.push_back({params.query_start_loc[sequence] + t,
                           params.seq_lens[sequence] - count + t, index + t});
      }
    }
    run.num_tokens = static_cast<int64_t>(tokens_.size()) - run.first_token;
  }
}

}  // namespace paged::cpu
