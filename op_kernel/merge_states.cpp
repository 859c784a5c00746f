// Merges two attention results over disjoint sets of keys by their lse.
//
// A result is a row state whose maximum is its lse and whose sum is 1, so merging is folding.
#include "attention/row_state.h"
#include "attention_tiling_data.h"
#include "common/entry.h"
#include "common/lanes.h"
#include "common/row_copy.h"
#include "kernel_operator.h"
#include "merge_states_tiling_data.h"

template <typename T>
class MergeStates {
 public:
  __aicore__ inline void Init(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b,
                              GM_ADDR out, GM_ADDR lse, const MergeStatesTilingData& tiling,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    width_ = tiling.head_dim;
    out_a_.SetGlobalBuffer((__gm__ T*)out_a);
    out_b_.SetGlobalBuffer((__gm__ T*)out_b);
    out_.SetGlobalBuffer((__gm__ T*)out);
    lse_a_.SetGlobalBuffer((__gm__ float*)lse_a);
    lse_b_.SetGlobalBuffer((__gm__ float*)lse_b);
    lse_.SetGlobalBuffer((__gm__ float*)lse);
    pipe->InitBuffer(rows_in_, 2, kMaxRows * width_ * sizeof(T));
    pipe->InitBuffer(rows_out_, 2, kMaxRows * width_ * sizeof(T));
    pipe->InitBuffer(lse_out_, 2, kMaxRows * kGranule * sizeof(float));
    const Float acc = NewBuffer<float>(pipe, 2 * kMaxRows * width_);
    const Float lanes = NewBuffer<float>(pipe, kNumLaneBuffers * kMaxRows);
    a_ = {lanes, lanes[kMaxRows], acc};
    b_ = {lanes[2 * kMaxRows], lanes[3 * kMaxRows], acc[kMaxRows * width_]};
    scratch_ = {lanes[4 * kMaxRows], lanes[5 * kMaxRows], lanes[6 * kMaxRows],
                NewBuffer<float>(pipe, kMaxRows * kGranule)};
    AscendC::Duplicate(lanes, 0.0f, kNumLaneBuffers * kMaxRows);
    Barrier();
  }

  // Up to kMaxRows heads of one token at a time.
  __aicore__ inline void Process() {
    const int64_t per_token = (tiling_->num_heads + kMaxRows - 1) / kMaxRows;
    const int64_t num_cores = AscendC::GetBlockNum();
    for (int64_t i = AscendC::GetBlockIdx(); i < tiling_->num_tokens * per_token; i += num_cores) {
      const int64_t head = i % per_token * kMaxRows;
      Merge(i / per_token, head, Smaller(kMaxRows, tiling_->num_heads - head));
    }
  }

 private:
  __aicore__ inline void Merge(int64_t token, int64_t head, int64_t rows) {
    LoadRows(a_.acc, out_a_, tiling_->out_a, token, head, rows);
    LoadRows(b_.acc, out_b_, tiling_->out_b, token, head, rows);
    for (int64_t r = 0; r < rows; ++r) {
      const float lse_a = LseAt(lse_a_, tiling_->lse_a, token, head + r);
      const float lse_b = LseAt(lse_b_, tiling_->lse_b, token, head + r);
      SetState(a_, r, lse_a, lse_b);
      SetState(b_, r, lse_b, lse_a);
    }
    AscendC::Duplicate(a_.sum, 1.0f, LanesOf(rows));
    AscendC::Duplicate(b_.sum, 1.0f, LanesOf(rows));
    Barrier();
    Fold(a_, b_, scratch_, rows, width_);
    Normalise(a_, scratch_, rows, width_);
    SetInfinite(token, head, rows);
    StoreRows(token, head, rows);
    StoreLse(token, head, rows);
  }

  __aicore__ inline void LoadRows(const Float& to, const AscendC::GlobalTensor<T>& from,
                                  const RowLayout& layout, int64_t token, int64_t head,
                                  int64_t rows) {
    AscendC::LocalTensor<T> in = rows_in_.template AllocTensor<T>();
    CopyRowsIn(in, from[token * layout.token_stride + head * layout.head_stride], rows, width_,
               layout.head_stride);
    rows_in_.EnQue(in);
    in = rows_in_.template DeQue<T>();
    const int32_t count = static_cast<int32_t>(rows * width_);
    if constexpr (sizeof(T) == sizeof(float)) {
      AscendC::Adds(to, in, 0.0f, count);
    } else {
      AscendC::Cast(to, in, AscendC::RoundMode::CAST_NONE, count);
    }
    Barrier();
    rows_in_.FreeTensor(in);
  }

  __aicore__ inline float LseAt(const AscendC::GlobalTensor<float>& lse, const RowLayout& layout,
                                int64_t token, int64_t head) const {
    return lse.GetValue(token * layout.token_stride + head * layout.head_stride);
  }

  // A state with lse -inf adds nothing, nor does a finite one beside an infinite one, whatever its
  // output holds: that becomes 0.
  __aicore__ inline void SetState(const RowState& state, int64_t r, float lse, float other) {
    SetLane(state.max, r, lse == kMinusInf ? kLowest : lse == kInf ? kHighest : lse);
    if (lse == kMinusInf || (other == kInf && lse < other)) {
      AscendC::Duplicate(state.acc[r * width_], 0.0f, static_cast<int32_t>(width_));
    }
  }

  // Puts the infinite lse in the place of what stood in for it.
  __aicore__ inline void SetInfinite(int64_t token, int64_t head, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const float lse_a = LseAt(lse_a_, tiling_->lse_a, token, head + r);
      const float lse_b = LseAt(lse_b_, tiling_->lse_b, token, head + r);
      if (lse_a == kMinusInf && lse_b == kMinusInf) {
        SetLane(a_.max, r, kMinusInf);
      } else if ((lse_a == kInf && lse_b <= lse_a) || (lse_b == kInf && lse_a <= lse_b)) {
        SetLane(a_.max, r, kInf);
      }
    }
    Barrier();
  }

  __aicore__ inline void StoreRows(int64_t token, int64_t head, int64_t rows) {
    AscendC::LocalTensor<T> out = rows_out_.template AllocTensor<T>();
    const int32_t count = static_cast<int32_t>(rows * width_);
    if constexpr (sizeof(T) == sizeof(float)) {
      AscendC::Adds(out, a_.acc, 0.0f, count);
    } else {
      AscendC::Cast(out, a_.acc, AscendC::RoundMode::CAST_RINT, count);
    }
    rows_out_.EnQue(out);
    out = rows_out_.template DeQue<T>();
    const RowLayout& layout = tiling_->out;
    CopyRowsOut(out_[token * layout.token_stride + head * layout.head_stride], out, rows, width_,
                layout.head_stride);
    rows_out_.FreeTensor(out);
  }

  __aicore__ inline void StoreLse(int64_t token, int64_t head, int64_t rows) {
    Float lse = lse_out_.template AllocTensor<float>();
    BroadcastLanes(lse, a_.max, rows);
    Barrier();
    lse_out_.EnQue(lse);
    lse = lse_out_.template DeQue<float>();
    CopyRowsOut(lse_[token * tiling_->num_heads + head], lse, rows, 1, 1);
    lse_out_.FreeTensor(lse);
  }

  static constexpr int64_t kNumLaneBuffers = 7;

  const MergeStatesTilingData* tiling_;
  int64_t width_;
  AscendC::GlobalTensor<T> out_a_;
  AscendC::GlobalTensor<T> out_b_;
  AscendC::GlobalTensor<T> out_;
  AscendC::GlobalTensor<float> lse_a_;
  AscendC::GlobalTensor<float> lse_b_;
  AscendC::GlobalTensor<float> lse_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> rows_in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> rows_out_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 2> lse_out_;
  RowState a_;
  RowState b_;
  RowScratch scratch_;
};

template <typename T>
__aicore__ inline void MergeAll(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b,
                                GM_ADDR out, GM_ADDR lse, GM_ADDR tiling) {
  const auto data = TilingAt<MergeStatesTilingData>(tiling);
  AscendC::TPipe pipe;
  MergeStates<T> merge;
  merge.Init(out_a, lse_a, out_b, lse_b, out, lse, data, &pipe);
  merge.Process();
}

#define PAGED_MERGE_STATES_ENTRY(name, type)                                             \
  PAGED_KERNEL(PAGED_VECTOR_CORES, name,                                                 \
               (GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out, \
                GM_ADDR lse, GM_ADDR tiling),                                            \
               MergeAll<type>(out_a, lse_a, out_b, lse_b, out, lse, tiling))

PAGED_MERGE_STATES_ENTRY(paged_merge_states_float16, half)
PAGED_MERGE_STATES_ENTRY(paged_merge_states_bfloat16, bfloat16_t)
PAGED_MERGE_STATES_ENTRY(paged_merge_states_float32, float)
