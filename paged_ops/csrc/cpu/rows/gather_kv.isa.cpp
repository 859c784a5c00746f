// One row of a quantised cache becomes floats again.
#include "cpu/kernels.h"
#include "cpu/simd/simd.h"

namespace paged::cpu::PAGED_ISA {
namespace {

template <class T>
void dequantise(int64_t head_dim, const T* from, float scale, float* to) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store(to + d, load(from + d) * scale);
  const int64_t rest = head_dim - d;
  if (rest > 0) store_partial(to + d, load_partial(from + d, rest) * scale, rest);
}

void dequantise_row(const GatherKvParams& params, const Cache& cache, const void* from, float scale,
                    float* to) {
  by_quantised_dtype(params.pool.dtype, [&](auto quantised) {
    dequantise(cache.head_dim, static_cast<const decltype(quantised)*>(from), scale, to);
  });
}

}  // namespace

extern const GatherKvKernels gather_kv_kernels = {dequantise_row};

}  // namespace paged::cpu::PAGED_ISA
