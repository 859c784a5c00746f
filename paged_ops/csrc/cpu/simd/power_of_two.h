// Scaling by powers of two for ISAs without an instruction for it: in the exponent's bits.
#pragma once

namespace paged::cpu {
namespace {

// x * 2^n for integers -160 <= n <= 0 and x near 1; 0 where the result would not be a normal float.
PAGED_INLINE Vec times_power_of_two(Vec x, Vec n) {
  const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return n < -126.0f ? broadcast(0.0f) : x * (Vec)power;
}

}  // namespace
}  // namespace paged::cpu
