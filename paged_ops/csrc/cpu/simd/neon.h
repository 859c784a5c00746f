// Arm NEON with half-precision conversion (armv8.2-a+fp16): 4 lanes, fused multiply-add. With bf16
// (armv8.2-a+fp16+bf16) also products of matrices of bfloat16, 2 x 4 and 4 x 2.
#pragma once

#include <arm_neon.h>

namespace paged::cpu {
namespace {

using Vec = float32x4_t;
using IntVec = int32x4_t;
constexpr int kLanes = 4;
constexpr int kDots = 16;  // dot products at a time

PAGED_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
PAGED_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

PAGED_INLINE Vec load(const float* p) { return vld1q_f32(p); }
PAGED_INLINE Vec load(const Half* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
PAGED_INLINE Vec load(const BFloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}

PAGED_INLINE uint16x4_t load_bytes(const void* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes))));
}
PAGED_INLINE Vec load(const Int8* p) {
  const int16x4_t x = vreinterpret_s16_u16(vshl_n_u16(load_bytes(p), 8));
  return vcvtq_f32_s32(vshrq_n_s32(vshll_n_s16(x, 0), 8));
}
PAGED_INLINE Vec load(const Float8E5M2* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(load_bytes(p), 8)));
}
// By way of a float16 2^8 times smaller, which holds all values, subnormal ones too.
PAGED_INLINE Vec load(const Float8E4M3* p) {
  const uint16x4_t x = load_bytes(p);
  const uint16x4_t magnitude = vand_u16(x, vdup_n_u16(0x7f));
  const uint16x4_t sign = vshl_n_u16(vand_u16(x, vdup_n_u16(0x80)), 8);
  const uint16x4_t half = vorr_u16(vshl_n_u16(magnitude, 7), sign);
  const uint16x4_t nan = vceq_u16(magnitude, vdup_n_u16(0x7f));
  return vcvt_f32_f16(vreinterpret_f16_u16(vbsl_u16(nan, vdup_n_u16(0x7e00), half))) * 256.0f;
}

PAGED_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
PAGED_INLINE void store(Half* p, Vec x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
PAGED_INLINE void store(BFloat16* p, Vec x) {
  vst1_u16(&p->bits, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
}
#else
PAGED_INLINE void store(BFloat16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(x[i]);
}
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAGED_HAS_BF16_PAIRS
#define PAGED_HAS_BF16_QUADS

// Pairs of bfloat16 from the first n elements at p, zeros after them.
PAGED_INLINE IntVec load_pairs(const BFloat16* p, int64_t n) {
  if (n >= 2 * kLanes) return vreinterpretq_s32_u16(vld1q_u16(&p->bits));
  uint16_t elements[2 * kLanes] = {};
  if (n > 0) std::memcpy(elements, p, static_cast<size_t>(n) * sizeof(BFloat16));
  return vreinterpretq_s32_u16(vld1q_u16(elements));
}
PAGED_INLINE void store_pairs(BFloat16* p, IntVec x) { vst1q_u16(&p->bits, (uint16x8_t)x); }

// The halves of 64 bits of two vectors.
PAGED_INLINE IntVec first_halves(IntVec a, IntVec b) {
  return (IntVec)vzip1q_s64((int64x2_t)a, (int64x2_t)b);
}
PAGED_INLINE IntVec last_halves(IntVec a, IntVec b) {
  return (IntVec)vzip2q_s64((int64x2_t)a, (int64x2_t)b);
}

// Both halves of a times both halves of b, by bfmmla: lane 2 * i + j is that of c and the dot
// product of half i of a with half j of b.
//
// As the Arm manual's BFMatMulAdd has it where FPCR.EBF is 0, as it is unless a process sets it: a
// lane takes two products at a time, twice. The products are exact, their sum and its sum with the
// lane are rounded to odd (an inexact one is cut and its last bit set), whatever FPCR says of
// rounding; subnormal operands, products and sums count as zero, and every NaN is the default one.
// So an addition is off by less than one unit in the last place, to either side, where an fma is
// off by half of one.
PAGED_INLINE Vec add_quads(IntVec a, IntVec b, Vec c) {
  return vbfmmlaq_f32(c, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
}

// Lane i is the sum of the first and the last lane of accs[i].
PAGED_INLINE Vec sum_diagonals(const Vec (&accs)[kLanes]) {
  const IntVec first =
      first_halves((IntVec)vzip1q_f32(accs[0], accs[1]), (IntVec)vzip1q_f32(accs[2], accs[3]));
  const IntVec last =
      last_halves((IntVec)vzip2q_f32(accs[0], accs[1]), (IntVec)vzip2q_f32(accs[2], accs[3]));
  return (Vec)first + (Vec)last;
}
#endif

PAGED_INLINE float sum(Vec x) {
  const float32x2_t half = vadd_f32(vget_low_f32(x), vget_high_f32(x));
  return vget_lane_f32(half, 0) + vget_lane_f32(half, 1);
}
PAGED_INLINE float max(Vec x) { return vmaxvq_f32(x); }

PAGED_INLINE Vec sum_each(const Vec (&accs)[kLanes]) {
  return vpaddq_f32(vpaddq_f32(accs[0], accs[1]), vpaddq_f32(accs[2], accs[3]));
}

}  // namespace
}  // namespace paged::cpu

#include "cpu/simd/partial.h"
#include "cpu/simd/power_of_two.h"
