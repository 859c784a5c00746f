// Any machine with a GCC-compatible compiler: 4 lanes of the vector extension, no intrinsics.
#pragma once

namespace paged::cpu {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kDots = 4;

PAGED_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
PAGED_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

PAGED_INLINE float to_float(float x) { return x; }
PAGED_INLINE float to_float(BFloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
PAGED_INLINE float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1f;
  const uint32_t fraction = x.bits & 0x3ff;
  if (exponent == 0x1f) return as_float(sign | 0x7f800000 | (fraction << 13));
  if (exponent != 0) return as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float subnormal = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -subnormal : subnormal;
}

PAGED_INLINE float to_float(Int8 x) { return x.bits; }
PAGED_INLINE float to_float(Float8E5M2 x) {
  return to_float(Half{static_cast<uint16_t>(x.bits << 8)});
}
PAGED_INLINE float to_float(Float8E4M3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t exponent = (x.bits >> 3) & 0xf;
  const uint32_t fraction = x.bits & 0x7;
  if ((x.bits & 0x7f) == 0x7f) return as_float(sign | 0x7fc00000);
  if (exponent != 0) return as_float(sign | ((exponent + 120) << 23) | (fraction << 20));
  const float subnormal = static_cast<float>(fraction) * 0x1p-9f;
  return sign != 0 ? -subnormal : subnormal;
}

// float32 to float16, to nearest even. Adding a power of two whose last place is the last place of
// the result rounds in the floating-point unit.
PAGED_INLINE Half to_half(float value) {
  const uint32_t bits = as_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000)
    return {static_cast<uint16_t>(sign | 0x7c00)};     // rounds to 65536 or more
  if (magnitude < 0x38800000) {                        // below 2^-14: a multiple of 2^-24
    const float rounded = as_float(magnitude) + 0.5f;  // 0.5 has its last place at 2^-24
    return {static_cast<uint16_t>(sign | (as_bits(rounded) - 0x3f000000))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)))};
}

template <class T>
PAGED_INLINE Vec load(const T* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}

PAGED_INLINE void store(float* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = x[i];
}
PAGED_INLINE void store(Half* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_half(x[i]);
}
PAGED_INLINE void store(BFloat16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(x[i]);
}

PAGED_INLINE float sum(Vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }
PAGED_INLINE float max(Vec x) {
  const float a = x[0] > x[2] ? x[0] : x[2];
  const float b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}

PAGED_INLINE Vec sum_each(const Vec (&accs)[kLanes]) {
  return Vec{sum(accs[0]), sum(accs[1]), sum(accs[2]), sum(accs[3])};
}

}  // namespace
}  // namespace paged::cpu

#include "cpu/simd/partial.h"
#include "cpu/simd/power_of_two.h"
