// Language extensions, scalar types and enumerations of Ascend C, for a host compiler.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

// Address spaces and function kinds mean nothing on the host: all memory is host memory. But clang
// can be asked to keep GM apart, as the device compiler does: tests/sim/test_device_language.py.
#define __global__ __attribute__((visibility("default")))
#define __aicore__
#ifdef ASCENDC_SIM_GM_SPACE
#define __gm__ __attribute__((address_space(ASCENDC_SIM_GM_SPACE)))
#else
#define __gm__
#endif
#define __ubuf__
#define __inout_pipe__(pipe)
#define GM_ADDR __gm__ uint8_t*

enum pipe_t {
  PIPE_S = 0,
  PIPE_V,
  PIPE_M,
  PIPE_MTE1,
  PIPE_MTE2,
  PIPE_MTE3,
  PIPE_ALL,
  PIPE_FIX = 10,
};

enum event_t {
  EVENT_ID0 = 0,
  EVENT_ID1,
  EVENT_ID2,
  EVENT_ID3,
  EVENT_ID4,
  EVENT_ID5,
  EVENT_ID6,
  EVENT_ID7,
};

// What Fixpipe does with the values on their way. The modes with a scale are left out.
enum QuantMode_t { NoQuant, F322F16, F322BF16 };

namespace sim {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Exact. Without branches on the value, so that loops over arrays vectorise.
inline float HalfToFloat(uint16_t half_bits) {
  const uint32_t sign = static_cast<uint32_t>(half_bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(half_bits & 0x7fffu) << 13;
  const float scaled =
      FloatOf(magnitude) * FloatOf(0x77800000u);  // 2^112 moves the exponent's bias
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // Inf and NaN
  return FloatOf(BitsOf(scaled) | special | sign);
}

// To nearest, ties to even; too large becomes Inf, NaN stays NaN.
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias, then round by adding just under half a unit plus the kept low bit.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 puts the half's unit into the float's last bit.
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return static_cast<uint16_t>(sign | result);
}

inline float BfloatToFloat(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }

inline uint16_t FloatToBfloat(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

}  // namespace sim

// IEEE binary16. The scalar unit converts and computes it; here it computes in float.
class half {
 public:
  half() = default;
  half(float value) : bits_(sim::FloatToHalf(value)) {}                        // NOLINT
  half(double value) : half(static_cast<float>(value)) {}                      // NOLINT
  template <typename I, std::enable_if_t<std::is_integral_v<I>, bool> = true>  //
  half(I value) : half(static_cast<float>(value)) {}                           // NOLINT
  operator float() const { return sim::HalfToFloat(bits_); }                   // NOLINT

 private:
  uint16_t bits_;
};

// bfloat16 can be stored, copied and cast. The core has no arithmetic on it, so neither has this
// class.
class bfloat16_t {
 public:
  bfloat16_t() = default;
  bfloat16_t(int value) : bits_(sim::FloatToBfloat(static_cast<float>(value))) {}  // NOLINT
  explicit bfloat16_t(float value) : bits_(sim::FloatToBfloat(value)) {}

 private:
  uint16_t bits_;
};

static_assert(sizeof(half) == 2 && std::is_trivially_copyable_v<half>);
static_assert(sizeof(bfloat16_t) == 2 && std::is_trivially_copyable_v<bfloat16_t>);

namespace AscendC {

using TEventID = int8_t;

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM = VECCALC,
  SPM,
  SHM = SPM,
  TSCM,
  C2PIPE2GM,
  C2PIPE2LOCAL,
  MAX,
};
using QuePosition = TPosition;

// Named source_destination. Those between pipes that no core has together are left out.
enum class HardEvent : uint8_t {
  MTE2_MTE1,
  MTE1_MTE2,
  MTE1_M,
  M_MTE1,
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  MTE2_M,
  M_MTE2,
  M_FIX,
  FIX_M,
  MTE3_MTE2,
  MTE2_MTE3,
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  MTE2_FIX,
  FIX_MTE2,
  FIX_S,
  M_S,
  MTE1_FIX,
  FIX_MTE1,
  MAX,
};

enum class RoundMode : uint8_t {
  CAST_NONE = 0,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD,
};

enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };

enum class SELMODE : uint8_t {
  VSEL_CMPMASK_SPR = 0,
  VSEL_TENSOR_SCALAR_MODE,
  VSEL_TENSOR_TENSOR_MODE,
};

enum class ReduceOrder : uint8_t {
  ORDER_VALUE_INDEX = 0,
  ORDER_INDEX_VALUE,
  ORDER_ONLY_VALUE,
  ORDER_ONLY_INDEX,
};

enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

enum KernelMetaType : uint8_t {
  KERNEL_TYPE_AIV_ONLY,
  KERNEL_TYPE_AIC_ONLY,
  KERNEL_TYPE_MIX_AIV_1_0,
  KERNEL_TYPE_MIX_AIC_1_0,
  KERNEL_TYPE_MIX_AIC_1_1,
  KERNEL_TYPE_MIX_AIC_1_2,
  KERNEL_TYPE_MAX,
};

// How Fixpipe leaves a matrix in GM.
enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR, COLUMN_MAJOR };

// The two kinds of core that a mixed kernel runs on.
constexpr int32_t AIC = 1;
constexpr int32_t AIV = 2;

// Stands for a mask given earlier with SetVectorMask, in calls with isSetMask = false.
constexpr uint64_t MASK_PLACEHOLDER = 0;

constexpr int32_t ONE_BLK_SIZE = 32;

}  // namespace AscendC

using AscendC::KERNEL_TYPE_AIC_ONLY;
using AscendC::KERNEL_TYPE_AIV_ONLY;
using AscendC::KERNEL_TYPE_MIX_AIC_1_0;
using AscendC::KERNEL_TYPE_MIX_AIC_1_1;
using AscendC::KERNEL_TYPE_MIX_AIC_1_2;
using AscendC::KERNEL_TYPE_MIX_AIV_1_0;
