// Paged attention of one row block: walk the keys through the block table a tile at a time, score,
// update the running softmax, add the weighted values.
#include <math.h>

#include "cpu/dot_products.h"
#include "cpu/kernels.h"
#include "cpu/row_block.h"
#include "cpu/softmax.h"
#include "cpu/weighted_sum.h"

namespace paged::cpu::PAGED_ISA {
namespace {

// dot_products may write kDots - 1 scores past the tile, and reads as many pointers.
constexpr int64_t kScoreStride = kTile + kDots;

// What one thread works in. Every part starts on a cache line.
template <class T>
struct Scratch {
  typename Products<T>::Query* queries;  // [kMaxRows][prepared_stride(head_dim)]
  float* scores;                         // [kMaxRows][kScoreStride]
  State total;
  State piece;
};

constexpr int64_t kCacheLine = 64;
constexpr int64_t kFloatBytes = sizeof(float);

PAGED_INLINE int64_t accumulator_stride(const AttentionParams& params) {
  return round_up(params.pool.value.head_dim, kLanes);
}

template <class T>
PAGED_INLINE int64_t query_bytes(const AttentionParams& params) {
  const int64_t stride = prepared_stride<T>(params.pool.key.head_dim);
  const int64_t element = sizeof(typename Products<T>::Query);
  return round_up(kMaxRows * stride * element, kCacheLine);
}

PAGED_INLINE int64_t state_bytes(const AttentionParams& params) {
  return round_up(state_floats(accumulator_stride(params)) * kFloatBytes, kCacheLine);
}

constexpr int64_t kScoreBytes = kMaxRows * kScoreStride * kFloatBytes;
static_assert(kScoreBytes % kCacheLine == 0);

template <class T>
int64_t scratch_bytes_for(const AttentionParams& params) {
  return query_bytes<T>(params) + kScoreBytes + 2 * state_bytes(params);
}

template <class T>
PAGED_INLINE Scratch<T> scratch_at(const AttentionParams& params, void* memory) {
  char* at = static_cast<char*>(memory);
  const int64_t stride = accumulator_stride(params);
  Scratch<T> scratch;
  scratch.queries = reinterpret_cast<typename Products<T>::Query*>(at);
  at += query_bytes<T>(params);
  scratch.scores = reinterpret_cast<float*>(at);
  at += kScoreBytes;
  scratch.total = state_at(reinterpret_cast<float*>(at), stride);
  at += state_bytes(params);
  scratch.piece = state_at(reinterpret_cast<float*>(at), stride);
  return scratch;
}

template <class T>
void prepare_queries(const AttentionParams& params, const RowBlock& block,
                     const Scratch<T>& scratch) {
  const int64_t head_dim = params.pool.key.head_dim;
  const T* query = static_cast<const T*>(params.query.data);
  for (int64_t r = 0; r < block.num_rows; ++r) {
    const QueryRow row = query_row(params, block, r);
    const T* from =
        query + row.token * params.query.token_stride + row.head * params.query.head_stride;
    Products<T>::prepare(from, head_dim, scratch.queries + r * prepared_stride<T>(head_dim));
  }
}

// Where the keys and values of one tile lie. Only [first, last) of the tile is filled; past it,
// kDots entries repeat the last key, so that dot_products may read them.
template <class T>
struct Tile {
  const T* keys[kTile + kDots];
  const T* values[kTile];
};

template <class T>
PAGED_INLINE void walk(const AttentionParams& params, const RowBlock& block, int64_t tile_begin,
                       int64_t first, int64_t last, Tile<T>& tile) {
  const Pool& pool = params.pool;
  const T* key_head = static_cast<const T*>(pool.key.data) + block.kv_head * pool.key.head_stride;
  const T* value_head =
      static_cast<const T*>(pool.value.data) + block.kv_head * pool.value.head_stride;
  int64_t column = (tile_begin + first) / pool.block_size;
  int64_t offset = (tile_begin + first) % pool.block_size;
  for (int64_t i = first; i < last; ++column, offset = 0) {
    const int64_t id = params.block_tables.at(block.sequence, column);
    const T* key = key_head + id * pool.key.block_stride;
    const T* value = value_head + id * pool.value.block_stride;
    for (; i < last && offset < pool.block_size; ++i, ++offset) {
      tile.keys[i] = key + offset * pool.key.token_stride;
      tile.values[i] = value + offset * pool.value.token_stride;
    }
  }
  for (int64_t i = 0; i < kDots; ++i) tile.keys[last + i] = tile.keys[last - 1];
}

PAGED_INLINE ScoreRule score_rule(const AttentionParams& params, const QueryRow& row,
                                  int64_t tile_begin) {
  const float slope = params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[row.head];
  return {params.scale, params.softcap, slope, static_cast<float>(tile_begin - row.position)};
}

// The part of a tile that a row sees, in keys from the tile's begin; may be empty.
PAGED_INLINE Visible visible_in_tile(const AttentionParams& params, const RowBlock& block,
                                     int64_t position, int64_t tile_begin) {
  Visible keys = visible(params, params.seq_lens[block.sequence], position);
  keys.first = keys.first > tile_begin ? keys.first - tile_begin : 0;
  keys.last = keys.last < tile_begin + kTile ? keys.last - tile_begin : kTile;
  if (keys.last < keys.first) keys.last = keys.first;
  return keys;
}

// Adds the weighted values of rows [begin, end), whose ranges of keys are given. Rows with one
// range share the reads of the values. A value outside a row's range is never multiplied, not even
// by 0: it may be NaN.
template <class T>
void add_values(const AttentionParams& params, const Tile<T>& tile, const Visible* ranges,
                int64_t num_rows, const Scratch<T>& scratch, const State& state) {
  for (int64_t begin = 0; begin < num_rows;) {
    int64_t end = begin + 1;
    while (end < num_rows && ranges[end].first == ranges[begin].first &&
           ranges[end].last == ranges[begin].last) {
      ++end;
    }
    const WeightedSum<T> sum = {scratch.scores,      kScoreStride,       tile.values,
                                ranges[begin].first, ranges[begin].last, state.acc,
                                state.acc_stride};
    if (ranges[begin].first < ranges[begin].last) {
      weighted_sum(sum, begin, end, params.pool.value.head_dim);
    }
    begin = end;
  }
}

// Attends all rows to the keys [first, last) of the tile that begins at key tile_begin.
template <class T>
void attend_tile(const AttentionParams& params, const RowBlock& block, int64_t tile_begin,
                 int64_t first, int64_t last, const Scratch<T>& scratch, const State& state) {
  Tile<T> tile;
  walk(params, block, tile_begin, first, last, tile);
  dot_products<T>(scratch.queries, block.num_rows, tile.keys + first, last - first,
                  params.pool.key.head_dim, scratch.scores + first, kScoreStride);
  Visible ranges[kMaxRows];
  for (int64_t r = 0; r < block.num_rows; ++r) {
    const QueryRow row = query_row(params, block, r);
    ranges[r] = visible_in_tile(params, block, row.position, tile_begin);
    if (ranges[r].first >= ranges[r].last) continue;
    const float shrink =
        softmax_tile(scratch.scores + r * kScoreStride, ranges[r].first, ranges[r].last,
                     score_rule(params, row, tile_begin), state.max[r], state.sum[r]);
    if (shrink != 1.0f) scale_row(state.acc + r * state.acc_stride, state.acc_stride, shrink);
  }
  add_values(params, tile, ranges, block.num_rows, scratch, state);
}

// The state of the row block over one piece of its keys.
template <class T>
void attend_piece(const AttentionParams& params, const RowBlock& block, const Visible& keys,
                  int64_t piece, const Scratch<T>& scratch, const State& state) {
  clear(state, block.num_rows);
  const int64_t begin = keys.first > piece * kPiece ? keys.first : piece * kPiece;
  const int64_t end = keys.last < (piece + 1) * kPiece ? keys.last : (piece + 1) * kPiece;
  for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
    const int64_t first = begin > tile ? begin - tile : 0;
    const int64_t last = end < tile + kTile ? end - tile : kTile;
    attend_tile(params, block, tile, first, last, scratch, state);
  }
}

template <class T>
void write_row(T* out, const float* acc, int64_t width, float factor) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(out + d, load(acc + d) * factor);
  if (d < width) store_partial(out + d, load(acc + d) * factor, width - d);
}

// Lets the sinks join the denominator, then writes output and lse. A row that saw no key writes 0.
template <class T>
void finish(const AttentionParams& params, const RowBlock& block, const State& state) {
  T* output = static_cast<T*>(params.output.data);
  for (int64_t r = 0; r < block.num_rows; ++r) {
    const QueryRow row = query_row(params, block, r);
    float max = state.max[r];
    float sum = state.sum[r];
    float keep = 1.0f;
    if (params.sinks != nullptr) {
      const float sink = params.sinks[row.head];
      const float new_max = sink > max ? sink : max;
      keep = weight_of(max, new_max);
      sum = sum * keep + weight_of(sink, new_max);
      max = new_max;
    }
    T* out = output + row.token * params.output.token_stride + row.head * params.output.head_stride;
    write_row(out, state.acc + r * state.acc_stride, params.pool.value.head_dim,
              sum == 0.0f ? 0.0f : keep / sum);
    if (params.lse != nullptr)
      params.lse[row.token * params.num_heads + row.head] = max + logf(sum);
  }
}

template <class T>
void attend_block(const AttentionParams& params, const RowBlock& block, void* memory) {
  const Scratch<T> scratch = scratch_at<T>(params, memory);
  const Visible keys = block_visible(params, block);
  const PieceRange pieces = pieces_of(keys);
  prepare_queries(params, block, scratch);
  clear(scratch.total, block.num_rows);
  for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
    // The first piece's state is the total so far; folding it into an empty one would copy it.
    const State& state = piece == pieces.begin ? scratch.total : scratch.piece;
    attend_piece(params, block, keys, piece, scratch, state);
    if (piece != pieces.begin) fold(scratch.total, scratch.piece, block.num_rows);
  }
  finish<T>(params, block, scratch.total);
}

template <class T>
void attend_block_pieces(const AttentionParams& params, const RowBlock& block, int64_t piece_begin,
                         int64_t piece_end, float* states, void* memory) {
  const Scratch<T> scratch = scratch_at<T>(params, memory);
  const Visible keys = block_visible(params, block);
  const int64_t stride = accumulator_stride(params);
  prepare_queries(params, block, scratch);
  for (int64_t piece = piece_begin; piece < piece_end; ++piece) {
    const State state = state_at(states + (piece - piece_begin) * state_floats(stride), stride);
    attend_piece(params, block, keys, piece, scratch, state);
  }
}

template <class T>
void combine_block(const AttentionParams& params, const RowBlock& block, int64_t num_pieces,
                   float* states) {
  const int64_t stride = accumulator_stride(params);
  const State total = state_at(states, stride);
  for (int64_t piece = 1; piece < num_pieces; ++piece) {
    fold(total, state_at(states + piece * state_floats(stride), stride), block.num_rows);
  }
  finish<T>(params, block, total);
}

int64_t scratch_bytes(const AttentionParams& params) {
  return by_dtype(params.pool.dtype,
                  [&](auto element) { return scratch_bytes_for<decltype(element)>(params); });
}

int64_t floats_per_state(const AttentionParams& params) {
  return state_floats(accumulator_stride(params));
}

void attend(const AttentionParams& params, const RowBlock& block, void* scratch) {
  by_dtype(params.pool.dtype,
           [&](auto element) { attend_block<decltype(element)>(params, block, scratch); });
}

void attend_pieces(const AttentionParams& params, const RowBlock& block, int64_t piece_begin,
                   int64_t piece_end, float* states, void* scratch) {
  by_dtype(params.pool.dtype, [&](auto element) {
    attend_block_pieces<decltype(element)>(params, block, piece_begin, piece_end, states, scratch);
  });
}

void combine(const AttentionParams& params, const RowBlock& block, int64_t num_pieces,
             float* states) {
  by_dtype(params.pool.dtype, [&](auto element) {
    combine_block<decltype(element)>(params, block, num_pieces, states);
  });
}

}  // namespace

extern const AttentionKernels attention_kernels = {scratch_bytes, floats_per_state, attend,
                                                   attend_pieces, combine};

}  // namespace paged::cpu::PAGED_ISA
