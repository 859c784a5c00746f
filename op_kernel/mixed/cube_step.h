// A step in flight on the cube core, with what is computed once for all its tiles.
//
// Keys are used at once, values kAhead steps later: what is found for a tile's keys, its block and
// its place in L1, is kept for its values.
#pragma once

#include "attention/visible.h"
#include "attention_tiling_data.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/piece_steps.h"

// Where a tile's keys and values are.
struct TilePlace {
  int64_t block;  // of the pool, and the slot in it, of a tile that is whole
  int64_t slot;
  uint32_t place;  // in L1, in keys, of one that stays
  bool comes_in;   // it isn't there yet
};

struct CubeStep {
  PieceStep step;
  Range tiles;  // begins of those with keys: from the first one to behind the last one
  Range whole;  // of these, those that are whole in one block
  uint32_t rows;
  uint32_t product_half;  // rows of the first half of its products
  uint32_t query;         // of the ring of queries
  uint32_t queries_at;    // where they begin in L1
  int64_t pairs_at;       // where its scores, and its weights, begin
  int64_t table_at;       // its sequence's row of block_tables
  int64_t key_head;       // elements from a block's begin to its KV head
  int64_t value_head;
  TilePlace places[kPiece / kFractal];  // of its tiles
};

// Finds the tiles, of `size` keys, a power of two; none is whole where blocks don't hold them.
__aicore__ inline void FindTiles(CubeStep& cube, int64_t size, bool blocks_hold_tiles) {
  const PieceStep& step = cube.step;
  cube.tiles = {step.span.first & -size, step.span.last};
  cube.whole = {0, 0};
  if (blocks_hold_tiles) {
    const int64_t first = Larger(step.span.first, step.unit_seen.first);
    cube.whole.first = (first + size - 1) & -size;
    cube.whole.last = Smaller(step.span.last, step.unit_seen.last) & -size;
  }
}

__aicore__ inline bool HasTile(const Range& tiles, int64_t begin) {
  return tiles.first <= begin && begin < tiles.last;
}
