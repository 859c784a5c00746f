// What every backend computes from: plain structs, no torch, filled by checks.h once all checks
// passed.
//
// Strides count elements. Offsets are 64-bit everywhere: a pool is easily larger than 2^31
// elements.
#pragma once

#include <cstdint>

// Units compiled for one ISA must not export a function that another unit also has: see
// cpu/kernels.h.
#define PAGED_INLINE inline __attribute__((always_inline))

namespace paged {

enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16 };

PAGED_INLINE constexpr int64_t element_size(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// One half of the pool, K or V: [num_blocks, block_size, num_kv_heads, head_dim], head_dim dense.
struct Cache {
  void* data;
  int64_t head_dim;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
};

// What key_cache and value_cache have in common.
struct Pool {
  Dtype dtype;
  int64_t num_blocks;
  int64_t block_size;
  int64_t num_kv_heads;
  Cache key;
  Cache value;
};

// Rows of vectors: [num_tokens, num_heads, head_dim], head_dim dense.
struct Rows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
};

// [batch, max_blocks_per_seq]
struct BlockTables {
  const int32_t* data;
  int64_t row_stride;
  int64_t column_stride;

  PAGED_INLINE int32_t at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

struct AttentionParams {
  Pool pool;
  BlockTables block_tables;
  const int32_t* seq_lens;         // [batch]
  const int32_t* query_start_loc;  // [batch + 1]
  int64_t batch;
  int64_t num_heads;
  Rows query;
  Rows output;
  float* lse;  // [num_tokens, num_heads] contiguous, or null
  float scale;
  bool causal;
  int64_t sliding_window;     // keys a row sees, its own included; 0: no window
  float softcap;              // 0: off
  const float* alibi_slopes;  // [num_heads], or null
  const float* sinks;         // [num_heads], or null
};

// What one query token sees: the keys first <= k < last of its sequence.
struct Visible {
  int64_t first;
  int64_t last;
};

// The query token at `position` of a sequence of `seq_len` keys. The position may be negative (more
// query tokens than keys); such a row sees nothing under the causal mask.
PAGED_INLINE Visible visible(const AttentionParams& params, int64_t seq_len, int64_t position) {
  int64_t first = 0;
  int64_t last = seq_len;
  if (params.causal && position + 1 < last) last = position + 1;
  if (params.sliding_window > 0 && position + 1 - params.sliding_window > first) {
    first = position + 1 - params.sliding_window;
  }
  if (last < 0) last = 0;
  if (first > last) first = last;
  return {first, last};
}

struct WriteKvParams {
  Pool pool;
  Rows key;
  Rows value;
  const int64_t* slot_mapping;  // [num_tokens]; negative: write nothing
  int64_t num_tokens;
};

struct CopyBlocksParams {
  Pool pool;
  const int64_t* block_mapping;  // [num_copies, 2] (source, destination); no destination twice
  int64_t num_copies;
};

struct GatherKvParams {
  Pool pool;
  BlockTables block_tables;
  const int32_t* seq_lens;  // [batch]
  int64_t batch;
  Rows key;
  Rows value;
};

struct MergeStatesParams {
  Dtype dtype;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  Rows out_a;
  Rows out_b;
  Rows out;
  // [num_tokens, num_heads] in float32; their head_stride and token_stride count floats.
  Rows lse_a;
  Rows lse_b;
  float* lse;  // contiguous
};

}  // namespace paged
