// The K and V of one new token become rows of the cache: as they are, or quantised.
#include "cpu/kernels.h"
#include "cpu/rows/quantise.h"

namespace paged::cpu::PAGED_ISA {
namespace {

constexpr int64_t kCacheLine = 64;

// Where the rows of one token lie, and those that they become; strides count elements.
struct TokenRows {
  const void* from;
  void* to;
  float* scale;
  int64_t from_stride;
  int64_t to_stride;
  int64_t scale_stride;
  int64_t next;  // from a row of `to` to that of the next token
  int64_t num_heads;
  int64_t head_dim;
  bool is_scale_written;
};

PAGED_INLINE TokenRows token_rows(const WriteKvParams& params, const Cache& cache, const Rows& rows,
                                  int64_t token, int64_t slot) {
  const Pool& pool = params.pool;
  const int64_t block = slot / pool.block_size;
  const int64_t offset = slot % pool.block_size;
  const int64_t to = block * cache.block_stride + offset * cache.token_stride;
  return {
      static_cast<const char*>(rows.data) + token * rows.token_stride * element_size(params.dtype),
      static_cast<char*>(cache.data) + to * element_size(pool.dtype),
      cache.scales.data == nullptr ? nullptr : cache.scales.at(block, offset, 0),
      rows.head_stride,
      cache.head_stride,
      cache.scales.head_stride,
      cache.token_stride,
      pool.num_kv_heads,
      cache.head_dim,
      cache.scales.are_per_token};
}

// Vector after vector, in order: where the rows aren't in a cache, memcpy, which takes a row of
// this length from both ends, is up to a third slower.
PAGED_INLINE void copy_row(const char* from, char* to, int64_t bytes) {
  int64_t i = 0;
  for (; i + int64_t{sizeof(Vec)} <= bytes; i += sizeof(Vec)) {
    Vec x;
    std::memcpy(&x, from + i, sizeof(Vec));
    std::memcpy(to + i, &x, sizeof(Vec));
  }
  for (; i < bytes; ++i) to[i] = from[i];
}

// Each head is a stream of rows. Of more than a processor follows by itself, the next row is asked
// for.
PAGED_INLINE void copy(const TokenRows& rows, int64_t element) {
  constexpr int64_t kStreams = 16;
  const int64_t bytes = rows.head_dim * element;
  const bool asks = rows.num_heads > kStreams;
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    char* to = static_cast<char*>(rows.to) + head * rows.to_stride * element;
    if (asks) {
      const char* next = to + rows.next * element;
      for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(next + i, 1);
    }
    copy_row(static_cast<const char*>(rows.from) + head * rows.from_stride * element, to, bytes);
  }
}

template <class T, class Element>
PAGED_INLINE void quantise_row(const Element* from, float scale, T* to, int64_t head_dim) {
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) quantise_lanes(load(from + d), scale, to + d, kLanes);
  const int64_t rest = head_dim - d;
  if (rest > 0) quantise_lanes(load_partial(from + d, rest), scale, to + d, rest);
}

template <class T, class Element>
void quantise(const TokenRows& rows) {
  for (int64_t head = 0; head < rows.num_heads; ++head) {
    const Element* from = static_cast<const Element*>(rows.from) + head * rows.from_stride;
    float* scale = rows.scale + head * rows.scale_stride;
    if (rows.is_scale_written) *scale = scale_of<T>(from, rows.head_dim);
    quantise_row(from, *scale, static_cast<T*>(rows.to) + head * rows.to_stride, rows.head_dim);
  }
}

void quantise_token(const WriteKvParams& params, const TokenRows& rows) {
  by_dtype(params.dtype, [&](auto element) {
    by_quantised_dtype(params.pool.dtype, [&](auto quantised) {
      quantise<decltype(quantised), decltype(element)>(rows);
    });
  });
}

void write_token(const WriteKvParams& params, int64_t token, int64_t slot) {
  const Pool& pool = params.pool;
  const TokenRows keys = token_rows(params, pool.key, params.key, token, slot);
  const TokenRows values = token_rows(params, pool.value, params.value, token, slot);
  if (!is_quantised(pool.dtype)) {
    copy(keys, element_size(pool.dtype));
    copy(values, element_size(pool.dtype));
    return;
  }
  quantise_token(params, keys);
  if (!values_are_keys(pool)) quantise_token(params, values);
}

}  // namespace

extern const WriteKvKernels write_kv_kernels = {write_token};

}  // namespace paged::cpu::PAGED_ISA
