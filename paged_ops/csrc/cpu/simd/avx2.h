// AVX2 with FMA and F16C (x86-64-v3): 8 lanes, tails through a zeroed buffer.
#pragma once

#include <immintrin.h>

namespace paged::cpu {
namespace {

using Vec = __m256;
typedef int32_t IntVec __attribute__((vector_size(32)));
constexpr int kLanes = 8;
constexpr int kDots = 8;  // dot products at a time

PAGED_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PAGED_INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }

PAGED_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PAGED_INLINE Vec load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGED_INLINE Vec load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

PAGED_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
PAGED_INLINE void store(Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
PAGED_INLINE void store(BFloat16* p, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(lanes[i]);
}

PAGED_INLINE float sum(Vec x) {
  __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  half = half + _mm_movehl_ps(half, half);
  return half[0] + half[1];
}
PAGED_INLINE float max(Vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return half[0] > half[1] ? half[0] : half[1];
}

// Halves three times: the vectors pairwise within 128-bit halves, then the halves.
PAGED_INLINE Vec sum_each(const Vec (&accs)[kLanes]) {
  const Vec low =
      _mm256_hadd_ps(_mm256_hadd_ps(accs[0], accs[1]), _mm256_hadd_ps(accs[2], accs[3]));
  const Vec high =
      _mm256_hadd_ps(_mm256_hadd_ps(accs[4], accs[5]), _mm256_hadd_ps(accs[6], accs[7]));
  return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

}  // namespace
}  // namespace paged::cpu

#include "cpu/simd/partial.h"
#include "cpu/simd/power_of_two.h"
