// A mixed kernel with two tiles in flight, and the same with one fault each.
//
// Each group computes out = sum over tiles t of (a b_t^T / 2) v_t for 32 rows of a: the cube core
// multiplies a with b_t, its vector cores halve the scores and round them to half, the cube core
// multiplies them with v_t. Scores and weights have two places in the workspace each.
#include "kernel_operator.h"

namespace {

using AscendC::CrossCoreSetFlag;
using AscendC::CrossCoreWaitFlag;
using AscendC::DataCopy;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::SetFlag;
using AscendC::TBuf;
using AscendC::TPosition;
using AscendC::WaitFlag;

enum Fault {
  kNone,
  kLoadBeforeCopy,      // no MTE2_MTE1
  kProductBeforeLoad,   // no MTE1_M
  kStoreBeforeProduct,  // no M_FIX
  kProductBeforeStore,  // no FIX_M
  kLoadBeforeProduct,   // no M_MTE1: L0 is overwritten too early
  kCopyBeforeLoad,      // no MTE1_MTE2: L1 is overwritten too early
  kFlagOfWrongPipe,     // the scores' flag follows M, not FIX
  kReadBeforeScores,    // the vector cores don't wait
  kWeightsOfWrongPipe,  // the weights' flag follows V, not MTE3
  kReadBeforeWeights,   // the cube core doesn't wait
  kOnePlaceForScores,   // scores are overwritten before they are read
  kOnePlaceForWeights,
  kValuesNotTurned,    // a fractal isn't transposed
  kFractalsMisplaced,  // fractals in the wrong order
  kSumLost,            // every product starts at zero
  kSumUnordered,       // no barrier between small products
  kFlagOfWrongId,
  kOneVectorSilent,  // only one of the two vector cores sets the weights' flag
  kOneWaitTooFew,
  kRowsExchanged,     // each vector core takes the other's rows
  kRowMissing,        // a tile's last row isn't copied
  kTilesSharedInL0,   // weights go to where a lies
  kOutputTooEarly,    // the result is stored before the last product
  kColumnsTooNarrow,  // the result's columns are taken from too near
  kGroupsShareWorkspace,
  kNumFaults,
};

constexpr int64_t kTiles = 5;
constexpr int64_t kRows = 32;
constexpr int64_t kKeys = 32;
constexpr int64_t kDepth = 64;
constexpr int64_t kHalf = kRows / 2;                    // rows of a vector core
constexpr int64_t kScores = kRows * kKeys;              // elements of a tile
constexpr int64_t kGroupBytes = 2 * kScores * (4 + 2);  // of workspace
constexpr uint32_t kFractal = 256;
constexpr uint32_t kLeftHalf = kRows * kDepth / 2;  // of a, by depth
constexpr uint32_t kRightHalf = kKeys * kDepth / 2;
constexpr uint16_t kScoresReady = 0;
constexpr uint16_t kWeightsReady = 1;

template <HardEvent event, bool wanted>
__aicore__ inline void Order() {
  if constexpr (wanted) {
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
  }
}

// The two places of a group's scores and weights.
template <Fault fault>
class Exchange {
 public:
  __aicore__ inline Exchange(GM_ADDR workspace, int64_t group) {
    if (fault == kGroupsShareWorkspace) group = 0;
    GM_ADDR base = workspace + group * kGroupBytes;
    scores_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(base), 2 * kScores);
    weights_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(base + 2 * kScores * 4), 2 * kScores);
  }
  __aicore__ inline GlobalTensor<float> Scores(int64_t tile) {
    return scores_[static_cast<uint64_t>(fault == kOnePlaceForScores ? 0 : tile % 2 * kScores)];
  }
  __aicore__ inline GlobalTensor<half> Weights(int64_t tile) {
    return weights_[static_cast<uint64_t>(fault == kOnePlaceForWeights ? 0 : tile % 2 * kScores)];
  }

 private:
  GlobalTensor<float> scores_;
  GlobalTensor<half> weights_;
};

template <Fault fault>
class Cube {
 public:
  __aicore__ inline Cube(GM_ADDR a, GM_ADDR b, GM_ADDR v, GM_ADDR workspace, GM_ADDR out)
      : exchange_(workspace, AscendC::GetBlockIdx()) {
    const int64_t first = AscendC::GetBlockIdx() * kRows * kDepth;
    a_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(a) + first, kRows * kDepth);
    b_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(b), kTiles * kKeys * kDepth);
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v), kTiles * kKeys * kDepth);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out) + first, kRows * kDepth);
    pipe_.InitBuffer(l1_buffer_, 4 * kKeys * kDepth * sizeof(half));
    pipe_.InitBuffer(a2_buffer_, 2 * kRows * kDepth * sizeof(half));
    pipe_.InitBuffer(b2_buffer_, kKeys * kDepth * sizeof(half));
    pipe_.InitBuffer(c_buffer_, (kScores + kRows * kDepth) * sizeof(float));
    l1_ = l1_buffer_.template Get<half>();
    a2_ = a2_buffer_.template Get<half>();
    b2_ = b2_buffer_.template Get<half>();
    scores_ = c_buffer_.template Get<float>();
    sums_ = scores_[static_cast<uint32_t>(kScores)];
  }

  __aicore__ inline void Run() {
    ToL1(l1_, a_, kRows, kDepth);
    Order<HardEvent::MTE2_MTE1, true>();
    LoadLeft(a2_, l1_, kDepth / 2);
    LoadLeft(a2_[kLeftHalf], l1_[kLeftHalf], kDepth / 2);
    SetFlag<HardEvent::MTE1_MTE2>(EVENT_ID3);
    SetFlag<HardEvent::M_MTE1>(EVENT_ID3);
    SetFlag<HardEvent::FIX_M>(EVENT_ID3);
    for (int64_t tile = 0; tile <= kTiles; ++tile) {
      if (tile < kTiles) ComputeScores(tile);
      if (tile > 0) AddValues(tile - 1);
    }
    WaitFlag<HardEvent::MTE1_MTE2>(EVENT_ID3);
    WaitFlag<HardEvent::M_MTE1>(EVENT_ID3);
    WaitFlag<HardEvent::FIX_M>(EVENT_ID3);
    Order<HardEvent::M_FIX, fault != kOutputTooEarly>();
    Store(out_, sums_, kDepth, fault == kColumnsTooNarrow ? kRows / 2 : kRows);
  }

 private:
  __aicore__ inline void ComputeScores(int64_t tile) {
    WaitUnless<HardEvent::MTE1_MTE2, fault == kCopyBeforeLoad>();
    ToL1(Keys(), b_[static_cast<uint64_t>(tile * kKeys * kDepth)],
         fault == kRowMissing ? kKeys - 1 : kKeys, kDepth);
    Order<HardEvent::MTE2_MTE1, fault != kLoadBeforeCopy>();
    WaitUnless<HardEvent::M_MTE1, fault == kLoadBeforeProduct>();
    AscendC::LoadData2DParams load;
    load.repeatTimes = kKeys * kDepth / kFractal;
    load.srcStride = 1;
    AscendC::LoadData(b2_, Keys(), load);
    SetUnless<HardEvent::MTE1_MTE2, fault == kCopyBeforeLoad>();
    Order<HardEvent::MTE1_M, fault != kProductBeforeLoad>();
    WaitUnless<HardEvent::FIX_M, fault == kProductBeforeStore>();
    AscendC::Mmad(scores_, a2_, b2_, Product(kKeys, kDepth / 2, true));
    if constexpr (fault != kSumUnordered) AscendC::PipeBarrier<PIPE_M>();
    AscendC::Mmad(scores_, a2_[kLeftHalf], b2_[kRightHalf], Product(kKeys, kDepth / 2, false));
    SetUnless<HardEvent::M_MTE1, fault == kLoadBeforeProduct>();
    Order<HardEvent::M_FIX, fault != kStoreBeforeProduct>();
    Store(exchange_.Scores(tile), scores_, kKeys, kRows);
    SetUnless<HardEvent::FIX_M, fault == kProductBeforeStore>();
    CrossCoreSetFlag<2, fault == kFlagOfWrongPipe ? PIPE_M : PIPE_FIX>(kScoresReady);
  }

  __aicore__ inline void AddValues(int64_t tile) {
    if constexpr (fault != kReadBeforeWeights) {
      CrossCoreWaitFlag(fault == kFlagOfWrongId ? kWeightsReady + 1 : kWeightsReady);
    }
    WaitUnless<HardEvent::MTE1_MTE2, fault == kCopyBeforeLoad>();
    const LocalTensor<half> weights = Keys();
    const LocalTensor<half> values = Keys()[static_cast<uint32_t>(kKeys * kDepth)];
    ToL1(weights, exchange_.Weights(tile), kRows, kKeys);
    ToL1(values, v_[static_cast<uint64_t>(tile * kKeys * kDepth)], kKeys, kDepth);
    Order<HardEvent::MTE2_MTE1, true>();
    WaitUnless<HardEvent::M_MTE1, fault == kLoadBeforeProduct>();
    const LocalTensor<half> left =
        fault == kTilesSharedInL0 ? a2_ : a2_[static_cast<uint32_t>(kRows * kDepth)];
    LoadLeft(left, weights, kKeys);
    LoadTurned(values);
    SetUnless<HardEvent::MTE1_MTE2, fault == kCopyBeforeLoad>();
    Order<HardEvent::MTE1_M, true>();
    AscendC::Mmad(sums_, left, b2_, Product(kDepth, kKeys, tile == 0 || fault == kSumLost));
    SetUnless<HardEvent::M_MTE1, fault == kLoadBeforeProduct>();
  }

  template <HardEvent event, bool left_out>
  __aicore__ inline void WaitUnless() {
    if constexpr (!left_out) WaitFlag<event>(EVENT_ID3);
  }
  template <HardEvent event, bool left_out>
  __aicore__ inline void SetUnless() {
    if constexpr (!left_out) SetFlag<event>(EVENT_ID3);
  }

  __aicore__ inline LocalTensor<half> Keys() { return l1_[static_cast<uint32_t>(kRows * kDepth)]; }

  __aicore__ inline void ToL1(const LocalTensor<half>& dst, const GlobalTensor<half>& src,
                              int64_t rows, int64_t columns) {
    AscendC::Nd2NzParams params;
    params.ndNum = 1;
    params.nValue = rows;
    params.dValue = params.srcDValue = columns;
    params.dstNzC0Stride = kRows;
    params.dstNzNStride = 1;
    DataCopy(dst, src, params);
  }

  __aicore__ inline void LoadLeft(const LocalTensor<half>& dst, const LocalTensor<half>& src,
                                  int64_t depth) {
    AscendC::LoadData2DParams load;
    load.repeatTimes = depth / 16;
    load.srcStride = fault == kFractalsMisplaced ? 1 : kRows / 16;
    for (uint32_t i = 0; i < kRows / 16; ++i) {
      AscendC::LoadData(dst[i * static_cast<uint32_t>(depth) / 16 * kFractal], src[i * kFractal],
                        load);
    }
  }

  __aicore__ inline void LoadTurned(const LocalTensor<half>& values) {
    AscendC::LoadData2DParams load;
    load.repeatTimes = kDepth / 16;
    load.srcStride = kKeys / 16;
    load.ifTranspose = fault != kValuesNotTurned;
    for (uint32_t i = 0; i < kKeys / 16; ++i) {
      AscendC::LoadData(b2_[i * (kDepth / 16) * kFractal], values[i * kFractal], load);
    }
  }

  __aicore__ inline AscendC::MmadParams Product(int64_t n, int64_t k, bool initialise) {
    AscendC::MmadParams params;
    params.m = kRows;
    params.n = n;
    params.k = k;
    params.cmatrixInitVal = initialise;
    return params;
  }

  __aicore__ inline void Store(const GlobalTensor<float>& dst, const LocalTensor<float>& src,
                               int64_t columns, int64_t height) {
    AscendC::FixpipeParamsV220 params;
    params.nSize = columns;
    params.mSize = kRows;
    params.srcStride = height;
    params.dstStride = columns;
    AscendC::Fixpipe(dst, src, params);
  }

  AscendC::TPipe pipe_;
  Exchange<fault> exchange_;
  GlobalTensor<half> a_;
  GlobalTensor<half> b_;
  GlobalTensor<half> v_;
  GlobalTensor<float> out_;
  TBuf<TPosition::A1> l1_buffer_;
  TBuf<TPosition::A2> a2_buffer_;
  TBuf<TPosition::B2> b2_buffer_;
  TBuf<TPosition::CO1> c_buffer_;
  LocalTensor<half> l1_;
  LocalTensor<half> a2_;
  LocalTensor<half> b2_;
  LocalTensor<float> scores_;
  LocalTensor<float> sums_;
};

template <Fault fault>
class Vector {
 public:
  __aicore__ inline explicit Vector(GM_ADDR workspace)
      : exchange_(workspace, AscendC::GetBlockIdx() / 2) {
    pipe_.InitBuffer(scores_, kHalf * kKeys * sizeof(float));
    pipe_.InitBuffer(weights_, kHalf * kKeys * sizeof(half));
  }

  __aicore__ inline void Run() {
    const int64_t part = AscendC::GetSubBlockIdx();
    const auto from = static_cast<uint64_t>(part * kHalf * kKeys);
    const auto to =
        static_cast<uint64_t>((fault == kRowsExchanged ? 1 - part : part) * kHalf * kKeys);
    const LocalTensor<float> scores = scores_.template Get<float>();
    const LocalTensor<half> weights = weights_.template Get<half>();
    for (int64_t tile = 0; tile < kTiles; ++tile) {
      if (fault != kReadBeforeScores && !(fault == kOneWaitTooFew && tile == 0)) {
        CrossCoreWaitFlag(kScoresReady);
      }
      DataCopy(scores, exchange_.Scores(tile)[from], kHalf * kKeys);
      Order<HardEvent::MTE2_V, true>();
      AscendC::Muls(scores, scores, 0.5f, kHalf * kKeys);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Cast(weights, scores, AscendC::RoundMode::CAST_RINT, kHalf * kKeys);
      Order<HardEvent::V_MTE2, true>();
      Order<HardEvent::V_MTE3, true>();
      DataCopy(exchange_.Weights(tile)[to], weights, kHalf * kKeys);
      Order<HardEvent::MTE3_V, true>();
      if (fault == kOneVectorSilent && part == 1) continue;
      CrossCoreSetFlag<2, fault == kWeightsOfWrongPipe ? PIPE_MTE2 : PIPE_MTE3>(kWeightsReady);
    }
  }

 private:
  AscendC::TPipe pipe_;
  Exchange<fault> exchange_;
  TBuf<TPosition::VECCALC> scores_;
  TBuf<TPosition::VECCALC> weights_;
};

template <Fault fault>
__aicore__ inline void Run(GM_ADDR a, GM_ADDR b, GM_ADDR v, GM_ADDR workspace, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube<fault>(a, b, v, workspace, out).Run();
  }
  if ASCEND_IS_AIV {
    Vector<fault>(workspace).Run();
  }
}

// On a device each would be a kernel of its own.
template <int fault = 0>
__aicore__ inline void Choose(int64_t chosen, GM_ADDR a, GM_ADDR b, GM_ADDR v, GM_ADDR workspace,
                              GM_ADDR out) {
  if constexpr (fault < kNumFaults) {
    if (chosen == fault) {
      Run<static_cast<Fault>(fault)>(a, b, v, workspace, out);
    } else {
      Choose<fault + 1>(chosen, a, b, v, workspace, out);
    }
  }
}

}  // namespace

extern "C" __global__ __aicore__ void pipelined(GM_ADDR a, GM_ADDR b, GM_ADDR v, GM_ADDR workspace,
                                                GM_ADDR out, int64_t fault) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  Choose(fault, a, b, v, workspace, out);
}
