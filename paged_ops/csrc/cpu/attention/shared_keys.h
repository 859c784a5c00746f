// Finds keys that several sequences share: pieces for which their tables have the same blocks.
//
// The state of a row over a piece depends on the row and on what it sees there, so where rows of
// several sequences see a whole piece, one pass over its keys makes the states of all of them. The
// tables say it themselves: nobody has to plan, and no bit depends on whether keys are shared.
#pragma once

#include <vector>

#include "cpu/kernels.h"

namespace paged::cpu {

// Sequences of more rows for each KV head than these gain nothing that is worth the states that are
// kept for them: their products outweigh the reading of keys.
constexpr int64_t kMostSharingRows = 128;

// Consecutive pieces that the same sequences share.
struct SharedRun {
  PieceRange pieces;
  int64_t first_member;  // the run's part of members() and tokens()
  int64_t num_members;
  int64_t first_token;
  int64_t num_tokens;
};

// What is shared in one call. Its memory is kept from call to call.
class SharedKeys {
 public:
  // `piece_keys` is the number of keys that make a piece.
  void find(const AttentionParams& params, int64_t piece_keys);

  // In the order of their first pieces. A sequence is in no two runs with the same piece.
  const std::vector<SharedRun>& runs() const { return runs_; }
  // The sequences of a run, in ascending order.
  const int64_t* members(const SharedRun& run) const { return &members_[run.first_member]; }
  const SharedToken* tokens(const SharedRun& run) const { return &tokens_[run.first_token]; }

  // All query tokens of sequences that share keys.
  int64_t num_tokens() const { return num_tokens_; }
  bool has(int64_t sequence) const { return !runs_.empty() && first_index_[sequence] >= 0; }
  // The index, among all of these, of the first token of a sequence.
  int64_t first_index(int64_t sequence) const { return first_index_[sequence]; }

 private:
  // A sequence, and the pieces of which all its rows see every key.
  struct Candidate {
    int64_t sequence;
    PieceRange whole;
  };

  static PieceRange whole_pieces(const AttentionParams& params, int64_t sequence,
                                 int64_t piece_keys);
  void group(const AttentionParams& params, int64_t piece, int64_t piece_keys);
  void add(int64_t piece, const int64_t* members, int64_t num_members);
  void list_tokens(const AttentionParams& params);

  std::vector<Candidate> candidates_;
  std::vector<int64_t> order_;  // of the candidates for one piece, those with equal blocks together
  std::vector<int64_t> last_run_;  // of each sequence, or -1
  std::vector<int64_t> first_index_;
  std::vector<SharedRun> runs_;
  std::vector<int64_t> members_;
  std::vector<SharedToken> tokens_;
  int64_t num_tokens_ = 0;
};

}  // namespace paged::cpu
