// Compare to a bit mask, and Select by one.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

// Bit i of dst is the result for element i. `count` elements must be a multiple of 256 bytes.
template <typename T, typename U>
SIM_API void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                     const LocalTensor<T>& src1, CMPMODE cmpMode, uint32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("Compare", T, half, float, int32_t);
  SIM_REQUIRE_TYPE("Compare to", U, int8_t, uint8_t);
  const sim::Operand second = src1.sim_operand();
  sim::Compare("Compare", dst.sim_operand(), src0.sim_operand(), &second, 0, cmpMode,
               sim::Count(count), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0,
                     const LocalTensor<T>& src1, CMPMODE cmpMode, const uint64_t mask,
                     sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("Compare", T, half, float, int32_t);
  SIM_REQUIRE_TYPE("Compare to", U, int8_t, uint8_t);
  const sim::Operand second = src1.sim_operand(params.src1BlkStride, params.src1RepStride);
  sim::Compare("Compare", dst.sim_operand(),
               src0.sim_operand(params.src0BlkStride, params.src0RepStride), &second, 0, cmpMode,
               sim::Repeats<true>(mask, repeatTime), SIM_HERE);
}

#define SIM_COMPARE_SCALAR(Name)                                                                 \
  template <typename T, typename U>                                                              \
  SIM_API void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar,   \
                    CMPMODE cmpMode, uint32_t count, SIM_SITE) {                                 \
    SIM_REQUIRE_TYPE(#Name, T, half, float, int32_t);                                            \
    SIM_REQUIRE_TYPE(#Name " to", U, uint8_t);                                                   \
    sim::Compare(#Name, dst.sim_operand(), src0.sim_operand(), nullptr,                          \
                 static_cast<double>(src1Scalar), cmpMode, sim::Count(count), SIM_HERE);         \
  }                                                                                              \
  template <typename T, typename U, bool isSetMask = true>                                       \
  SIM_API void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar,   \
                    CMPMODE cmpMode, const uint64_t mask, sim::Field<uint8_t> repeatTime,        \
                    const UnaryRepeatParams& params, SIM_SITE) {                                 \
    SIM_REQUIRE_TYPE(#Name, T, half, float, int32_t);                                            \
    SIM_REQUIRE_TYPE(#Name " to", U, uint8_t);                                                   \
    sim::Compare(#Name, dst.sim_operand(),                                                       \
                 src0.sim_operand(params.srcBlkStride, params.srcRepStride), nullptr,            \
                 static_cast<double>(src1Scalar), cmpMode, sim::Repeats<true>(mask, repeatTime), \
                 SIM_HERE);                                                                      \
  }

SIM_COMPARE_SCALAR(CompareScalar)
SIM_COMPARE_SCALAR(Compares)
#undef SIM_COMPARE_SCALAR

// Where the bit of selMask is set, src0; elsewhere src1, a tensor or a scalar.
template <typename T, typename U>
SIM_API void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                    const LocalTensor<T>& src0, const LocalTensor<T>& src1, SELMODE selMode,
                    uint32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("Select", T, half, float);
  SIM_REQUIRE_TYPE("Select by", U, uint8_t, uint16_t, uint32_t, uint64_t);
  const sim::Operand second = src1.sim_operand();
  sim::Select(dst.sim_operand(), selMask.sim_operand(), src0.sim_operand(), &second, 0, selMode,
              sim::Count(count), SIM_HERE);
}

template <typename T, typename U>
SIM_API void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                    const LocalTensor<T>& src0, T src1, SELMODE selMode, uint32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("Select", T, half, float);
  SIM_REQUIRE_TYPE("Select by", U, uint8_t, uint16_t, uint32_t, uint64_t);
  sim::Select(dst.sim_operand(), selMask.sim_operand(), src0.sim_operand(), nullptr,
              static_cast<double>(src1), selMode, sim::Count(count), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                    const LocalTensor<T>& src0, const LocalTensor<T>& src1, SELMODE selMode,
                    uint64_t mask, sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params,
                    SIM_SITE) {
  SIM_REQUIRE_TYPE("Select", T, half, float);
  SIM_REQUIRE_TYPE("Select by", U, uint8_t, uint16_t, uint32_t, uint64_t);
  const sim::Operand second = src1.sim_operand(params.src1BlkStride, params.src1RepStride);
  sim::Select(dst.sim_operand(params.dstBlkStride, params.dstRepStride), selMask.sim_operand(),
              src0.sim_operand(params.src0BlkStride, params.src0RepStride), &second, 0, selMode,
              sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask,
                    const LocalTensor<T>& src0, T src1, SELMODE selMode, uint64_t mask,
                    sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_TYPE("Select", T, half, float);
  SIM_REQUIRE_TYPE("Select by", U, uint8_t, uint16_t, uint32_t, uint64_t);
  sim::Select(dst.sim_operand(params.dstBlkStride, params.dstRepStride), selMask.sim_operand(),
              src0.sim_operand(params.src0BlkStride, params.src0RepStride), nullptr,
              static_cast<double>(src1), selMode, sim::Repeats<isSetMask>(mask, repeatTime),
              SIM_HERE);
}

}  // namespace AscendC
