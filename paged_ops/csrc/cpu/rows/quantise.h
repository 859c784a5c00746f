// Floats to the elements of a quantised cache: x / scale, rounded to nearest even.
//
// What is too large becomes the largest element, an infinity too. NaN stays NaN in float8; int8 has
// none, so a row's own scale carries it, and with a fixed scale it becomes 0.
#pragma once

#include "cpu/simd/simd.h"

namespace paged::cpu {
namespace {

// An element type as a float format; kBias is float32's exponent bias minus its own.
template <class T>
struct Float8;
template <>
struct Float8<Float8E4M3> {
  static constexpr float kLargest = 448.0f;
  static constexpr float kSmallestNormal = 0x1p-6f;
  static constexpr int kFractionBits = 3;
  static constexpr int kBias = 120;
};
template <>
struct Float8<Float8E5M2> {
  static constexpr float kLargest = 57344.0f;
  static constexpr float kSmallestNormal = 0x1p-14f;
  static constexpr int kFractionBits = 2;
  static constexpr int kBias = 112;
};

template <class T>
PAGED_INLINE constexpr float largest_element() {
  if constexpr (requires { Float8<T>::kLargest; }) {
    return Float8<T>::kLargest;
  } else {
    return 127.0f;
  }
}

PAGED_INLINE Vec magnitude_of(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

// The scale that brings the row's largest magnitude to the largest element; NaN for a row that
// holds one or an infinity, which no scale brings there.
template <class T, class Element>
PAGED_INLINE float scale_of(const Element* row, int64_t head_dim) {
  Vec top = broadcast(0.0f);
  Vec poison = broadcast(0.0f);  // 0 times what isn't finite is NaN, and stays
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t rest = head_dim - d;
    const Vec x = rest >= kLanes ? load(row + d) : load_partial(row + d, rest);
    top = larger(magnitude_of(x), top);
    poison = fma(x, broadcast(0.0f), poison);
  }
  return max(top) / largest_element<T>() + sum(poison);
}

// The int8 of each lane, in the low byte.
PAGED_INLINE IntVec quantised(Vec x, Int8) {
  x = x == x ? x : broadcast(0.0f);
  x = x < 127.0f ? x : broadcast(127.0f);
  x = x > -128.0f ? x : broadcast(-128.0f);
  // Adding 1.5 * 2^23 rounds to an integer.
  const Vec shift = broadcast(12582912.0f);
  return __builtin_convertvector((x + shift) - shift, IntVec);
}

// The float8 of each lane, in the low byte.
template <class T>
PAGED_INLINE IntVec quantised(Vec x, T) {
  using F = Float8<T>;
  constexpr int kCut = 23 - F::kFractionBits;
  const IntVec sign = ((IntVec)x >> 24) & 0x80;
  Vec m = magnitude_of(x);
  m = m < F::kLargest ? m : broadcast(F::kLargest);
  const IntVec bits = (IntVec)m;
  const IntVec rounded = bits + (((bits >> kCut) & 1) + ((1 << (kCut - 1)) - 1));
  const IntVec normal = (rounded >> kCut) - (F::kBias << F::kFractionBits);
  // Adding a power of two whose last place is that of the subnormals rounds to it.
  constexpr float kShift = F::kSmallestNormal * (1 << (23 - F::kFractionBits));
  const IntVec subnormal = (IntVec)(m + broadcast(kShift)) - (IntVec)broadcast(kShift);
  const IntVec finite = m < F::kSmallestNormal ? subnormal : normal;
  return (x == x ? finite : finite * 0 + 0x7f) | sign;
}

// Writes the first n lanes of x / scale. A scale of 0 or NaN says all about its row: zeros go with
// it.
template <class T>
PAGED_INLINE void quantise_lanes(Vec x, float scale, T* to, int64_t n) {
  const Vec ratio = scale == 0.0f || scale != scale ? broadcast(0.0f) : x / scale;
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(quantised(ratio, T{}), Bytes);
  std::memcpy(to, &bytes, static_cast<size_t>(n));
}

}  // namespace
}  // namespace paged::cpu
