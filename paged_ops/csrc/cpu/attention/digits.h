// Floats as integers of three digits of eight bits, so that integer products of digits with the
// elements of an int8 cache, and their sums, are exact.
//
// A row of floats is multiplied by the power of two that brings its largest magnitude to the
// integers' top binade, and rounded. Queries have a sign, and signed digits; weights have none.
// What is lost is a rounding at 2^-22 of the largest query, 2^-24 of the largest weight.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd/simd_math.h"

namespace paged::cpu {
namespace {

// The first is the most significant.
constexpr int64_t kDigits = 3;

// By which power of two a row was multiplied; NaN for a row that holds infinities, NaN or, where
// there mustn't be any, negative numbers.
using Exponent = float;
PAGED_INLINE bool is_cut(Exponent exponent) { return exponent == exponent; }

// n such that 2^n times x, which is finite and not negative, has `bits` bits before the point.
PAGED_INLINE Exponent exponent_for(float x, int bits) {
  if (x == 0.0f) return 0.0f;
  return static_cast<float>(bits - 1) - exponents(broadcast(x))[0];
}

// Numbers that are cut at a time.
constexpr int64_t kCutNumbers = 4 * kLanes;

// Cuts a row of `count` numbers into digits of -128 to 127, and fills up with zeros to a multiple
// of kCutNumbers.
template <class Element>
PAGED_INLINE Exponent cut_query(const Element* row, int64_t count, int8_t* to, int64_t stride) {
  constexpr int kBits = 22;  // of 23, since the digits below may carry into the first
  Vec top = broadcast(0.0f);
  Vec poison = broadcast(0.0f);  // 0 times what isn't finite is NaN, and stays
  for (int64_t d = 0; d < count; d += kLanes) {
    const Vec x = count - d >= kLanes ? load(row + d) : load_partial(row + d, count - d);
    top = larger((Vec)((IntVec)x & 0x7fffffff), top);
    poison = fma(x, broadcast(0.0f), poison);
  }
  const bool is_finite = sum(poison) == 0.0f;
  const Exponent exponent = is_finite ? exponent_for(max(top), kBits) : 0.0f;
  for (int64_t d = 0; d < count; d += kCutNumbers) {
    IntVec n[4] = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t rest = count - d - i * kLanes;
      if (rest <= 0 || !is_finite) continue;
      const Element* from = row + d + i * kLanes;
      const Vec x = rest >= kLanes ? load(from) : load_partial(from, rest);
      n[i] = nearest(times_power_of_two(x, broadcast(exponent)));
    }
    // Half a digit more at every place but the first turns cutting into rounding.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) n[i] = (n[i] + 0x8080) ^ 0x8080;
    store_three_bytes(n, to + d, stride);
  }
  return is_finite ? exponent : __builtin_nanf("");
}

// Cuts weights [begin, end), multiples of kCutNumbers, into digits of 0 to 255.
PAGED_INLINE Exponent cut_weights(const float* weights, int64_t begin, int64_t end, int8_t* to,
                                  int64_t stride) {
  constexpr int kBits = 24;
  Vec top = broadcast(0.0f);
  Vec least = broadcast(0.0f);
  Vec poison = broadcast(0.0f);
  for (int64_t i = begin; i < end; i += kLanes) {
    const Vec x = load(weights + i);
    top = larger(x, top);
    least = larger(-x, least);
    poison = fma(x, broadcast(0.0f), poison);
  }
  if (sum(poison) != 0.0f || max(least) > 0.0f) return __builtin_nanf("");
  const Exponent exponent = exponent_for(max(top), kBits);
  for (int64_t i = begin; i < end; i += kCutNumbers) {
    IntVec n[4];
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      n[j] = nearest(times_power_of_two(load(weights + i + j * kLanes), broadcast(exponent)));
    }
    store_three_bytes(n, to + i, stride);
  }
  return exponent;
}

// The number whose products with the digits are these, if it was multiplied by that power of two.
PAGED_INLINE Vec join_digits(IntVec first, IntVec second, IntVec third, Exponent exponent) {
  const auto as_float = [](IntVec x) __attribute__((always_inline)) {
    return __builtin_convertvector(x, Vec);
  };
  const Vec low = fma(as_float(second), broadcast(0x1p8f), as_float(third));
  return times_power_of_two(fma(as_float(first), broadcast(0x1p16f), low), broadcast(-exponent));
}

}  // namespace
}  // namespace paged::cpu
