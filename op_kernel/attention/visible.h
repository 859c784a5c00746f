// Which keys a query row sees, and the bits of the vector mask that says so.
#pragma once

#include "attention_tiling_data.h"
#include "common/scalar.h"
#include "kernel_operator.h"

// n / d, for the d that `by` was made for.
PAGED_INLINE int64_t Divide(int64_t n, const Divisor& by) {
  return (n * by.multiplier) >> by.shift;
}

// first <= k < last
struct Range {
  int64_t first;
  int64_t last;
};

// The keys that the query token at `position` sees. The position is negative
// where a sequence has more query tokens than keys; such a row sees nothing under the causal mask.
__aicore__ inline Range VisibleKeys(const AttentionTilingData& tiling, int64_t seq_len,
                                    int64_t position) {
  int64_t last = seq_len;
  if (tiling.causal != 0) {
    last = Clamp(position + 1, 0, seq_len);
  }
  int64_t first = 0;
  if (tiling.sliding_window > 0) {
    first = Larger(0, position + 1 - tiling.sliding_window);
  }
  return {Smaller(first, last), last};
}

// Those of `keys` that are inside the `size` keys from `begin` on, counted from there.
PAGED_INLINE Range Within(const Range& keys, int64_t begin, int64_t size) {
  const int64_t first = Clamp(keys.first - begin, 0, size);
  return {first, Larger(first, Clamp(keys.last - begin, 0, size))};
}

// Bits [first, last) of 64.
__aicore__ inline uint64_t MaskOf(const Range& lanes) {
  const uint64_t below_last = lanes.last >= 64 ? ~0ULL : (1ULL << lanes.last) - 1;
  const uint64_t below_first = lanes.first >= 64 ? ~0ULL : (1ULL << lanes.first) - 1;
  return below_last & ~below_first;
}
