// One vector of floats per ISA, under one set of names.
//
// Each of simd/{generic,avx2,avx512,neon}.h defines, in the unit's anonymous namespace:
//
//   Vec, IntVec          kLanes floats, kLanes int32; both take + - * / and comparisons, and
//                        `mask ? a : b` selects by lane (GCC's vector extension)
//   load(p), store(p, x) kLanes of float, Half or BFloat16, as floats; rounded to nearest even
//   load(p)              of Int8, Float8E4M3 and Float8E5M2 too
//   load_partial(p, n)   the first n only, then zeros; store_partial writes the first n only
//   broadcast(x), fma(a, b, c)    fma is fused where the ISA has it; a * b + c never is
//   larger(a, b)         the larger float of each lane; b where either is NaN
//   sum(x), max(x)       over the lanes of one vector
//   kDots, sum_each(accs)    sums that a row of dot products keeps; lane i is the sum of the lanes
//                        of accs[i], for kLanes vectors, each added in the same fixed order
//   times_power_of_two(x, n)        x * 2^n for the integer n
//
// An ISA that multiplies pairs of bfloat16 defines PAGED_HAS_BF16_PAIRS, load_pairs and dot_pairs
// too; one that also sums values in pairs, PAGED_HAS_INTERLEAVED_ROWS and what
// cpu/attention/weighted_pairs.h and cpu/attention/transposed_keys.h take: load_units, store_units,
// broadcast_unit, interleave_rows, narrow_pair and transpose_pairs; one that multiplies pairs of
// rows of four, PAGED_HAS_BF16_QUADS, and instead of dot_pairs what cpu/attention/quad_products.h
// takes; one with a matrix unit, what cpu/attention/by_tiles.h takes as well: transpose_rows,
// high_half and high_halves.
#pragma once

#include <cstdint>
#include <cstring>

#include "params.h"

namespace paged::cpu {
namespace {

// Storage formats of the half-width types. Only load and store know their bits.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Those of quantised caches: an integer, and float8 as OCP's "8-bit floating point specification"
// has it. E4M3 has no infinity and one NaN; E5M2 is the upper half of a float16.
struct Int8 {
  int8_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// A float8 that is multiplied with bfloat16 queries in pairs, as a bfloat16.
template <class T>
struct Paired : T {};

template <class T>
constexpr bool kIsQuantised = sizeof(T) == 1;
template <class T>
constexpr bool kIsFloat8 = false;
template <>
constexpr bool kIsFloat8<Float8E4M3> = true;
template <>
constexpr bool kIsFloat8<Float8E5M2> = true;
template <class T>
constexpr bool kIsFloat8<Paired<T>> = kIsFloat8<T>;
template <class T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

// Calls f with a value of the element type that dtype, not a quantised one, names.
template <class F>
PAGED_INLINE auto by_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kFloat16:
      return f(Half{});
    case Dtype::kBFloat16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

// The same for a quantised one, and for either.
template <class F>
PAGED_INLINE auto by_quantised_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kFloat8E4M3:
      return f(Float8E4M3{});
    case Dtype::kFloat8E5M2:
      return f(Float8E5M2{});
    default:
      return f(Int8{});
  }
}
template <class F>
PAGED_INLINE auto by_cache_dtype(Dtype dtype, F f) {
  return is_quantised(dtype) ? by_quantised_dtype(dtype, f) : by_dtype(dtype, f);
}

PAGED_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
PAGED_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// float32 to bfloat16, to nearest even; a NaN stays a NaN.
PAGED_INLINE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

PAGED_INLINE constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace
}  // namespace paged::cpu

#if defined(PAGED_ISA_AVX512) || defined(PAGED_ISA_AVX512BF16) || defined(PAGED_ISA_AMX)
#include "cpu/simd/avx512.h"
#elif defined(PAGED_ISA_AVX2)
#include "cpu/simd/avx2.h"
#elif defined(PAGED_ISA_NEON) || defined(PAGED_ISA_NEONBF16)
#include "cpu/simd/neon.h"
#else
#include "cpu/simd/generic.h"
#endif
