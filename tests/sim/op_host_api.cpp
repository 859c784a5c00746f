// A C interface to the tiling functions, for tests that call them through ctypes.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <initializer_list>
#include <sstream>
#include <string>

#include "op_host/attention_tiling.h"
#include "op_host/copy_blocks_tiling.h"
#include "op_host/gather_kv_tiling.h"
#include "op_host/merge_states_tiling.h"
#include "op_host/write_kv_tiling.h"

using namespace paged;

namespace {

struct Answer {
  int64_t num_cores;
  int64_t workspace_bytes;
  char stem[64];
  char kernel[64];
  char refusal[256];  // empty: planned
};

// Plans with `plan`, and stores the tiling and what else the plan says.
template <class Tiling, class Plan>
void answer(Tiling* tiling, Answer* to, Plan plan) {
  *to = {};
  try {
    const auto planned = plan();
    *tiling = planned.tiling;
    to->num_cores = planned.num_cores;
    to->workspace_bytes = planned.workspace_bytes;
    std::snprintf(to->stem, sizeof(to->stem), "%s", planned.stem.c_str());
    std::snprintf(to->kernel, sizeof(to->kernel), "%s", planned.kernel.c_str());
  } catch (const Unsupported& unsupported) {
    std::snprintf(to->refusal, sizeof(to->refusal), "%s", unsupported.what());
  }
}

Soc chip(int64_t vector_cores) {
  return {"test", std::max<int64_t>(1, vector_cores / 2), vector_cores};
}

// How the structs lie in memory, for tiling.py, which makes its own from it.

template <class T>
constexpr const char* kName = nullptr;
template <class T>
constexpr const char* kName<T*> = "pointer";
template <size_t n>
constexpr const char* kName<char[n]> = "text";
template <>
constexpr const char* kName<int64_t> = "int64";
template <>
constexpr const char* kName<float> = "float";
template <>
constexpr const char* kName<bool> = "bool";
template <>
constexpr const char* kName<Dtype> = "int32";

struct Field {
  const char* name;
  const char* type;
  size_t offset;
  size_t size;
};

// As JSON: the name of a struct, its size, and its fields.
std::string described(const char* name, size_t size, std::initializer_list<Field> fields) {
  std::ostringstream text;
  text << '"' << name << "\": {\"size\": " << size << ", \"fields\": [";
  const char* separator = "";
  for (const Field& field : fields) {
    text << separator << "[\"" << field.name << "\", \"" << field.type << "\", " << field.offset
         << ", " << field.size << "]";
    separator = ", ";
  }
  text << "]}";
  return text.str();
}

#define NAME(type) \
  template <>      \
  constexpr const char* kName<type> = #type
NAME(Divisor);
NAME(RowLayout);
NAME(CacheLayout);
NAME(Scales);
NAME(Cache);
NAME(Pool);
NAME(Rows);
NAME(BlockTables);
NAME(TreeMask);
NAME(KeyRanges);

// F(field), for each field, with commas between.
#define EACH(...) __VA_OPT__(EXPAND(FIRST(__VA_ARGS__)))
#define FIRST(field, ...) F(field) __VA_OPT__(, AGAIN PARENTHESES(__VA_ARGS__))
#define AGAIN() FIRST
#define PARENTHESES ()
#define EXPAND(...) EXPAND_4(EXPAND_4(EXPAND_4(EXPAND_4(__VA_ARGS__))))
#define EXPAND_4(...) EXPAND_2(EXPAND_2(EXPAND_2(EXPAND_2(__VA_ARGS__))))
#define EXPAND_2(...) EXPAND_1(EXPAND_1(__VA_ARGS__))
#define EXPAND_1(...) __VA_ARGS__

#define F(field) {#field, kName<decltype(S::field)>, offsetof(S, field), sizeof(S::field)}

// The binding doesn't compile unless it names as many fields as there are.
#define STRUCT(type, ...)                                    \
  [] {                                                       \
    using S = type;                                          \
    [[maybe_unused]] const auto& [__VA_ARGS__] = S();        \
    return described(#type, sizeof(S), {EACH(__VA_ARGS__)}); \
  }()

// Structs within others come first.
std::string all_structs() {
  std::string text = "{";
  const char* separator = "";
  for (const std::string& each : {
           STRUCT(Answer, num_cores, workspace_bytes, stem, kernel, refusal),
           STRUCT(Divisor, multiplier, shift),
           STRUCT(RowLayout, token_stride, head_stride),
           STRUCT(CacheLayout, head_dim, block_stride, token_stride, head_stride),
           STRUCT(AttentionTilingData, num_tokens, batch, num_heads, num_kv_heads,
                  heads_per_kv_head, per_kv_head, num_blocks, block_size, per_block,
                  max_blocks_per_seq, table_row_stride, table_column_stride, query, output, key,
                  value, key_scale, value_scale, values_are_keys, tree_columns, tree_token_stride,
                  sliding_window, causal, has_query_start_loc, has_alibi_slopes, has_sinks, has_lse,
                  tile, max_rows, unit_rows, per_unit, split, max_pieces, dense_tiles, key_columns,
                  value_columns, chunk_buffers, part_elements, exchange_keys, exchange_bytes, scale,
                  softcap),
           STRUCT(WriteKvTilingData, num_tokens, num_kv_heads, num_blocks, block_size, key_rows,
                  value_rows, key, value, key_scale, value_scale, chooses_key_scales,
                  chooses_value_scales, values_are_keys, has_int64_slots, heads_per_copy),
           STRUCT(CopyBlocksTilingData, num_copies, num_kv_heads, num_blocks, block_size, key,
                  value, key_scale, value_scale, values_are_keys, scales_at, has_int64_ids,
                  id_row_stride, id_column_stride, tokens_per_copy),
           STRUCT(GatherKvTilingData, num_tokens, batch, num_kv_heads, num_blocks, block_size,
                  max_blocks_per_seq, table_row_stride, table_column_stride, key, value, key_scale,
                  value_scale, tokens_per_copy),
           STRUCT(MergeStatesTilingData, num_tokens, num_heads, head_dim, out_a, out_b, out, lse_a,
                  lse_b),
           STRUCT(Scales, data, block_stride, token_stride, head_stride, are_per_token),
           STRUCT(Cache, data, head_dim, block_stride, token_stride, head_stride, scales),
           STRUCT(Pool, dtype, num_blocks, block_size, num_kv_heads, key, value),
           STRUCT(Rows, data, token_stride, head_stride),
           STRUCT(BlockTables, data, row_stride, column_stride),
           STRUCT(TreeMask, data, token_stride, column_stride, num_columns),
           STRUCT(KeyRanges, data, token_stride, end_stride),
           STRUCT(AttentionShape, dtype, pool, block_tables, max_blocks_per_seq, batch, num_tokens,
                  num_heads, query, output, lse, scale, softcap, sliding_window, causal,
                  has_query_start_loc, has_alibi_slopes, has_sinks, tree_mask, key_ranges),
           STRUCT(WriteKvShape, dtype, pool, key, value, num_tokens, has_int64_slots),
           STRUCT(CopyBlocksShape, pool, num_copies, has_int64_ids, id_row_stride,
                  id_column_stride),
           STRUCT(GatherKvShape, dtype, pool, block_tables, max_blocks_per_seq, batch, num_tokens),
           STRUCT(MergeStatesParams, dtype, num_tokens, num_heads, head_dim, out_a, out_b, out,
                  lse_a, lse_b, lse),
       }) {
    text += separator + each;
    separator = ", ";
  }
  return text + "}";
}

}  // namespace

extern "C" {

const char* structs() {
  static const std::string text = all_structs();
  return text.c_str();
}

// Cube cores of a device of that chip which says so much of itself; 0 if there are no kernels for
// it, -1 if it hasn't twice as many vector cores.
int64_t soc_cube_cores(const char* name, int64_t cube_cores, int64_t vector_cores, int64_t arch) {
  const auto soc = soc_of_device(name, {cube_cores, vector_cores, arch});
  if (!soc || soc->name != name) return 0;
  return soc->vector_cores == 2 * soc->cube_cores ? soc->cube_cores : -1;
}

int64_t usable_ub() { return kUsableUb; }

int64_t usable_l1() { return kUsableL1; }

int64_t attention_ub_bytes(int64_t head_dim, int64_t head_dim_v, int64_t element_size, int64_t rows,
                           int64_t tile) {
  const Dtype dtype = element_size == 4 ? Dtype::kFloat32 : Dtype::kFloat16;
  return attention_ub_bytes({dtype, dtype, head_dim, head_dim_v, false, false}, {rows, tile});
}

int64_t attention_l1_bytes(int64_t head_dim, int64_t head_dim_v, int64_t rows, int64_t tile,
                           int64_t bands) {
  return attention_l1_bytes(head_dim, head_dim_v, {rows, tile}, bands);
}

int64_t softmax_ub_bytes(int64_t head_dim_v, int64_t rows, int64_t tile, int64_t bands,
                         int64_t buffers, int64_t has_alibi, int64_t split) {
  return softmax_ub_bytes(head_dim_v, {rows, tile}, bands, buffers, has_alibi != 0, split != 0);
}

// `wanted` is "vector", "mixed", or empty for the usual kernel.
void plan_attention(const AttentionShape* shape, int64_t cores, AttentionTilingData* tiling,
                    Answer* to, const char* wanted) {
  answer(tiling, to, [&] { return plan_attention(*shape, chip(cores), named_kernel(wanted)); });
}

void plan_write_kv(const WriteKvShape* shape, int64_t cores, WriteKvTilingData* tiling,
                   Answer* to) {
  answer(tiling, to, [&] { return plan_write_kv(*shape, chip(cores)); });
}

void plan_copy_blocks(const CopyBlocksShape* shape, int64_t cores, CopyBlocksTilingData* tiling,
                      Answer* to) {
  answer(tiling, to, [&] { return plan_copy_blocks(*shape, chip(cores)); });
}

void plan_gather_kv(const GatherKvShape* shape, int64_t cores, GatherKvTilingData* tiling,
                    Answer* to) {
  answer(tiling, to, [&] { return plan_gather_kv(*shape, chip(cores)); });
}

void plan_merge_states(const MergeStatesParams* params, int64_t cores,
                       MergeStatesTilingData* tiling, Answer* to) {
  answer(tiling, to, [&] { return plan_merge_states(*params, chip(cores)); });
}

}  // extern "C"
