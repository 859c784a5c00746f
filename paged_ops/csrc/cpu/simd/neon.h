// Arm NEON with half-precision conversion (armv8.2-a+fp16): 4 lanes, fused multiply-add.
#pragma once

#include <arm_neon.h>

namespace paged::cpu {
namespace {

using Vec = float32x4_t;
using IntVec = int32x4_t;
constexpr int kLanes = 4;
constexpr int kDots = 16;  // of 32 registers; 16 sums in flight hide the latency of fmla

PAGED_INLINE Vec broadcast(float x) { return vdupq_n_f32(x); }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

PAGED_INLINE Vec load(const float* p) { return vld1q_f32(p); }
PAGED_INLINE Vec load(const Half* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
}
PAGED_INLINE Vec load(const BFloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16));
}

PAGED_INLINE void store(float* p, Vec x) { vst1q_f32(p, x); }
PAGED_INLINE void store(Half* p, Vec x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
PAGED_INLINE void store(BFloat16* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(x[i]);
}

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
