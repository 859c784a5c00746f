// What op_host decides and op_kernel reads: plain data, the same bytes on host and device.
//
// Every number comes from shapes, strides, dtypes and options, never from lengths or block ids:
// those stay on the device, so a captured graph may be replayed after they have changed.
#pragma once

#include <cstdint>

#include "layout.h"

// Keys of a sequence are cut at multiples of a piece; each piece has a running softmax of its own
// and the pieces' states are folded in order, whichever core computed them. Both attention kernels
// and that of the CPU cut at the same places. On the cube the keys and the values of a piece stay
// in L1 while the bands of a unit take turns, which longer ones wouldn't leave room for.
constexpr int64_t kPiece = 512;

// Query rows (token x head of one KV head) that share one walk over the keys on a vector
// core alone. Two Brcb repeats broadcast the factors of 16 rows.
constexpr int64_t kMaxRows = 16;

// Elements of the weighted values that a vector core alone sums at a time, as floats of UB.
constexpr int64_t kSumColumns = 256;

// Floats of one state in the workspace beyond its accumulator: the maximum and the sum, each a
// granule of 32 bytes, the least of a copy between UB and GM.
constexpr int64_t kStateTail = 16;

// Steps that a group of cores may have in flight, one more than how far one kind of core may be
// ahead of the other.
constexpr int64_t kExchangeBuffers = 5;

// Scores, or sums of values, that come into a vector core of a group at a time: 64 keys of 64 rows.
// As many such buffers as fit, from 5 to 7.
constexpr int64_t kChunkScores = 4096;
constexpr int64_t kLeastChunkBuffers = 5;
constexpr int64_t kMostChunkBuffers = 7;

// Weights, or values of output rows, that leave it at a time, through two buffers: at least a chunk
// with a granule between its columns of 16 rows.
constexpr int64_t kPartScores = kChunkScores + 48;
constexpr int64_t kPartBuffers = 2;

// Scores that the maxima are folded to before their keys are folded: half a chunk.
constexpr int64_t kMaximaLanes = kChunkScores / 2;

// What the cores of a group hand each other begins at multiples of so many bytes, the lines of L2.
constexpr int64_t kExchangeLine = 512;

// Floats of the two verdicts of a group's vector cores, each in cache lines of its own.
constexpr int64_t kVerdictPitch = 64;
constexpr int64_t kVerdicts = 2 * kVerdictPitch;

// Bands of a unit on the cube: each has a total of its own in the vector cores.
constexpr int64_t kMostBands = 2;

// n / d for n from 0 to 2^31 - 1, as n * multiplier >> shift: the scalar unit doesn't divide.
struct Divisor {
  int64_t multiplier;
  int64_t shift;
};

struct AttentionTilingData {
  int64_t num_tokens;
  int64_t batch;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t heads_per_kv_head;
  Divisor per_kv_head;  // by heads_per_kv_head
  int64_t num_blocks;
  int64_t block_size;
  Divisor per_block;  // by block_size
  int64_t max_blocks_per_seq;
  int64_t table_row_stride;
  int64_t table_column_stride;
  RowLayout query;
  RowLayout output;
  CacheLayout key;
  CacheLayout value;
  CacheLayout key_scale;  // of an int8 cache, head_dim 1
  CacheLayout value_scale;
  int64_t values_are_keys;    // a row of V is the begin of that row of K
  int64_t tree_columns;       // of tree_mask; 0: there is none
  int64_t tree_token_stride;  // its columns are dense
  int64_t sliding_window;     // 0: none
  int64_t causal;
  int64_t has_query_start_loc;
  int64_t has_alibi_slopes;
  int64_t has_sinks;
  int64_t has_lse;
  int64_t tile;        // keys of one tile: at most 64 in UB, at most 128 in L1
  int64_t max_rows;    // of a band: query rows that share one walk over the keys
  int64_t unit_rows;   // of a unit: max_rows of each of its bands
  Divisor per_unit;    // by unit_rows
  int64_t split;       // 1: pieces are spread over the cores, states go through the workspace
  int64_t max_pieces;  // of a sequence that fills its row of block_tables
  // Of the kernel on cube and vector cores.
  int64_t dense_tiles;     // 1: keys and values lie in L1 as they do in GM
  int64_t key_columns;     // elements of a key that one load of L0 takes
  int64_t value_columns;   // elements of a value
  int64_t chunk_buffers;   // of kChunkScores, in UB
  int64_t part_elements;   // of one buffer of what leaves UB, at least kPartScores
  int64_t exchange_keys;   // of one step that the workspace has room for
  int64_t exchange_bytes;  // of workspace for each group of cores; the states come after them
  float scale;
  float softcap;  // 0: off
};
