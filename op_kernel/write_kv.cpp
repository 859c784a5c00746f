// Writes the K and V of new tokens into their slots.
//
// Slots, not tokens, are dealt to the cores, a few neighbours at a time: a slot given twice is
// written by one core in order, so the last row wins, whole. A slot outside the pool writes
// nothing.
#include "common/row_copy.h"
#include "kernel_operator.h"
#include "write_kv_tiling_data.h"

template <typename T>
class WriteKv {
 public:
  __aicore__ inline void Init(GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache,
                              GM_ADDR slot_mapping, const WriteKvTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    key_.SetGlobalBuffer((__gm__ T*)key);
    value_.SetGlobalBuffer((__gm__ T*)value);
    key_cache_.SetGlobalBuffer((__gm__ T*)key_cache);
    value_cache_.SetGlobalBuffer((__gm__ T*)value_cache);
    if (tiling.has_int64_slots != 0) {
      slots64_.SetGlobalBuffer((__gm__ int64_t*)slot_mapping, tiling.num_tokens);
    } else {
      slots32_.SetGlobalBuffer((__gm__ int32_t*)slot_mapping, tiling.num_tokens);
    }
    mover_.Init(pipe, tiling.heads_per_copy, Larger(tiling.key.head_dim, tiling.value.head_dim));
  }

  __aicore__ inline void Process() {
    constexpr int64_t kNeighbours = 8;
    const int64_t num_slots = tiling_->num_blocks * tiling_->block_size;
    const int64_t num_cores = AscendC::GetBlockNum();
    for (int64_t token = 0; token < tiling_->num_tokens; ++token) {
      const int64_t slot = SlotOf(token);
      if (slot < 0 || slot >= num_slots ||
          slot / kNeighbours % num_cores != AscendC::GetBlockIdx()) {
        continue;
      }
      WriteToken(key_cache_, tiling_->key, key_, tiling_->key_rows, token, slot);
      WriteToken(value_cache_, tiling_->value, value_, tiling_->value_rows, token, slot);
    }
  }

 private:
  __aicore__ inline int64_t SlotOf(int64_t token) const {
    return tiling_->has_int64_slots != 0 ? slots64_.GetValue(token)
                                         : static_cast<int64_t>(slots32_.GetValue(token));
  }

  __aicore__ inline void WriteToken(const AscendC::GlobalTensor<T>& cache,
                                    const CacheLayout& layout, const AscendC::GlobalTensor<T>& rows,
                                    const RowLayout& row_layout, int64_t token, int64_t slot) {
    const int64_t to = slot / tiling_->block_size * layout.block_stride +
                       slot % tiling_->block_size * layout.token_stride;
    const int64_t from = token * row_layout.token_stride;
    for (int64_t head = 0; head < tiling_->num_kv_heads; head += tiling_->heads_per_copy) {
      const int64_t count = Smaller(tiling_->heads_per_copy, tiling_->num_kv_heads - head);
      mover_.Move(cache[to + head * layout.head_stride], layout.head_stride,
                  rows[from + head * row_layout.head_stride], row_layout.head_stride, count,
                  layout.head_dim);
    }
  }

  const WriteKvTilingData* tiling_;
  AscendC::GlobalTensor<T> key_;
  AscendC::GlobalTensor<T> value_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;
  AscendC::GlobalTensor<int64_t> slots64_;
  AscendC::GlobalTensor<int32_t> slots32_;
  RowMover<T> mover_;
};

#define PAGED_WRITE_KV_ENTRY(name, type)                                                    \
  extern "C" __global__ __aicore__ void name(GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, \
                                             GM_ADDR value_cache, GM_ADDR slot_mapping,     \
                                             GM_ADDR tiling) {                              \
    const WriteKvTilingData data = *(__gm__ WriteKvTilingData*)tiling;                      \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                         \
    AscendC::TPipe pipe;                                                                    \
    WriteKv<type> write;                                                                    \
    write.Init(key, value, key_cache, value_cache, slot_mapping, data, &pipe);              \
    write.Process();                                                                        \
  }

// Plain copies: only the size of an element matters.
PAGED_WRITE_KV_ENTRY(paged_write_kv_16bit, half)
PAGED_WRITE_KV_ENTRY(paged_write_kv_32bit, float)
