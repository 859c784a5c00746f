// Tails for ISAs without masked memory access: through a buffer, so that nothing past n is touched.
#pragma once

namespace paged::cpu {
namespace {

template <class T>
PAGED_INLINE Vec load_partial(const T* p, int64_t n) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
  return load(lanes);
}

template <class T>
PAGED_INLINE void store_partial(T* p, Vec x, int64_t n) {
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}

}  // namespace
}  // namespace paged::cpu
