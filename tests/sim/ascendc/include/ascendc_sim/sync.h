// Order between pipes and between cores.
#pragma once

#include "tensor.h"

namespace AscendC {

template <HardEvent event>
SIM_API void SetFlag(int32_t eventID, SIM_SITE) {
  sim::SetFlag(event, eventID, SIM_HERE);
}

template <HardEvent event>
SIM_API void WaitFlag(int32_t eventID, SIM_SITE) {
  sim::WaitFlag(event, eventID, SIM_HERE);
}

template <pipe_t pipe>
SIM_API void PipeBarrier(SIM_SITE) {
  static_assert(pipe != PIPE_S, "PipeBarrier: PIPE_S is ordered by the hardware");
  sim::PipeBarrier(pipe, SIM_HERE);
}

// All cores of the launch, by hardware. Needs a kernel of a mixed type.
template <bool isAIVOnly = true>
SIM_API void SyncAll(SIM_SITE) {
  sim::SyncAll(isAIVOnly, SIM_HERE);
}

// By polling: a zeroed workspace and a local buffer of 32 bytes for every core.
template <bool isAIVOnly = true>
SIM_API void SyncAll(const GlobalTensor<int32_t>& gmWorkspace,
                     const LocalTensor<int32_t>& ubWorkspace, const int32_t usedCores = 0,
                     SIM_SITE) {
  sim::SyncAllSoft(gmWorkspace.sim_view(), ubWorkspace.sim_view(), usedCores, SIM_HERE);
}

// Mode 0: all cores of a kind wait for all of them. Mode 1: the AIVs of a group for each other.
// Mode 2: the AIVs of a group for its AIC, or the AIC for all of them.
template <uint8_t modeId, pipe_t pipe>
SIM_API void CrossCoreSetFlag(uint16_t flagId, SIM_SITE) {
  static_assert(pipe != PIPE_S && pipe != PIPE_ALL,
                "CrossCoreSetFlag: a flag is set by one of the pipes V, M, MTE1, MTE2, MTE3, FIX");
  static_assert(modeId <= 2, "CrossCoreSetFlag: a 910B has the modes 0, 1 and 2");
  sim::CrossCoreSet(modeId, pipe, flagId, SIM_HERE);
}

// Holds up whatever the core issues afterwards. The 910B ignores mode and pipe.
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
SIM_API void CrossCoreWaitFlag(uint16_t flagId, SIM_SITE) {
  sim::CrossCoreWait(flagId, SIM_HERE);
}

template <typename T, CacheLine entireType, DcciDst dcciDst = DcciDst::CACHELINE_OUT>
SIM_API void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, SIM_SITE) {
  static_assert(dcciDst == DcciDst::CACHELINE_OUT || dcciDst == DcciDst::CACHELINE_ALL,
                "DataCacheCleanAndInvalid: the GM side is CACHELINE_OUT");
  sim::CleanAndInvalidate(dst.sim_view(), entireType == CacheLine::ENTIRE_DATA_CACHE, SIM_HERE);
}

}  // namespace AscendC
