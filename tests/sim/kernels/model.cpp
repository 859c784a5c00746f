// Kernels of one instruction each, for the cycles that the model gives it.
#include "kernel_operator.h"

using AscendC::GlobalTensor;
using AscendC::LocalTensor;
using AscendC::TBuf;
using AscendC::TPosition;

namespace {

template <typename T>
__aicore__ inline GlobalTensor<T> Global(GM_ADDR address) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
  return tensor;
}

template <TPosition position, typename T>
__aicore__ inline LocalTensor<T> Local(AscendC::TPipe* pipe, uint32_t bytes) {
  TBuf<position> buffer;
  pipe->InitBuffer(buffer, bytes);
  return buffer.template Get<T>();
}

__aicore__ inline AscendC::DataCopyExtParams Rows(int64_t rows, int64_t bytes, int64_t src_gap,
                                                  int64_t dst_gap) {
  return {static_cast<uint16_t>(rows), static_cast<uint32_t>(bytes), static_cast<uint32_t>(src_gap),
          static_cast<uint32_t>(dst_gap), 0};
}

}  // namespace

// Rows of halves, `stride` apart, to L1.
extern "C" __global__ __aicore__ void rows_to_l1(GM_ADDR in, int64_t rows, int64_t width,
                                                 int64_t stride) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  AscendC::TPipe pipe;
  AscendC::Nd2NzParams params;
  params.ndNum = 1;
  params.nValue = params.dstNzC0Stride = rows;
  params.dValue = width;
  params.srcDValue = stride;
  params.dstNzNStride = 1;
  AscendC::DataCopy(Local<TPosition::A1, half>(&pipe, 256 * 1024), Global<half>(in), params);
}

// Rows of bytes, `gap` bytes between them, `offset` bytes from the start, to UB, `times` times.
extern "C" __global__ __aicore__ void rows_to_ub(GM_ADDR in, int64_t rows, int64_t bytes,
                                                 int64_t gap, int64_t offset, int64_t times) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  const auto to = Local<TPosition::VECCALC, half>(&pipe, 128 * 1024);
  for (int64_t i = 0; i < times; ++i) {
    AscendC::DataCopyPad(to, Global<half>(in + offset), Rows(rows, bytes, gap, 0),
                         {false, 0, 0, half(0)});
    AscendC::PipeBarrier<PIPE_MTE2>();
  }
}

// Rows of bytes from UB, `gap` bytes between them, `offset` bytes from the start.
extern "C" __global__ __aicore__ void rows_from_ub(GM_ADDR out, int64_t rows, int64_t bytes,
                                                   int64_t gap, int64_t offset) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  const auto from = Local<TPosition::VECCALC, float>(&pipe, 128 * 1024);
  AscendC::Duplicate(from, 0.0f, 32 * 1024);
  AscendC::SetFlag<AscendC::HardEvent::V_MTE3>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::V_MTE3>(EVENT_ID0);
  AscendC::DataCopyPad(Global<float>(out + offset), from, Rows(rows, bytes, 0, gap));
}

// A product of 128 x 128 floats to GM, `offset` bytes from the start.
extern "C" __global__ __aicore__ void results_to_gm(GM_ADDR out, int64_t offset) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  AscendC::TPipe pipe;
  constexpr int64_t kSide = 128;
  const auto left = Local<TPosition::A2, half>(&pipe, 2 * kSide * 16);
  const auto right = Local<TPosition::B2, half>(&pipe, 2 * kSide * 16);
  const auto sums = Local<TPosition::CO1, float>(&pipe, 4 * kSide * kSide);
  AscendC::InitConstValue(left, {1, kSide / 16, 0, half(1)});
  AscendC::InitConstValue(right, {1, kSide / 16, 0, half(1)});
  AscendC::SetFlag<AscendC::HardEvent::MTE1_M>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::MTE1_M>(EVENT_ID0);
  AscendC::Mmad(sums, left, right, {kSide, kSide, 16, 0, false, true});
  AscendC::SetFlag<AscendC::HardEvent::M_FIX>(EVENT_ID0);
  AscendC::WaitFlag<AscendC::HardEvent::M_FIX>(EVENT_ID0);
  AscendC::Fixpipe(Global<float>(out + offset), sums,
                   AscendC::FixpipeParamsV220(kSide, kSide, kSide, kSide, false));
}

// c = a + b in `repeats` repeats, with `offset` bytes between the beginnings of a and b.
extern "C" __global__ __aicore__ void sums_in_ub(int64_t repeats, int64_t offset) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  const auto memory = Local<TPosition::VECCALC, float>(&pipe, 160 * 1024);
  const auto b = memory[static_cast<uint32_t>(offset / sizeof(float))];
  const auto c = memory[28 * 1024];
  AscendC::Duplicate(memory, 0.0f, 27 * 1024);
  AscendC::PipeBarrier<PIPE_V>();
  AscendC::Add(c, memory, b, 64, static_cast<uint8_t>(repeats), {1, 1, 1, 8, 8, 8});
}

// The sum of each of `repeats` repeats.
extern "C" __global__ __aicore__ void sums_of_repeats(int64_t repeats) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  const auto memory = Local<TPosition::VECCALC, float>(&pipe, 64 * 1024);
  AscendC::Duplicate(memory, 0.0f, 15 * 1024);
  AscendC::PipeBarrier<PIPE_V>();
  AscendC::WholeReduceSum(memory[15 * 1024], memory, 64, static_cast<int32_t>(repeats), 1, 1, 8);
}

// Issues an instruction more where time passes, which it doesn't where instructions are counted.
extern "C" __global__ __aicore__ void goes_by_the_clock() {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::PipeBarrier<PIPE_V>();
  if (AscendC::GetSystemCycle() > 0) AscendC::PipeBarrier<PIPE_V>();
}
