// Weights 2^x as bfloat16, of 32 keys at a time.
#pragma once

#include "cpu/simd/simd_math.h"

namespace paged::cpu {
namespace {

// 2^x to the precision of a float, with the limits of a weight.
PAGED_INLINE Vec precise_power(Vec x) {
  const Vec f = _mm512_reduce_ps(x, 0);  // x - the nearest integer
  return times_power_of_two(exp_near_zero(f * 0.693147181f), x - f);
}

// Weights 2^(unit * score - reference). The power of the fraction, of [0, 1), is a cubic of
// relative error 1e-4 (a least-maximum fit), an eighth of half a unit in the last place of
// bfloat16.
//
// A weight is 0 where it is far too small for a float, infinite where it is too large, and NaN for
// a score of NaN. A score of -inf weighs 0.
struct WeightFunction {
  Vec unit;
  Vec c0, c1, c2, c3;

  PAGED_INLINE explicit WeightFunction(float unit_)
      : unit(broadcast(unit_)),
        c0(broadcast(0.9999252f)),
        c1(broadcast(0.69583356f)),
        c2(broadcast(0.22606716f)),
        c3(broadcast(0.078024523f)) {}

  // Constants are kept in registers from here on, not in memory: beside tile loads, loads are
  // scarce.
  PAGED_INLINE void keep_in_registers() {
    asm volatile("" : "+v"(unit), "+v"(c0), "+v"(c1), "+v"(c2), "+v"(c3));
  }

  PAGED_INLINE Vec power(Vec x) const {
    const Vec f = _mm512_reduce_ps(x, 1);  // x - floor(x)
    Vec p = fma(c3, f, c2);
    p = fma(p, f, c1);
    p = fma(p, f, c0);
    return _mm512_scalef_ps(p, x);
  }

  // The weights of keys 0 to 15 in `first`, 16 to 31 in `second`, 0 where `seen` has no bit.
  // `minus_reference` in all lanes.
  PAGED_INLINE IntVec weights(Vec first, Vec second, Vec minus_reference, uint32_t seen) const {
    first = power(fma(first, unit, minus_reference));
    second = power(fma(second, unit, minus_reference));
    first = _mm512_maskz_mov_ps(static_cast<__mmask16>(seen), first);
    second = _mm512_maskz_mov_ps(static_cast<__mmask16>(seen >> 16), second);
    return narrow_pair(first, second);
  }

  // The largest of those scores that are seen, in each lane of either half, in units of log2.
  PAGED_INLINE Vec largest(Vec first, Vec second, uint32_t seen) const {
    const Vec none = broadcast(-__builtin_inff());
    first = _mm512_mask_mov_ps(none, static_cast<__mmask16>(seen), first * unit);
    second = _mm512_mask_mov_ps(none, static_cast<__mmask16>(seen >> 16), second * unit);
    return larger(first, second);
  }

  // total + the weights before rounding.
  PAGED_INLINE Vec add_precisely(Vec total, Vec first, Vec second, Vec minus_reference,
                                 uint32_t seen) const {
    first = precise_power(fma(first, unit, minus_reference));
    second = precise_power(fma(second, unit, minus_reference));
    total = _mm512_mask_add_ps(total, static_cast<__mmask16>(seen), total, first);
    return _mm512_mask_add_ps(total, static_cast<__mmask16>(seen >> 16), total, second);
  }

  // The same in memory, and not moved by the compiler from between the tile instructions where it
  // is written: the unit works on one product while this takes the slots beside it.
  template <bool kIsMasked>
  PAGED_INLINE void store_weights(const float* first, const float* second,
                                  const float* minus_reference, uint32_t seen, void* to) const {
    Vec a, b, f, g, p;
    asm volatile(
        "vbroadcastss %[reference], %[a]\n\t"
        "vmovaps %[a], %[b]\n\t"
        "vfmadd231ps %[first], %[unit], %[a]\n\t"
        "vfmadd231ps %[second], %[unit], %[b]\n\t"
        "vreduceps $1, %[a], %[f]\n\t"
        "vreduceps $1, %[b], %[g]\n\t"
        "vmovaps %[c3], %[p]\n\t"
        "vfmadd213ps %[c2], %[f], %[p]\n\t"
        "vfmadd213ps %[c1], %[f], %[p]\n\t"
        "vfmadd213ps %[c0], %[f], %[p]\n\t"
        : [a] "=&v"(a), [b] "=&v"(b), [f] "=&v"(f), [g] "=&v"(g), [p] "=&v"(p)
        : [reference] "m"(*minus_reference), [first] "m"(*reinterpret_cast<const Vec*>(first)),
          [second] "m"(*reinterpret_cast<const Vec*>(second)), [unit] "v"(unit), [c0] "v"(c0),
          [c1] "v"(c1), [c2] "v"(c2), [c3] "v"(c3));
    if constexpr (kIsMasked) {
      asm volatile(
          "vscalefps %[a], %[p], %[a]%{%[low]%}%{z%}\n\t"
          "vmovaps %[c3], %[p]\n\t"
          "vfmadd213ps %[c2], %[g], %[p]\n\t"
          "vfmadd213ps %[c1], %[g], %[p]\n\t"
          "vfmadd213ps %[c0], %[g], %[p]\n\t"
          "vscalefps %[b], %[p], %[b]%{%[high]%}%{z%}\n\t"
          "vcvtne2ps2bf16 %[a], %[b], %[a]\n\t"
          "vmovdqa64 %[a], %[to]\n\t"
          : [a] "+&v"(a), [b] "+&v"(b), [p] "+&v"(p), [to] "=m"(*static_cast<Vec*>(to))
          : [g] "v"(g), [c0] "v"(c0), [c1] "v"(c1), [c2] "v"(c2), [c3] "v"(c3),
            [low] "Yk"(static_cast<__mmask16>(seen)),
            [high] "Yk"(static_cast<__mmask16>(seen >> 16)));
    } else {
      asm volatile(
          "vscalefps %[a], %[p], %[a]\n\t"
          "vmovaps %[c3], %[p]\n\t"
          "vfmadd213ps %[c2], %[g], %[p]\n\t"
          "vfmadd213ps %[c1], %[g], %[p]\n\t"
          "vfmadd213ps %[c0], %[g], %[p]\n\t"
          "vscalefps %[b], %[p], %[b]\n\t"
          "vcvtne2ps2bf16 %[a], %[b], %[a]\n\t"
          "vmovdqa64 %[a], %[to]\n\t"
          : [a] "+&v"(a), [b] "+&v"(b), [p] "+&v"(p), [to] "=m"(*static_cast<Vec*>(to))
          : [g] "v"(g), [c0] "v"(c0), [c1] "v"(c1), [c2] "v"(c2), [c3] "v"(c3));
    }
  }
};

// While it lives, results too small for a normal float are 0. The unit takes such weights for 0 in
// any case, but making one takes a processor as long as a hundred others.
class FlushToZero {
 public:
  PAGED_INLINE FlushToZero() : found_(_mm_getcsr()) {
    _mm_setcsr(found_ | _MM_FLUSH_ZERO_ON);
    asm volatile("" : : : "memory");
  }
  PAGED_INLINE ~FlushToZero() {
    asm volatile("" : : : "memory");
    _mm_setcsr(found_);
  }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
  uint32_t found_;
};

// Minus the reference that stands for the largest score of each lane.
PAGED_INLINE Vec minus_reference(Vec largest) {
  return broadcast(0.0f) - _mm512_roundscale_ps(largest, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
}

// Lane i is the largest of the lanes of rows[i].
PAGED_INLINE Vec max_each(const Vec (&rows)[kLanes]) {
  return reduce_each(rows,
                     [](Vec a, Vec b) __attribute__((always_inline)) { return larger(a, b); });
}

}  // namespace
}  // namespace paged::cpu
