// AVX-512 (x86-64-v4): 16 lanes, masked tails. With VBMI also lookups among 128 bytes, with BF16
// products of pairs of bfloat16, with AMX a matrix unit.
#pragma once

#include <immintrin.h>

#if defined(__AVX512VBMI__)
#define PAGED_HAS_FLOAT8_TABLES
#include "cpu/simd/float8_tables.h"
#endif

namespace paged::cpu {
namespace {

using Vec = __m512;
typedef int32_t IntVec __attribute__((vector_size(64)));
constexpr int kLanes = 16;
constexpr int kDots = 16;  // dot products at a time, of 32 registers

PAGED_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

PAGED_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
PAGED_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PAGED_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PAGED_INLINE Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
PAGED_INLINE Vec exponents(Vec x) { return _mm512_getexp_ps(x); }  // floor(log2(|x|))
PAGED_INLINE IntVec nearest(Vec x) { return (IntVec)_mm512_cvtps_epi32(x); }

PAGED_INLINE Vec widen(__m256i bits, Half) { return _mm512_cvtph_ps(bits); }
PAGED_INLINE Vec widen(__m256i bits, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

PAGED_INLINE Vec widen(__m128i bits, Int8) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits));
}
PAGED_INLINE Vec widen(__m128i bits, Float8E5M2) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 8));
}
#if defined(PAGED_HAS_FLOAT8_TABLES)
// The bfloat16 of float8 elements, looked up by byte: `bits` holds an element in both bytes of the
// result, of which `high` and `low` say where they are; the other bytes stay.
template <class T>
PAGED_INLINE __m512i look_up_bfloat16(__m512i bits, __mmask64 high, __mmask64 low) {
  const Float8Tables<T>& tables = kFloat8Tables<T>;
  const auto half = [](const uint8_t* table, int i) { return _mm512_load_si512(table + 64 * i); };
  __m512i found =
      _mm512_mask2_permutex2var_epi8(half(tables.high, 0), bits, high, half(tables.high, 1));
  found = _mm512_mask2_permutex2var_epi8(half(tables.low, 0), found, low, half(tables.low, 1));
  const __m512i sign = _mm512_maskz_set1_epi8(high, -128);
  return _mm512_ternarylogic_epi32(bits, sign, found, 0xea);  // the sign of bits, or found
}
// A bfloat16 is the upper half of a float.
PAGED_INLINE Vec widen(__m128i bits, Float8E4M3) {
  const __m512i to_upper_half =
      _mm512_setr_epi32(0x00008080, 0x01018080, 0x02028080, 0x03038080, 0x04048080, 0x05058080,
                        0x06068080, 0x07078080, 0x08088080, 0x09098080, 0x0a0a8080, 0x0b0b8080,
                        0x0c0c8080, 0x0d0d8080, 0x0e0e8080, 0x0f0f8080);
  return (Vec)look_up_bfloat16<Float8E4M3>(
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bits), to_upper_half), 0x8888888888888888,
      0x4444444444444444);
}
#else
// By way of a float16 2^8 times smaller, which holds all values, subnormal ones too.
PAGED_INLINE Vec widen(__m128i bits, Float8E4M3) {
  const __m256i x = _mm256_cvtepi8_epi16(bits);  // the sign is spread over the upper half
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
  return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00))) * 256.0f;
}
#endif

PAGED_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PAGED_INLINE Vec load_partial(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
template <class T>
PAGED_INLINE Vec load(const T* p) {
  if constexpr (kIsQuantised<T>) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
  } else {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
  }
}
template <class T>
PAGED_INLINE Vec load_partial(const T* p, int64_t n) {
  if constexpr (kIsQuantised<T>) {
    return widen(_mm_maskz_loadu_epi8(first_lanes(n), p), T{});
  } else {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p), T{});
  }
}

PAGED_INLINE __m256i narrow(Vec x, Half) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#if defined(__AVX512BF16__)
PAGED_INLINE __m256i narrow(Vec x, BFloat16) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
PAGED_INLINE __m256i narrow(Vec x, BFloat16) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
}
#endif

PAGED_INLINE IntVec load_units(const int32_t* p) { return (IntVec)_mm512_loadu_si512(p); }
PAGED_INLINE void store_units(int32_t* p, IntVec x) { _mm512_storeu_si512(p, (__m512i)x); }
PAGED_INLINE IntVec broadcast_unit(int32_t x) { return (IntVec)_mm512_set1_epi32(x); }

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

// The 128-bit quarters at row_at(0), row_at(4), row_at(8) and row_at(12). Loading them one by one
// costs no shuffle.
template <class F>
PAGED_INLINE __m512i load_quarters(F row_at) {
  const auto quarter = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row_at(4 * i)));
  };
  __m512i x = _mm512_castsi128_si512(quarter(0));
  x = _mm512_inserti32x4(x, quarter(1), 1);
  x = _mm512_inserti32x4(x, quarter(2), 2);
  return _mm512_inserti32x4(x, quarter(3), 3);
}

// out[i * out_stride + j] = unit i of row j, which is at unit_at(j, i), for kLanes rows of kLanes
// units.
template <class F>
PAGED_INLINE void transpose_units(F unit_at, int32_t* out, int64_t out_stride) {
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    const __m512i a = load_quarters([&](int j) { return unit_at(j, i); });
    const __m512i b = load_quarters([&](int j) { return unit_at(j + 1, i); });
    const __m512i c = load_quarters([&](int j) { return unit_at(j + 2, i); });
    const __m512i d = load_quarters([&](int j) { return unit_at(j + 3, i); });
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b);
    const __m512i ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d);
    const __m512i cd_high = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(out + i * out_stride, _mm512_unpacklo_epi64(ab_low, cd_low));
    _mm512_storeu_si512(out + (i + 1) * out_stride, _mm512_unpackhi_epi64(ab_low, cd_low));
    _mm512_storeu_si512(out + (i + 2) * out_stride, _mm512_unpacklo_epi64(ab_high, cd_high));
    _mm512_storeu_si512(out + (i + 3) * out_stride, _mm512_unpackhi_epi64(ab_high, cd_high));
  }
}

// Of rows `stride` units apart.
PAGED_INLINE void transpose_rows(const int32_t* rows, int64_t stride, int32_t* out,
                                 int64_t out_stride) {
  transpose_units([&](int j, int i) { return rows + j * stride + i; }, out, out_stride);
}
// Of rows of pairs, wherever they are.
PAGED_INLINE void transpose_pairs(const BFloat16* const (&rows)[kLanes], int32_t* out,
                                  int64_t out_stride) {
  transpose_units([&](int j, int i) { return rows[j] + 2 * i; }, out, out_stride);
}

#if defined(__AVX512BF16__)
#define PAGED_HAS_BF16_PAIRS
#define PAGED_HAS_INTERLEAVED_ROWS

// Pairs of bfloat16 from the first n elements at p, zeros after them.
PAGED_INLINE IntVec load_pairs(const BFloat16* p, int64_t n) {
  if (n >= 32) return (IntVec)_mm512_loadu_si512(p);
  const uint32_t first = n > 0 ? static_cast<uint32_t>((uint64_t{1} << n) - 1) : 0;
  return (IntVec)_mm512_maskz_loadu_epi16(first, p);
}
// x cut, not rounded, to bfloat16.
PAGED_INLINE Vec high_half(Vec x) { return (Vec)((IntVec)x & static_cast<int32_t>(0xffff0000u)); }
// The lanes of both vectors in order, as bfloat16: cut, and rounded.
PAGED_INLINE IntVec high_halves(Vec first, Vec second) {
  alignas(64) static constexpr int16_t kOdd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                   23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                   45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (IntVec)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(kOdd),
                                           (__m512i)second);
}
PAGED_INLINE IntVec narrow_pair(Vec first, Vec second) {
  return (IntVec)_mm512_cvtne2ps_pbh(second, first);
}
#if defined(PAGED_HAS_FLOAT8_TABLES)
// The same of a row of float8.
template <class T>
PAGED_INLINE IntVec pairs_of(__m256i bits, T) {
  const __m512i words = _mm512_cvtepu8_epi16(bits);
  const __m512i twice = _mm512_or_si512(words, _mm512_slli_epi16(words, 8));
  return (IntVec)look_up_bfloat16<T>(twice, 0xaaaaaaaaaaaaaaaa, 0x5555555555555555);
}
#endif
template <class T>
PAGED_INLINE IntVec load_pairs(const T* p, int64_t n) {
  static_assert(kIsFloat8<T>);
  if (n >= 32) return pairs_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
  const uint32_t first = n > 0 ? (1u << n) - 1 : 0;
  return pairs_of(_mm256_maskz_loadu_epi8(first, p), T{});
}
// The pairs of each of 32 columns of two rows, of which the first num_a and num_b are there.
template <class T>
PAGED_INLINE void interleave_rows(const T* a, int64_t num_a, const T* b, int64_t num_b,
                                  IntVec (&pairs)[2]) {
  const __m512i first = (__m512i)load_pairs(a, num_a);
  const __m512i second = (__m512i)load_pairs(b, num_b);
  const __m512i low = _mm512_unpacklo_epi16(first, second);
  const __m512i high = _mm512_unpackhi_epi16(first, second);
  const __m512i begin = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i end = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  pairs[0] = (IntVec)_mm512_permutex2var_epi64(low, begin, high);
  pairs[1] = (IntVec)_mm512_permutex2var_epi64(low, end, high);
}
// Lane by lane: c + a.first * b.first + a.second * b.second.
PAGED_INLINE Vec dot_pairs(IntVec a, IntVec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#endif

#if defined(PAGED_HAS_FLOAT8_TABLES)
// 64 elements of float8 as bfloat16, after `order` has moved their bytes: words[0] takes the first
// eight bytes of each 128-bit quarter, words[1] the last eight.
template <class T>
PAGED_INLINE void bfloat16_of(__m512i bits, __m512i order, T, __m512i (&words)[2]) {
  const Float8Tables<T>& tables = kFloat8Tables<T>;
  const auto half = [](const uint8_t* table, int i) { return _mm512_load_si512(table + 64 * i); };
  bits = _mm512_permutexvar_epi8(order, bits);
  const __m512i low = _mm512_permutex2var_epi8(half(tables.low, 0), bits, half(tables.low, 1));
  __m512i high = _mm512_permutex2var_epi8(half(tables.high, 0), bits, half(tables.high, 1));
  high = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi8(-128), high, 0xea);
  words[0] = _mm512_unpacklo_epi8(low, high);
  words[1] = _mm512_unpackhi_epi8(low, high);
}
// An order of bytes in which a quarter holds kRun neighbours from each of 16 / kRun parts of
// the 64.
template <int kRun>
struct BytesByQuarter {
  alignas(64) uint8_t order[64];

  constexpr BytesByQuarter() : order() {
    for (int i = 0; i < 64; ++i) {
      const int quarter = i / 16, part = i % 16 / kRun;
      order[i] = static_cast<uint8_t>(part * 4 * kRun + quarter * kRun + i % kRun);
    }
  }
};
template <int kRun>
constexpr BytesByQuarter<kRun> kBytesByQuarter;

// Pairs from the first n of 64 elements, zeros after them.
template <class T>
PAGED_INLINE void load_64_pairs(const T* p, int64_t n, IntVec (&pairs)[2]) {
  const uint64_t first = n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  __m512i words[2];
  bfloat16_of(_mm512_maskz_loadu_epi8(first, p), _mm512_load_si512(kBytesByQuarter<8>.order), T{},
              words);
  pairs[0] = (IntVec)words[0];
  pairs[1] = (IntVec)words[1];
}
// Four vectors of floats.
template <class T>
PAGED_INLINE void load_four(const T* p, Vec* out) {
  __m512i words[2];
  bfloat16_of(_mm512_loadu_si512(p), _mm512_load_si512(kBytesByQuarter<4>.order), T{}, words);
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = (Vec)_mm512_unpacklo_epi16(_mm512_setzero_si512(), words[i]);
    out[2 * i + 1] = (Vec)_mm512_unpackhi_epi16(_mm512_setzero_si512(), words[i]);
  }
}
#endif

#if defined(__AVX512VBMI__)
// Which bytes of 32 neighbouring numbers: those of two places, the higher one first, or of one.
struct ByteOrders {
  alignas(64) uint8_t upper[64];
  alignas(64) uint8_t lowest[64];

  constexpr ByteOrders() : upper(), lowest() {
    for (int i = 0; i < 32; ++i) {
      upper[i] = static_cast<uint8_t>(4 * i + 2);
      upper[32 + i] = static_cast<uint8_t>(4 * i + 1);
      lowest[i] = lowest[32 + i] = static_cast<uint8_t>(4 * i);
    }
  }
};
constexpr ByteOrders kByteOrders;

// Of 64 numbers the third byte goes to to[0] and on, the second to to[stride], the lowest to
// to[2 * stride].
PAGED_INLINE void store_three_bytes(const IntVec (&n)[4], int8_t* to, int64_t stride) {
  const __m512i upper = _mm512_load_si512(kByteOrders.upper);
  const __m512i lowest = _mm512_load_si512(kByteOrders.lowest);
  const auto pick = [&](int i, __m512i order) __attribute__((always_inline)) {
    return _mm512_permutex2var_epi8((__m512i)n[i], order, (__m512i)n[i + 1]);
  };
  const __m512i a = pick(0, upper), b = pick(2, upper);
  _mm512_storeu_si512(to, _mm512_shuffle_i64x2(a, b, 0x44));
  _mm512_storeu_si512(to + stride, _mm512_shuffle_i64x2(a, b, 0xee));
  const __m512i c = pick(0, lowest), d = pick(2, lowest);
  _mm512_storeu_si512(to + 2 * stride, _mm512_shuffle_i64x2(c, d, 0x44));
}
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define PAGED_HAS_TILES
#endif

PAGED_INLINE float sum(Vec x) { return _mm512_reduce_add_ps(x); }
PAGED_INLINE float max(Vec x) { return _mm512_reduce_max_ps(x); }

// Lane i is the reduction of accs[i] by f. Halves four times: first the vectors pairwise within
// 128-bit quarters, then the quarters.
template <class F>
PAGED_INLINE Vec reduce_each(const Vec (&accs)[kLanes], F f) {
  Vec pairs[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    pairs[i] = f(_mm512_unpacklo_ps(accs[2 * i], accs[2 * i + 1]),
                 _mm512_unpackhi_ps(accs[2 * i], accs[2 * i + 1]));
  }
  Vec fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]);
    const __m512d b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        f(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // fours[i] holds, in each of its quarters, a partial result of accs[4 * i] to accs[4 * i + 3].
  const Vec low = f(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                    _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const Vec high = f(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88),
                     _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return f(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// cpu/attention/transposed_keys.h adds in the same order.
PAGED_INLINE Vec sum_each(const Vec (&accs)[kLanes]) {
  return reduce_each(accs, [](Vec a, Vec b) __attribute__((always_inline)) { return a + b; });
}

}  // namespace
}  // namespace paged::cpu
