// What every backend computes from: plain structs, no torch.
//
// A shape is what the metadata of a call's tensors and its options say: sizes, strides, dtypes, and
// where the tensors lie in the memory of their device. arguments/ fills it, and a device that
// leaves values where they are plans from it alone. Params are a shape and the values of lengths,
// slots and the like, copied to the host: what the CPU kernels run on.
//
// Strides count elements. Offsets are 64-bit everywhere: a pool is easily larger than 2^31
// elements.
#pragma once

#include <cstdint>

// Units compiled for one ISA must not export a function that another unit also has: see
// cpu/kernels.h.
#define PAGED_INLINE inline __attribute__((always_inline))

namespace paged {

// The 8-bit ones are those of quantised caches: an element stands for itself times a scale.
enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16, kInt8, kFloat8E4M3, kFloat8E5M2 };

PAGED_INLINE constexpr bool is_quantised(Dtype dtype) { return dtype >= Dtype::kInt8; }

PAGED_INLINE constexpr int64_t element_size(Dtype dtype) {
  if (is_quantised(dtype)) return 1;
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// The scales of a quantised cache: [num_blocks, block_size, num_kv_heads], with strides of 0 where
// tokens or heads share one.
struct Scales {
  float* data;  // null: the cache isn't quantised
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  bool are_per_token;  // then whoever writes or copies a token, writes or copies its scale

  PAGED_INLINE float* at(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * token_stride + head * head_stride;
  }
};

// One half of the pool, K or V: [num_blocks, block_size, num_kv_heads, head_dim], head_dim dense.
struct Cache {
  void* data;
  int64_t head_dim;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  Scales scales;
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

// Whether each row of V lies within the row of K of the same token and head, as in multi-head
// latent attention (MLA).
PAGED_INLINE bool shares_rows(const Pool& pool) {
  const auto key = reinterpret_cast<uintptr_t>(pool.key.data);
  const auto value = reinterpret_cast<uintptr_t>(pool.value.data);
  const int64_t row_bytes = pool.key.head_dim * element_size(pool.dtype);
  return value >= key && value < key + static_cast<uintptr_t>(row_bytes) &&
         pool.value.block_stride == pool.key.block_stride &&
         pool.value.token_stride == pool.key.token_stride &&
         pool.value.head_stride == pool.key.head_stride;
}

// Whether a row of V is the begin of that row of K.
PAGED_INLINE bool values_are_keys(const Pool& pool) {
  return pool.value.data == pool.key.data && pool.value.head_dim <= pool.key.head_dim &&
         shares_rows(pool);
}

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

// [num_tokens, max_query_len]: element (i, j) is whether query token i sees the j-th new token of
// its sequence.
struct TreeMask {
  const uint8_t* data;  // 0: not seen. Null: no mask
  int64_t token_stride;
  int64_t column_stride;
  int64_t num_columns;

  PAGED_INLINE bool at(int64_t token, int64_t column) const {
    return data[token * token_stride + column * column_stride] != 0;
  }
};

// [num_tokens, 2]: query token i sees none but the keys from element (i, 0) to before element (i,
// 1) of its sequence. Any numbers are good.
struct KeyRanges {
  const int32_t* data;  // null: no limits
  int64_t token_stride;
  int64_t end_stride;

  PAGED_INLINE int64_t first(int64_t token) const { return data[token * token_stride]; }
  PAGED_INLINE int64_t last(int64_t token) const { return data[token * token_stride + end_stride]; }
};

struct AttentionShape {
  Dtype dtype;  // of query and output
  Pool pool;
  BlockTables block_tables;
  int64_t max_blocks_per_seq;
  int64_t batch;
  int64_t num_tokens;
  int64_t num_heads;
  Rows query;
  Rows output;
  float* lse;  // [num_tokens, num_heads] contiguous, or null
  float scale;
  float softcap;           // 0: off
  int64_t sliding_window;  // keys a row sees, its own included; 0: no window
  bool causal;
  bool has_query_start_loc;  // else each sequence has one query token
  bool has_alibi_slopes;
  bool has_sinks;
  TreeMask tree_mask;
  KeyRanges key_ranges;
};

struct AttentionParams : AttentionShape {
  const int32_t* seq_lens;         // [batch]
  const int32_t* query_start_loc;  // [batch + 1]
  const float* alibi_slopes;       // [num_heads], or null
  const float* sinks;              // [num_heads], or null
};

// What one query token sees: the keys first <= k < last of its sequence.
struct Visible {
  int64_t first;
  int64_t last;
};

// The query token at `position` of a sequence of `seq_len` keys. The position may be negative (more
// query tokens than keys); such a row sees nothing under the causal mask. A tree mask hides some of
// these keys, none of them context; key ranges cut them shorter.
PAGED_INLINE Visible visible(const AttentionShape& shape, int64_t seq_len, int64_t position) {
  int64_t first = 0;
  int64_t last = seq_len;
  if (shape.causal && position + 1 < last) last = position + 1;
  if (shape.sliding_window > 0 && position + 1 - shape.sliding_window > first) {
    first = position + 1 - shape.sliding_window;
  }
  if (last < 0) last = 0;
  if (first > last) first = last;
  return {first, last};
}

// The same within the key range of query token `token` of the call.
PAGED_INLINE Visible visible_to(const AttentionShape& shape, int64_t seq_len, int64_t position,
                                int64_t token) {
  Visible keys = visible(shape, seq_len, position);
  if (shape.key_ranges.data == nullptr) return keys;
  const int64_t first = shape.key_ranges.first(token);
  const int64_t last = shape.key_ranges.last(token);
  if (last < keys.last) keys.last = last < 0 ? 0 : last;
  if (first > keys.first) keys.first = first;
  if (keys.first > keys.last) keys.first = keys.last;
  return keys;
}

// What at least one of some query tokens of the call, one after another, sees, with all between.
// The first of them is at `position`. Without key ranges both ends grow with the position, so the
// first and the last row decide.
PAGED_INLINE Visible visible_to_some(const AttentionShape& shape, int64_t seq_len, int64_t position,
                                     int64_t token, int64_t num_tokens) {
  Visible all = {visible(shape, seq_len, position).first,
                 visible(shape, seq_len, position + num_tokens - 1).last};
  if (shape.key_ranges.data == nullptr) return all;
  all = {seq_len, 0};
  for (int64_t i = 0; i < num_tokens; ++i) {
    const Visible keys = visible_to(shape, seq_len, position + i, token + i);
    if (keys.first >= keys.last) continue;
    if (keys.first < all.first) all.first = keys.first;
    if (keys.last > all.last) all.last = keys.last;
  }
  if (all.first > all.last) all.first = all.last;
  return all;
}

struct WriteKvShape {
  Dtype dtype;  // of key and value
  Pool pool;
  Rows key;
  Rows value;
  int64_t num_tokens;
  bool has_int64_slots;  // slot_mapping is int64, not int32
};

struct WriteKvParams : WriteKvShape {
  const int64_t* slot_mapping;  // [num_tokens]; negative: write nothing
};

struct CopyBlocksShape {
  Pool pool;
  int64_t num_copies;
  bool has_int64_ids;     // block_mapping is int64, not int32
  int64_t id_row_stride;  // strides of block_mapping
  int64_t id_column_stride;
};

struct CopyBlocksParams : CopyBlocksShape {
  const int64_t* block_mapping;  // [num_copies, 2] (source, destination); no destination twice
};

struct GatherKvShape {
  Dtype dtype;  // of key and value: float32 where the pool is quantised
  Pool pool;
  BlockTables block_tables;
  int64_t max_blocks_per_seq;
  int64_t batch;
  int64_t num_tokens;  // of the result, the sum of seq_lens: 0 until they have been read
};

struct GatherKvParams : GatherKvShape {
  const int32_t* seq_lens;  // [batch]
  Rows key;
  Rows value;
};

// A shape without values: nothing of it depends on what a tensor holds.
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
