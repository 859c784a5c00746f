// Places in L1 for the tiles of a piece that stay for the bands of a unit.
//
// A piece has as many places as tiles, which are taken in turn, piece after piece. A unit's bands
// see neighbouring keys, the first ones the earliest, so its tiles come in in their order, each
// when the first band that sees it needs it. A place is taken again kPiece keys later at the
// earliest: by then at least as many tiles as the ring of tiles has buffers have been used since
// its last use, and the ring's flags say that it is free. Values take the places of their keys, a
// few steps later.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"

class StayingTiles {
 public:
  // Tiles of `tile` keys, a power of two.
  __aicore__ inline void Init(int64_t tile) {
    tile_ = tile;
    next_ = 0;
    shift_ = 0;
    end_ = 0;
  }

  // Whether the tile that begins with key `begin` of the piece has yet to come in. `opens_piece`:
  // it is the first one of a unit's piece.
  __aicore__ inline bool Take(bool opens_piece, int64_t begin) {
    if (opens_piece) {
      shift_ = next_ - begin;
      end_ = begin;
    }
    if (begin < end_) {
      return false;
    }
    end_ = begin + tile_;
    next_ = shift_ + end_;
    return true;
  }

  // The place in keys, of kPiece.
  __aicore__ inline uint32_t At(int64_t begin) const {
    return static_cast<uint32_t>((shift_ + begin) & (kPiece - 1));
  }

 private:
  int64_t tile_;
  int64_t next_;   // where the next tile comes in, in keys, without the turns
  int64_t shift_;  // from keys of the piece to places
  int64_t end_;    // keys of the piece that have come in
};
