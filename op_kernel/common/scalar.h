// Integer helpers of the scalar unit.
#pragma once

#include <cstdint>

#include "kernel_operator.h"

__aicore__ inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__aicore__ inline int64_t Larger(int64_t a, int64_t b) { return a > b ? a : b; }
__aicore__ inline int64_t Clamp(int64_t x, int64_t low, int64_t high) {
  return Larger(low, Smaller(x, high));
}
__aicore__ inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
