// exp and tanh on vectors, for the range that attention needs.
#pragma once

#include "cpu/simd/simd.h"

namespace paged::cpu {
namespace {

// e^r for |r| <= ln 2 / 2, as 1 + r + r^2 P(r), P a least-maximum fit (4e-9).
PAGED_INLINE Vec exp_near_zero(Vec r) {
  Vec p = broadcast(1.3813145e-3f);
  p = fma(p, r, broadcast(8.369419e-3f));
  p = fma(p, r, broadcast(4.1668456e-2f));
  p = fma(p, r, broadcast(1.6666515e-1f));
  p = fma(p, r, broadcast(0.49999994f));
  return fma(r * r, p, r) + broadcast(1.0f);
}

// e^x for x <= 0; 0 where it is far below the smallest float, at -inf for one; NaN for NaN.
// Relative error below 2e-7.
//
// x = n ln 2 + r with |r| <= ln 2 / 2.
PAGED_INLINE Vec exp(Vec x) {
  x = larger(broadcast(-110.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer.
  const Vec shift = broadcast(12582912.0f);
  const Vec n = fma(x, broadcast(1.44269504f), shift) - shift;
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  return times_power_of_two(exp_near_zero(r), n);
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
