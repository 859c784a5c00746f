// torch's threads, handed in by library.cpp so that the rest of the CPU code needs no torch.
#pragma once

#include <cstdint>

namespace paged::cpu {

struct ThreadPool {
  int64_t num_threads;
  // Calls body(begin, end, context) on disjoint ranges that cover [0, count), possibly in parallel.
  void (*parallel_for)(int64_t count, void (*body)(int64_t begin, int64_t end, void* context),
                       void* context);

  // Calls f(i) for each i in [0, count), possibly in parallel. f must not throw.
  template <class F>
  void for_each(int64_t count, F f) const {
    if (count == 1) return f(int64_t{0});
    parallel_for(
        count,
        [](int64_t begin, int64_t end, void* context) {
          for (int64_t i = begin; i < end; ++i) (*static_cast<F*>(context))(i);
        },
        &f);
  }

  // How many threads are worth waking for `bytes` of memory traffic: a thread takes some
  // microseconds to wake, in which one thread moves about 64 KB.
  int64_t threads_for(int64_t bytes) const {
    constexpr int64_t kBytesPerThread = 64 * 1024;
    const int64_t useful = bytes / kBytesPerThread + 1;
    return useful < num_threads ? useful : num_threads;
  }
};

// Part i of [0, count) cut into `parts` nearly equal ranges.
struct Range {
  int64_t begin;
  int64_t end;
};

inline Range part_of(int64_t count, int64_t parts, int64_t i) {
  return {count * i / parts, count * (i + 1) / parts};
}

}  // namespace paged::cpu
