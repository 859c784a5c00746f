// Paged attention of one row span, by the engine that the dtypes ask for.
#include <type_traits>

#include "cpu/attention/by_pieces.h"
#include "cpu/attention/by_vectors.h"
#include "cpu/kernels.h"
#if defined(PAGED_HAS_TILES)
#include "cpu/attention/by_integers.h"
#include "cpu/attention/by_segments.h"
#include "cpu/attention/by_tiles.h"
#endif

namespace paged::cpu::PAGED_ISA {
namespace {

// Calls f with the type of what attends: one engine for all spans, so that a row's bits don't
// depend on whether it came as decode or as prefill.
template <class F>
PAGED_INLINE auto by_engine(const AttentionParams& params, F f) {
  return by_cache_dtype(params.pool.dtype, [&](auto element) {
    using T = decltype(element);
#if defined(PAGED_HAS_TILES)
    if constexpr (kIsBFloat16<T>) return f(std::type_identity<BySegments>{});
    if constexpr (std::is_same_v<T, Int8>) {
      if (ByIntegers::takes(params)) return f(std::type_identity<ByPieces<ByIntegers>>{});
    }
    if constexpr (kIsFloat8<T>) {
      if (params.dtype == Dtype::kBFloat16) return f(std::type_identity<ByPieces<ByTiles<T>>>{});
    }
#elif defined(PAGED_HAS_BF16_PAIRS) && defined(PAGED_HAS_FLOAT8_TABLES)
    // An int8 becomes a float as fast as a bfloat16.
    if constexpr (kIsFloat8<T>) {
      if (params.dtype == Dtype::kBFloat16) {
        return f(std::type_identity<ByPieces<ByVectors<Paired<T>>>>{});
      }
    }
#endif
    return f(std::type_identity<ByPieces<ByVectors<T>>>{});
  });
}

SpanLimits span_limits(const AttentionParams& params) {
  return by_engine(params, [&](auto by) { return decltype(by)::type::span_limits(params); });
}

int64_t scratch_bytes(const AttentionParams& params, int64_t num_rows) {
  return by_engine(params,
                   [&](auto by) { return decltype(by)::type::scratch_bytes(params, num_rows); });
}

void attend(const AttentionParams& params, const RowSpan& span, void* scratch) {
  by_engine(params, [&](auto by) { decltype(by)::type::attend(params, span, scratch); });
}

void extend(const AttentionParams& params, const RowSpan& span, PieceRange pieces, float* state,
            void* scratch) {
  by_engine(params,
            [&](auto by) { decltype(by)::type::extend(params, span, pieces, state, scratch); });
}

void fold(const AttentionParams& params, const RowSpan& span, int64_t num_states, float* states) {
  by_engine(params, [&](auto by) { decltype(by)::type::fold(params, span, num_states, states); });
}

void finish(const AttentionParams& params, const RowSpan& span, float* state) {
  by_engine(params, [&](auto by) { decltype(by)::type::finish(params, span, state); });
}

}  // namespace

extern const AttentionKernels attention_kernels = {span_limits, scratch_bytes, attend,
                                                   extend,      fold,          finish};

}  // namespace paged::cpu::PAGED_ISA
