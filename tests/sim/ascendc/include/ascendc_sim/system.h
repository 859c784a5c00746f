// Who runs, and what kind of kernel it is.
#pragma once

#include "runtime.h"

// Stated at the head of a kernel. Instructions between cores need one of the mixed types.
#define KERNEL_TASK_TYPE_DEFAULT(type) sim::SetKernelType(type)

namespace AscendC {

inline int64_t GetBlockIdx() { return sim::BlockIndex(); }
inline int64_t GetBlockNum() { return sim::BlockCount(); }
inline int64_t GetSubBlockIdx() { return 0; }
inline int64_t GetSubBlockNum() { return 1; }
inline int64_t GetTaskRation() { return 1; }
inline int64_t GetTaskRatio() { return 1; }
inline int64_t GetSystemCycle() { return sim::SystemCycle(); }

}  // namespace AscendC
