// The seam between the portable CPU code and the units compiled once per ISA.
//
// An .isa.cpp unit keeps everything in an anonymous namespace but for one constant table of
// function pointers in paged::cpu::<isa>: a function with external linkage in two such units would
// be one symbol to the linker, which could keep the copy whose instructions this machine lacks. For
// the same reason these units include neither torch nor a standard container, and their inline
// helpers are always_inline; tests/test_build.py looks at their symbols.
#pragma once

#include <cstdint>

#include "params.h"

namespace paged::cpu {

PAGED_INLINE constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Every sequence of keys is cut at multiples of this many. A piece is the unit of softmax: all its
// scores are known before the first weight, each piece has a state of its own, and the states are
// folded in order. The length depends neither on the batch nor on the number of threads, so the
// bits of a result don't either. The K and V of 512 keys (128 KB at head_dim 64 in float16)
// outweigh one state (head_dim floats) by far, and a long sequence still feeds many threads.
constexpr int64_t kPiece = 512;

// Rows that are scored, weighted and summed together. Their scores of one piece (64 KB) fit an L2
// cache beside the panels.
constexpr int64_t kBlockRows = 32;

// A query token among those of several sequences.
struct SharedToken {
  int64_t token;
  int64_t position;
  int64_t index;  // among all tokens of the call that share keys with others
};

// Query tokens of several sequences, all of which see all of some keys, in the same blocks.
struct SharedTokens {
  const SharedToken* tokens;
  Visible keys;
};

// A row span: consecutive rows of one sequence and one KV head. Rows are pairs (query token, query
// head of the KV head's group), the head running fastest.
struct RowSpan {
  int64_t sequence;
  int64_t kv_head;
  int64_t row_begin;
  int64_t num_rows;
  // If not null, the rows are those of these tokens, and all that they see is the keys that these
  // share: keys of `sequence`, which is one of theirs.
  const SharedTokens* shared = nullptr;
};

// The pieces [begin, end) of a sequence.
struct PieceRange {
  int64_t begin;
  int64_t end;
};

// How a call may be cut: into spans of so many rows, and those between pieces of so many keys.
struct SpanLimits {
  int64_t most_rows;
  int64_t piece_keys;
};

// Rows of a span share the packing of their keys, so more are better; but their states (half a
// megabyte at head_dim 128) have to stay in a cache, and threads need tasks to share.
constexpr SpanLimits kSpansOfPieces = {1024, kPiece};

struct AttentionKernels {
  SpanLimits (*span_limits)(const AttentionParams& params);
  // Bytes of 64-byte aligned scratch memory that a thread needs for spans of at most `num_rows`.
  int64_t (*scratch_bytes)(const AttentionParams& params, int64_t num_rows);
  // Attends the span to all it sees and writes its output.
  void (*attend)(const AttentionParams& params, const RowSpan& span, void* scratch);
  // The same in steps, with the same bits. Attends the span to `pieces` and folds them, in order,
  // into its state over the pieces before.
  void (*extend)(const AttentionParams& params, const RowSpan& span, PieceRange pieces,
                 float* state, void* scratch);
  // Folds the last of `num_states` states that follow each other into the first, in order.
  void (*fold)(const AttentionParams& params, const RowSpan& span, int64_t num_states,
               float* states);
  // Writes the output of a span whose state is over all it sees.
  void (*finish)(const AttentionParams& params, const RowSpan& span, float* state);
};

struct MergeStatesKernels {
  // Merges the rows (token x head, the head running fastest) [row_begin, row_end).
  void (*merge)(const MergeStatesParams& params, int64_t row_begin, int64_t row_end);
};

struct WriteKvKernels {
  // Writes the K and V of one token to the rows of a slot. Of a quantised cache whose scales are
  // per token it chooses and writes these too, else it goes by them.
  void (*write_token)(const WriteKvParams& params, int64_t token, int64_t slot);
};

struct GatherKvKernels {
  // Writes one row of a quantised cache times its scale.
  void (*dequantise_row)(const GatherKvParams& params, const Cache& cache, const void* from,
                         float scale, float* to);
};

// The tables of one variant; dispatch.cpp has them all.
struct Isa {
  const char* name;
  const AttentionKernels* attention;
  const WriteKvKernels* write_kv;
  const GatherKvKernels* gather_kv;
  const MergeStatesKernels* merge_states;
};

// The best ISA that was built, that this machine runs and that PAGED_CPU_ISA allows; chosen once.
// Throws std::runtime_error, naming the ISAs, when PAGED_CPU_ISA names none of those built.
const Isa& selected_isa();

}  // namespace paged::cpu
