#include "op_host/attention_tiling.h"

#include <algorithm>

namespace paged {
namespace {

constexpr int64_t kFloat = 4;
constexpr int64_t kRepeatLanes = 64;  // floats of one vector repeat
constexpr int64_t kBlockLanes = 8;    // floats of one 32-byte block
constexpr int64_t kSumRows = 16;      // partial sums of weighted values
constexpr int64_t kLaneBuffers = 8;
constexpr int64_t kSoftmaxLaneBuffers = 4 + 2 * kMostBands + 2 * kExchangeBuffers;
constexpr int64_t kStateBuffers = 5;  // of a granule for each of 8 rows

// The cube core multiplies fractals of 16 x 16 elements of 16 bits.
constexpr int64_t kHalf = 2;
constexpr int64_t kSide = 16;
constexpr int64_t kMostDenseWidth = 63 * kSide;  // a filter moves 63 granules of L1 at most
constexpr int64_t kL0Bytes = 64 * 1024;          // of L0A, of L0B
constexpr int64_t kL0cBytes = 128 * 1024;        // of L0C

// Of a square of 128 x 128 the left factor, the right one (head_dim 128) and the sums each fill
// half of their memory, so that two are in flight.
constexpr int64_t kMostCubeRows = 128;
constexpr int64_t kMostCubeTile = 128;

// Keys that are left of a step's while they are folded.
constexpr int64_t kSlabKeys = 32;

// Splitting costs a write and a read of one state per row and piece, 0.2 percent of the keys' and
// values' bytes in decode. It pays while there are fewer than this many row blocks per core: with
// 32, dealing out whole row blocks of one length leaves at most 1 in 33 of the time idle.
constexpr int64_t kEnoughBlocksPerCore = 32;

// Units of two bands halve the keys and values that come into L1, and are dealt to the groups in
// larger lumps: from so many bands for each group on, 8 units or more, that costs little.
constexpr int64_t kEnoughBandsPerGroup = 16;

// States of all rows and pieces that a full row of block_tables could hold. Above this, row blocks
// are dealt out whole: their lengths are unknown here, and memory for the longest would be wasted.
constexpr int64_t kWorkspaceLimit = 256 * 1024 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_head_dim(const char* name, int64_t head_dim) {
  // A row of 16 elements is a whole number of 32-byte blocks in every dtype; a repeat stride of 255
  // blocks of float32 bounds the row.
  if (head_dim % 16 != 0 || head_dim < 16 || head_dim > 255 * kBlockLanes) {
    throw Unsupported(std::string(name) + " is " + std::to_string(head_dim) +
                      ", expected a multiple of 16 from 16 to 2032 on the NPU");
  }
}

// The largest step that fits the unified buffer; nothing if none does. 64 keys fill one vector
// repeat of scores, 16 rows two repeats of a broadcast. Fewer keys cost more instructions per key
// in every phase, fewer rows only in prefill and in large query groups, so from 32 keys on rows go
// first.
std::optional<AttentionStep> largest_step(const AttentionKind& kind) {
  constexpr AttentionStep kSteps[] = {{16, 64}, {16, 32}, {8, 32}, {16, 16}, {8, 16}};
  for (const AttentionStep& step : kSteps) {
    if (attention_ub_bytes(kind, step) <= kUsableUb) return step;
  }
  return std::nullopt;
}

// That V is a view of K saves room, but a step that grew by it would give a row other bits than
// over two caches: the room is only used where nothing fits without.
AttentionStep choose_step(const AttentionKind& kind) {
  AttentionKind two_caches = kind;
  two_caches.values_are_keys = false;
  if (const auto step = largest_step(two_caches)) return *step;
  if (const auto step = largest_step(kind)) return *step;
  throw Unsupported("head_dim is " + std::to_string(kind.head_dim) +
                    " and head_dim of value_cache " + std::to_string(kind.head_dim_v) +
                    ", expected less: 16 keys and 8 query rows don't fit the unified buffer of a "
                    "vector core");
}

// What the states of pieces take: so many on their way, and what they are folded with.
int64_t states_ub_bytes(int64_t head_dim_v, int64_t rows) {
  const int64_t granules = kStateBuffers * kBlockLanes * kBlockLanes;
  return (rows * (head_dim_v + kStateTail) + granules) * kFloat;
}

// Rows of one vector core of a group.
int64_t share_of(const AttentionStep& step) { return std::max(step.rows / 2, kSide); }

bool fits_cube(int64_t head_dim, int64_t head_dim_v, const AttentionStep& step) {
  const int64_t l0 = step.tile * std::max(step.rows, kSide) * kHalf;
  const int64_t l0c = step.rows * std::max(step.tile, head_dim_v) * kFloat;
  return l0 <= kL0Bytes / 2 && l0c <= kL0cBytes / 2 &&
         attention_l1_bytes(head_dim, head_dim_v, step, 1) <= kUsableL1 &&
         kChunkScores >= kBlockLanes * head_dim_v &&  // products come in by blocks of rows
         softmax_ub_bytes(head_dim_v, step, 1, kLeastChunkBuffers, true, true) <= kUsableUb;
}

// Multiplier and shift so that n / divisor is exact for n from 0 to 2^31 - 1: with 2^bits at least
// the divisor, the multiplier is up to 1 part in 2^31 too large, which a quotient's fraction never
// reaches.
Divisor divisor(int64_t divisor) {
  int64_t bits = 0;
  divisor = std::max<int64_t>(divisor, 1);  // of a call without heads
  while ((int64_t{1} << bits) < divisor) ++bits;
  return {(int64_t{1} << (31 + bits)) / divisor + 1, 31 + bits};
}

// What the kernels read of a call. The decisions, from `tile` on, are left 0.
AttentionTilingData tiling_of(const AttentionShape& shape) {
  AttentionTilingData tiling = {};
  tiling.num_tokens = shape.num_tokens;
  tiling.batch = shape.batch;
  tiling.num_heads = shape.num_heads;
  tiling.num_kv_heads = shape.pool.num_kv_heads;
  tiling.heads_per_kv_head = shape.num_heads / shape.pool.num_kv_heads;
  tiling.per_kv_head = divisor(tiling.heads_per_kv_head);
  tiling.num_blocks = shape.pool.num_blocks;
  tiling.block_size = shape.pool.block_size;
  tiling.per_block = divisor(tiling.block_size);
  tiling.max_blocks_per_seq = shape.max_blocks_per_seq;
  tiling.table_row_stride = shape.block_tables.row_stride;
  tiling.table_column_stride = shape.block_tables.column_stride;
  tiling.query = layout_of(shape.query);
  tiling.output = layout_of(shape.output);
  tiling.key = layout_of(shape.pool.key);
  tiling.value = layout_of(shape.pool.value);
  tiling.key_scale = layout_of(shape.pool.key.scales);
  tiling.value_scale = layout_of(shape.pool.value.scales);
  tiling.values_are_keys = values_are_keys(shape.pool);
  tiling.tree_columns = shape.tree_mask.num_columns;
  tiling.tree_token_stride = shape.tree_mask.token_stride;
  tiling.sliding_window = shape.sliding_window;
  tiling.causal = shape.causal;
  tiling.has_query_start_loc = shape.has_query_start_loc;
  tiling.has_alibi_slopes = shape.has_alibi_slopes;
  tiling.has_sinks = shape.has_sinks;
  tiling.has_lse = shape.lse != nullptr;
  tiling.scale = shape.scale;
  tiling.softcap = shape.softcap;
  return tiling;
}

// Row blocks if every sequence fills its blocks; each may leave one block partly empty.
int64_t count_row_blocks(const AttentionTilingData& tiling) {
  const int64_t group = tiling.heads_per_kv_head;
  const int64_t per_head = ceil_div(tiling.num_tokens * group, tiling.max_rows);
  return std::max(per_head, tiling.batch * ceil_div(group, tiling.max_rows)) * tiling.num_kv_heads;
}

int64_t states_bytes(const AttentionTilingData& tiling) {
  const int64_t states = tiling.num_tokens * tiling.num_heads * tiling.max_pieces;
  return states * (tiling.value.head_dim + kStateTail) * kFloat;
}

LaunchPlan<AttentionTilingData> plan_vector(AttentionTilingData tiling, const AttentionKind& kind,
                                            const Soc& soc) {
  const AttentionStep step = choose_step(kind);
  tiling.tile = step.tile;
  tiling.max_rows = step.rows;
  tiling.unit_rows = step.rows;
  tiling.per_unit = divisor(tiling.unit_rows);
  const int64_t row_blocks = count_row_blocks(tiling);
  const int64_t workspace = states_bytes(tiling);
  tiling.split = tiling.max_pieces > 1 && row_blocks < kEnoughBlocksPerCore * soc.vector_cores &&
                 workspace <= kWorkspaceLimit;
  const int64_t units = tiling.split ? row_blocks * tiling.max_pieces : row_blocks;
  std::string kernel = "paged_attention_" + kernel_suffix(kind.dtype);
  if (is_quantised(kind.cache_dtype)) kernel.append("_").append(kernel_suffix(kind.cache_dtype));
  return {"attention", std::move(kernel), tiling, std::clamp<int64_t>(units, 1, soc.vector_cores),
          tiling.split ? workspace : 0};
}

// Elements of `width` in equal parts of at most `most`, each whole fractals.
int64_t equal_parts(int64_t width, int64_t most) {
  const int64_t parts = ceil_div(width, most / kSide * kSide);
  return ceil_div(ceil_div(width, parts), kSide) * kSide;
}

// The largest step of the cube, up to the rows that there are, that fits all its memories and the
// vector cores' unified buffer, or nothing. More rows cross fewer keys and values from GM to L1, so
// rows go first. Whether there is one doesn't depend on the rows.
std::optional<AttentionStep> choose_cube_step(int64_t head_dim, int64_t head_dim_v,
                                              int64_t num_rows) {
  for (int64_t rows = kMostCubeRows; rows >= kSide; rows /= 2) {
    if (rows > kSide && rows / 2 >= num_rows) continue;
    for (int64_t tile = kMostCubeTile; tile >= kSide; tile /= 2) {
      const AttentionStep step = {rows, tile};
      if (fits_cube(head_dim, head_dim_v, step)) return step;
    }
  }
  return std::nullopt;
}

// Rows that one sequence of a call can have for a KV head.
int64_t most_rows(const AttentionTilingData& tiling) {
  const int64_t group = tiling.heads_per_kv_head;
  return tiling.has_query_start_loc ? tiling.num_tokens * group : group;
}

// Bytes of workspace through which a group's cores exchange scores, weights and products of the
// steps in flight; and its verdicts.
int64_t exchange_bytes(const AttentionTilingData& tiling) {
  const int64_t per_row = tiling.exchange_keys * (kFloat + kHalf) + tiling.value.head_dim * kFloat;
  static_assert(kSide * kMostCubeTile * kHalf % kExchangeLine == 0, "scores, weights");
  static_assert(kSide * kSide * kFloat % kExchangeLine == 0, "products");
  static_assert(kVerdicts * kFloat % kExchangeLine == 0, "verdicts");
  return kExchangeBuffers * tiling.max_rows * per_row + kVerdicts * kFloat;
}

// Weights leave by chunks, output by blocks of rows.
int64_t part_elements(int64_t head_dim_v) {
  return std::max(kPartScores, kBlockLanes * head_dim_v);
}

int64_t bands_of(const AttentionTilingData& tiling) { return tiling.unit_rows / tiling.max_rows; }

// As many as fit: there is an event for each.
int64_t chunk_buffers(const AttentionTilingData& tiling, const AttentionStep& step) {
  int64_t buffers = kMostChunkBuffers;
  while (buffers > kLeastChunkBuffers &&
         softmax_ub_bytes(tiling.value.head_dim, step, bands_of(tiling), buffers,
                          tiling.has_alibi_slopes != 0, tiling.split != 0) > kUsableUb) {
    --buffers;
  }
  return buffers;
}

// Pieces of a row block are spread over groups where that costs little: a state per row and piece
// is nothing beside the keys and values of a piece while there are few rows.
bool splits_on_groups(const AttentionTilingData& tiling, const Soc& soc) {
  const int64_t group = tiling.heads_per_kv_head;
  const bool few_rows = tiling.num_tokens * group <= kSide * tiling.batch;
  return few_rows && tiling.max_pieces > 1 &&
         count_row_blocks(tiling) < kEnoughBlocksPerCore * soc.cube_cores &&
         states_bytes(tiling) <= kWorkspaceLimit;
}

// Whether keys and values come into L1 as they lie: where they are dense, one long piece of each
// block comes in faster than its rows one by one. The loads of L0 that make factors of it may be
// slower than those of fractals, which doesn't matter while a band has few rows.
bool has_dense_tiles(const AttentionTilingData& tiling) {
  const auto is_dense = [](const CacheLayout& layout) {
    return layout.token_stride == layout.head_dim && layout.head_dim <= kMostDenseWidth;
  };
  return tiling.max_rows == kSide && is_dense(tiling.key) && is_dense(tiling.value);
}

// Bands of a unit: two, where they fit and there are enough for all groups. A row's bits don't
// depend on it.
int64_t choose_bands(const AttentionTilingData& tiling, const AttentionStep& step, const Soc& soc) {
  const bool enough = count_row_blocks(tiling) >= kEnoughBandsPerGroup * soc.cube_cores;
  const int64_t head_dim_v = tiling.value.head_dim;
  const bool fit =
      attention_l1_bytes(tiling.key.head_dim, head_dim_v, step, kMostBands) <= kUsableL1 &&
      softmax_ub_bytes(head_dim_v, step, kMostBands, kLeastChunkBuffers,
                       tiling.has_alibi_slopes != 0, false) <= kUsableUb;
  return enough && fit && !tiling.split ? kMostBands : 1;
}

LaunchPlan<AttentionTilingData> plan_mixed(AttentionTilingData tiling, Dtype dtype,
                                           const Soc& soc) {
  const AttentionStep step =
      *choose_cube_step(tiling.key.head_dim, tiling.value.head_dim, most_rows(tiling));
  tiling.max_rows = step.rows;
  tiling.tile = step.tile;
  tiling.dense_tiles = has_dense_tiles(tiling);
  tiling.part_elements = part_elements(tiling.value.head_dim);
  const int64_t slot = kL0Bytes / 2 / kHalf;
  tiling.key_columns = equal_parts(tiling.key.head_dim, slot / std::max(step.rows, step.tile));
  tiling.value_columns = equal_parts(tiling.value.head_dim, slot / step.tile);
  const int64_t capacity = tiling.max_blocks_per_seq * tiling.block_size;
  tiling.exchange_keys = std::min(kPiece, ceil_div(capacity, kMostCubeTile) * kMostCubeTile);
  tiling.exchange_bytes = exchange_bytes(tiling);
  tiling.split = splits_on_groups(tiling, soc);
  tiling.unit_rows = choose_bands(tiling, step, soc) * step.rows;
  tiling.per_unit = divisor(tiling.unit_rows);
  tiling.chunk_buffers = chunk_buffers(tiling, step);
  const int64_t row_blocks = count_row_blocks(tiling);
  const int64_t units = tiling.split ? row_blocks * tiling.max_pieces : row_blocks;
  const int64_t groups = std::clamp<int64_t>(units, 1, soc.cube_cores);
  const int64_t workspace =
      groups * tiling.exchange_bytes + (tiling.split ? states_bytes(tiling) : 0);
  return {"attention_mixed", "paged_attention_mixed_" + kernel_suffix(dtype), tiling, groups,
          workspace};
}

}  // namespace

int64_t attention_l1_bytes(int64_t head_dim, int64_t head_dim_v, const AttentionStep& step,
                           int64_t bands) {
  const int64_t queries = 2 * step.rows * head_dim;
  if (bands > 1) {
    // The keys and values of a piece, and weights.
    return (queries + kPiece * (head_dim + head_dim_v) + 4 * step.tile * step.rows) * kHalf;
  }
  // Keys, or values and weights.
  const int64_t tiles = 4 * step.tile * std::max(head_dim, head_dim_v + step.rows);
  return (queries + tiles) * kHalf;
}

int64_t softmax_ub_bytes(int64_t head_dim_v, const AttentionStep& step, int64_t bands,
                         int64_t buffers, bool has_alibi, bool split) {
  const int64_t share = share_of(step);
  const int64_t columns = ceil_div(head_dim_v, kRepeatLanes) * kRepeatLanes;
  const int64_t part = part_elements(head_dim_v);
  int64_t bytes = 0;
  bytes += buffers * kChunkScores * kFloat;      // scores and products on their way in
  bytes += kPartBuffers * part * kHalf;          // rows_out
  bytes += bands * share * head_dim_v * kFloat;  // the totals
  bytes += kMaximaLanes * kFloat;                // maxima over some of the keys
  bytes += kSlabKeys * share * kFloat;           // sums
  bytes += kSoftmaxLaneBuffers * kRepeatLanes * kFloat;
  bytes += kRepeatLanes * kBlockLanes * kFloat;            // factors, broadcast
  bytes += 2 * kBlockLanes * kFloat;                       // constants
  bytes += columns * kFloat;                               // zeros
  bytes += 2 * kRepeatLanes * kFloat;                      // sinks, and ones
  if (has_alibi) bytes += 2 * 10 * kRepeatLanes * kFloat;  // twice
  if (split) bytes += states_ub_bytes(head_dim_v, kBlockLanes);
  return bytes;
}

int64_t attention_ub_bytes(const AttentionKind& kind, const AttentionStep& step) {
  const auto [rows, tile] = step;
  const int64_t head_dim = kind.head_dim;
  const int64_t head_dim_v = kind.head_dim_v;
  const int64_t element = element_size(kind.dtype);
  const int64_t cached = element_size(kind.cache_dtype);
  // Rows of 8-bit elements begin on granules.
  const auto row_bytes = [&](int64_t width) { return ceil_div(width * cached, 32) * 32; };
  const int64_t widest = std::max(head_dim, head_dim_v);
  int64_t bytes = 0;
  bytes += 2 * rows * head_dim * element;                                // query_in, twice
  bytes += 2 * tile * row_bytes(head_dim);                               // key_in, twice
  if (!kind.values_are_keys) bytes += 2 * tile * row_bytes(head_dim_v);  // value_in, twice
  bytes += rows * head_dim_v * element;                                  // output_out
  bytes += states_ub_bytes(head_dim_v, rows);
  bytes += rows * head_dim * kFloat;                      // queries, widened
  if (cached != kFloat) bytes += tile * widest * kFloat;  // a tile, widened
  const int64_t sums = kSumRows * std::min(head_dim_v, kSumColumns);
  bytes += std::max(tile * kRepeatLanes, sums) * kFloat;  // products
  bytes += 2 * rows * kRepeatLanes * kFloat;              // scores, and as much beside
  bytes += kRepeatLanes * kBlockLanes * kFloat;           // weights, broadcast
  bytes += rows * head_dim_v * kFloat;  // accumulators: twice as many, but then no states
  bytes += kLaneBuffers * kMaxRows * kFloat;
  bytes += rows * kBlockLanes * kFloat;  // factors, broadcast
  bytes += kRepeatLanes * kFloat;        // indices
  bytes += 2 * kRepeatLanes * kFloat;    // sinks, and ones
  if (is_quantised(kind.cache_dtype)) {
    bytes += 4 * tile * kBlockLanes * kFloat;  // key_scale_in and value_scale_in, twice
    bytes += 3 * kRepeatLanes * kFloat;        // their lanes, and offsets
  }
  // Always counted: a mask must not change how large a step is.
  bytes += kMaxRows * (2 * kRepeatLanes + 2 * kBlockLanes);  // tree_in, twice, and its bits
  return bytes;
}

std::optional<AttentionKernel> named_kernel(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "vector") return AttentionKernel::kVector;
  if (name == "mixed") return AttentionKernel::kMixed;
  throw Unsupported("PAGED_NPU_KERNEL is \"" + name + "\", expected \"vector\" or \"mixed\"");
}

AttentionKernel choose_attention_kernel(const AttentionKind& kind,
                                        std::optional<AttentionKernel> wanted) {
  check_head_dim("head_dim", kind.head_dim);
  check_head_dim("head_dim of value_cache", kind.head_dim_v);
  const bool fits = element_size(kind.cache_dtype) == kHalf && !kind.has_tree_mask &&
                    choose_cube_step(kind.head_dim, kind.head_dim_v, 1).has_value();
  if (fits && wanted != AttentionKernel::kVector) return AttentionKernel::kMixed;
  choose_step(kind);
  return AttentionKernel::kVector;
}

LaunchPlan<AttentionTilingData> plan_attention(const AttentionShape& shape, const Soc& soc,
                                               std::optional<AttentionKernel> wanted) {
  AttentionTilingData tiling = tiling_of(shape);
  const AttentionKind kind = {
      .dtype = shape.dtype,
      .cache_dtype = shape.pool.dtype,
      .head_dim = shape.pool.key.head_dim,
      .head_dim_v = shape.pool.value.head_dim,
      .values_are_keys = values_are_keys(shape.pool),
      .has_tree_mask = shape.tree_mask.data != nullptr,
  };
  const bool is_mixed = choose_attention_kernel(kind, wanted) == AttentionKernel::kMixed;
  tiling.max_pieces = ceil_div(tiling.max_blocks_per_seq * tiling.block_size, kPiece);
  return is_mixed ? plan_mixed(tiling, kind.dtype, soc) : plan_vector(tiling, kind, soc);
}

}  // namespace paged
