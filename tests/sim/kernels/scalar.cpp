// A kernel whose scalar unit works for itself between two instructions.
#include "kernel_operator.h"

// n rounds of a loop that the compiler can't shorten.
extern "C" __global__ __aicore__ void rounds(uint64_t n) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::PipeBarrier<PIPE_V>();
  for (uint64_t i = 0; i < n; ++i) {
    asm volatile("" : "+r"(i));
  }
  AscendC::PipeBarrier<PIPE_V>();
}
