// The cube core: matrices from GM through L1 to L0A and L0B, the product in L0C, and back to GM.
#pragma once

#include "cube_params.h"
#include "tensor.h"

namespace AscendC {

// GM to L1, on MTE2. Rows of less than a multiple of 32 bytes are filled up with zeros.
template <typename T>
SIM_API void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                      const Nd2NzParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("DataCopy with Nd2NzParams", T, int8_t, uint8_t, int16_t, uint16_t, half,
                   bfloat16_t, int32_t, uint32_t, float);
  sim::CopyNdToNz(
      dst.sim_view(), src.sim_view(),
      {params.ndNum, params.nValue, params.dValue, params.srcNdMatrixStride, params.srcDValue,
       params.dstNzC0Stride, params.dstNzNStride, params.dstNzMatrixStride, sizeof(T)},
      SIM_HERE);
}

// L1 to L0A or L0B, on MTE1. A 16-bit type may be transposed within its fractals.
template <typename T>
SIM_API void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LoadData2DParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("LoadData", T, int8_t, uint8_t, int16_t, uint16_t, half, bfloat16_t, int32_t,
                   uint32_t, float);
  sim::LoadFractals("LoadData", dst.sim_view(), src.sim_view(),
                    {1, params.startIndex, params.repeatTimes, params.srcStride, params.dstGap, 0,
                     params.ifTranspose, params.addrMode, sizeof(T)},
                    SIM_HERE);
}

// A square of 16 x 16: one fractal of a 16-bit type, two neighbouring ones of a 32-bit type.
template <typename T>
SIM_API void LoadDataWithTranspose(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                                   const LoadData2dTransposeParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("LoadDataWithTranspose", T, half, bfloat16_t, int32_t, uint32_t, float);
  sim::LoadFractals("LoadDataWithTranspose", dst.sim_view(), src.sim_view(),
                    {sizeof(T) / 2, params.startIndex, params.repeatTimes, params.srcStride,
                     params.dstGap, params.dstFracGap, true, params.addrMode, sizeof(T)},
                    SIM_HERE);
}

// An image in L1 to L0A or L0B, as the left or the right factor that its matrix is, on MTE1.
template <typename T, const IsResetLoad3dConfig& config = IS_RESER_LOAD3D_DEFAULT_CONFIG>
SIM_API void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const LoadData3DParamsV2<T>& params, SIM_SITE) {
  static_assert(sim::kIsOneOf<T, half, bfloat16_t>, "LoadData of images: here it has 16-bit types");
  sim::LoadImage(dst.sim_view(), src.sim_view(),
                 {params.l1H, params.l1W, params.padList[0], params.padList[1], params.padList[2],
                  params.padList[3], config.isSetFMatrix, config.isSetPadding},
                 {params.channelSize, params.kExtension, params.mExtension, params.kStartPt,
                  params.mStartPt, params.strideW, params.strideH, params.filterW, params.filterH,
                  params.dilationFilterW, params.dilationFilterH, params.enTranspose,
                  params.enSmallK, params.filterSizeW, params.filterSizeH, params.fMatrixCtrl},
                 SIM_HERE);
}

// The register that describes the image, for loads that don't set it.
SIM_API void SetFmatrix(uint16_t height, uint16_t width, const uint8_t padding[4],
                        const FmatrixMode& mode, SIM_SITE) {
  sim::SetImage({height, width, padding[0], padding[1], padding[2], padding[3], true, false},
                mode == FmatrixMode::FMATRIX_LEFT, SIM_HERE);
}

// A constant into L1 (on MTE2), L0A or L0B (on MTE1). Fill is the newer name.
template <typename T>
SIM_API void InitConstValue(const LocalTensor<T>& dst, const InitConstValueParams<T>& params,
                            SIM_SITE) {
  SIM_REQUIRE_TYPE("InitConstValue", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t,
                   float);
  uint64_t value = 0;
  std::memcpy(&value, &params.initValue, sizeof(T));
  sim::FillConstant(dst.sim_view(), params.repeatTimes, params.blockNum, params.dstGap, value,
                    sizeof(T), SIM_HERE);
}
template <typename T>
SIM_API void Fill(const LocalTensor<T>& dst, const InitConstValueParams<T>& params, SIM_SITE) {
  InitConstValue(dst, params, site_file, site_line);
}

namespace sim_cube {

template <typename C, typename A, typename B>
constexpr bool kExists =
    std::is_same_v<A, B> && std::is_same_v<C, float> && sim::kIsOneOf<A, half, bfloat16_t, float>;

template <typename D, typename S>
constexpr bool kStores = std::is_same_v<S, float> && sim::kIsOneOf<D, half, bfloat16_t, float>;

}  // namespace sim_cube

// dst [m, n] = or += fm [m, k] * filter [k, n]. With m = 1 the row of fm is read as it lies.
template <typename T, typename U, typename S>
SIM_API void Mmad(const LocalTensor<T>& dst, const LocalTensor<U>& fm, const LocalTensor<S>& filter,
                  const MmadParams& params, SIM_SITE) {
  static_assert(sim_cube::kExists<T, U, S>,
                "Mmad: here it has half, bfloat16_t and float, with sums in float");
  sim::Mmad(dst.sim_view(), fm.sim_view(), filter.sim_view(), sim::TypeOf<U>(),
            {params.m, params.n, params.k, params.cmatrixInitVal, params.cmatrixSource,
             params.kDirectionAlign, params.unitFlag},
            SIM_HERE);
}

// L0C to GM, on FIX.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
SIM_API void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src,
                     const FixpipeParamsV220& params, SIM_SITE) {
  static_assert(sim_cube::kStores<T, U>,
                "Fixpipe: here it has float to half, bfloat16_t and float");
  static_assert(config.format != CO2Layout::COLUMN_MAJOR, "Fixpipe: a 910B has no COLUMN_MAJOR");
  sim::Fixpipe(dst.sim_view(), src.sim_view(), sim::TypeOf<T>(),
               {params.nSize, params.mSize, params.srcStride, params.dstStride, params.ndNum,
                params.srcNdStride, params.dstNdStride, config.format == CO2Layout::NZ,
                params.reluEn, params.isChannelSplit, params.quantPre, params.unitFlag},
               SIM_HERE);
}

}  // namespace AscendC
