// Instructions that spread or generate values: Duplicate, Brcb, CreateVecIndex, Gather, Transpose.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

namespace sim_fill {

template <typename T>
uint32_t Bits(const T& value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

}  // namespace sim_fill

template <typename T>
SIM_API void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count,
                       SIM_SITE) {
  SIM_REQUIRE_TYPE("Duplicate", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Duplicate(dst.sim_operand(), sim_fill::Bits(scalarValue), sim::Count(count), SIM_HERE);
}

template <typename T, bool isSetMask = true>
SIM_API void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask,
                       const sim::Field<uint8_t> repeatTime,
                       const sim::Field<uint16_t> dstBlockStride,
                       const sim::Field<uint8_t> dstRepeatStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("Duplicate", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Duplicate(dst.sim_operand(dstBlockStride, dstRepeatStride), sim_fill::Bits(scalarValue),
                 sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, bool isSetMask = true>
SIM_API void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask[],
                       const sim::Field<uint8_t> repeatTime,
                       const sim::Field<uint16_t> dstBlockStride,
                       const sim::Field<uint8_t> dstRepeatStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("Duplicate", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Duplicate(dst.sim_operand(dstBlockStride, dstRepeatStride), sim_fill::Bits(scalarValue),
                 sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

// Each repeat takes eight elements and fills a 32-byte block with each of them.
template <typename T>
SIM_API void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                  const sim::Field<uint8_t> repeatTime, const BrcbRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("Brcb", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Brcb(dst.sim_operand(params.dstBlkStride, params.dstRepStride), src.sim_operand(),
            repeatTime, SIM_HERE);
}

// firstValue, firstValue + 1, ...
template <typename T>
SIM_API void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("CreateVecIndex", T, int16_t, half, int32_t, float);
  sim::CreateVecIndex(dst.sim_operand(), static_cast<double>(firstValue), sim::Count(count),
                      SIM_HERE);
}

template <typename T>
SIM_API void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, uint64_t mask,
                            sim::Field<uint8_t> repeatTime, sim::Field<uint16_t> dstBlkStride,
                            sim::Field<uint8_t> dstRepStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("CreateVecIndex", T, int16_t, half, int32_t, float);
  sim::CreateVecIndex(dst.sim_operand(dstBlkStride, dstRepStride), static_cast<double>(firstValue),
                      sim::Repeats<true>(mask, repeatTime), SIM_HERE);
}

// dst[i] is the element `srcOffset[i]` bytes after srcBaseOffset bytes after src.
template <typename T>
SIM_API void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                    const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
                    const uint32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("Gather", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Gather(dst.sim_operand(), src.sim_operand(), srcOffset.sim_operand(), srcBaseOffset,
              sim::Count(count), SIM_HERE);
}

template <typename T>
SIM_API void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                    const LocalTensor<uint32_t>& srcOffset, const uint32_t srcBaseOffset,
                    const uint64_t mask, const sim::Field<uint8_t> repeatTime,
                    const sim::Field<uint16_t> dstRepStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("Gather", T, int16_t, uint16_t, half, bfloat16_t, int32_t, uint32_t, float);
  sim::Gather(dst.sim_operand(1, dstRepStride), src.sim_operand(), srcOffset.sim_operand(),
              srcBaseOffset, sim::Repeats<true>(mask, repeatTime), SIM_HERE);
}

// A 16 x 16 matrix of 16-bit elements.
template <typename T>
SIM_API void Transpose(const LocalTensor<T>& dst, const LocalTensor<T>& src, SIM_SITE) {
  SIM_REQUIRE_TYPE("Transpose", T, int16_t, uint16_t, half);
  sim::TransposeB16(dst.sim_operand(), src.sim_operand(), SIM_HERE);
}

}  // namespace AscendC
