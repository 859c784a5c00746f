// Single instructions, to compare their results with numpy's: in -> UB -> instruction -> UB -> out.
#include "bench.h"

namespace {

using AscendC::LocalTensor;

// Room for `count` elements of a type in whole repeats.
template <typename T>
__aicore__ inline uint32_t Bytes(uint64_t count) {
  return static_cast<uint32_t>((count * sizeof(T) + 255) / 256 * 256);
}

template <typename T>
__aicore__ inline void CopyIn(const LocalTensor<T>& to, GM_ADDR from, uint64_t count) {
  AscendC::GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(from), count);
  const uint32_t bytes = static_cast<uint32_t>(count * sizeof(T));
  AscendC::DataCopyPad(to, tensor, {1, bytes, 0, 0, 0}, {});
}

template <typename T>
__aicore__ inline void CopyOut(GM_ADDR to, const LocalTensor<T>& from, uint64_t count) {
  AscendC::GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(to), count);
  const uint32_t bytes = static_cast<uint32_t>(count * sizeof(T));
  AscendC::DataCopyPad(tensor, from, {1, bytes, 0, 0, 0});
}

// Runs `instruction(dst, src)` on `sources` elements; `results` elements go to `out`.
template <typename D, typename S, typename Instruction>
__aicore__ inline void Map(GM_ADDR in, GM_ADDR out, uint64_t sources, uint64_t results,
                           Instruction instruction) {
  AscendC::TPipe pipe;
  AscendC::TBuf<AscendC::TPosition::VECCALC> src_buffer;
  AscendC::TBuf<AscendC::TPosition::VECCALC> dst_buffer;
  pipe.InitBuffer(src_buffer, Bytes<S>(sources));
  pipe.InitBuffer(dst_buffer, Bytes<D>(results));
  LocalTensor<S> src = src_buffer.Get<S>();
  LocalTensor<D> dst = dst_buffer.Get<D>();
  CopyIn(src, in, sources);
  Order<AscendC::HardEvent::MTE2_V>();
  instruction(dst, src, pipe);
  Order<AscendC::HardEvent::V_MTE3>();
  CopyOut(out, dst, results);
}

template <typename D, typename S>
__aicore__ inline void CastAll(GM_ADDR in, GM_ADDR out, uint64_t count, uint64_t mode) {
  Map<D, S>(in, out, count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Cast(dst, src, static_cast<AscendC::RoundMode>(mode), static_cast<uint32_t>(count));
  });
}

}  // namespace

#define CAST(name, D, S)                                                              \
  extern "C" __global__ __aicore__ void name(GM_ADDR in, GM_ADDR out, uint64_t count, \
                                             uint64_t mode) {                         \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                   \
    CastAll<D, S>(in, out, count, mode);                                              \
  }

CAST(cast_float_half, half, float)
CAST(cast_float_bfloat, bfloat16_t, float)
CAST(cast_float_int32, int32_t, float)
CAST(cast_float_int16, int16_t, float)
CAST(cast_float_float, float, float)
CAST(cast_half_float, float, half)
CAST(cast_half_int32, int32_t, half)
CAST(cast_half_int8, int8_t, half)
CAST(cast_bfloat_float, float, bfloat16_t)
CAST(cast_int32_float, float, int32_t)
CAST(cast_int32_int16, int16_t, int32_t)
CAST(cast_uint8_half, half, uint8_t)

#define UNARY(Name, name, T)                                                            \
  extern "C" __global__ __aicore__ void name(GM_ADDR in, GM_ADDR out, uint64_t count) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                     \
    Map<T, T>(in, out, count, count, [&](auto& dst, auto& src, auto&) {                 \
      AscendC::Name(dst, src, static_cast<int32_t>(count));                             \
    });                                                                                 \
  }

UNARY(Exp, exp_float, float)
UNARY(Exp, exp_half, half)
UNARY(Ln, ln_float, float)
UNARY(Abs, abs_half, half)
UNARY(Sqrt, sqrt_float, float)
UNARY(Rsqrt, rsqrt_float, float)
UNARY(Reciprocal, reciprocal_float, float)
UNARY(Relu, relu_float, float)
UNARY(Not, not_int16, int16_t)

// The first half of the input with the second half.
#define BINARY(Name, name, T)                                                           \
  extern "C" __global__ __aicore__ void name(GM_ADDR in, GM_ADDR out, uint64_t count) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                     \
    Map<T, T>(in, out, 2 * count, count, [&](auto& dst, auto& src, auto&) {             \
      AscendC::Name(dst, src, src[count], static_cast<int32_t>(count));                 \
    });                                                                                 \
  }

BINARY(Add, add_float, float)
BINARY(Add, add_half, half)
BINARY(Sub, sub_int32, int32_t)
BINARY(Mul, mul_half, half)
BINARY(Mul, mul_int16, int16_t)
BINARY(Div, div_float, float)
BINARY(Max, max_float, float)
BINARY(Min, min_half, half)
BINARY(And, and_int16, int16_t)
BINARY(Or, or_int16, int16_t)

#define WITH_SCALAR(Name, name, T, scalar)                                              \
  extern "C" __global__ __aicore__ void name(GM_ADDR in, GM_ADDR out, uint64_t count) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                     \
    Map<T, T>(in, out, count, count, [&](auto& dst, auto& src, auto&) {                 \
      AscendC::Name(dst, src, static_cast<T>(scalar), static_cast<int32_t>(count));     \
    });                                                                                 \
  }

WITH_SCALAR(Adds, adds_float, float, 1.5)
WITH_SCALAR(Muls, muls_half, half, 0.3)
WITH_SCALAR(Maxs, maxs_int32, int32_t, 7)
WITH_SCALAR(Mins, mins_float, float, 0.25)
WITH_SCALAR(ShiftLeft, shift_left_int32, int32_t, 3)
WITH_SCALAR(ShiftRight, shift_right_int16, int16_t, 2)

// dst = 1 first, then dst += src * 3.
extern "C" __global__ __aicore__ void axpy_half_to_float(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, half>(in, out, count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Duplicate(dst, 1.0f, static_cast<int32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Axpy(dst, src, static_cast<half>(3.0f), static_cast<int32_t>(count));
  });
}

// dst = 2 first, then dst += src[first half] * src[second half].
extern "C" __global__ __aicore__ void mul_add_dst_float(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, 2 * count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Duplicate(dst, 2.0f, static_cast<int32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::MulAddDst(dst, src, src[count], static_cast<int32_t>(count));
  });
}

// Rows of 64: their sum; their maximum and its index; the sums of their blocks of 8.
extern "C" __global__ __aicore__ void row_sums(GM_ADDR in, GM_ADDR out, uint64_t rows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, rows * 64, rows, [&](auto& dst, auto& src, auto&) {
    AscendC::WholeReduceSum(dst, src, 64, static_cast<int32_t>(rows), 1, 1, 8);
  });
}

extern "C" __global__ __aicore__ void row_maxima(GM_ADDR in, GM_ADDR out, uint64_t rows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, rows * 64, rows * 2, [&](auto& dst, auto& src, auto&) {
    AscendC::WholeReduceMax(dst, src, 50, static_cast<int32_t>(rows), 1, 1, 8);
  });
}

extern "C" __global__ __aicore__ void block_sums(GM_ADDR in, GM_ADDR out, uint64_t rows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, rows * 64, rows * 8, [&](auto& dst, auto& src, auto&) {
    AscendC::BlockReduceSum(dst, src, static_cast<int32_t>(rows), 64, 1, 1, 8);
  });
}

extern "C" __global__ __aicore__ void pair_sums(GM_ADDR in, GM_ADDR out, uint64_t rows) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, rows * 64, rows * 32, [&](auto& dst, auto& src, auto&) {
    AscendC::PairReduceSum(dst, src, static_cast<int32_t>(rows), 64, 1, 1, 8);
  });
}

extern "C" __global__ __aicore__ void sum_of_halves(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<half, half>(in, out, count, 1, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> work;
    pipe.InitBuffer(work, 256);
    AscendC::ReduceSum(dst, src, work.template Get<half>(), static_cast<int32_t>(count));
  });
}

extern "C" __global__ __aicore__ void maximum_and_index(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, 2, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> work;
    pipe.InitBuffer(work, 1024);
    AscendC::ReduceMax(dst, src, work.template Get<float>(), static_cast<int32_t>(count), true);
  });
}

// Only lanes 0, 2, 4, ... of each second repeat, the others keep -1.
extern "C" __global__ __aicore__ void masked_abs(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Duplicate(dst, -1.0f, static_cast<int32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    uint64_t mask[2] = {0x5555555555555555u, 0};
    AscendC::Abs(dst, src, mask, static_cast<uint8_t>(count / 128), {1, 1, 16, 16});
  });
}

// The first 100 elements, counted by the mask register; the others keep -1.
extern "C" __global__ __aicore__ void counted_abs(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Duplicate(dst, -1.0f, static_cast<int32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::SetMaskCount();
    AscendC::SetVectorMask<float, AscendC::MaskMode::COUNTER>(100);
    AscendC::Abs<float, false>(dst, src, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
    AscendC::SetMaskNorm();
    AscendC::ResetMask();
  });
}

// The first 5 lanes of every repeat, by the mask register; the others keep -1.
extern "C" __global__ __aicore__ void register_masked_abs(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, count, [&](auto& dst, auto& src, auto&) {
    AscendC::Duplicate(dst, -1.0f, static_cast<int32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::SetVectorMask<float>(0, 0x1f);
    AscendC::Abs<float, false>(dst, src, AscendC::MASK_PLACEHOLDER,
                               static_cast<uint8_t>(count / 64), {1, 1, 8, 8});
    AscendC::ResetMask();
  });
}

// Row i of 8 rows of 64 plus the i-th of 8 values after them, each value spread over a block.
extern "C" __global__ __aicore__ void add_spread_values(GM_ADDR in, GM_ADDR out) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, 520, 512, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> spread_buffer;
    pipe.InitBuffer(spread_buffer, 256);
    AscendC::LocalTensor<float> spread = spread_buffer.template Get<float>();
    AscendC::Brcb(spread, src[512], 1, {1, 8});
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(dst, src, spread, 64, 8, {1, 1, 0, 8, 8, 1});
  });
}

// Elements above 0 stay, others become -2.
extern "C" __global__ __aicore__ void keep_positive(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, count, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> bits_buffer;
    pipe.InitBuffer(bits_buffer, 256);
    AscendC::LocalTensor<uint8_t> bits = bits_buffer.template Get<uint8_t>();
    AscendC::CompareScalar(bits, src, 0.0f, AscendC::CMPMODE::GT, static_cast<uint32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(dst, bits, src, -2.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE,
                    static_cast<uint32_t>(count));
  });
}

// The larger of the two halves of the input, by a comparison.
extern "C" __global__ __aicore__ void larger_half(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<half, half>(in, out, 2 * count, count, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> bits_buffer;
    pipe.InitBuffer(bits_buffer, 256);
    AscendC::LocalTensor<uint8_t> bits = bits_buffer.template Get<uint8_t>();
    const auto elements = static_cast<uint32_t>(count);
    AscendC::Compare(bits, src, src[count], AscendC::CMPMODE::GE, elements);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(dst, bits, src, src[count], AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE,
                    elements);
  });
}

// Element count - 1 - i of the input, by byte offsets that CreateVecIndex makes.
extern "C" __global__ __aicore__ void reversed(GM_ADDR in, GM_ADDR out, uint64_t count) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<float, float>(in, out, count, count, [&](auto& dst, auto& src, auto& pipe) {
    AscendC::TBuf<> index_buffer;
    pipe.InitBuffer(index_buffer, Bytes<int32_t>(count));
    AscendC::LocalTensor<int32_t> index = index_buffer.template Get<int32_t>();
    const auto elements = static_cast<int32_t>(count);
    AscendC::CreateVecIndex(index, 0, static_cast<uint32_t>(count));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(index, index, -4, elements);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(index, index, (elements - 1) * 4, elements);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Gather(dst, src, index.template ReinterpretCast<uint32_t>(), 0,
                    static_cast<uint32_t>(count));
  });
}

extern "C" __global__ __aicore__ void transposed_16x16(GM_ADDR in, GM_ADDR out) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  Map<half, half>(in, out, 256, 256,
                  [&](auto& dst, auto& src, auto&) { AscendC::Transpose(dst, src); });
}

// Four pieces of 5 floats, 7 apart in GM, come to rest 16 apart in UB with a padding of 2.5 each
// side.
extern "C" __global__ __aicore__ void padded_pieces(GM_ADDR in, GM_ADDR out) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  AscendC::TPipe pipe;
  AscendC::TBuf<> buffer;
  pipe.InitBuffer(buffer, 256);
  AscendC::LocalTensor<float> pieces = buffer.Get<float>();
  AscendC::GlobalTensor<float> from;
  from.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(in));
  AscendC::Duplicate(pieces, -1.0f, 64);
  Order<AscendC::HardEvent::V_MTE2>();
  AscendC::DataCopyPad(pieces, from, {4, 20, 8, 1, 0},
                       AscendC::DataCopyPadExtParams<float>{true, 1, 2, 2.5f});
  Order<AscendC::HardEvent::MTE2_MTE3>();
  CopyOut(out, pieces, 64);
}
