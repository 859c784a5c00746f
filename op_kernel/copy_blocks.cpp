// Copies whole blocks inside the pool, as if every block were read before any is written.
//
// The ids are on the device, so the host can't tell which sources some copy overwrites: all sources
// go to the workspace first, and after a barrier of all cores from there to their destinations. A
// pair with an id outside the pool copies nothing.
#include "common/entry.h"
#include "common/row_copy.h"
#include "copy_blocks_tiling_data.h"
#include "kernel_operator.h"

template <typename T>
class CopyBlocks {
 public:
  __aicore__ inline void Init(GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale,
                              GM_ADDR value_scale, GM_ADDR block_mapping, GM_ADDR workspace,
                              const CopyBlocksTilingData& tiling, AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    key_cache_.SetGlobalBuffer((__gm__ T*)key_cache);
    value_cache_.SetGlobalBuffer((__gm__ T*)value_cache);
    staged_.SetGlobalBuffer((__gm__ T*)workspace);
    if (tiling.has_int64_ids != 0) {
      ids64_.SetGlobalBuffer((__gm__ int64_t*)block_mapping);
    } else {
      ids32_.SetGlobalBuffer((__gm__ int32_t*)block_mapping);
    }
    mover_.Init(pipe, tiling.tokens_per_copy, Larger(tiling.key.head_dim, tiling.value.head_dim));
    if constexpr (kHasScales) {
      key_scale_.SetGlobalBuffer((__gm__ float*)key_scale);
      value_scale_.SetGlobalBuffer((__gm__ float*)value_scale);
      staged_scales_.SetGlobalBuffer((__gm__ float*)(workspace + tiling.scales_at));
      scale_mover_.Init(pipe, tiling.tokens_per_copy, 1);
    }
  }

  __aicore__ inline void Process() {
    MoveAll(true);
    AscendC::PipeBarrier<PIPE_ALL>();
    AscendC::SyncAll();
    MoveAll(false);
  }

 private:
  static constexpr bool kHasScales = sizeof(T) == 1;

  // Cores take turns at the KV heads of the blocks. `staging`: into the workspace, else out of it.
  __aicore__ inline void MoveAll(bool staging) {
    const int64_t num_cores = AscendC::GetBlockNum();
    const int64_t num_heads = tiling_->num_copies * tiling_->num_kv_heads;
    const int64_t num_rows = num_heads * tiling_->block_size;
    const int64_t num_keys = num_rows * tiling_->key.head_dim;
    for (int64_t i = AscendC::GetBlockIdx(); i < num_heads; i += num_cores) {
      const int64_t copy = i / tiling_->num_kv_heads;
      const int64_t source = IdOf(copy, 0);
      const int64_t destination = IdOf(copy, 1);
      if (!IsBlock(source) || !IsBlock(destination)) {
        continue;
      }
      const int64_t block = staging ? source : destination;
      MoveHead(mover_, key_cache_, tiling_->key, block, i, staged_, 0, staging);
      if (tiling_->values_are_keys == 0) {
        MoveHead(mover_, value_cache_, tiling_->value, block, i, staged_, num_keys, staging);
      }
      if constexpr (kHasScales) {
        MoveHead(scale_mover_, key_scale_, tiling_->key_scale, block, i, staged_scales_, 0,
                 staging);
        MoveHead(scale_mover_, value_scale_, tiling_->value_scale, block, i, staged_scales_,
                 num_rows, staging);
      }
    }
  }

  // One head's rows of a block, or their scales; nothing where they have no elements. Rows that lie
  // side by side are moved as one.
  template <typename Element>
  __aicore__ inline void MoveHead(RowMover<Element>& mover,
                                  const AscendC::GlobalTensor<Element>& cache,
                                  const CacheLayout& layout, int64_t block, int64_t i,
                                  const AscendC::GlobalTensor<Element>& stage, int64_t staged_base,
                                  bool staging) {
    if (layout.head_dim == 0) {
      return;
    }
    const bool are_one = layout.token_stride == layout.head_dim;
    const int64_t head = i % tiling_->num_kv_heads;
    const int64_t in_cache = block * layout.block_stride + head * layout.head_stride;
    const int64_t in_stage = staged_base + i * tiling_->block_size * layout.head_dim;
    for (int64_t token = 0; token < tiling_->block_size; token += tiling_->tokens_per_copy) {
      const int64_t count = Smaller(tiling_->tokens_per_copy, tiling_->block_size - token);
      const AscendC::GlobalTensor<Element> cached = cache[in_cache + token * layout.token_stride];
      const AscendC::GlobalTensor<Element> staged = stage[in_stage + token * layout.head_dim];
      const int64_t rows = are_one ? 1 : count;
      const int64_t width = are_one ? count * layout.head_dim : layout.head_dim;
      if (staging) {
        mover.Move(staged, width, cached, layout.token_stride, rows, width);
      } else {
        mover.Move(cached, layout.token_stride, staged, width, rows, width);
      }
    }
  }

  __aicore__ inline int64_t IdOf(int64_t copy, int64_t column) const {
    const int64_t at = copy * tiling_->id_row_stride + column * tiling_->id_column_stride;
    return tiling_->has_int64_ids != 0 ? ids64_.GetValue(at)
                                       : static_cast<int64_t>(ids32_.GetValue(at));
  }

  __aicore__ inline bool IsBlock(int64_t id) const { return id >= 0 && id < tiling_->num_blocks; }

  const CopyBlocksTilingData* tiling_;
  AscendC::GlobalTensor<T> key_cache_;
  AscendC::GlobalTensor<T> value_cache_;
  AscendC::GlobalTensor<T> staged_;
  AscendC::GlobalTensor<float> key_scale_;
  AscendC::GlobalTensor<float> value_scale_;
  AscendC::GlobalTensor<float> staged_scales_;
  AscendC::GlobalTensor<int64_t> ids64_;
  AscendC::GlobalTensor<int32_t> ids32_;
  RowMover<T> mover_;
  RowMover<float> scale_mover_;
};

template <typename T>
__aicore__ inline void CopyAll(GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale,
                               GM_ADDR value_scale, GM_ADDR block_mapping, GM_ADDR workspace,
                               GM_ADDR tiling) {
  const auto data = TilingAt<CopyBlocksTilingData>(tiling);
  AscendC::TPipe pipe;
  CopyBlocks<T> copy;
  copy.Init(key_cache, value_cache, key_scale, value_scale, block_mapping, workspace, data, &pipe);
  copy.Process();
}

#define PAGED_COPY_BLOCKS_ENTRY(name, type)                                                     \
  PAGED_KERNEL(PAGED_MEETING_VECTOR_CORES, name,                                                \
               (GM_ADDR key_cache, GM_ADDR value_cache, GM_ADDR key_scale, GM_ADDR value_scale, \
                GM_ADDR block_mapping, GM_ADDR workspace, GM_ADDR tiling),                      \
               CopyAll<type>(key_cache, value_cache, key_scale, value_scale, block_mapping,     \
                             workspace, tiling))

// Plain copies: only the size of an element matters.
PAGED_COPY_BLOCKS_ENTRY(paged_copy_blocks_8bit, int8_t)
PAGED_COPY_BLOCKS_ENTRY(paged_copy_blocks_16bit, half)
PAGED_COPY_BLOCKS_ENTRY(paged_copy_blocks_32bit, float)
