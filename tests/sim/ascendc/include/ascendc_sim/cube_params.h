// Parameter structs of the cube core's instructions. Their fields are as narrow as the hardware's,
// or whole and checked (params.h).
#pragma once

#include "params.h"

namespace AscendC {

// A row-major matrix (ND) becomes columns of blocks of 32 bytes (NZ).
struct Nd2NzParams {
  Nd2NzParams() = default;
  Nd2NzParams(sim::Field<uint16_t> matrices, sim::Field<uint16_t> rows,
              sim::Field<uint16_t> columns, sim::Field<uint16_t> src_matrix_stride,
              sim::Field<uint16_t> src_row_stride, sim::Field<uint16_t> dst_column_stride,
              sim::Field<uint16_t> dst_row_stride, sim::Field<uint16_t> dst_matrix_stride)
      : ndNum(matrices),
        nValue(rows),
        dValue(columns),
        srcNdMatrixStride(src_matrix_stride),
        srcDValue(src_row_stride),
        dstNzC0Stride(dst_column_stride),
        dstNzNStride(dst_row_stride),
        dstNzMatrixStride(dst_matrix_stride) {}

  sim::Field<uint16_t> ndNum = 0;
  sim::Field<uint16_t> nValue = 0;
  sim::Field<uint16_t> dValue = 0;
  sim::Field<uint16_t> srcNdMatrixStride = 0;
  sim::Field<uint16_t> srcDValue = 0;
  sim::Field<uint16_t> dstNzC0Stride = 0;
  sim::Field<uint16_t> dstNzNStride = 0;
  sim::Field<uint16_t> dstNzMatrixStride = 0;
};

// All in fractals of 512 bytes; the gap of the destination counts from tail to head.
struct LoadData2DParams {
  LoadData2DParams() = default;
  LoadData2DParams(sim::Field<uint16_t> start, sim::Field<uint8_t> repeat,
                   sim::Field<uint16_t> src_stride, sim::Field<uint8_t> unused,
                   sim::Field<uint16_t> dst_gap, bool transpose, sim::Field<uint8_t> addr_mode)
      : startIndex(start),
        dstGap(dst_gap),
        srcStride(src_stride),
        ifTranspose(transpose),
        repeatTimes(repeat),
        sid(unused),
        addrMode(addr_mode) {}

  sim::Field<uint16_t> startIndex = 0;
  sim::Field<uint16_t> dstGap = 0;
  sim::Field<uint16_t> srcStride = 0;
  bool ifTranspose = false;
  sim::Field<uint8_t> repeatTimes = 0;
  sim::Field<uint8_t> sid = 0;
  sim::Field<uint8_t> addrMode = 0;
};
using LoadData2dParams = LoadData2DParams;

// The source in squares: 512 bytes of a 16-bit type, 1024 of a 32-bit type.
struct LoadData2dTransposeParams {
  LoadData2dTransposeParams() = default;
  LoadData2dTransposeParams(sim::Field<uint16_t> start, sim::Field<uint8_t> repeat,
                            sim::Field<uint16_t> src_stride, sim::Field<uint16_t> dst_gap,
                            sim::Field<uint16_t> dst_part_gap, sim::Field<uint8_t> addr_mode = 0)
      : startIndex(start),
        repeatTimes(repeat),
        srcStride(src_stride),
        dstGap(dst_gap),
        dstFracGap(dst_part_gap),
        addrMode(addr_mode) {}

  sim::Field<uint16_t> startIndex = 0;
  sim::Field<uint8_t> repeatTimes = 0;
  sim::Field<uint16_t> srcStride = 0;
  sim::Field<uint16_t> dstGap = 0;
  sim::Field<uint16_t> dstFracGap = 0;
  sim::Field<uint8_t> addrMode = 0;
};

// An image in L1, [C1][H][W][32 bytes], becomes a matrix: a row for each place of the filter, in it
// all that the filter covers there. Extensions and starts are of that matrix, in rows and elements.
template <typename T>
struct LoadData3DParamsV2 {
  uint8_t padList[4] = {0, 0, 0, 0};
  sim::Field<uint16_t> l1H = 0;
  sim::Field<uint16_t> l1W = 0;
  sim::Field<uint16_t> channelSize = 0;
  sim::Field<uint16_t> kExtension = 0;
  sim::Field<uint16_t> mExtension = 0;
  sim::Field<uint16_t> kStartPt = 0;
  sim::Field<uint16_t> mStartPt = 0;
  sim::Field<uint8_t> strideW = 1;
  sim::Field<uint8_t> strideH = 1;
  sim::Field<uint8_t> filterW = 1;
  sim::Field<uint8_t> filterH = 1;
  sim::Field<uint8_t> dilationFilterW = 1;
  sim::Field<uint8_t> dilationFilterH = 1;
  bool enTranspose = false;
  bool enSmallK = false;
  T padValue = 0;
  bool filterSizeW = false;
  bool filterSizeH = false;
  bool fMatrixCtrl = false;
};

// Whether such a load sets the registers of the image and of the padding itself.
struct IsResetLoad3dConfig {
  bool isSetFMatrix = true;
  bool isSetPadding = true;
};
constexpr IsResetLoad3dConfig IS_RESER_LOAD3D_DEFAULT_CONFIG = {true, true};

enum class FmatrixMode : uint8_t { FMATRIX_LEFT = 0, FMATRIX_RIGHT = 1 };

// Blocks have 32 bytes in L1 and 512 in L0A and L0B.
template <typename T>
struct InitConstValueParams {
  InitConstValueParams() = default;
  InitConstValueParams(sim::Field<uint16_t> repeat, sim::Field<uint16_t> blocks,
                       sim::Field<uint16_t> dst_gap, T value)
      : repeatTimes(repeat), blockNum(blocks), dstGap(dst_gap), initValue(value) {}

  sim::Field<uint16_t> repeatTimes = 0;
  sim::Field<uint16_t> blockNum = 0;
  sim::Field<uint16_t> dstGap = 0;
  T initValue = 0;
};

struct MmadParams {
  MmadParams() = default;
  MmadParams(sim::Field<uint16_t> rows, sim::Field<uint16_t> columns, sim::Field<uint16_t> depth,
             sim::Field<uint8_t> unit_flag, bool from_bias, bool initialise)
      : m(rows),
        n(columns),
        k(depth),
        unitFlag(unit_flag),
        cmatrixSource(from_bias),
        cmatrixInitVal(initialise) {}

  sim::Field<uint16_t> m = 0;
  sim::Field<uint16_t> n = 0;
  sim::Field<uint16_t> k = 0;
  sim::Field<uint8_t> unitFlag = 0;
  bool kDirectionAlign = false;
  bool cmatrixSource = false;
  bool cmatrixInitVal = true;
};

struct FixpipeConfig {
  CO2Layout format;
  constexpr FixpipeConfig(CO2Layout layout) : format(layout) {}  // NOLINT
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};

struct FixpipeParamsV220 {
  FixpipeParamsV220() = default;
  FixpipeParamsV220(sim::Field<uint16_t> columns, sim::Field<uint16_t> rows,
                    sim::Field<uint16_t> src_stride, sim::Field<uint32_t> dst_stride, bool relu)
      : nSize(columns), mSize(rows), srcStride(src_stride), dstStride(dst_stride), reluEn(relu) {}
  FixpipeParamsV220(sim::Field<uint16_t> columns, sim::Field<uint16_t> rows,
                    sim::Field<uint16_t> src_stride, sim::Field<uint32_t> dst_stride, bool relu,
                    QuantMode_t quant, int64_t scale, sim::Field<uint16_t> matrices,
                    sim::Field<uint16_t> src_matrix_stride, sim::Field<uint16_t> dst_matrix_stride,
                    sim::Field<uint8_t> unit_flag)
      : nSize(columns),
        mSize(rows),
        srcStride(src_stride),
        dstStride(dst_stride),
        quantPre(quant),
        deqScalar(static_cast<uint64_t>(scale)),
        ndNum(matrices),
        srcNdStride(src_matrix_stride),
        dstNdStride(dst_matrix_stride),
        reluEn(relu),
        unitFlag(unit_flag) {}

  sim::Field<uint16_t> nSize = 0;
  sim::Field<uint16_t> mSize = 0;
  sim::Field<uint16_t> srcStride = 0;
  sim::Field<uint32_t> dstStride = 0;
  QuantMode_t quantPre = QuantMode_t::NoQuant;
  uint64_t deqScalar = 0;
  sim::Field<uint16_t> ndNum = 1;
  sim::Field<uint16_t> srcNdStride = 0;
  sim::Field<uint16_t> dstNdStride = 0;
  bool reluEn = false;
  sim::Field<uint8_t> unitFlag = 0;
  bool isChannelSplit = false;
};

}  // namespace AscendC
