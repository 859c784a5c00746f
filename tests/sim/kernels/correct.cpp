// Kernels that keep every rule.
#include "kernel_operator.h"

namespace {

constexpr uint32_t kTile = 256;

// z = x + y, with double-buffered queues.
class AddQueues {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR z, uint64_t length,
                              AscendC::TPipe* pipe) {
    const uint64_t share = length / AscendC::GetBlockNum();
    const uint64_t first = share * AscendC::GetBlockIdx();
    x_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x) + first, share);
    y_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y) + first, share);
    z_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(z) + first, share);
    tiles_ = static_cast<uint32_t>(share / kTile);
    pipe->InitBuffer(in_x_, 2, kTile * sizeof(float));
    pipe->InitBuffer(in_y_, 2, kTile * sizeof(float));
    pipe->InitBuffer(out_, 2, kTile * sizeof(float));
  }

  __aicore__ inline void Process() {
    for (uint32_t tile = 0; tile < tiles_; ++tile) {
      Load(tile);
      Compute();
      Store(tile);
    }
  }

 private:
  __aicore__ inline void Load(uint32_t tile) {
    AscendC::LocalTensor<float> x = in_x_.AllocTensor<float>();
    AscendC::LocalTensor<float> y = in_y_.AllocTensor<float>();
    AscendC::DataCopy(x, x_[tile * kTile], kTile);
    AscendC::DataCopy(y, y_[tile * kTile], kTile);
    in_x_.EnQue(x);
    in_y_.EnQue(y);
  }

  __aicore__ inline void Compute() {
    AscendC::LocalTensor<float> x = in_x_.DeQue<float>();
    AscendC::LocalTensor<float> y = in_y_.DeQue<float>();
    AscendC::LocalTensor<float> z = out_.AllocTensor<float>();
    AscendC::Add(z, x, y, static_cast<int32_t>(kTile));
    out_.EnQue(z);
    in_x_.FreeTensor(x);
    in_y_.FreeTensor(y);
  }

  __aicore__ inline void Store(uint32_t tile) {
    AscendC::LocalTensor<float> z = out_.DeQue<float>();
    AscendC::DataCopy(z_[tile * kTile], z, kTile);
    out_.FreeTensor(z);
  }

  AscendC::TQue<AscendC::TPosition::VECIN, 1> in_x_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> in_y_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
  AscendC::GlobalTensor<float> x_;
  AscendC::GlobalTensor<float> y_;
  AscendC::GlobalTensor<float> z_;
  uint32_t tiles_ = 0;
};

}  // namespace

extern "C" __global__ __aicore__ void add_queues(GM_ADDR x, GM_ADDR y, GM_ADDR z, uint64_t length) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  AddQueues op;
  op.Init(x, y, z, length, &pipe);
  op.Process();
}

// Softmax of rows of 64 floats, one row at a time, with flags instead of queues.
extern "C" __global__ __aicore__ void softmax_rows(GM_ADDR x, GM_ADDR y, uint64_t rows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  constexpr uint32_t kRow = 64;
  AscendC::TPipe pipe;
  AscendC::TBuf<AscendC::TPosition::VECCALC> row_buffer;
  AscendC::TBuf<AscendC::TPosition::VECCALC> scalar_buffer;
  pipe.InitBuffer(row_buffer, kRow * sizeof(float));
  pipe.InitBuffer(scalar_buffer, 32);
  AscendC::LocalTensor<float> row = row_buffer.Get<float>();
  AscendC::LocalTensor<float> scalar = scalar_buffer.Get<float>();
  AscendC::GlobalTensor<float> in;
  AscendC::GlobalTensor<float> out;
  in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), rows * kRow);
  out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), rows * kRow);

  const auto filled = static_cast<int32_t>(pipe.AllocEventID<AscendC::HardEvent::MTE2_V>());
  const auto reduced = static_cast<int32_t>(pipe.AllocEventID<AscendC::HardEvent::V_S>());
  const auto read = static_cast<int32_t>(pipe.AllocEventID<AscendC::HardEvent::S_V>());
  const auto computed = static_cast<int32_t>(pipe.AllocEventID<AscendC::HardEvent::V_MTE3>());
  const auto stored = static_cast<int32_t>(pipe.AllocEventID<AscendC::HardEvent::MTE3_MTE2>());
  AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(stored);
  for (uint64_t i = AscendC::GetBlockIdx(); i < rows; i += AscendC::GetBlockNum()) {
    AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(stored);
    AscendC::DataCopy(row, in[i * kRow], kRow);
    AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(filled);
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(filled);

    AscendC::WholeReduceMax(scalar, row, 64, 1, 1, 1, 8, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    AscendC::SetFlag<AscendC::HardEvent::V_S>(reduced);
    AscendC::WaitFlag<AscendC::HardEvent::V_S>(reduced);
    const float largest = scalar.GetValue(0);
    AscendC::SetFlag<AscendC::HardEvent::S_V>(read);
    AscendC::WaitFlag<AscendC::HardEvent::S_V>(read);

    AscendC::Adds(row, row, -largest, static_cast<int32_t>(kRow));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(row, row, static_cast<int32_t>(kRow));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::WholeReduceSum(scalar, row, 64, 1, 1, 1, 8);
    AscendC::SetFlag<AscendC::HardEvent::V_S>(reduced);
    AscendC::WaitFlag<AscendC::HardEvent::V_S>(reduced);
    const float sum = scalar.GetValue(0);
    AscendC::SetFlag<AscendC::HardEvent::S_V>(read);
    AscendC::WaitFlag<AscendC::HardEvent::S_V>(read);

    AscendC::Muls(row, row, 1.0f / sum, static_cast<int32_t>(kRow));
    AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(computed);
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(computed);
    AscendC::DataCopy(out[i * kRow], row, kRow);
    AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE2>(stored);
  }
  AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE2>(stored);
}

// The sum of all floats: each core adds up its share, then core 0 adds up the cores' sums.
extern "C" __global__ __aicore__ void sum_in_two_phases(GM_ADDR x, GM_ADDR partial, GM_ADDR y,
                                                        uint64_t length) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  constexpr uint32_t kMost = 4096;
  const auto cores = static_cast<uint32_t>(AscendC::GetBlockNum());
  const auto core = static_cast<uint32_t>(AscendC::GetBlockIdx());
  const auto share = static_cast<uint32_t>(length) / cores;

  AscendC::TPipe pipe;
  AscendC::TBuf<AscendC::TPosition::VECCALC> values_buffer;
  AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer;
  AscendC::TBuf<AscendC::TPosition::VECCALC> sum_buffer;
  pipe.InitBuffer(values_buffer, kMost * sizeof(float));
  pipe.InitBuffer(work_buffer, 1024);
  pipe.InitBuffer(sum_buffer, 32);
  AscendC::LocalTensor<float> values = values_buffer.Get<float>();
  AscendC::LocalTensor<float> work = work_buffer.Get<float>();
  AscendC::LocalTensor<float> sum = sum_buffer.Get<float>();
  AscendC::GlobalTensor<float> in;
  AscendC::GlobalTensor<float> sums;
  AscendC::GlobalTensor<float> out;
  in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), length);
  sums.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(partial), cores);
  out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(y), 1);

  const auto reduce = [&](const AscendC::GlobalTensor<float>& from, uint32_t count,
                          const AscendC::GlobalTensor<float>& to) {
    const uint32_t bytes = static_cast<uint32_t>(count * sizeof(float));
    AscendC::DataCopyPad(values, from, {1, bytes, 0, 0, 0}, {false, 0, 0, 0.0f});
    AscendC::SetFlag<AscendC::HardEvent::MTE2_V>(EVENT_ID0);
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(EVENT_ID0);
    AscendC::ReduceSum(sum, values, work, static_cast<int32_t>(count));
    AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(EVENT_ID0);
    AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(EVENT_ID0);
    AscendC::DataCopyPad(to, sum, {1, sizeof(float), 0, 0, 0});
  };
  reduce(in[core * share], share, sums[core]);
  AscendC::SyncAll();
  if (core == 0) reduce(sums, cores, out);
}
