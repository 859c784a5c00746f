// Products of small matrices of bytes by Intel's matrix unit: integers, exact.
//
// A unit is four bytes that are neighbours along the sum, a tile 16 rows of 16 units.
#pragma once

#include "cpu/attention/amx.h"

namespace paged::cpu {
namespace {

constexpr int64_t kTileBytes = 64;  // of a row
constexpr int64_t kUnitsOfTile = kTileRows * kTileUnits;

// The right-hand side of a product: tiles of 1 KB without gaps, so many units apart.
struct BytePanel {
  int32_t* data;
  int64_t step_stride;   // along the sum
  int64_t group_stride;  // between 16 columns and the next 16

  PAGED_INLINE const int32_t* at(int64_t step, int64_t group) const {
    return data + step * step_stride + group * group_stride;
  }
};

// Adds the product of two tiles, the left one of signed bytes or of unsigned ones.
#define PAGED_ADD_BYTES(kIsSigned, c, a, b) \
  do {                                      \
    if constexpr (kIsSigned) {              \
      _tile_dpbssd(c, a, b);                \
    } else {                                \
      _tile_dpbusd(c, a, b);                \
    }                                       \
  } while (false)

// c[kRowTiles * 16][32] += a[kRowTiles * 16][num_steps * 64] * b, kRowTiles up to 3.
template <bool kIsSigned, int kRowTiles>
PAGED_INLINE void multiply_byte_tiles(const int8_t* a, int64_t a_stride, const BytePanel& b,
                                      int64_t num_steps, int32_t* c, int64_t c_stride) {
  const int64_t c_bytes = c_stride * kUnitBytes;
  const int8_t* second = a + kTileRows * a_stride;
  const int8_t* third = second + kTileRows * a_stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kRowTiles > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  if constexpr (kRowTiles > 2) {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    const int64_t at = step * kTileBytes;
    _tile_stream_loadd(7, b.at(step, 0), kTileBytes);
    _tile_loadd(6, a + at, a_stride);
    PAGED_ADD_BYTES(kIsSigned, 0, 6, 7);
    if constexpr (kRowTiles == 3) {
      // All tiles are taken: rows are loaded twice.
      _tile_loadd(6, second + at, a_stride);
      PAGED_ADD_BYTES(kIsSigned, 2, 6, 7);
      _tile_loadd(6, third + at, a_stride);
      PAGED_ADD_BYTES(kIsSigned, 4, 6, 7);
      _tile_stream_loadd(7, b.at(step, 1), kTileBytes);
      PAGED_ADD_BYTES(kIsSigned, 5, 6, 7);
      _tile_loadd(6, second + at, a_stride);
      PAGED_ADD_BYTES(kIsSigned, 3, 6, 7);
      _tile_loadd(6, a + at, a_stride);
      PAGED_ADD_BYTES(kIsSigned, 1, 6, 7);
    } else {
      _tile_stream_loadd(5, b.at(step, 1), kTileBytes);
      PAGED_ADD_BYTES(kIsSigned, 1, 6, 5);
      if constexpr (kRowTiles == 2) {
        _tile_loadd(4, second + at, a_stride);
        PAGED_ADD_BYTES(kIsSigned, 2, 4, 7);
        PAGED_ADD_BYTES(kIsSigned, 3, 4, 5);
      }
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + kTileUnits, c_bytes);
  if constexpr (kRowTiles > 1) {
    _tile_stored(2, c + kTileRows * c_stride, c_bytes);
    _tile_stored(3, c + kTileRows * c_stride + kTileUnits, c_bytes);
  }
  if constexpr (kRowTiles > 2) {
    _tile_stored(4, c + 2 * kTileRows * c_stride, c_bytes);
    _tile_stored(5, c + 2 * kTileRows * c_stride + kTileUnits, c_bytes);
  }
}

// c[num_rows][32] = a[num_rows][num_steps * 64] * b, of rows `a_stride` bytes apart. Reads and
// writes whole tiles of 16 rows.
template <bool kIsSigned>
PAGED_INLINE void multiply_bytes(const int8_t* a, int64_t a_stride, int64_t num_rows,
                                 const BytePanel& b, int64_t num_steps, int32_t* c,
                                 int64_t c_stride) {
  int64_t tiles = (num_rows + kTileRows - 1) / kTileRows;
  while (tiles > 0) {
    // Not 3 and 1: a sum alone waits for itself.
    const int64_t some = tiles == 4 || tiles == 2 ? 2 : tiles < 3 ? tiles : 3;
    if (some == 3) {
      multiply_byte_tiles<kIsSigned, 3>(a, a_stride, b, num_steps, c, c_stride);
    } else if (some == 2) {
      multiply_byte_tiles<kIsSigned, 2>(a, a_stride, b, num_steps, c, c_stride);
    } else {
      multiply_byte_tiles<kIsSigned, 1>(a, a_stride, b, num_steps, c, c_stride);
    }
    a += some * kTileRows * a_stride;
    c += some * kTileRows * c_stride;
    tiles -= some;
  }
}

// 16 rows of bytes, `stride` apart.
struct ByteRows {
  const char* data;
  int64_t stride;
};

// Adds up in tiles, to be stored by store_row_bytes, the products of groups of 16 rows of bytes
// with kGroups groups of 16 columns, [step][group][unit][column]: four groups of rows with one of
// columns, else two. beside() runs after each product: 4 or 6 in a step.
template <int kGroups, class F>
PAGED_INLINE void multiply_row_bytes(const ByteRows* rows, const int32_t* columns,
                                     int64_t num_steps, F beside) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if constexpr (kGroups == 3) {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int64_t step = 0; step < num_steps; ++step, columns += kGroups * kUnitsOfTile) {
    const int64_t at = step * kTileBytes;
    _tile_loadd(7, columns, kTileBytes);
    _tile_loadd(6, rows[0].data + at, rows[0].stride);
    _tile_dpbssd(0, 6, 7);
    beside();
    if constexpr (kGroups == 1) {
      _tile_loadd(5, rows[1].data + at, rows[1].stride);
      _tile_dpbssd(1, 5, 7);
      beside();
      _tile_loadd(4, rows[2].data + at, rows[2].stride);
      _tile_dpbssd(2, 4, 7);
      beside();
      _tile_loadd(6, rows[3].data + at, rows[3].stride);
      _tile_dpbssd(3, 6, 7);
      beside();
    } else if constexpr (kGroups == 2) {
      _tile_loadd(5, rows[1].data + at, rows[1].stride);
      _tile_dpbssd(2, 5, 7);
      beside();
      _tile_loadd(4, columns + kUnitsOfTile, kTileBytes);
      _tile_dpbssd(1, 6, 4);
      beside();
      _tile_dpbssd(3, 5, 4);
      beside();
    } else {
      _tile_loadd(7, columns + kUnitsOfTile, kTileBytes);
      _tile_dpbssd(1, 6, 7);
      beside();
      _tile_loadd(7, columns + 2 * kUnitsOfTile, kTileBytes);
      _tile_dpbssd(2, 6, 7);
      beside();
      _tile_loadd(6, rows[1].data + at, rows[1].stride);
      _tile_dpbssd(5, 6, 7);
      beside();
      _tile_loadd(7, columns + kUnitsOfTile, kTileBytes);
      _tile_dpbssd(4, 6, 7);
      beside();
      _tile_loadd(7, columns, kTileBytes);
      _tile_dpbssd(3, 6, 7);
      beside();
    }
  }
}

// Stores what multiply_row_bytes added up: [group of rows][group of columns][row][column].
template <int kGroups>
PAGED_INLINE void store_row_bytes(int32_t* to) {
  _tile_stored(0, to, kTileBytes);
  _tile_stored(1, to + kUnitsOfTile, kTileBytes);
  _tile_stored(2, to + 2 * kUnitsOfTile, kTileBytes);
  _tile_stored(3, to + 3 * kUnitsOfTile, kTileBytes);
  if constexpr (kGroups == 3) {
    _tile_stored(4, to + 4 * kUnitsOfTile, kTileBytes);
    _tile_stored(5, to + 5 * kUnitsOfTile, kTileBytes);
  }
}

// Of four rows 64 bytes each: tile t gets the units of columns 16 * l + 4 * t + i, l and i from 0
// to 3, to[t * tile_stride] on.
PAGED_INLINE void interleave_bytes(const Int8* a, const Int8* b, const Int8* c, const Int8* d,
                                   int64_t count, int32_t* to, int64_t tile_stride) {
  const auto bytes = [&](const Int8* p) __attribute__((always_inline)) {
    if (count >= 64) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, p);
  };
  const __m512i row_a = bytes(a), row_b = bytes(b), row_c = bytes(c), row_d = bytes(d);
  const __m512i ab_low = _mm512_unpacklo_epi8(row_a, row_b);
  const __m512i ab_high = _mm512_unpackhi_epi8(row_a, row_b);
  const __m512i cd_low = _mm512_unpacklo_epi8(row_c, row_d);
  const __m512i cd_high = _mm512_unpackhi_epi8(row_c, row_d);
  store_units(to, (IntVec)_mm512_unpacklo_epi16(ab_low, cd_low));
  store_units(to + tile_stride, (IntVec)_mm512_unpackhi_epi16(ab_low, cd_low));
  store_units(to + 2 * tile_stride, (IntVec)_mm512_unpacklo_epi16(ab_high, cd_high));
  store_units(to + 3 * tile_stride, (IntVec)_mm512_unpackhi_epi16(ab_high, cd_high));
}

// Puts what interleave_bytes leaves in four tiles into the order of the columns.
PAGED_INLINE void order_columns(Vec (&x)[4]) {
  const Vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
  const Vec c = _mm512_shuffle_f32x4(x[0], x[1], 0xee), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

}  // namespace
}  // namespace paged::cpu
