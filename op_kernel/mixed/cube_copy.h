// Copies of matrices on a cube core: GM to L1, and L1 to L0A and L0B.
//
// In L1 a matrix lies in columns of 32 bytes: column c holds elements [16 c, 16 c + 16) of `pitch`
// rows, one row after the other. 16 rows of a column are a fractal; L0A and L0B hold whole
// fractals.
#pragma once

#include "attention/block_tables.h"
#include "attention/visible.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/piece_steps.h"

// The widest gap between rows, in elements, that the copy's field holds.
constexpr int64_t kWidestNdStride = 65535;

// Copies `rows` rows of `width` elements of each of some tokens, `stride` and `token_stride`
// elements apart in GM, to the rows of a matrix in L1, one after the other.
template <typename T>
__aicore__ inline void CopyTokensToL1(const AscendC::LocalTensor<T>& to,
                                      const AscendC::GlobalTensor<T>& from, int64_t tokens,
                                      int64_t token_stride, int64_t rows, int64_t width,
                                      int64_t stride, int64_t pitch) {
  // Overlapping rows, as in an expanded tensor, and rows far apart go one by one.
  const bool together = stride >= width && stride <= kWidestNdStride;
  const int64_t at_once = together ? rows : 1;
  const AscendC::Nd2NzParams params(
      static_cast<uint16_t>(tokens), static_cast<uint16_t>(at_once), static_cast<uint16_t>(width),
      static_cast<uint16_t>(tokens > 1 ? token_stride : 0),
      static_cast<uint16_t>(together ? stride : width), static_cast<uint16_t>(pitch), 1,
      static_cast<uint16_t>(rows * kFractal));
  for (int64_t i = 0; i < rows; i += at_once) {
    AscendC::DataCopy(to[i * kFractal], from[i * stride], params);
  }
}

// Copies `count` rows of `width` elements, `stride` elements apart in GM, to a matrix in L1.
template <typename T>
__aicore__ inline void CopyRowsToL1(const AscendC::LocalTensor<T>& to,
                                    const AscendC::GlobalTensor<T>& from, int64_t count,
                                    int64_t width, int64_t stride, int64_t pitch) {
  CopyTokensToL1(to, from, 1, 0, count, width, stride, pitch);
}

// Fills rows [first, last) of a matrix of `width` columns with zeros.
template <typename T>
__aicore__ inline void ZeroRowsInL1(const AscendC::LocalTensor<T>& to, int64_t first, int64_t last,
                                    int64_t width, int64_t pitch) {
  if (first == last) {
    return;
  }
  const int64_t rows = last - first;
  const AscendC::InitConstValueParams<T> params(
      static_cast<uint16_t>(width / kFractal), static_cast<uint16_t>(rows),
      static_cast<uint16_t>(pitch - rows), static_cast<T>(0));
  AscendC::InitConstValue(to[first * kFractal], params);
}

// Copies keys (or values) [begin + seen.first, begin + seen.last) of the unit's sequence and KV
// head to the rows of `to` that begin with row 0 for key begin + span.first. The rows of the span's
// fractals beside them become zeros: a product with weight 0 must be 0.
template <typename T>
__aicore__ inline void CopyTileToL1(const AscendC::LocalTensor<T>& to,
                                    const AscendC::GlobalTensor<T>& cache,
                                    const CacheLayout& layout, const BlockTables& tables,
                                    const Unit& unit, int64_t begin, const Range& seen,
                                    const Range& span, int64_t pitch) {
  ZeroRowsInL1(to, 0, seen.first - span.first, layout.head_dim, pitch);
  ZeroRowsInL1(to, seen.last - span.first, span.last - span.first, layout.head_dim, pitch);
  for (int64_t k = seen.first; k < seen.last;) {
    const int64_t count = Smaller(tables.CountFrom(begin + k), seen.last - k);
    const int64_t at = tables.Find(layout, unit.index, unit.kv_head, begin + k);
    CopyRowsToL1(to[(k - span.first) * kFractal], cache[at], count, layout.head_dim,
                 layout.token_stride, pitch);
    k += count;
  }
}

// Loads the fractals of `rows` rows of `width` elements, all of a row of fractals before the next
// one; with `transposed` each is transposed on the way. That is the left factor [rows][width], or
// transposed the right factor [rows][width] of a sum over the rows. `rows` and `width` are
// multiples of 16.
template <bool transposed, typename T>
__aicore__ inline void LoadRows(const AscendC::LocalTensor<T>& to,
                                const AscendC::LocalTensor<T>& from, int64_t rows, int64_t width,
                                int64_t pitch) {
  const int64_t across = width / kFractal;
  const int64_t apart = pitch / kFractal;
  for (int64_t r = 0; r < rows / kFractal; ++r) {
    const AscendC::LoadData2DParams params(static_cast<uint16_t>(r), static_cast<uint8_t>(across),
                                           static_cast<uint16_t>(apart), 0, 0, transposed, 0);
    AscendC::LoadData(to[r * across * kFractal * kFractal], from, params);
  }
}

// The same, all of a column of fractals before the next one, as they lie in L1. That is the right
// factor of a product with the rows, or transposed the left factor of which `from` holds the
// columns as rows.
template <bool transposed, typename T>
__aicore__ inline void LoadColumns(const AscendC::LocalTensor<T>& to,
                                   const AscendC::LocalTensor<T>& from, int64_t rows, int64_t width,
                                   int64_t pitch) {
  const int64_t down = rows / kFractal;
  for (int64_t c = 0; c < width / kFractal; ++c) {
    const AscendC::LoadData2DParams params(static_cast<uint16_t>(c * (pitch / kFractal)),
                                           static_cast<uint8_t>(down), 1, 0, 0, transposed, 0);
    AscendC::LoadData(to[c * down * kFractal * kFractal], from, params);
  }
}
