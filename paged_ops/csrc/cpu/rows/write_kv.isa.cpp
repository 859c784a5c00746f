// One row of new K or V becomes a row of a quantised cache.
#include "cpu/kernels.h"
#include "cpu/rows/quantise.h"

namespace paged::cpu::PAGED_ISA {
namespace {

template <class T, class Element>
void quantise(const Cache& cache, const Element* from, float* scale, T* to) {
  if (cache.scales.are_per_token) *scale = scale_of<T>(from, cache.head_dim);
  int64_t d = 0;
  for (; d + kLanes <= cache.head_dim; d += kLanes) {
    quantise_lanes(load(from + d), *scale, to + d, kLanes);
  }
  const int64_t rest = cache.head_dim - d;
  if (rest > 0) quantise_lanes(load_partial(from + d, rest), *scale, to + d, rest);
}

void quantise_row(const WriteKvParams& params, const Cache& cache, const void* from, float* scale,
                  void* to) {
  by_dtype(params.dtype, [&](auto element) {
    by_quantised_dtype(params.pool.dtype, [&](auto quantised) {
      quantise(cache, static_cast<const decltype(element)*>(from), scale,
               static_cast<decltype(quantised)*>(to));
    });
  });
}

}  // namespace

extern const WriteKvKernels write_kv_kernels = {quantise_row};

}  // namespace paged::cpu::PAGED_ISA
