// Writes the K and V of new tokens into their slots.
//
// Slots, not tokens, are dealt to the cores, a few neighbours at a time: a slot given twice is
// written by one core in order, so the last row wins, whole. A slot outside the pool writes
// nothing.
#include "common/entry.h"
#include "common/quantise.h"
#include "common/row_copy.h"
#include "kernel_operator.h"
#include "write_kv_tiling_data.h"

// The slots of new tokens, dealt to the cores.
class Slots {
 public:
  __aicore__ inline void Init(GM_ADDR slot_mapping, const WriteKvTilingData& tiling) {
    tiling_ = &tiling;
    if (tiling.has_int64_slots != 0) {
      slots64_.SetGlobalBuffer((__gm__ int64_t*)slot_mapping, tiling.num_tokens);
    } else {
      slots32_.SetGlobalBuffer((__gm__ int32_t*)slot_mapping, tiling.num_tokens);
    }
    next_ = 0;
  }

  // Finds this core's next token that goes to a slot. False: there is none.
  __aicore__ inline bool Next(int64_t& token, int64_t& slot) {
    constexpr int64_t kNeighbours = 8;
    const int64_t num_slots = tiling_->num_blocks * tiling_->block_size;
    const int64_t num_cores = AscendC::GetBlockNum();
    while (next_ < tiling_->num_tokens) {
      token = next_++;
      slot = SlotOf(token);
      if (slot < 0 || slot >= num_slots ||
          slot / kNeighbours % num_cores != AscendC::GetBlockIdx()) {
        continue;
      }
      return true;
    }
    return false;
  }

  // The element of a cache, or of its scales, at which a slot's first head begins.
  __aicore__ inline int64_t At(const CacheLayout& layout, int64_t slot) const {
    return slot / tiling_->block_size * layout.block_stride +
           slot % tiling_->block_size * layout.token_stride;
  }

 private:
  __aicore__ inline int64_t SlotOf(int64_t token) const {
    return tiling_->has_int64_slots != 0 ? slots64_.GetValue(token)
                                         : static_cast<int64_t>(slots32_.GetValue(token));
  }

  const WriteKvTilingData* tiling_;
  AscendC::GlobalTensor<int64_t> slots64_;
  AscendC::GlobalTensor<int32_t> slots32_;
  int64_t next_;
};

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
    slots_.Init(slot_mapping, tiling);
    mover_.Init(pipe, tiling.heads_per_copy, Larger(tiling.key.head_dim, tiling.value.head_dim));
  }

  __aicore__ inline void Process() {
    int64_t token;
    int64_t slot;
    while (slots_.Next(token, slot)) {
      WriteToken(key_cache_, tiling_->key, key_, tiling_->key_rows, token, slot);
      WriteToken(value_cache_, tiling_->value, value_, tiling_->value_rows, token, slot);
    }
  }

 private:
  __aicore__ inline void WriteToken(const AscendC::GlobalTensor<T>& cache,
                                    const CacheLayout& layout, const AscendC::GlobalTensor<T>& rows,
                                    const RowLayout& row_layout, int64_t token, int64_t slot) {
    const int64_t to = slots_.At(layout, slot);
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
  Slots slots_;
  RowMover<T> mover_;
};

// Into int8 caches. T is an element of the new rows.
template <typename T>
class WriteInt8 {
 public:
  __aicore__ inline void Init(GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache,
                              GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR slot_mapping,
                              const WriteKvTilingData& tiling, AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    SetHalf(key_, key, key_cache, key_scale);
    SetHalf(value_, value, value_cache, value_scale);
    slots_.Init(slot_mapping, tiling);
    quantiser_.Init(pipe, tiling.heads_per_copy,
                    Larger(tiling.key.head_dim, tiling.value.head_dim));
  }

  __aicore__ inline void Process() {
    int64_t token;
    int64_t slot;
    while (slots_.Next(token, slot)) {
      WriteToken(key_, tiling_->key, tiling_->key_scale, tiling_->chooses_key_scales != 0,
                 tiling_->key_rows, token, slot);
      if (tiling_->values_are_keys == 0) {
        WriteToken(value_, tiling_->value, tiling_->value_scale, tiling_->chooses_value_scales != 0,
                   tiling_->value_rows, token, slot);
      }
    }
  }

 private:
  // K or V.
  struct Half {
    AscendC::GlobalTensor<T> rows;
    AscendC::GlobalTensor<int8_t> cache;
    AscendC::GlobalTensor<float> scales;
  };

  __aicore__ inline void SetHalf(Half& half, GM_ADDR rows, GM_ADDR cache, GM_ADDR scales) {
    half.rows.SetGlobalBuffer((__gm__ T*)rows);
    half.cache.SetGlobalBuffer((__gm__ int8_t*)cache);
    half.scales.SetGlobalBuffer((__gm__ float*)scales);
  }

  __aicore__ inline void WriteToken(const Half& half, const CacheLayout& layout,
                                    const CacheLayout& scale_layout, bool chooses_scales,
                                    const RowLayout& row_layout, int64_t token, int64_t slot) {
    const int64_t to = slots_.At(layout, slot);
    const int64_t scale = slots_.At(scale_layout, slot);
    const int64_t from = token * row_layout.token_stride;
    for (int64_t head = 0; head < tiling_->num_kv_heads; head += tiling_->heads_per_copy) {
      const int64_t count = Smaller(tiling_->heads_per_copy, tiling_->num_kv_heads - head);
      quantiser_.Move(half.cache[to + head * layout.head_stride], layout.head_stride,
                      half.scales[scale + head * scale_layout.head_stride],
                      scale_layout.head_stride, chooses_scales,
                      half.rows[from + head * row_layout.head_stride], row_layout.head_stride,
                      count, layout.head_dim);
    }
  }

  const WriteKvTilingData* tiling_;
  Half key_;
  Half value_;
  Slots slots_;
  RowQuantiser<T> quantiser_;
};

template <typename T>
__aicore__ inline void WriteAll(GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache,
                                GM_ADDR slot_mapping, GM_ADDR tiling) {
  const auto data = TilingAt<WriteKvTilingData>(tiling);
  AscendC::TPipe pipe;
  WriteKv<T> write;
  write.Init(key, value, key_cache, value_cache, slot_mapping, data, &pipe);
  write.Process();
}

#define PAGED_WRITE_KV_ENTRY(name, type)                                            \
  PAGED_KERNEL(PAGED_VECTOR_CORES, name,                                            \
               (GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache, \
                GM_ADDR slot_mapping, GM_ADDR tiling),                              \
               WriteAll<type>(key, value, key_cache, value_cache, slot_mapping, tiling))

// Plain copies: only the size of an element matters.
PAGED_WRITE_KV_ENTRY(paged_write_kv_16bit, half)
PAGED_WRITE_KV_ENTRY(paged_write_kv_32bit, float)

template <typename T>
__aicore__ inline void WriteAllInt8(GM_ADDR key, GM_ADDR value, GM_ADDR key_cache,
                                    GM_ADDR value_cache, GM_ADDR key_scale, GM_ADDR value_scale,
                                    GM_ADDR slot_mapping, GM_ADDR tiling) {
  const auto data = TilingAt<WriteKvTilingData>(tiling);
  AscendC::TPipe pipe;
  WriteInt8<T> write;
  write.Init(key, value, key_cache, value_cache, key_scale, value_scale, slot_mapping, data, &pipe);
  write.Process();
}

#define PAGED_WRITE_INT8_ENTRY(name, type)                                                     \
  PAGED_KERNEL(PAGED_VECTOR_CORES, name,                                                       \
               (GM_ADDR key, GM_ADDR value, GM_ADDR key_cache, GM_ADDR value_cache,            \
                GM_ADDR key_scale, GM_ADDR value_scale, GM_ADDR slot_mapping, GM_ADDR tiling), \
               WriteAllInt8<type>(key, value, key_cache, value_cache, key_scale, value_scale,  \
                                  slot_mapping, tiling))

PAGED_WRITE_INT8_ENTRY(paged_write_kv_float16_int8, half)
PAGED_WRITE_INT8_ENTRY(paged_write_kv_bfloat16_int8, bfloat16_t)
PAGED_WRITE_INT8_ENTRY(paged_write_kv_float32_int8, float)
