// Merges two attention results over disjoint sets of keys by their lse.
#include <math.h>

#include "cpu/attention/softmax.h"
#include "cpu/kernels.h"

namespace paged::cpu::PAGED_ISA {
namespace {

// out = a * weight_a + b * weight_b. An operand of weight 0 is not read: it may hold NaN.
template <class T>
void mix(T* out, const T* a, float weight_a, const T* b, float weight_b, int64_t width) {
  const Vec zero = broadcast(0.0f);
  for (int64_t d = 0; d < width; d += kLanes) {
    const int64_t n = width - d;
    const bool full = n >= kLanes;
    const Vec from_a = weight_a == 0.0f ? zero : full ? load(a + d) : load_partial(a + d, n);
    const Vec from_b = weight_b == 0.0f ? zero : full ? load(b + d) : load_partial(b + d, n);
    const Vec mixed = fma(from_b, broadcast(weight_b), from_a * weight_a);
    if (full) {
      store(out + d, mixed);
    } else {
      store_partial(out + d, mixed, n);
    }
  }
}

template <class T>
void merge_rows(const MergeStatesParams& params, int64_t row_begin, int64_t row_end) {
  const auto at = [](const Rows& rows, int64_t token, int64_t head) {
    return token * rows.token_stride + head * rows.head_stride;
  };
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t token = row / params.num_heads;
    const int64_t head = row % params.num_heads;
    const float lse_a = static_cast<const float*>(params.lse_a.data)[at(params.lse_a, token, head)];
    const float lse_b = static_cast<const float*>(params.lse_b.data)[at(params.lse_b, token, head)];
    // A NaN in either lse must show in the result, so neither branch may lose it.
    const float top = lse_a > lse_b || lse_a != lse_a ? lse_a : lse_b;
    const float share_a = weight_of(lse_a, top);
    const float share_b = weight_of(lse_b, top);
    const float total = share_a + share_b;
    const float norm = total == 0.0f ? 0.0f : 1.0f / total;
    mix(static_cast<T*>(params.out.data) + at(params.out, token, head),
        static_cast<const T*>(params.out_a.data) + at(params.out_a, token, head), share_a * norm,
        static_cast<const T*>(params.out_b.data) + at(params.out_b, token, head), share_b * norm,
        params.head_dim);
    params.lse[row] = top == kMinusInf ? kMinusInf : top + logf(total);
  }
}

void merge(const MergeStatesParams& params, int64_t row_begin, int64_t row_end) {
  by_dtype(params.dtype,
           [&](auto element) { merge_rows<decltype(element)>(params, row_begin, row_end); });
}

}  // namespace

extern const MergeStatesKernels merge_states_kernels = {merge};

}  // namespace paged::cpu::PAGED_ISA
