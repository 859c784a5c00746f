// What the cores of a group hand each other through the workspace, and the flags that say it is
// there.
//
// The cube is kAhead steps further with scores than with products, and the vector cores with
// weights than with sums: steps differ in length, and who has a short one doesn't wait for who has
// a long one. So each goes through a ring of kAhead + 1 buffers:
//
//   scores    cube -> vector   keys x queries     float32  [keys][RowPitch]
//   weights   vector -> cube   e^(score - max)    T        [RowPitch / 16][exchange_keys][16]
//   products  cube -> vector   weights x values   float32  [rows][value_dim]
//
// Scores lie key by key, the rows of a key side by side: that is how the vector cores work on them.
// Weights lie as L1 has them, in columns of 16 rows, so that a tile comes in by long pieces. The
// two vector cores of a group share the rows.
//
// No flag says that a buffer is free again, because a later one does. Let m = n + kAhead + 1 be the
// next step in the buffers of step n. The cube writes the scores of m after the products of n, for
// which it has waited for the weights of n, which the vector cores wrote after they had read the
// scores of n. They write the weights of m after they have waited for its scores, for which the
// cube has used up the weights of n. The products of m follow its weights, which follow the vector
// cores' sums over the products of n.
#pragma once

#include "attention_tiling_data.h"
#include "kernel_operator.h"

// Ids of the flags between the cores of a group.
constexpr uint16_t kScoresReady = 0;
constexpr uint16_t kWeightsReady = 1;
constexpr uint16_t kProductsReady = 2;
constexpr uint16_t kVerdictReady = 3;
constexpr uint16_t kVerdictShared = 4;

// Between the AIC of a group and its AIVs: the AIVs wait for the AIC, or the AIC for both of them.
constexpr uint8_t kWithinGroup = 2;

constexpr int64_t kAhead = kExchangeBuffers - 1;

// Rows of a band with those that fill it up, which are 0: a power of two, at least a fractal.
__aicore__ inline int64_t RowPitch(int64_t num_rows) {
  int64_t pitch = 16;
  while (pitch < num_rows) {
    pitch *= 2;
  }
  return pitch;
}

// Rows of the first vector core of a group; the second one takes the rest. Both are whole fractals.
__aicore__ inline int64_t FirstShare(int64_t pitch) { return pitch > 16 ? pitch / 2 : pitch; }

template <typename T>
class Exchange {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR workspace, int64_t group) {
    keys_ = tiling.exchange_keys;
    pairs_ = tiling.max_rows * keys_;
    products_size_ = tiling.max_rows * tiling.value.head_dim;
    GM_ADDR at = workspace + group * tiling.exchange_bytes;
    scores_.SetGlobalBuffer((__gm__ float*)at, kExchangeBuffers * pairs_);
    at += kExchangeBuffers * pairs_ * sizeof(float);
    weights_.SetGlobalBuffer((__gm__ T*)at, kExchangeBuffers * pairs_);
    at += kExchangeBuffers * pairs_ * sizeof(T);
    products_.SetGlobalBuffer((__gm__ float*)at, kExchangeBuffers * products_size_);
    at += kExchangeBuffers * products_size_ * sizeof(float);
    verdicts_.SetGlobalBuffer((__gm__ float*)at, kVerdicts);
  }

  // The first pair of a row and a key in a buffer.
  __aicore__ inline int64_t PairsAt(int64_t buffer) const { return buffer * pairs_; }

  __aicore__ inline AscendC::GlobalTensor<float> Scores(int64_t buffer) const {
    return scores_[buffer * pairs_];
  }
  // Of the share that begins with row `first_row`.
  __aicore__ inline AscendC::GlobalTensor<T> Weights(int64_t buffer, int64_t first_row) const {
    return weights_[buffer * pairs_ + first_row * keys_];
  }
  __aicore__ inline AscendC::GlobalTensor<float> Products(int64_t buffer) const {
    return products_[buffer * products_size_];
  }
  // One vector core's, in a cache line of its own.
  __aicore__ inline AscendC::GlobalTensor<float> Verdict(int64_t vector_core) const {
    return verdicts_[vector_core * kVerdictPitch];
  }

 private:
  int64_t keys_;
  int64_t pairs_;  // of a row and a key: scores, or weights
  int64_t products_size_;
  AscendC::GlobalTensor<float> scores_;
  AscendC::GlobalTensor<T> weights_;
  AscendC::GlobalTensor<float> products_;
  AscendC::GlobalTensor<float> verdicts_;
};
