#include "op_host/attention_tiling.h"

#include <algorithm>

namespace paged {
namespace {

constexpr int64_t kFloat = 4;
constexpr int64_t kRepeatLanes = 64;  // floats of one vector repeat
constexpr int64_t kBlockLanes = 8;    // floats of one 32-byte block
constexpr int64_t kSumRows = 16;      // partial sums of weighted values
constexpr int64_t kLaneBuffers = 9;

// Splitting costs a write and a read of one state per row and piece, 0.2 percent of the keys' and
// values' bytes in decode. It pays while there are fewer than this many row blocks per core: with
// 32, dealing out whole row blocks of one length leaves at most 1 in 33 of the time idle.
constexpr int64_t kEnoughBlocksPerCore = 32;

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

// The largest step that fits the unified buffer. 64 keys fill one vector repeat of scores, 16 rows
// two repeats of a broadcast. Fewer keys cost more instructions per key in every phase, fewer rows
// only in prefill and in large query groups, so from 32 keys on rows go first.
AttentionStep choose_step(int64_t head_dim, int64_t head_dim_v, int64_t element_size) {
  constexpr AttentionStep kSteps[] = {{16, 64}, {16, 32}, {8, 32}, {16, 16}, {8, 16}};
  for (const AttentionStep& step : kSteps) {
    if (attention_ub_bytes(head_dim, head_dim_v, element_size, step) <= kUsableUb) return step;
  }
  throw Unsupported("head_dim is " + std::to_string(head_dim) + " and head_dim of value_cache " +
                    std::to_string(head_dim_v) +
                    ", expected less: 16 keys and 8 query rows don't fit the unified buffer of a "
                    "vector core");
}

}  // namespace

int64_t attention_ub_bytes(int64_t head_dim, int64_t head_dim_v, int64_t element_size,
                           const AttentionStep& step) {
  const auto [rows, tile] = step;
  const int64_t widest = std::max(head_dim, head_dim_v);
  int64_t bytes = 0;
  bytes += 2 * rows * head_dim * element_size;                  // query_in, twice
  bytes += 2 * tile * (head_dim + head_dim_v) * element_size;   // key_in and value_in, twice
  bytes += 2 * (head_dim_v + kStateTail) * kFloat;              // state_in, twice
  bytes += rows * head_dim_v * element_size;                    // output_out
  bytes += rows * kBlockLanes * kFloat;                         // lse_out
  bytes += rows * (head_dim_v + kStateTail) * kFloat;           // state_out
  bytes += rows * head_dim * kFloat;                            // queries, widened
  if (element_size != kFloat) bytes += tile * widest * kFloat;  // a tile, widened
  bytes += std::max(tile * kRepeatLanes, kSumRows * head_dim_v) * kFloat;  // products
  bytes += 2 * rows * kRepeatLanes * kFloat;     // scores, and as much beside
  bytes += kRepeatLanes * kBlockLanes * kFloat;  // weights, broadcast
  bytes += 2 * rows * head_dim_v * kFloat;       // accumulators
  bytes += kLaneBuffers * kMaxRows * kFloat;
  bytes += rows * kBlockLanes * kFloat;  // factors, broadcast
  bytes += kRepeatLanes * kFloat;        // indices
  return bytes;
}

LaunchPlan<AttentionTilingData> plan_attention(const AttentionTilingData& shape,
                                               const std::string& dtype, const Soc& soc) {
  check_head_dim("head_dim", shape.key.head_dim);
  check_head_dim("head_dim of value_cache", shape.value.head_dim);
  const int64_t element_size = dtype == "float32" ? 4 : 2;
  AttentionTilingData tiling = shape;
  const AttentionStep step = choose_step(shape.key.head_dim, shape.value.head_dim, element_size);
  tiling.tile = step.tile;
  tiling.max_rows = step.rows;
  tiling.max_pieces = ceil_div(shape.max_blocks_per_seq * shape.block_size, kPiece);
  // Row blocks if every sequence fills its blocks; each may leave one block partly empty.
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t per_head = ceil_div(shape.num_tokens * group, step.rows);
  const int64_t row_blocks =
      std::max(per_head, shape.batch * ceil_div(group, step.rows)) * shape.num_kv_heads;
  const int64_t states = shape.num_tokens * shape.num_heads * tiling.max_pieces;
  const int64_t workspace = states * (shape.value.head_dim + kStateTail) * kFloat;
  tiling.split = tiling.max_pieces > 1 && row_blocks < kEnoughBlocksPerCore * soc.vector_cores &&
                 workspace <= kWorkspaceLimit;
  const int64_t units = tiling.split ? row_blocks * tiling.max_pieces : row_blocks;
  return {"paged_attention_" + dtype, tiling, std::clamp<int64_t>(units, 1, soc.vector_cores),
          tiling.split ? workspace : 0};
}

}  // namespace paged
