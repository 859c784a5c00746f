// Cast between types, with its rounding modes. What a pair of types allows is checked at run time,
// because the mode is an argument.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

namespace sim_cast {

// The pairs of the 910B vector core.
template <typename D, typename S>
constexpr bool kExists =
    (std::is_same_v<S, int8_t> && std::is_same_v<D, half>) ||
    (std::is_same_v<S, uint8_t> && std::is_same_v<D, half>) ||
    (std::is_same_v<S, int16_t> && sim::kIsOneOf<D, half, float>) ||
    (std::is_same_v<S, half> && sim::kIsOneOf<D, int8_t, uint8_t, int16_t, int32_t, float>) ||
    (std::is_same_v<S, bfloat16_t> && sim::kIsOneOf<D, int32_t, float>) ||
    (std::is_same_v<S, int32_t> && sim::kIsOneOf<D, int16_t, float, int64_t>) ||
    (std::is_same_v<S, float> &&
     sim::kIsOneOf<D, int16_t, half, bfloat16_t, int32_t, float, int64_t>) ||
    (std::is_same_v<S, int64_t> && sim::kIsOneOf<D, int32_t, float>);

}  // namespace sim_cast

#define SIM_REQUIRE_CAST(D, S)                                                                     \
  static_assert(sim_cast::kExists<D, S>,                                                           \
                "Cast: the 910B vector core can't cast between these types (bfloat16_t and half: " \
                "go through float)")

template <typename T, typename U>
SIM_API void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
                  const uint32_t count, SIM_SITE) {
  SIM_REQUIRE_CAST(T, U);
  sim::Cast(dst.sim_operand(), src.sim_operand(), roundMode, sim::Count(count), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
                  const uint64_t mask, const sim::Field<uint8_t> repeatTime,
                  const UnaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_CAST(T, U);
  sim::Cast(dst.sim_operand(params.dstBlkStride, params.dstRepStride),
            src.sim_operand(params.srcBlkStride, params.srcRepStride), roundMode,
            sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

template <typename T, typename U, bool isSetMask = true>
SIM_API void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
                  const uint64_t mask[], const sim::Field<uint8_t> repeatTime,
                  const UnaryRepeatParams& params, SIM_SITE) {
  SIM_REQUIRE_CAST(T, U);
  sim::Cast(dst.sim_operand(params.dstBlkStride, params.dstRepStride),
            src.sim_operand(params.srcBlkStride, params.srcRepStride), roundMode,
            sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}
#undef SIM_REQUIRE_CAST

// Scalar conversions of bfloat16_t.
inline float ToFloat(const bfloat16_t& value) {
  uint16_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return sim::BfloatToFloat(bits);
}
inline bfloat16_t ToBfloat16(const float& value) { return bfloat16_t(value); }

}  // namespace AscendC
