// A kernel with the name and parameters of the real one that reads one slot too many.
#include "kernel_operator.h"
#include "write_kv_tiling_data.h"

extern "C" __global__ __aicore__ void paged_write_kv_32bit(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                                           GM_ADDR slot_mapping, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  const int64_t num_tokens = ((__gm__ WriteKvTilingData*)tiling)->num_tokens;
  AscendC::GlobalTensor<int64_t> slots;
  slots.SetGlobalBuffer((__gm__ int64_t*)slot_mapping);
  (void)slots.GetValue(num_tokens);
}
