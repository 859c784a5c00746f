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
// What only some have comes with a macro that says so. A header asks what the compiler may use
// (__AVX512BF16__, ...), never which variant it is for. A unit is a pair of neighbouring elements,
// the first in the low half of an int32; units of quantised elements are of what these are as
// bfloat16.
//
// PAGED_HAS_BF16_PAIRS: products of units of bfloat16.
//   load_pairs(p, n)     the units of the first n of 2 * kLanes elements, zeros after them
//   dot_pairs(a, b, c)   lane by lane c + a.first * b.first + a.second * b.second
//
// PAGED_HAS_BF16_QUADS, beside it: products of two rows of four bfloat16 with two, which stand in
// for dot_pairs.
//   store_pairs(p, x)    what load_pairs takes whole
//   first_halves(a, b), last_halves(a, b)      the first, or last, two lanes of both
//   add_quads(a, b, c)   lane 2 * i + j is that of c and half i of a times half j of b
//   sum_diagonals(accs)  lane i is the sum of the first and the last lane of accs[i]
//
// PAGED_HAS_INTERLEAVED_ROWS, beside PAGED_HAS_BF16_PAIRS: units across two rows, and across lanes.
//   load_units(p), store_units(p, x), broadcast_unit(x)    kLanes int32, one for all lanes
//   interleave_rows(a, num_a, b, num_b, units)    unit i is elements i of rows a and b, for
//                        2 * kLanes elements, of which the first num_a and num_b are there
//   narrow_pair(first, second)      the floats of both in order, as bfloat16, to nearest even
//   transpose_pairs(rows, out, out_stride)    out[i * out_stride + j] is unit i of rows[j], for
//                        kLanes of each
//
// PAGED_HAS_FLOAT8_TABLES: float8 looked up 64 elements at a time.
//   load_four(p, out)    4 * kLanes elements as floats
//   load_64_pairs(p, n, units)      the units of the first n of 64 elements, zeros after them
//
// PAGED_HAS_TILES, beside all of the above but quads: Intel's matrix unit.
//   load_pairs, interleave_rows     of float8 too
//   exponents(x), nearest(x)        floor(log2(|x|)); rounded to an integer, to nearest even
//   store_three_bytes(n, p, stride) of 64 int32 the lowest three bytes, each to a row of its own
//   transpose_rows(rows, stride, out, out_stride)    as transpose_pairs, of rows of units
//   high_half(x), high_halves(first, second)    x cut to bfloat16, not rounded; as narrow_pair
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

}  // namespace
}  // namespace paged::cpu

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/simd/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/simd/avx2.h"
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#include "cpu/simd/neon.h"
#else
#include "cpu/simd/generic.h"
#endif
