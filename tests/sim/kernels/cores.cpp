// Order and visibility between cores. Each kernel runs on two cores or more.
#include "bench.h"

#define MIXED_RULE(name)                                                         \
  extern "C" __global__ __aicore__ void name##_broken(GM_ADDR in, GM_ADDR out) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);                           \
    name<false>(in, out);                                                        \
  }                                                                              \
  extern "C" __global__ __aicore__ void name##_kept(GM_ADDR in, GM_ADDR out) {   \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);                           \
    name<true>(in, out);                                                         \
  }

namespace {

using AscendC::CacheLine;
using AscendC::DataCacheCleanAndInvalid;
using AscendC::DataCopy;
using AscendC::DcciDst;
using AscendC::HardEvent;

__aicore__ inline void CleanLine(const AscendC::GlobalTensor<float>& at) {
  DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(at);
}

// Core 0 writes the first tile of `out`.
__aicore__ inline void WriteFirstTile(Bench& bench) {
  if (AscendC::GetBlockIdx() != 0) return;
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  bench.Store(bench.c);
}

template <bool kept>
__aicore__ inline void readers_wait_for_writers(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  WriteFirstTile(bench);
  if constexpr (kept) AscendC::SyncAll();
  if (AscendC::GetBlockIdx() == 1) {
    DataCopy(bench.a, bench.out, kTile);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void writers_wait_for_writers(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  WriteFirstTile(bench);
  if constexpr (kept) AscendC::SyncAll();
  if (AscendC::GetBlockIdx() == 1) {
    AscendC::Duplicate(bench.a, 2.0f, 8);
    Order<HardEvent::V_MTE3>();
    DataCopy(bench.out[kTile - 8], bench.a, 8);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void flags_order_cores(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  WriteFirstTile(bench);
  if constexpr (kept) {
    AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(3);
  } else {
    AscendC::CrossCoreSetFlag<0, PIPE_V>(3);
  }
  AscendC::CrossCoreWaitFlag(3);
  if (AscendC::GetBlockIdx() == 1) {
    DataCopy(bench.a, bench.out, kTile);  // breaks here
  }
}

// Neighbouring bytes of a 32-byte block are nobody else's.
template <bool kept>
__aicore__ inline void neighbours_share_a_block(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const int64_t core = AscendC::GetBlockIdx();
  AscendC::Duplicate(bench.c, 1.0f, 8);
  Order<HardEvent::V_MTE3>();
  const uint64_t first = kept ? core * 4 : core * 3;
  AscendC::DataCopyPad(bench.out[first], bench.c, {1, 16, 0, 0, 0});  // breaks here
}

template <bool kept>
__aicore__ inline void scalars_own_their_cache_line(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const uint64_t at = AscendC::GetBlockIdx() * (kept ? 16 : 8);
  bench.out.SetValue(at, 1.0f);  // breaks here
  CleanLine(bench.out[at]);
}

template <bool kept>
__aicore__ inline void set_values_are_written_back(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const uint64_t at = AscendC::GetBlockIdx() * 16;
  bench.out.SetValue(at, 1.0f);  // breaks here
  if constexpr (kept) CleanLine(bench.out[at]);
}

template <bool kept>
__aicore__ inline void set_values_are_cleaned_before_use(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if (AscendC::GetBlockIdx() == 0) {
    bench.out.SetValue(0, 1.0f);
    if constexpr (kept) CleanLine(bench.out);
  }
  AscendC::SyncAll();
  if (AscendC::GetBlockIdx() == 1) {
    AscendC::DataCopyPad(bench.a, bench.out, {1, 4, 0, 0, 0}, {false, 0, 0, 0.0f});  // breaks here
  }
  if constexpr (!kept) CleanLine(bench.out);
}

template <bool kept>
__aicore__ inline void cached_values_are_dropped(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  WriteFirstTile(bench);
  AscendC::SyncAll();
  if constexpr (kept) CleanLine(bench.out);
  (void)bench.out.GetValue(2);  // breaks here
}

template <bool kept>
__aicore__ inline void every_core_reaches_sync_all(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if (kept || AscendC::GetBlockIdx() == 0) {
    AscendC::SyncAll();  // breaks here
  }
}

template <bool kept>
__aicore__ inline void sync_all_of_vector_cores(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::SyncAll<kept>();  // breaks here
}

template <bool kept>
__aicore__ inline void sync_all_owns_its_flags(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  constexpr uint16_t kFlag = kept ? 10 : 11;
  AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(kFlag);  // breaks here
  AscendC::CrossCoreWaitFlag(kFlag);
}

template <bool kept>
__aicore__ inline void flags_have_sixteen_ids(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  constexpr uint16_t kFlag = kept ? 15 : 16;
  AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(kFlag);  // breaks here
  AscendC::CrossCoreWaitFlag(kFlag);
}

template <bool kept>
__aicore__ inline void flags_count_to_fifteen(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  constexpr int kTimes = kept ? 15 : 16;
  for (int i = 0; i < kTimes; ++i) {
    AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(1);  // breaks here
  }
  for (int i = 0; i < kTimes; ++i) AscendC::CrossCoreWaitFlag(1);
}

template <bool kept>
__aicore__ inline void flags_are_waited_for(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::CrossCoreSetFlag<0, PIPE_MTE3>(1);  // breaks here
  if constexpr (kept) AscendC::CrossCoreWaitFlag(1);
}

template <bool kept>
__aicore__ inline void cores_without_cubes_have_mode_0(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::CrossCoreSetFlag<kept ? 0 : 2, PIPE_MTE3>(1);  // breaks here
  AscendC::CrossCoreWaitFlag(1);
}

template <bool kept>
__aicore__ inline void sync_workspace_is_large_enough(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::GlobalTensor<int32_t> workspace;
  workspace.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(in), kept ? 16 : 8);
  const AscendC::LocalTensor<int32_t> local = bench.a.ReinterpretCast<int32_t>();
  AscendC::SyncAll(workspace, local);  // breaks here
}

template <bool kept>
__aicore__ inline void sync_workspace_is_zero(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::GlobalTensor<int32_t> workspace;
  workspace.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(kept ? in : in + 128));
  const AscendC::LocalTensor<int32_t> local = bench.a.ReinterpretCast<int32_t>();
  AscendC::SyncAll(workspace, local);  // breaks here
}

}  // namespace

MIXED_RULE(readers_wait_for_writers)
MIXED_RULE(writers_wait_for_writers)
MIXED_RULE(flags_order_cores)
MIXED_RULE(neighbours_share_a_block)
MIXED_RULE(scalars_own_their_cache_line)
MIXED_RULE(set_values_are_written_back)
MIXED_RULE(set_values_are_cleaned_before_use)
MIXED_RULE(cached_values_are_dropped)
MIXED_RULE(every_core_reaches_sync_all)
MIXED_RULE(sync_all_of_vector_cores)
MIXED_RULE(sync_all_owns_its_flags)
MIXED_RULE(flags_have_sixteen_ids)
MIXED_RULE(flags_count_to_fifteen)
MIXED_RULE(flags_are_waited_for)
MIXED_RULE(cores_without_cubes_have_mode_0)
MIXED_RULE(sync_workspace_is_large_enough)
MIXED_RULE(sync_workspace_is_zero)

extern "C" __global__ __aicore__ void sync_all_needs_a_mixed_kernel_broken(GM_ADDR, GM_ADDR) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::SyncAll();  // breaks here
}

extern "C" __global__ __aicore__ void sync_all_needs_a_mixed_kernel_kept(GM_ADDR, GM_ADDR) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  AscendC::SyncAll();
}

extern "C" __global__ __aicore__ void kernels_state_their_type_broken(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.a, 0.0f, kTile);  // breaks here
}

extern "C" __global__ __aicore__ void kernels_state_their_type_kept(GM_ADDR in, GM_ADDR out) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Bench bench(in, out);
  AscendC::Duplicate(bench.a, 0.0f, kTile);
}
