// Copies of matrices on a cube core: GM to L1, and L1 to L0A and L0B, which hold whole fractals of
// 16 x 16 elements.
//
// In L1 queries and weights lie column of fractals by column, as the matrix unit takes the factor
// on their side; keys and values row of fractals by row, as it takes theirs. So a factor is one
// load, unless only part of its columns fits L0. Where the tiling says so keys and values lie row
// by row, as in GM, and the load of L0 makes fractals of them.
#pragma once

#include "attention/block_tables.h"
#include "attention/visible.h"
#include "common/scalar.h"
#include "kernel_operator.h"
#include "mixed/piece_steps.h"

// The widest gap between rows, or matrices, in elements, that the copy's field holds.
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

// Whether one copy takes many rows of fractals.
__aicore__ inline bool RowsAreNear(int64_t width, int64_t stride) {
  return stride >= width && kFractal * stride <= kWidestNdStride;
}

// Copies `matrices` of `rows` rows of `width` elements, all `stride` elements apart in GM, to a row
// of fractals each.
template <typename T>
PAGED_INLINE void CopyMatricesToL1(const AscendC::LocalTensor<T>& to,
                                   const AscendC::GlobalTensor<T>& from, int64_t matrices,
                                   int64_t rows, int64_t width, int64_t stride) {
  const AscendC::Nd2NzParams params(
      static_cast<uint16_t>(matrices), static_cast<uint16_t>(rows), static_cast<uint16_t>(width),
      static_cast<uint16_t>(matrices > 1 ? kFractal * stride : 0), static_cast<uint16_t>(stride),
      static_cast<uint16_t>(kFractal), 1, static_cast<uint16_t>(kFractal * width));
  AscendC::DataCopy(to, from, params);
}

// Copies `count` rows of `width` elements, `stride` elements apart in GM, to those from `row` on of
// a matrix that lies row of fractals by row.
template <typename T>
__aicore__ inline void CopyRowsToL1(const AscendC::LocalTensor<T>& to, int64_t row,
                                    const AscendC::GlobalTensor<T>& from, int64_t count,
                                    int64_t width, int64_t stride) {
  const bool together = stride >= width && stride <= kWidestNdStride;
  int64_t done = 0;
  if (RowsAreNear(width, stride) && row % kFractal == 0) {
    // Whole rows of fractals at once.
    const uint32_t fractals = static_cast<uint32_t>(count) / kFractal;
    if (fractals > 0) {
      CopyMatricesToL1(to[row * width], from, fractals, kFractal, width, stride);
    }
    done = fractals * kFractal;
  }
  while (done < count) {
    const int64_t at = row + done;
    const int64_t in_fractal = at & (kFractal - 1);
    const int64_t rows = together ? Smaller(kFractal - in_fractal, count - done) : 1;
    CopyMatricesToL1(to[(at - in_fractal) * width + in_fractal * kFractal], from[done * stride], 1,
                     rows, width, together ? stride : width);
    done += rows;
  }
}

// Fills rows [first, last) of such a matrix with zeros: less than a row of fractals.
template <typename T>
__aicore__ inline void ZeroRowsOfFractal(const AscendC::LocalTensor<T>& to, int64_t first,
                                         int64_t last, int64_t width) {
  if (first == last) {
    return;
  }
  const int64_t rows = last - first;
  const int64_t in_fractal = first & (kFractal - 1);
  const AscendC::InitConstValueParams<T> params(
      static_cast<uint16_t>(width / kFractal), static_cast<uint16_t>(rows),
      static_cast<uint16_t>(kFractal - rows), static_cast<T>(0));
  AscendC::InitConstValue(to[(first - in_fractal) * width + in_fractal * kFractal], params);
}

// Fills rows [first, last) of a matrix of `width` columns, column of fractals by column, with
// zeros.
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

// The same of dense rows.
template <typename T>
__aicore__ inline void ZeroDenseRows(const AscendC::LocalTensor<T>& to, int64_t first, int64_t last,
                                     int64_t width) {
  if (first == last) {
    return;
  }
  const AscendC::InitConstValueParams<T> params(
      1, static_cast<uint16_t>((last - first) * width / kFractal), 0, static_cast<T>(0));
  AscendC::InitConstValue(to[first * width], params);
}

// The loads of dense rows leave the registers of the image alone.
constexpr AscendC::IsResetLoad3dConfig kDescribedImage = {false, false};

// Describes an image that holds `rows` dense rows of up to `width` elements: for as long as the
// kernel runs.
__aicore__ inline void DescribeDenseRows(int64_t rows, int64_t width) {
  const uint8_t no_padding[4] = {0, 0, 0, 0};
  AscendC::SetFmatrix(1, static_cast<uint16_t>(rows * width / kFractal), no_padding,
                      AscendC::FmatrixMode::FMATRIX_LEFT);
}

// Copies keys (or values) [begin + seen.first, begin + seen.last) of the unit's sequence and KV
// head to the rows of `to` that begin with row 0 for key begin + span.first. The rows of the span's
// fractals beside them become zeros: a product with weight 0 must be 0.
template <typename T>
__aicore__ inline void CopyTileToL1(const AscendC::LocalTensor<T>& to,
                                    const AscendC::GlobalTensor<T>& cache,
                                    const CacheLayout& layout, int64_t width,
                                    const BlockTables& tables, const Unit& unit, int64_t begin,
                                    const Range& seen, const Range& span) {
  ZeroRowsOfFractal(to, 0, seen.first - span.first, width);
  ZeroRowsOfFractal(to, seen.last - span.first, span.last - span.first, width);
  for (int64_t k = seen.first; k < seen.last;) {
    const BlockTables::Run run = tables.RunFrom(layout, unit.index, unit.kv_head, begin + k);
    const int64_t count = Smaller(run.count, seen.last - k);
    CopyRowsToL1(to, k - span.first, cache[run.at], count, width, layout.token_stride);
    k += count;
  }
}

// Copies keys (or values) [begin + seen.first, begin + seen.last) to dense rows of `to`, with zeros
// as above.
template <typename T>
__aicore__ inline void CopyDenseTileToL1(const AscendC::LocalTensor<T>& to,
                                         const AscendC::GlobalTensor<T>& cache,
                                         const CacheLayout& layout, int64_t width,
                                         const BlockTables& tables, const Unit& unit, int64_t begin,
                                         const Range& seen, const Range& span) {
  ZeroDenseRows(to, 0, seen.first - span.first, width);
  ZeroDenseRows(to, seen.last - span.first, span.last - span.first, width);
  for (int64_t k = seen.first; k < seen.last;) {
    const BlockTables::Run run = tables.RunFrom(layout, unit.index, unit.kv_head, begin + k);
    const int64_t count = Smaller(run.count, seen.last - k);
    AscendC::DataCopy(to[(k - span.first) * width], cache[run.at],
                      static_cast<uint32_t>(count * width));
    k += count;
  }
}

// Loads elements [column, column + columns) of `rows` dense rows of `width` elements, as the left
// factor, or as the right factor of a sum over the rows. A row is taken for what a filter as wide
// as a row covers of an image of one line, which DescribeDenseRows has described.
template <typename T>
PAGED_INLINE void LoadDenseRows(const AscendC::LocalTensor<T>& to,
                                const AscendC::LocalTensor<T>& from, uint32_t rows, uint32_t width,
                                uint32_t column, uint32_t columns) {
  AscendC::LoadData3DParamsV2<T> params;
  params.channelSize = static_cast<uint16_t>(kFractal);
  params.filterW = static_cast<uint8_t>(width / kFractal);
  params.strideW = static_cast<uint8_t>(width / kFractal);
  params.mExtension = static_cast<uint16_t>(rows);
  params.kExtension = static_cast<uint16_t>(columns);
  params.kStartPt = static_cast<uint16_t>(column);
  AscendC::LoadData<T, kDescribedImage>(to, from, params);
}

// Loads `count` fractals that lie one after the other; with `transposed` each is transposed on the
// way.
template <bool transposed, typename T>
PAGED_INLINE void LoadFractals(const AscendC::LocalTensor<T>& to,
                               const AscendC::LocalTensor<T>& from, uint32_t count) {
  const AscendC::LoadData2DParams params(0, static_cast<uint8_t>(count), 1, 0, 0, transposed, 0);
  AscendC::LoadData(to, from, params);
}

// Loads elements [column, column + columns) of `rows` rows of `width` elements that lie row of
// fractals by row, and so they are loaded: as the left factor, or transposed as the right factor of
// a sum over the rows.
template <bool transposed, typename T>
PAGED_INLINE void LoadRows(const AscendC::LocalTensor<T>& to, const AscendC::LocalTensor<T>& from,
                           uint32_t rows, uint32_t width, uint32_t column, uint32_t columns) {
  if (columns == width) {
    LoadFractals<transposed>(to, from, rows * columns / kFractalSize);
    return;
  }
  for (uint32_t r = 0; r < rows; r += kFractal) {
    LoadFractals<transposed>(to[r * columns], from[r * width + column * kFractal],
                             columns / kFractal);
  }
}

// Loads `rows` of `pitch` rows of `width` elements that lie column of fractals by column, and so
// they are loaded: as the right factor of a product with the rows, or transposed as the left factor
// of which they are the columns.
template <bool transposed, typename T>
PAGED_INLINE void LoadColumns(const AscendC::LocalTensor<T>& to,
                              const AscendC::LocalTensor<T>& from, uint32_t rows, uint32_t width,
                              uint32_t pitch) {
  if (rows == pitch) {
    LoadFractals<transposed>(to, from, rows * width / kFractalSize);
    return;
  }
  for (uint32_t c = 0; c < width; c += kFractal) {
    LoadFractals<transposed>(to[c * rows], from[c * pitch], rows / kFractal);
  }
}
