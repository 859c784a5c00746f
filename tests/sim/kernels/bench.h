// What the small kernels of the rule tests share.
//
// A rule's kernel is a template: with `kept` it keeps the rule, else it breaks it in the line
// marked "breaks here". Both take the tensors `in` and `out`, 1024 floats each.
#pragma once

#include "kernel_operator.h"

#define RULE(name)                                                               \
  extern "C" __global__ __aicore__ void name##_broken(GM_ADDR in, GM_ADDR out) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                              \
    name<false>(in, out);                                                        \
  }                                                                              \
  extern "C" __global__ __aicore__ void name##_kept(GM_ADDR in, GM_ADDR out) {   \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                              \
    name<true>(in, out);                                                         \
  }

constexpr uint32_t kSize = 1024;  // floats of in and out
constexpr int32_t kTile = 256;    // floats of each local tensor

// A value that the compiler doesn't know, so that it can't warn of it: the launch has one block.
__aicore__ inline int64_t Hidden(int64_t value) { return value * AscendC::GetBlockNum(); }

// What `to` does after this comes after what `from` did before it.
template <AscendC::HardEvent event>
__aicore__ inline void Order() {
  AscendC::SetFlag<event>(EVENT_ID0);
  AscendC::WaitFlag<event>(EVENT_ID0);
}

// Three local tensors without queues.
class Bench {
 public:
  __aicore__ inline Bench(GM_ADDR in_address, GM_ADDR out_address) {
    in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(in_address));
    out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out_address));
    pipe.InitBuffer(a_buffer_, kTile * sizeof(float));
    pipe.InitBuffer(b_buffer_, kTile * sizeof(float));
    pipe.InitBuffer(c_buffer_, kTile * sizeof(float));
    a = a_buffer_.Get<float>();
    b = b_buffer_.Get<float>();
    c = c_buffer_.Get<float>();
  }

  // a and b hold input that the vector pipe may use.
  __aicore__ inline void Load() {
    AscendC::DataCopy(a, in, kTile);
    AscendC::DataCopy(b, in[kTile], kTile);
    Order<AscendC::HardEvent::MTE2_V>();
  }

  // The vector pipe's result goes to `out`.
  __aicore__ inline void Store(const AscendC::LocalTensor<float>& result) {
    Order<AscendC::HardEvent::V_MTE3>();
    AscendC::DataCopy(out, result, kTile);
  }

  AscendC::TPipe pipe;
  AscendC::GlobalTensor<float> in;
  AscendC::GlobalTensor<float> out;
  AscendC::LocalTensor<float> a;
  AscendC::LocalTensor<float> b;
  AscendC::LocalTensor<float> c;

 private:
  AscendC::TBuf<AscendC::TPosition::VECCALC> a_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> b_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> c_buffer_;
};
