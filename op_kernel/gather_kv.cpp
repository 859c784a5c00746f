// Gathers the K and V of whole sequences out of the pool, one sequence after another.
//
// Cores take turns at the KV heads of the blocks of all sequences. Lengths and block ids are those
// on the device, clamped: none can make the kernel read outside the pool or write outside the
// result.
#include <type_traits>

#include "common/dequantise.h"
#include "common/entry.h"
#include "common/row_copy.h"
#include "gather_kv_tiling_data.h"
#include "kernel_operator.h"

// T is an element of the caches. int8 elements become floats.
template <typename T>
class GatherKv {
 public:
  static constexpr bool kDequantises = sizeof(T) == 1;
  using Out = std::conditional_t<kDequantises, float, T>;

  __aicore__ inline void Init(GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale,
                              GM_ADDR value_scale, GM_ADDR block_tables, GM_ADDR seq_lens,
                              GM_ADDR key, GM_ADDR value, const GatherKvTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    SetHalf(key_, key_cache, key_scale, key);
    SetHalf(value_, value_cache, value_scale, value);
    ids_.SetGlobalBuffer((__gm__ int32_t*)block_tables);
    seq_lens_.SetGlobalBuffer((__gm__ int32_t*)seq_lens, tiling.batch);
    mover_.Init(pipe, tiling.tokens_per_copy, Larger(tiling.key.head_dim, tiling.value.head_dim));
  }

  __aicore__ inline void Process() {
    const int64_t capacity = tiling_->max_blocks_per_seq * tiling_->block_size;
    const int64_t num_cores = AscendC::GetBlockNum();
    int64_t first_token = 0;
    int64_t skip = AscendC::GetBlockIdx();
    for (int64_t i = 0; i < tiling_->batch; ++i) {
      const int64_t room = Smaller(capacity, tiling_->num_tokens - first_token);
      const int64_t length = Clamp(seq_lens_.GetValue(i), 0, room);
      const int64_t columns = (length + tiling_->block_size - 1) / tiling_->block_size;
      const int64_t units = columns * tiling_->num_kv_heads;
      for (; skip < units; skip += num_cores) {
        GatherBlock(i, skip / tiling_->num_kv_heads, skip % tiling_->num_kv_heads, first_token,
                    length);
      }
      skip -= units;
      first_token += length;
    }
  }

 private:
  // K or V.
  struct Half {
    AscendC::GlobalTensor<T> cache;
    AscendC::GlobalTensor<float> scales;
    AscendC::GlobalTensor<Out> rows;
  };

  __aicore__ inline void SetHalf(Half& half, GM_ADDR cache, GM_ADDR scales, GM_ADDR rows) {
    half.cache.SetGlobalBuffer((__gm__ T*)cache);
    half.rows.SetGlobalBuffer((__gm__ Out*)rows);
    if constexpr (kDequantises) {
      half.scales.SetGlobalBuffer((__gm__ float*)scales);
    }
  }

  // One KV head of one block of a sequence that begins at `first_token` of the result.
  __aicore__ inline void GatherBlock(int64_t sequence, int64_t column, int64_t head,
                                     int64_t first_token, int64_t length) {
    const int64_t at = sequence * tiling_->table_row_stride + column * tiling_->table_column_stride;
    const int64_t block = Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);
    const int64_t position = column * tiling_->block_size;
    const int64_t tokens = Smaller(tiling_->block_size, length - position);
    for (int64_t offset = 0; offset < tokens; offset += tiling_->tokens_per_copy) {
      const int64_t count = Smaller(tiling_->tokens_per_copy, tokens - offset);
      const int64_t row = (first_token + position + offset) * tiling_->num_kv_heads + head;
      GatherRows(key_, tiling_->key, tiling_->key_scale, block, offset, head, row, count);
      GatherRows(value_, tiling_->value, tiling_->value_scale, block, offset, head, row, count);
    }
  }

  __aicore__ inline int64_t At(const CacheLayout& layout, int64_t block, int64_t offset,
                               int64_t head) const {
    return block * layout.block_stride + offset * layout.token_stride + head * layout.head_stride;
  }

  // The rows of neighbouring tokens of a block with one head.
  __aicore__ inline void GatherRows(const Half& half, const CacheLayout& layout,
                                    const CacheLayout& scale_layout, int64_t block, int64_t offset,
                                    int64_t head, int64_t row, int64_t count) {
    const int64_t width = layout.head_dim;
    const int64_t stride = tiling_->num_kv_heads * width;
    const AscendC::GlobalTensor<T> from = half.cache[At(layout, block, offset, head)];
    const AscendC::GlobalTensor<Out> to = half.rows[row * width];
    if constexpr (kDequantises) {
      mover_.Move(to, stride, from, layout.token_stride,
                  half.scales[At(scale_layout, block, offset, head)], scale_layout.token_stride,
                  count, width);
    } else {
      mover_.Move(to, stride, from, layout.token_stride, count, width);
    }
  }

  const GatherKvTilingData* tiling_;
  Half key_;
  Half value_;
  AscendC::GlobalTensor<int32_t> ids_;
  AscendC::GlobalTensor<int32_t> seq_lens_;
  std::conditional_t<kDequantises, RowDequantiser, RowMover<T>> mover_;
};

template <typename T>
__aicore__ inline void GatherAll(GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale,
                                 GM_ADDR value_scale, GM_ADDR block_tables, GM_ADDR seq_lens,
                                 GM_ADDR key, GM_ADDR value, GM_ADDR tiling) {
  const auto data = TilingAt<GatherKvTilingData>(tiling);
  AscendC::TPipe pipe;
  GatherKv<T> gather;
  gather.Init(key_cache, value_cache, key_scale, value_scale, block_tables, seq_lens, key, value,
              data, &pipe);
  gather.Process();
}

#define PAGED_GATHER_KV_ENTRY(name, type)                                                          \
  PAGED_KERNEL(                                                                                    \
      PAGED_VECTOR_CORES, name,                                                                    \
      (GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale, GM_ADDR value_scale,             \
       GM_ADDR block_tables, GM_ADDR seq_lens, GM_ADDR key, GM_ADDR value, GM_ADDR tiling),        \
      GatherAll<type>(key_cache, value_cache, key_scale, value_scale, block_tables, seq_lens, key, \
                      value, tiling))

// Plain copies: only the size of an element matters.
PAGED_GATHER_KV_ENTRY(paged_gather_kv_16bit, half)
PAGED_GATHER_KV_ENTRY(paged_gather_kv_32bit, float)
PAGED_GATHER_KV_ENTRY(paged_gather_kv_int8, int8_t)
