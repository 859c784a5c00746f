// AVX-512 (x86-64-v4): 16 lanes, masked tails.
#pragma once

#include <immintrin.h>

namespace paged::cpu {
namespace {

using Vec = __m512;
typedef int32_t IntVec __attribute__((vector_size(64)));
constexpr int kLanes = 16;
constexpr int kDots = 16;  // of 32 registers; the rest hold the operands of 4 x 4 sums

PAGED_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

PAGED_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

PAGED_INLINE Vec widen(__m256i bits, Half) { return _mm512_cvtph_ps(bits); }
PAGED_INLINE Vec widen(__m256i bits, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

PAGED_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PAGED_INLINE Vec load_partial(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
template <class T>
PAGED_INLINE Vec load(const T* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
PAGED_INLINE Vec load_partial(const T* p, int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), T{});
}

PAGED_INLINE __m256i narrow(Vec x, Half) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PAGED_INLINE __m256i narrow(Vec x, BFloat16) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}

PAGED_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
PAGED_INLINE void store_partial(float* p, Vec x, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
template <class T>
PAGED_INLINE void store(T* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, T{}));
}
template <class T>
PAGED_INLINE void store_partial(T* p, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x, T{}));
}

// Halves four times: first the vectors pairwise within 128-bit quarters, then the quarters.
PAGED_INLINE Vec sum_each(const Vec (&accs)[kLanes]) {
  Vec pairs[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pairs[i] = _mm512_unpacklo_ps(accs[2 * i], accs[2 * i + 1]) +
               _mm512_unpackhi_ps(accs[2 * i], accs[2 * i + 1]);
  }
  Vec fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]);
    const __m512d b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  // fours[i] holds, in each of its quarters, a partial sum of accs[4 * i] to accs[4 * i + 3].
  const Vec low = _mm512_shuffle_f32x4(fours[0], fours[1], 0x88) +
                  _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd);
  const Vec high = _mm512_shuffle_f32x4(fours[2], fours[3], 0x88) +
                   _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

PAGED_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }
PAGED_INLINE float max(Vec x) { return _mm512_reduce_max_ps(x); }

}  // namespace
}  // namespace paged::cpu
