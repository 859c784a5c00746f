// How an entry point begins: its head, the cores that run it, and its tiling.
#pragma once

#include <cstdint>

#include "kernel_operator.h"

// Defines an entry point: a C function of `parameters`, in parentheses, that makes the call `run`.
// `cores` is one of the three below. A unit with several entry points has to state them, and CANN
// moves from this statement to words in the function's head: here is the only place that knows.
#define PAGED_KERNEL(cores, name, parameters, run)        \
  extern "C" __global__ __aicore__ void name parameters { \
    KERNEL_TASK_TYPE_DEFAULT(cores);                      \
    run;                                                  \
  }

#define PAGED_VECTOR_CORES KERNEL_TYPE_AIV_ONLY
// SyncAll meets on the hardware's flags, which only a mixed kernel has: cube cores do nothing.
#define PAGED_MEETING_VECTOR_CORES KERNEL_TYPE_MIX_AIV_1_0
// Groups of a cube core and two vector cores. The function is compiled once for each kind of core.
#define PAGED_GROUPS KERNEL_TYPE_MIX_AIC_1_2

// A copy of what op_host put at `address`. GM is an address space of its own, out of which no
// reference leads, and so no copy constructor: the words cross one by one.
template <typename Data>
__aicore__ inline Data TilingAt(GM_ADDR address) {
  using Word __attribute__((may_alias)) = uint64_t;
  static_assert(__is_trivially_copyable(Data), "words make a copy");
  static_assert(sizeof(Data) % sizeof(Word) == 0 && alignof(Data) == alignof(Word), "whole words");
  const __gm__ uint64_t* from = (const __gm__ uint64_t*)address;
  Data data;
  Word* to = reinterpret_cast<Word*>(&data);
  for (uint32_t i = 0; i < sizeof(Data) / sizeof(Word); ++i) {
    to[i] = from[i];
  }
  return data;
}
