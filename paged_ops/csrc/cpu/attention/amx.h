// Products of small matrices of bfloat16 by Intel's matrix unit (AMX).
//
// The unit works on tiles of 16 rows of 16 units, a unit being a pair of bfloat16 that are
// neighbours along the sum. One instruction adds the product of two tiles to a tile of 16 x 16
// float32 sums. A sum's order of additions is fixed by its depth alone, so its bits depend on
// nothing but its row and its column.
#pragma once

#include "cpu/simd/simd.h"

namespace paged::cpu {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileUnits = 16;
constexpr int64_t kUnitBytes = 4;

// The unit's configuration: the shape of each of its eight tiles.
struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// All tiles of 16 rows of 64 bytes.
constexpr TileConfig kFullTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// The tile intrinsics don't tell the compiler that they read memory: nothing may be stored later,
// or loaded earlier, than the program says.
PAGED_INLINE void memory_fence() { asm volatile("" : : : "memory"); }

// The same address, of which the compiler no longer knows that only it reads and writes there.
template <class T>
PAGED_INLINE T* shared_with_unit(T* address) {
  asm volatile("" : "+r"(address) : : "memory");
  return address;
}

// Tiles that lie without gaps, `offset` bytes after an address: the intrinsics would take a
// register for each. Not moved past each other, nor past other volatile assembly.
#if !defined(PAGED_TILE_AT)
#define PAGED_TILE_AT(instruction, tile, base, offset)                  \
  asm volatile(#instruction " %c[at](%[from],%[stride],1), %%tmm" #tile \
               :                                                        \
               : [from] "r"(base), [at] "i"(offset), [stride] "r"(int64_t{64}))
#define PAGED_STORE_TILE_AT(tile, base, offset)                       \
  asm volatile("tilestored %%tmm" #tile ", %c[at](%[to],%[stride],1)" \
               :                                                      \
               : [to] "r"(base), [at] "i"(offset), [stride] "r"(int64_t{64}))
#endif
#define PAGED_LOAD_TILE_AT(tile, base, offset) PAGED_TILE_AT(tileloadd, tile, base, offset)
// For what comes from the second cache, and isn't needed again soon: it leaves the first to others.
#define PAGED_STREAM_TILE_AT(tile, base, offset) PAGED_TILE_AT(tileloaddt1, tile, base, offset)

// Asks the second cache for a line, in its place among the tile instructions.
PAGED_INLINE void ask_for(const void* line) {
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
}

// What the tiles hold is lost.
PAGED_INLINE void configure_tiles(const TileConfig& config) {
  _tile_loadconfig(shared_with_unit(&config));
}

// Configures the tiles of this thread for its lifetime, and leaves them as they were found: other
// libraries remember what they configured.
class TileSession {
 public:
  PAGED_INLINE TileSession() {
    _tile_storeconfig(shared_with_unit(&found_));
    memory_fence();
    configure_tiles(kFullTiles);
  }
  PAGED_INLINE ~TileSession() {
    if (found_.palette == 0) {
      _tile_release();
    } else {
      configure_tiles(found_);
    }
  }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  TileConfig found_;
};

// The left-hand side of a product: units by row. A sum of several such matrices, `part_stride`
// apart, where one bfloat16 can't hold an element.
struct Matrix {
  int32_t* data;
  int64_t stride;
  int64_t part_stride;

  PAGED_INLINE Matrix from(int64_t row, int64_t unit) const {
    return {data + row * stride + unit, stride, part_stride};
  }
  PAGED_INLINE const int32_t* part(int i) const { return data + i * part_stride; }
};

// The right-hand side of a product: units by row, in groups of 16 columns. Either the rows of a
// group follow each other (stride 16) or the groups of a row do (group_stride 16).
struct Panel {
  int32_t* data;
  int64_t stride;        // between the rows of a group
  int64_t group_stride;  // between the groups of a row

  PAGED_INLINE Panel from_row(int64_t row) const {
    return {data + row * stride, stride, group_stride};
  }
  PAGED_INLINE Panel from_group(int64_t group) const {
    return {data + group * group_stride, stride, group_stride};
  }
};

// Two tiles of rows times two tiles of columns.
template <int kParts>
PAGED_INLINE void multiply_two_by_two(Matrix a, Panel b, int64_t depth, float* c,
                                      int64_t c_stride) {
  const int64_t a_bytes = a.stride * kUnitBytes;
  const int64_t b_bytes = b.stride * kUnitBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t u = 0; u < depth; u += kTileUnits) {
    const int32_t* columns = b.from_row(u).data;
    _tile_loadd(6, columns, b_bytes);
    _tile_loadd(7, columns + b.group_stride, b_bytes);
    for (int i = 0; i < kParts; ++i) {
      const int32_t* rows = a.part(i) + u;
      _tile_loadd(4, rows, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows + kTileRows * a.stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  const int64_t c_bytes = c_stride * static_cast<int64_t>(sizeof(float));
  float* lower = c + kTileRows * c_stride;
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, lower, c_bytes);
  _tile_stored(3, lower + 16, c_bytes);
}

// One tile of rows times two tiles of columns.
template <int kParts>
PAGED_INLINE void multiply_one_by_two(Matrix a, Panel b, int64_t depth, float* c,
                                      int64_t c_stride) {
  const int64_t b_bytes = b.stride * kUnitBytes;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t u = 0; u < depth; u += kTileUnits) {
    const int32_t* columns = b.from_row(u).data;
    _tile_loadd(6, columns, b_bytes);
    _tile_loadd(7, columns + b.group_stride, b_bytes);
    for (int i = 0; i < kParts; ++i) {
      _tile_loadd(4, a.part(i) + u, a.stride * kUnitBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, c_stride * static_cast<int64_t>(sizeof(float)));
  _tile_stored(1, c + 16, c_stride * static_cast<int64_t>(sizeof(float)));
}

// c[num_rows][num_columns] = a[num_rows][depth] * b[depth][num_columns]. Reads and writes whole
// tiles of 16 rows; num_columns is a multiple of 32.
template <int kParts>
void multiply(Matrix a, int64_t num_rows, Panel b, int64_t depth, int64_t num_columns, float* c,
              int64_t c_stride) {
  memory_fence();
  for (int64_t r = 0; r < num_rows; r += 2 * kTileRows) {
    for (int64_t n = 0; n < num_columns; n += 32) {
      const Panel columns = b.from_group(n / 16);
      float* to = c + r * c_stride + n;
      if (num_rows - r > kTileRows) {
        multiply_two_by_two<kParts>(a.from(r, 0), columns, depth, to, c_stride);
      } else {
        multiply_one_by_two<kParts>(a.from(r, 0), columns, depth, to, c_stride);
      }
    }
  }
  memory_fence();
}

// dots[r * dots_stride + k] = queries[r] . keys[k] for 16 keys, rows of units that are `stride`
// units apart, and a group of 16 queries, [depth][16]. The products of multiply() in the same
// order, without a transposition of the keys.
PAGED_INLINE void multiply_key_rows(const int32_t* keys, int64_t stride, const int32_t* queries,
                                    int64_t depth, float* dots, int64_t dots_stride) {
  alignas(64) int32_t by_key[kTileRows][16];
  memory_fence();
  _tile_zero(0);
  for (int64_t u = 0; u < depth; u += kTileUnits) {
    _tile_loadd(4, keys + u, stride * kUnitBytes);
    _tile_loadd(5, queries + u * 16, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, by_key, 64);
  memory_fence();
  transpose_rows(by_key[0], 16, reinterpret_cast<int32_t*>(dots), dots_stride);
}

}  // namespace
}  // namespace paged::cpu
