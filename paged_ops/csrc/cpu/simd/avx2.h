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

PAGED_INLINE __m128i load_bytes(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}
PAGED_INLINE Vec load(const Int8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p)));
}
PAGED_INLINE Vec load(const Float8E5M2* p) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_bytes(p)));
}
// By way of a float16 2^8 times smaller, which holds all values, subnormal ones too.
PAGED_INLINE Vec load(const Float8E4M3* p) {
  const __m128i x = _mm_cvtepi8_epi16(load_bytes(p));  // the sign is spread over the upper half
  const __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
  const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_and_si128(x, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), sign);
  return _mm256_cvtph_ps(_mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), nan)) * 256.0f;
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
