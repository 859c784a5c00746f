// Lengths and starts of sequences, read on the device and clamped, so that no value can make the
// kernel read outside its tensors. The host refuses bad values only on request (PAGED_CHECK=1).
#pragma once

#include "attention/visible.h"
#include "attention_tiling_data.h"
#include "kernel_operator.h"

struct Sequence {
  int64_t length;       // keys
  int64_t first_token;  // of the call's query tokens
  int64_t new_tokens;
};

class Sequences {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR seq_lens,
                              GM_ADDR query_start_loc) {
    capacity_ = tiling.max_blocks_per_seq * tiling.block_size;
    num_tokens_ = tiling.num_tokens;
    has_starts_ = tiling.has_query_start_loc != 0;
    batch_ = tiling.batch;
    seq_lens_.SetGlobalBuffer((__gm__ int32_t*)seq_lens, tiling.batch);
    if (has_starts_) {
      starts_.SetGlobalBuffer((__gm__ int32_t*)query_start_loc, tiling.batch + 1);
    }
  }

  // Those of the call, and an empty one that has the rows past the last start.
  __aicore__ inline int64_t Count() const { return has_starts_ ? batch_ + 1 : batch_; }

  __aicore__ inline Sequence At(int64_t i) const {
    if (i == batch_) {
      const int64_t end = Clamp(starts_.GetValue(i), 0, num_tokens_);
      return {0, end, num_tokens_ - end};
    }
    const int64_t length = Clamp(seq_lens_.GetValue(i), 0, capacity_);
    if (!has_starts_) {
      return {length, i, 1};
    }
    const int64_t begin = Clamp(starts_.GetValue(i), 0, num_tokens_);
    const int64_t end = Clamp(starts_.GetValue(i + 1), begin, num_tokens_);
    return {length, begin, end - begin};
  }

 private:
  AscendC::GlobalTensor<int32_t> seq_lens_;
  AscendC::GlobalTensor<int32_t> starts_;
  int64_t capacity_;
  int64_t num_tokens_;
  int64_t batch_;
  bool has_starts_;
};
