// Integer helpers of the scalar unit.
#pragma once

#include <cstdint>

#include "kernel_operator.h"

// For what runs once for each instruction or two that it issues: what its caller knows of its
// arguments is known in it, too.
#define PAGED_INLINE __aicore__ inline __attribute__((always_inline))

PAGED_INLINE int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PAGED_INLINE int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }
PAGED_INLINE int64_t Clamp(int64_t x, int64_t low, int64_t high) {
  return Larger(low, Smaller(x, high));
}
PAGED_INLINE int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// 0 <= x < end
PAGED_INLINE bool IsBelow(int64_t x, int64_t end) {
  return static_cast<uint64_t>(x) < static_cast<uint64_t>(end);
}
