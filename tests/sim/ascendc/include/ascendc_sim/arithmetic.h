// Arithmetic and bitwise vector instructions.
//
// Each has three forms: the first `count` elements; repeats with the first `mask` lanes of each;
// and repeats with a bit for each lane.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

#define SIM_UNARY(Name, Op, ...)                                                                   \
  template <typename T>                                                                            \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count,    \
                    SIM_SITE) {                                                                    \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                       \
    sim::Unary(#Name, sim::UnaryOp::Op, dst.sim_operand(), src.sim_operand(), sim::Count(count),   \
               SIM_HERE);                                                                          \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask,           \
                    const sim::Field<uint8_t> repeatTime, const UnaryRepeatParams& params,         \
                    SIM_SITE) {                                                                    \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                       \
    sim::Unary(#Name, sim::UnaryOp::Op, dst.sim_operand(params.dstBlkStride, params.dstRepStride), \
               src.sim_operand(params.srcBlkStride, params.srcRepStride),                          \
               sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                               \
  }                                                                                                \
  template <typename T, bool isSetMask = true>                                                     \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask[],         \
                    const sim::Field<uint8_t> repeatTime, const UnaryRepeatParams& params,         \
                    SIM_SITE) {                                                                    \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                       \
    sim::Unary(#Name, sim::UnaryOp::Op, dst.sim_operand(params.dstBlkStride, params.dstRepStride), \
               src.sim_operand(params.srcBlkStride, params.srcRepStride),                          \
               sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                               \
  }

SIM_UNARY(Exp, kExp, half, float)
SIM_UNARY(Ln, kLn, half, float)
SIM_UNARY(Abs, kAbs, half, float)
SIM_UNARY(Sqrt, kSqrt, half, float)
SIM_UNARY(Rsqrt, kRsqrt, half, float)
SIM_UNARY(Reciprocal, kReciprocal, half, float)
SIM_UNARY(Relu, kRelu, half, int32_t, float)
SIM_UNARY(Not, kNot, int16_t, uint16_t)
#undef SIM_UNARY

#define SIM_BINARY(Name, Op, ...)                                                           \
  template <typename T>                                                                     \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                  \
                    const LocalTensor<T>& src1, const int32_t& count, SIM_SITE) {           \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                \
    sim::Binary(#Name, sim::BinaryOp::Op, dst.sim_operand(), src0.sim_operand(),            \
                src1.sim_operand(), sim::Count(count), SIM_HERE);                           \
  }                                                                                         \
  template <typename T, bool isSetMask = true>                                              \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                  \
                    const LocalTensor<T>& src1, uint64_t mask,                              \
                    const sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params, \
                    SIM_SITE) {                                                             \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                \
    sim::Binary(#Name, sim::BinaryOp::Op,                                                   \
                dst.sim_operand(params.dstBlkStride, params.dstRepStride),                  \
                src0.sim_operand(params.src0BlkStride, params.src0RepStride),               \
                src1.sim_operand(params.src1BlkStride, params.src1RepStride),               \
                sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                       \
  }                                                                                         \
  template <typename T, bool isSetMask = true>                                              \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0,                  \
                    const LocalTensor<T>& src1, uint64_t mask[],                            \
                    const sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params, \
                    SIM_SITE) {                                                             \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                \
    sim::Binary(#Name, sim::BinaryOp::Op,                                                   \
                dst.sim_operand(params.dstBlkStride, params.dstRepStride),                  \
                src0.sim_operand(params.src0BlkStride, params.src0RepStride),               \
                src1.sim_operand(params.src1BlkStride, params.src1RepStride),               \
                sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                       \
  }

SIM_BINARY(Add, kAdd, int16_t, half, int32_t, float)
SIM_BINARY(Sub, kSub, int16_t, half, int32_t, float)
SIM_BINARY(Mul, kMul, int16_t, half, int32_t, float)
SIM_BINARY(Div, kDiv, half, float)
SIM_BINARY(Max, kMax, int16_t, half, int32_t, float)
SIM_BINARY(Min, kMin, int16_t, half, int32_t, float)
SIM_BINARY(And, kAnd, int16_t, uint16_t)
SIM_BINARY(Or, kOr, int16_t, uint16_t)
SIM_BINARY(AddRelu, kAddRelu, int16_t, half, float)
SIM_BINARY(FusedMulAdd, kFusedMulAdd, half, float)
#undef SIM_BINARY

#define SIM_WITH_SCALAR(Name, Op, ...)                                                          \
  template <typename T, bool isSetMask = true>                                                  \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, \
                    const int32_t& count, SIM_SITE) {                                           \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                    \
    sim::WithScalar(#Name, sim::ScalarOp::Op, dst.sim_operand(), src.sim_operand(),             \
                    static_cast<double>(scalarValue), sim::Count(count), SIM_HERE);             \
  }                                                                                             \
  template <typename T, bool isSetMask = true>                                                  \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, \
                    uint64_t mask, const sim::Field<uint8_t> repeatTime,                        \
                    const UnaryRepeatParams& params, SIM_SITE) {                                \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                    \
    sim::WithScalar(                                                                            \
        #Name, sim::ScalarOp::Op, dst.sim_operand(params.dstBlkStride, params.dstRepStride),    \
        src.sim_operand(params.srcBlkStride, params.srcRepStride),                              \
        static_cast<double>(scalarValue), sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE); \
  }                                                                                             \
  template <typename T, bool isSetMask = true>                                                  \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, \
                    uint64_t mask[], const sim::Field<uint8_t> repeatTime,                      \
                    const UnaryRepeatParams& params, SIM_SITE) {                                \
    SIM_REQUIRE_TYPE(#Name, T, __VA_ARGS__);                                                    \
    sim::WithScalar(                                                                            \
        #Name, sim::ScalarOp::Op, dst.sim_operand(params.dstBlkStride, params.dstRepStride),    \
        src.sim_operand(params.srcBlkStride, params.srcRepStride),                              \
        static_cast<double>(scalarValue), sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE); \
  }

SIM_WITH_SCALAR(Adds, kAdds, int16_t, half, int32_t, float)
SIM_WITH_SCALAR(Muls, kMuls, int16_t, half, int32_t, float)
SIM_WITH_SCALAR(Maxs, kMaxs, int16_t, half, int32_t, float)
SIM_WITH_SCALAR(Mins, kMins, int16_t, half, int32_t, float)
SIM_WITH_SCALAR(ShiftLeft, kShiftLeft, int16_t, uint16_t, int32_t, uint32_t)
SIM_WITH_SCALAR(ShiftRight, kShiftRight, int16_t, uint16_t, int32_t, uint32_t)
SIM_WITH_SCALAR(LeakyRelu, kLeakyRelu, half, float)
#undef SIM_WITH_SCALAR

// dst += src * scalar and dst += src0 * src1. A float destination may have half sources.
template <typename T, typename U>
constexpr bool kAccumulates = (std::is_same_v<T, half> && std::is_same_v<U, half>) ||
                              (std::is_same_v<T, float> && std::is_same_v<U, float>) ||
                              (std::is_same_v<T, float> && std::is_same_v<U, half>);

#define SIM_REQUIRE_ACCUMULATE(name)     \
  static_assert(kAccumulates<T, U>, name \
                ": the 910B vector core adds half to half, float to float and half to float only")

template <typename T, typename U>
SIM_API void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue,
                  const int32_t& count, SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("Axpy");
  sim::WithScalar("Axpy", sim::ScalarOp::kAxpy, dst.sim_operand(), src.sim_operand(),
                  static_cast<double>(scalarValue), sim::Count(count), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue,
                  uint64_t mask, const sim::Field<uint8_t> repeatTime,
                  const UnaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("Axpy");
  sim::WithScalar(
      "Axpy", sim::ScalarOp::kAxpy, dst.sim_operand(params.dstBlkStride, params.dstRepStride),
      src.sim_operand(params.srcBlkStride, params.srcRepStride), static_cast<double>(scalarValue),
      sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue,
                  uint64_t mask[], const sim::Field<uint8_t> repeatTime,
                  const UnaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("Axpy");
  sim::WithScalar(
      "Axpy", sim::ScalarOp::kAxpy, dst.sim_operand(params.dstBlkStride, params.dstRepStride),
      src.sim_operand(params.srcBlkStride, params.srcRepStride), static_cast<double>(scalarValue),
      sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, typename U>
SIM_API void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0,
                       const LocalTensor<U>& src1, const int32_t& count, SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("MulAddDst");
  sim::Binary("MulAddDst", sim::BinaryOp::kMulAddDst, dst.sim_operand(), src0.sim_operand(),
              src1.sim_operand(), sim::Count(count), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0,
                       const LocalTensor<U>& src1, uint64_t mask,
                       const sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params,
                       SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("MulAddDst");
  sim::Binary("MulAddDst", sim::BinaryOp::kMulAddDst,
              dst.sim_operand(params.dstBlkStride, params.dstRepStride),
              src0.sim_operand(params.src0BlkStride, params.src0RepStride),
              src1.sim_operand(params.src1BlkStride, params.src1RepStride),
              sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0,
                       const LocalTensor<U>& src1, const uint64_t mask[],
                       const sim::Field<uint8_t> repeatTime, const BinaryRepeatParams& params,
                       SIM_SITE) {
  SIM_REQUIRE_ACCUMULATE("MulAddDst");
  sim::Binary("MulAddDst", sim::BinaryOp::kMulAddDst,
              dst.sim_operand(params.dstBlkStride, params.dstRepStride),
              src0.sim_operand(params.src0BlkStride, params.src0RepStride),
              src1.sim_operand(params.src1BlkStride, params.src1RepStride),
              sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}
#undef SIM_REQUIRE_ACCUMULATE

}  // namespace AscendC
