// exp and tanh on vectors, for the range that attention needs.
#pragma once

#include "cpu/simd.h"

namespace paged::cpu {
namespace {

// Below this, e^x is less than the smallest normal float; the result is then exactly 0.
constexpr float kExpUnderflow = -87.3365f;

// e^x for x <= 0; 0 below kExpUnderflow and at -inf; NaN for NaN. Relative error below 2e-7.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r = 1 + r + r^2 P(r), P a least-maximum fit (6e-11).
PAGED_INLINE Vec exp(Vec x) {
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
  const Vec shift = broadcast(12582912.0f);
  const Vec shifted = fma(x, broadcast(1.44269504f), shift);
  const Vec n = shifted - shift;
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9790342e-4f);
  p = fma(p, r, broadcast(1.3944659e-3f));
  p = fma(p, r, broadcast(8.3334967e-3f));
  p = fma(p, r, broadcast(4.1666295e-2f));
  p = fma(p, r, broadcast(1.6666667e-1f));
  p = fma(p, r, broadcast(0.5f));
  const Vec e_r = fma(r * r, p, r) + broadcast(1.0f);
  // 2^n: n + 127 in the exponent's place. The shift drops the rounding constant's bits.
  const IntVec power = ((IntVec)shifted + 127) << 23;
  const Vec y = e_r * (Vec)power;
  return x < kExpUnderflow ? broadcast(0.0f) : y;
}

// tanh(x). Relative error below 3e-7, also near 0, where 1 - 2 / (e^2x + 1) would cancel.
PAGED_INLINE Vec tanh(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x;
  // Odd polynomial x + x^3 P(x^2), P fitted for |x| <= 0.625 (2e-10).
  const Vec z = x * x;
  Vec p = broadcast(2.1475395e-3f);
  p = fma(p, z, broadcast(-8.1826774e-3f));
  p = fma(p, z, broadcast(2.1702968e-2f));
  p = fma(p, z, broadcast(-5.3947203e-2f));
  p = fma(p, z, broadcast(1.3333210e-1f));
  p = fma(p, z, broadcast(-3.3333331e-1f));
  const Vec near = fma(x * z, p, x);
  const Vec e = exp(magnitude * -2.0f);
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec signed_far = x < 0.0f ? -far : far;
  return magnitude < 0.625f ? near : signed_far;
}

}  // namespace
}  // namespace paged::cpu
