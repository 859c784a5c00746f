// Who runs, and what kind of kernel it is.
#pragma once

#include "runtime.h"

// Stated at the head of a kernel. Instructions between cores need one of the mixed types.
#define KERNEL_TASK_TYPE_DEFAULT(type) sim::SetKernelType(type, sim::Site{__FILE__, __LINE__})

// `if ASCEND_IS_AIC { ... }`: the device compiler compiles a kernel once for each kind of core, and
// so can a host compiler that is told which.
#ifdef ASCENDC_SIM_CORE
#define ASCEND_IS_AIC constexpr(AscendC::ASCENDC_SIM_CORE == AscendC::AIC)
#define ASCEND_IS_AIV constexpr(AscendC::ASCENDC_SIM_CORE == AscendC::AIV)
#else
#define ASCEND_IS_AIC (sim::IsCube())
#define ASCEND_IS_AIV (!sim::IsCube())
#endif
#define ASCEND_IS_NOT_AIC ASCEND_IS_AIV
#define ASCEND_IS_NOT_AIV ASCEND_IS_AIC

namespace AscendC {

// On an AIC the number of its group; on an AIV of a group with two, twice that, plus 0 or 1.
inline int64_t GetBlockIdx() { return sim::BlockIndex(); }
// Groups of the launch.
inline int64_t GetBlockNum() { return sim::BlockCount(); }
// Which of its kind in the group.
inline int64_t GetSubBlockIdx() { return sim::SubBlockIndex(); }
inline int64_t GetSubBlockNum() { return sim::SubBlockCount(); }
// Cores of this kind for each group.
inline int64_t GetTaskRation() { return sim::TaskRatio(); }
inline int64_t GetTaskRatio() { return sim::TaskRatio(); }
inline int64_t GetSystemCycle() { return sim::SystemCycle(); }

}  // namespace AscendC
