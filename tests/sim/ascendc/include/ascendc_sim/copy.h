// DataCopy, DataCopyPad and Copy.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

// Dense: `count` elements, a multiple of 32 bytes.
template <typename T>
SIM_API void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count,
                      SIM_SITE) {
  sim::CopyIn("DataCopy", dst.sim_view(), src.sim_view(),
              {1, int64_t{count} * int64_t{sizeof(T)}, 0, 0, sizeof(T), false, false, 0, 0, 0},
              SIM_HERE);
}

template <typename T>
SIM_API void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
                      SIM_SITE) {
  sim::CopyOut("DataCopy", dst.sim_view(), src.sim_view(),
               {1, int64_t{count} * int64_t{sizeof(T)}, 0, 0, sizeof(T), false, false, 0, 0, 0},
               SIM_HERE);
}

// Pieces of 32-byte blocks.
template <typename T>
SIM_API void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                      const DataCopyParams& params, SIM_SITE) {
  sim::CopyIn("DataCopy", dst.sim_view(), src.sim_view(),
              {params.blockCount, params.blockLen * 32, params.srcStride * 32, params.dstStride,
               sizeof(T), false, false, 0, 0, 0},
              SIM_HERE);
}

template <typename T>
SIM_API void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                      const DataCopyParams& params, SIM_SITE) {
  sim::CopyOut("DataCopy", dst.sim_view(), src.sim_view(),
               {params.blockCount, params.blockLen * 32, params.dstStride * 32, params.srcStride,
                sizeof(T), false, false, 0, 0, 0},
               SIM_HERE);
}

// Within the unified buffer, on the vector pipe.
template <typename T>
SIM_API void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
                      SIM_SITE) {
  sim::CopyLocal(dst.sim_view(), src.sim_view(), 1, int64_t{count} * int64_t{sizeof(T)}, 0, 0,
                 SIM_HERE);
}

template <typename T>
SIM_API void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                      const DataCopyParams& params, SIM_SITE) {
  sim::CopyLocal(dst.sim_view(), src.sim_view(), params.blockCount, params.blockLen * 32,
                 params.srcStride, params.dstStride, SIM_HERE);
}

// Pieces of any length. In UB each piece starts a new 32-byte block.
template <typename T>
SIM_API void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                         const DataCopyExtParams& params, const DataCopyPadExtParams<T>& pad,
                         SIM_SITE) {
  uint64_t value = 0;
  std::memcpy(&value, &pad.paddingValue, sizeof(T));
  constexpr int64_t size = sizeof(T);
  sim::CopyIn("DataCopyPad", dst.sim_view(), src.sim_view(),
              {params.blockCount, params.blockLen, params.srcStride, params.dstStride, size, true,
               pad.isPad, pad.leftPadding * size, pad.rightPadding * size, value},
              SIM_HERE);
}

template <typename T>
SIM_API void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                         const DataCopyExtParams& params, SIM_SITE) {
  sim::CopyOut("DataCopyPad", dst.sim_view(), src.sim_view(),
               {params.blockCount, params.blockLen, params.dstStride, params.srcStride, sizeof(T),
                true, false, 0, 0, 0},
               SIM_HERE);
}

// A masked copy within the unified buffer.
template <typename T, bool isSetMask = true>
SIM_API void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask,
                  const sim::Field<uint8_t> repeatTime, const CopyRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("Copy", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Unary("Copy", sim::UnaryOp::kCopy, dst.sim_operand(params.dstStride, params.dstRepeatSize),
             src.sim_operand(params.srcStride, params.srcRepeatSize),
             sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, bool isSetMask = true>
SIM_API void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[],
                  const sim::Field<uint8_t> repeatTime, const CopyRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("Copy", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Unary("Copy", sim::UnaryOp::kCopy, dst.sim_operand(params.dstStride, params.dstRepeatSize),
             src.sim_operand(params.srcStride, params.srcRepeatSize),
             sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

}  // namespace AscendC
