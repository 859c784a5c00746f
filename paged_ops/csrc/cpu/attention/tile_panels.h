// K and V in the order in which the matrix unit reads them: tiles of 1 KB without gaps.
//
//   keys     [chunks][2 groups of 16 keys][steps of 32 elements][16 pairs of elements][16 keys]
//   values   [pieces][passes of 32 columns][chunks of a piece][2 groups of 16 columns]
//            [16 pairs of keys][16 columns]
#pragma once

#include "cpu/attention/amx.h"
#include "cpu/attention/piece.h"

namespace paged::cpu {
namespace {

constexpr int64_t kUnitsPerTile = kTileRows * kTileUnits;
constexpr int64_t kChunksPerPiece = kPiece / kChunk;
constexpr int64_t kStep = 32;  // elements of a sum of scores that a tile holds
constexpr int64_t kPass = 32;  // columns of values whose sums the unit holds

struct TileCounts {
  int64_t steps;   // of a key
  int64_t passes;  // of a value

  PAGED_INLINE explicit TileCounts(const AttentionParams& params)
      : steps(round_up(params.pool.key.head_dim, kStep) / kStep),
        passes(round_up(params.pool.value.head_dim, kPass) / kPass) {}

  PAGED_INLINE int64_t units_per_key_chunk() const { return 2 * steps * kUnitsPerTile; }
  PAGED_INLINE int64_t units_per_value_piece() const {
    return passes * kChunksPerPiece * 2 * kUnitsPerTile;
  }
};

// The rows of the keys of a chunk, in K or V. A key that nobody sees is a row of zeros.
struct ChunkRows {
  const BFloat16* rows[kChunk];

  PAGED_INLINE ChunkRows(const BFloat16* const* by_key, Visible held, int64_t begin,
                         const BFloat16* zeros) {
    for (int64_t i = 0; i < kChunk; ++i) {
      const bool is_held = begin + i >= held.first && begin + i < held.last;
      rows[i] = is_held ? by_key[begin + i] : zeros;
    }
  }
};

// A row's step that may be shorter than others, padded with zeros.
PAGED_INLINE void stage_step(const BFloat16* const* rows, int64_t step, int64_t head_dim,
                             int32_t* to, int64_t to_stride) {
  for (int64_t i = 0; i < kTileRows; ++i) {
    store_units(to + i * to_stride, load_pairs(rows[i] + step * kStep, head_dim - step * kStep));
  }
}

// Asks the second cache for the 64 bytes of so many rows that begin at element d.
PAGED_INLINE void ask_for_rows(const BFloat16* const* rows, int64_t count, int64_t d) {
  for (int64_t i = 0; i < count; ++i) __builtin_prefetch(rows[i] + d, 0, 2);
}

// Asks for the rows of `next`, which are to be packed after this, unless it is null.
PAGED_INLINE void pack_keys(const ChunkRows& keys, int64_t head_dim, int64_t steps,
                            const BFloat16* const* next, int32_t* to) {
  for (int64_t group = 0; group < 2; ++group) {
    const BFloat16* const* rows = keys.rows + group * kTileRows;
    for (int64_t step = 0; step < steps; ++step, to += kUnitsPerTile) {
      if (next != nullptr) ask_for_rows(next + group * kTileRows, kTileRows, step * kStep);
      if ((step + 1) * kStep <= head_dim) {
        transpose_units([&](int j, int i) { return rows[j] + step * kStep + 2 * i; }, to,
                        kTileUnits);
      } else {
        alignas(64) int32_t staged[kTileRows][kTileUnits];
        stage_step(rows, step, head_dim, staged[0], kTileUnits);
        transpose_rows(staged[0], kTileUnits, to, kTileUnits);
      }
    }
  }
}

// `to` is the chunk's place in the first pass.
PAGED_INLINE void pack_values(const ChunkRows& values, int64_t head_dim, int64_t passes,
                              const BFloat16* const* next, int32_t* to) {
  constexpr int64_t kPassStride = kChunksPerPiece * 2 * kUnitsPerTile;
  for (int64_t pair = 0; pair < kTileRows; ++pair) {
    const BFloat16* first = values.rows[2 * pair];
    const BFloat16* second = values.rows[2 * pair + 1];
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t column = pass * kPass;
      if (next != nullptr) ask_for_rows(next + 2 * pair, 2, column);
      IntVec units[2];
      interleave_rows(first + column, head_dim - column, second + column, head_dim - column, units);
      int32_t* at = to + pass * kPassStride + pair * kTileUnits;
      store_units(at, units[0]);
      store_units(at + kUnitsPerTile, units[1]);
    }
  }
}

}  // namespace
}  // namespace paged::cpu
