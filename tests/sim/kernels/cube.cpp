// The rules of a cube core. Each kernel runs on one.
#include "kernel_operator.h"

#define CUBE_RULE(name)                                                          \
  extern "C" __global__ __aicore__ void name##_broken(GM_ADDR in, GM_ADDR out) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                              \
    name<false>(in, out);                                                        \
  }                                                                              \
  extern "C" __global__ __aicore__ void name##_kept(GM_ADDR in, GM_ADDR out) {   \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                              \
    name<true>(in, out);                                                         \
  }

namespace {

using AscendC::DataCopy;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::PipeBarrier;
using AscendC::TBuf;
using AscendC::TPosition;

constexpr uint32_t kSide = 32;
constexpr uint32_t kSize = kSide * kSide;  // elements of each matrix
constexpr uint32_t kFractal = 256;         // elements

template <HardEvent event>
__aicore__ inline void Order() {
  AscendC::SetFlag<event>(EVENT_ID3);
  AscendC::WaitFlag<event>(EVENT_ID3);
}

// A value that the compiler doesn't know: the launch has one block.
__aicore__ inline int64_t Hidden(int64_t value) { return value * AscendC::GetBlockNum(); }

// out = a b^T for two matrices of 32 x 32 halves that `in` holds, step by step.
class Bench {
 public:
  __aicore__ inline Bench(GM_ADDR in_address, GM_ADDR out_address) {
    in.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(in_address));
    out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out_address));
    pipe.InitBuffer(a1_buffer_, kSize * sizeof(half));
    pipe.InitBuffer(b1_buffer_, kSize * sizeof(half));
    pipe.InitBuffer(a2_buffer_, kSize * sizeof(half));
    pipe.InitBuffer(b2_buffer_, kSize * sizeof(half));
    pipe.InitBuffer(c_buffer_, kSize * sizeof(float));
    a1 = a1_buffer_.Get<half>();
    b1 = b1_buffer_.Get<half>();
    a2 = a2_buffer_.Get<half>();
    b2 = b2_buffer_.Get<half>();
    c = c_buffer_.Get<float>();
    to_l1.ndNum = 1;
    to_l1.nValue = to_l1.dValue = to_l1.srcDValue = to_l1.dstNzC0Stride = kSide;
    to_l1.dstNzNStride = 1;
    to_l0.repeatTimes = 4;
    to_l0.srcStride = 1;
    product.m = product.n = product.k = kSide;
    to_gm.nSize = to_gm.mSize = to_gm.srcStride = to_gm.dstStride = kSide;
  }

  // Both matrices in L1, for MTE1.
  __aicore__ inline void CopyIn() {
    DataCopy(a1, in, to_l1);
    DataCopy(b1, in[kSize], to_l1);
    Order<HardEvent::MTE2_MTE1>();
  }

  // Both in L0, for M. Which order their fractals have is no matter here.
  __aicore__ inline void Load() {
    AscendC::LoadData(a2, a1, to_l0);
    AscendC::LoadData(b2, b1, to_l0);
    Order<HardEvent::MTE1_M>();
  }

  __aicore__ inline void Multiply() { AscendC::Mmad(c, a2, b2, product); }
  __aicore__ inline void Store() { AscendC::Fixpipe(out, c, to_gm); }

  __aicore__ inline void UpTo(int step) {
    if (step >= 1) CopyIn();
    if (step >= 2) Load();
    if (step >= 3) Multiply();
    if (step >= 4) {
      Order<HardEvent::M_FIX>();
      Store();
    }
  }

  AscendC::TPipe pipe;
  GlobalTensor<half> in;
  GlobalTensor<float> out;
  LocalTensor<half> a1;
  LocalTensor<half> b1;
  LocalTensor<half> a2;
  LocalTensor<half> b2;
  LocalTensor<float> c;
  AscendC::Nd2NzParams to_l1;
  AscendC::LoadData2DParams to_l0;
  AscendC::MmadParams product;
  AscendC::FixpipeParamsV220 to_gm;

 private:
  TBuf<TPosition::A1> a1_buffer_;
  TBuf<TPosition::B1> b1_buffer_;
  TBuf<TPosition::A2> a2_buffer_;
  TBuf<TPosition::B2> b2_buffer_;
  TBuf<TPosition::CO1> c_buffer_;
};

// ---- Kinds of core and positions
// ----------------------------------------------------------------

template <bool kept>
__aicore__ inline void cubes_have_no_vector_unit(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if constexpr (!kept) {
    AscendC::Duplicate(bench.c, 1.0f, 64);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void cubes_have_no_unified_buffer(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  TBuf<kept ? TPosition::A1 : TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, 1024);  // breaks here
}

template <bool kept>
__aicore__ inline void tensors_are_placed_in_memories_of_the_core(GM_ADDR in, GM_ADDR out) {
  constexpr TPosition kPosition = kept ? TPosition::A2 : TPosition::VECIN;
  LocalTensor<half> tensor(kPosition, 0, 256);  // breaks here
  (void)tensor;
}

template <bool kept>
__aicore__ inline void events_are_between_pipes_of_the_core(GM_ADDR in, GM_ADDR out) {
  constexpr HardEvent kEvent = kept ? HardEvent::MTE2_MTE1 : HardEvent::MTE2_V;
  AscendC::SetFlag<kEvent>(EVENT_ID0);  // breaks here
  AscendC::WaitFlag<kEvent>(EVENT_ID0);
}

template <bool kept>
__aicore__ inline void pipes_have_set_their_own_flags(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  const int64_t id = Hidden(kept ? 3 : 2);
  AscendC::SetFlag<HardEvent::M_MTE1>(id);  // breaks here
  AscendC::WaitFlag<HardEvent::M_MTE1>(id);
}

template <bool kept>
__aicore__ inline void pipes_find_their_flags_set(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;  // breaks here
  AscendC::WaitFlag<HardEvent::M_MTE1>(EVENT_ID1);
  if constexpr (kept) AscendC::SetFlag<HardEvent::M_MTE1>(EVENT_ID1);
}

template <bool kept>
__aicore__ inline void pipes_hold_their_own_ids(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  for (int64_t i = Hidden(kept ? 3 : 2); i < 8; ++i) {
    (void)pipe.AllocEventID<HardEvent::M_MTE1>();  // breaks here
  }
}

template <bool kept>
__aicore__ inline void barriers_are_on_pipes_of_the_core(GM_ADDR in, GM_ADDR out) {
  PipeBarrier<kept ? PIPE_FIX : PIPE_MTE3>();  // breaks here
}

template <bool kept>
__aicore__ inline void loads_come_from_l1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  Order<HardEvent::M_MTE1>();
  AscendC::LoadData(bench.a2, kept ? bench.a1 : bench.b2, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void left_matrices_lie_in_l0a(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  AscendC::Mmad(bench.c, kept ? bench.a2 : bench.b2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void matrices_become_fractals_in_l1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(kept ? bench.a1 : bench.a2, bench.in, bench.to_l1);  // breaks here
}

// ---- Capacity, bounds and alignment
// -------------------------------------------------------------

template <bool kept>
__aicore__ inline void l1_capacity(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  TBuf<TPosition::A1> a;
  TBuf<TPosition::B1> b;
  pipe.InitBuffer(a, 256 * 1024);
  pipe.InitBuffer(b, 256 * 1024 - (kept ? 256 : 0));  // breaks here
}

template <bool kept>
__aicore__ inline void l0_capacity(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  TBuf<TPosition::A2> a;
  TBuf<TPosition::B2> b;
  pipe.InitBuffer(a, 64 * 1024);
  pipe.InitBuffer(b, (kept ? 64 : 65) * 1024);  // breaks here
}

template <bool kept>
__aicore__ inline void l0c_capacity(GM_ADDR in, GM_ADDR out) {
  constexpr uint32_t kFirst = kept ? 96 * 1024 : 97 * 1024;
  LocalTensor<float> tensor(TPosition::CO1, kFirst, 8 * 1024);  // breaks here
  (void)tensor;
}

template <bool kept>
__aicore__ inline void fractals_fit_into_l1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.dstNzC0Stride = kept ? 32 : 33;
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void loads_stay_inside_l1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  bench.to_l0.startIndex = kept ? 0 : 1;
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void loads_stay_inside_l0(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  bench.to_l0.dstGap = kept ? 0 : 1;
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void products_stay_inside_l0c(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.k = 16;
  bench.product.m = kept ? 32 : 64;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void operands_stay_inside_l0(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.k = kept ? 32 : 48;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void results_come_from_inside_l0c(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.srcStride = kept ? 32 : 48;
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void l1_is_used_in_blocks(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = 16;
  DataCopy(bench.a1[kept ? 16 : 8], bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void l0_is_used_in_fractals(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  bench.to_l0.repeatTimes = 1;
  AscendC::LoadData(bench.a2[kept ? 256 : 128], bench.a1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void products_start_at_fractals(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.n = 16;
  AscendC::Mmad(bench.c[kept ? 256 : 128], bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void results_start_at_rows(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.mSize = 1;
  AscendC::Fixpipe(bench.out, bench.c[kept ? 16 : 8], bench.to_gm);  // breaks here
}

// ---- Limits
// ---------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void rows_of_gm_have_16_bit_strides(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = 1;
  bench.to_l1.srcDValue = Hidden(kept ? 65535 : 65536);
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void columns_of_blocks_have_a_stride(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.dstNzC0Stride = kept ? 32 : 0;
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void columns_of_blocks_lie_apart(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.dstNzC0Stride = kept ? 32 : 16;
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void matrices_have_rows(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = kept ? 1 : 0;
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void loads_repeat_255_times(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  LocalTensor<half> l0(TPosition::A2, 0, 32 * 1024);
  bench.to_l0.srcStride = 0;
  bench.to_l0.dstGap = 0;
  bench.to_l0.repeatTimes = Hidden(kept ? 127 : 256);
  AscendC::LoadData(l0, bench.a1, bench.to_l0);  // breaks here
}

// The rows of a matrix of 32 x 32 halves, as places of a filter.
__aicore__ inline AscendC::LoadData3DParamsV2<half> RowsOfImage() {
  AscendC::LoadData3DParamsV2<half> rows;
  rows.l1H = 1;
  rows.l1W = kSize / 16;
  rows.channelSize = 16;
  rows.filterW = rows.strideW = kSide / 16;
  rows.mExtension = rows.kExtension = kSide;
  return rows;
}

template <bool kept>
__aicore__ inline void images_have_strides_to_63(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData3DParamsV2<half> rows = RowsOfImage();
  rows.mExtension = 16;
  rows.filterW = rows.strideW = 1;
  rows.kExtension = 16;
  rows.strideH = Hidden(kept ? 63 : 64);
  AscendC::LoadData(bench.a2, bench.a1, rows);  // breaks here
}

template <bool kept>
__aicore__ inline void images_are_read_inside_their_matrix(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData3DParamsV2<half> rows = RowsOfImage();
  rows.l1W = kept ? kSize / 16 : kSide;
  AscendC::LoadData(bench.a2, bench.a1, rows);  // breaks here
}

template <bool kept>
__aicore__ inline void images_are_cut_at_fractals(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData3DParamsV2<half> rows = RowsOfImage();
  rows.kExtension = 16;
  rows.kStartPt = kept ? 16 : 8;
  AscendC::LoadData(bench.a2, bench.a1, rows);  // breaks here
}

constexpr AscendC::IsResetLoad3dConfig kKeepImage = {false, false};

template <bool kept>
__aicore__ inline void images_are_described_first(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  const AscendC::LoadData3DParamsV2<half> rows = RowsOfImage();
  if constexpr (kept) {
    AscendC::SetFmatrix(1, rows.l1W, rows.padList, AscendC::FmatrixMode::FMATRIX_LEFT);
  }
  AscendC::LoadData<half, kKeepImage>(bench.a2, bench.a1, rows);  // breaks here
}

template <bool kept>
__aicore__ inline void images_stay_inside_l1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData3DParamsV2<half> rows = RowsOfImage();
  rows.l1W = 2 * kSize / 16;
  rows.mExtension = 16;
  rows.mStartPt = kept ? 16 : 32;
  AscendC::LoadData(bench.a2, bench.a1, rows);  // breaks here
}

template <bool kept>
__aicore__ inline void images_are_read_when_they_are_there(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a1, bench.in, kSize);
  if constexpr (kept) Order<HardEvent::MTE2_MTE1>();
  AscendC::LoadData(bench.a2, bench.a1, RowsOfImage());  // breaks here
}

template <bool kept>
__aicore__ inline void loads_transpose_16_bit_types(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  bench.to_l0.repeatTimes = 1;
  bench.to_l0.ifTranspose = true;
  if constexpr (kept) {
    AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);
  } else {
    const LocalTensor<float> a1 = bench.a1.ReinterpretCast<float>();
    AscendC::LoadData(bench.a2.ReinterpretCast<float>(), a1, bench.to_l0);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void squares_do_not_overwrite_each_other(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData2dTransposeParams squares;
  squares.repeatTimes = 2;
  squares.srcStride = 1;
  squares.dstFracGap = kept ? 1 : 0;
  const LocalTensor<float> a1 = bench.a1.ReinterpretCast<float>();
  const LocalTensor<float> a2 = bench.a2.ReinterpretCast<float>();
  AscendC::LoadDataWithTranspose(a2, a1, squares);  // breaks here
}

template <bool kept>
__aicore__ inline void products_have_4095_rows(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.m = Hidden(kept ? 32 : 4096);
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void products_have_a_depth(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.k = kept ? 1 : 0;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void products_have_no_bias(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.cmatrixSource = !kept;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void results_have_whole_fractals_of_columns(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.nSize = kept ? 16 : 24;
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void results_are_converted_to_the_output(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.quantPre = kept ? QuantMode_t::NoQuant : QuantMode_t::F322F16;
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void rows_of_results_lie_apart(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.dstStride = kept ? 32 : 16;
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void columns_of_results_lie_apart(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.dstStride = kept ? 64 : 32;  // blocks of 32 bytes: a row of 16 floats has two
  AscendC::Fixpipe<float, float, AscendC::CFG_NZ>(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void channels_are_split_in_nz(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  bench.to_gm.isChannelSplit = !kept;
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

// ---- Garbage
// --------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void l1_is_written_before_its_use(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = kept ? 32 : 31;
  bench.UpTo(2);
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

// Rows, columns and depths beyond the product's are nobody's business.
template <bool kept>
__aicore__ inline void padding_may_be_garbage(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = 17;
  bench.UpTo(2);
  bench.product.m = bench.product.n = kept ? 17 : 18;
  bench.product.k = 16;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void garbage_is_garbage_when_transposed(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = 17;  // of k
  bench.CopyIn();
  bench.to_l0.repeatTimes = 2;
  bench.to_l0.srcStride = 2;
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);
  bench.to_l0.ifTranspose = true;
  AscendC::LoadData(bench.b2, bench.b1, bench.to_l0);
  AscendC::LoadData(bench.b2[2 * kFractal], bench.b1[kFractal], bench.to_l0);
  Order<HardEvent::MTE1_M>();
  bench.product.m = 16;
  bench.product.k = kept ? 17 : 18;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void sums_start_with_something(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  bench.product.cmatrixInitVal = kept;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void results_were_computed(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.product.m = kept ? 32 : 31;
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void constants_fill_what_is_missing(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.to_l1.nValue = 16;
  DataCopy(bench.a1, bench.in, bench.to_l1);
  DataCopy(bench.b1, bench.in, bench.to_l1);
  if constexpr (kept) {
    AscendC::InitConstValue(bench.a1[16 * 16], {2, 16, 16, half(0.0f)});
    AscendC::InitConstValue(bench.b1[16 * 16], {2, 16, 16, half(0.0f)});
  }
  Order<HardEvent::MTE2_MTE1>();
  bench.Load();
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

// ---- Order
// ----------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void mte1_waits_for_mte2(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a1, bench.in, bench.to_l1);
  if constexpr (kept) Order<HardEvent::MTE2_MTE1>();
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_waits_for_mte1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  if constexpr (kept) Order<HardEvent::MTE1_MTE2>();
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void m_waits_for_mte1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);
  AscendC::LoadData(bench.b2, bench.b1, bench.to_l0);
  if constexpr (kept) Order<HardEvent::MTE1_M>();
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void mte1_waits_for_the_product(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  if constexpr (kept) Order<HardEvent::M_MTE1>();
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void fix_waits_for_m(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  if constexpr (kept) Order<HardEvent::M_FIX>();
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void m_waits_for_fix(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(4);
  if constexpr (kept) Order<HardEvent::FIX_M>();
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void small_products_add_up_in_order(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  if constexpr (kept) PipeBarrier<PIPE_M>();
  bench.product.cmatrixInitVal = false;
  AscendC::Mmad(bench.c, bench.a2, bench.b2, bench.product);  // breaks here
}

// From ten fractals on, products keep their order.
template <bool kept>
__aicore__ inline void large_products_add_up_in_order(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(2);
  LocalTensor<float> c(TPosition::CO1, 8192, 64 * 64);
  bench.product.m = kept ? 64 : 48;
  bench.product.n = 48;
  bench.product.k = 16;
  AscendC::Mmad(c, bench.a2, bench.b2, bench.product);
  bench.product.cmatrixInitVal = false;
  AscendC::Mmad(c, bench.a2, bench.b2, bench.product);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_writes_l1_in_order(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a1, bench.in, bench.to_l1);
  if constexpr (kept) PipeBarrier<PIPE_MTE2>();
  DataCopy(bench.a1, bench.in, bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void mte1_writes_l0_in_order(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.CopyIn();
  AscendC::LoadData(bench.a2, bench.a1, bench.to_l0);
  if constexpr (kept) PipeBarrier<PIPE_MTE1>();
  AscendC::LoadData(bench.a2, bench.b1, bench.to_l0);  // breaks here
}

template <bool kept>
__aicore__ inline void fix_writes_gm_in_order(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(4);
  if constexpr (kept) PipeBarrier<PIPE_FIX>();
  AscendC::Fixpipe(bench.out, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_reads_what_fix_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(4);
  if constexpr (kept) Order<HardEvent::FIX_MTE2>();
  GlobalTensor<half> again;
  again.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(out));
  Order<HardEvent::MTE1_MTE2>();
  DataCopy(bench.a1, again, bench.to_l1);  // breaks here
}

// A queue sets the flags, and ends the use of a tensor.
template <bool kept>
__aicore__ inline void l1_queues_take_tensors_back(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::TQue<TPosition::A1, 1> queue;
  bench.pipe.InitBuffer(queue, 2, kSize * sizeof(half));
  LocalTensor<half> filled = queue.AllocTensor<half>();
  DataCopy(filled, bench.in, bench.to_l1);
  queue.EnQue(filled);
  LocalTensor<half> taken = queue.DeQue<half>();
  AscendC::LoadData(bench.a2, taken, bench.to_l0);
  queue.FreeTensor(taken);
  if constexpr (kept) taken = queue.AllocTensor<half>();
  AscendC::LoadData(bench.b2, taken, bench.to_l0);  // breaks here
  if constexpr (kept) queue.FreeTensor(taken);
}

// ---- GM
// ---------------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void matrices_are_read_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a1, bench.in[kSize + (kept ? 0 : 16)], bench.to_l1);  // breaks here
}

template <bool kept>
__aicore__ inline void results_are_written_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  AscendC::Fixpipe(bench.out[kept ? 0 : 16], bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void results_go_to_outputs(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.UpTo(3);
  Order<HardEvent::M_FIX>();
  GlobalTensor<float> target;
  target.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(kept ? out : in));
  AscendC::Fixpipe(target, bench.c, bench.to_gm);  // breaks here
}

template <bool kept>
__aicore__ inline void workspaces_are_garbage(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  GlobalTensor<half> source;
  source.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(kept ? in : out));
  DataCopy(bench.a1, source, bench.to_l1);  // breaks here
}

}  // namespace

CUBE_RULE(cubes_have_no_vector_unit)
CUBE_RULE(cubes_have_no_unified_buffer)
CUBE_RULE(tensors_are_placed_in_memories_of_the_core)
CUBE_RULE(events_are_between_pipes_of_the_core)
CUBE_RULE(pipes_have_set_their_own_flags)
CUBE_RULE(pipes_find_their_flags_set)
CUBE_RULE(pipes_hold_their_own_ids)
CUBE_RULE(barriers_are_on_pipes_of_the_core)
CUBE_RULE(loads_come_from_l1)
CUBE_RULE(left_matrices_lie_in_l0a)
CUBE_RULE(matrices_become_fractals_in_l1)
CUBE_RULE(l1_capacity)
CUBE_RULE(l0_capacity)
CUBE_RULE(l0c_capacity)
CUBE_RULE(fractals_fit_into_l1)
CUBE_RULE(loads_stay_inside_l1)
CUBE_RULE(loads_stay_inside_l0)
CUBE_RULE(products_stay_inside_l0c)
CUBE_RULE(operands_stay_inside_l0)
CUBE_RULE(results_come_from_inside_l0c)
CUBE_RULE(l1_is_used_in_blocks)
CUBE_RULE(l0_is_used_in_fractals)
CUBE_RULE(products_start_at_fractals)
CUBE_RULE(results_start_at_rows)
CUBE_RULE(rows_of_gm_have_16_bit_strides)
CUBE_RULE(columns_of_blocks_have_a_stride)
CUBE_RULE(columns_of_blocks_lie_apart)
CUBE_RULE(matrices_have_rows)
CUBE_RULE(loads_repeat_255_times)
CUBE_RULE(loads_transpose_16_bit_types)
CUBE_RULE(images_have_strides_to_63)
CUBE_RULE(images_are_read_inside_their_matrix)
CUBE_RULE(images_are_cut_at_fractals)
CUBE_RULE(images_are_described_first)
CUBE_RULE(images_stay_inside_l1)
CUBE_RULE(images_are_read_when_they_are_there)
CUBE_RULE(squares_do_not_overwrite_each_other)
CUBE_RULE(products_have_4095_rows)
CUBE_RULE(products_have_a_depth)
CUBE_RULE(products_have_no_bias)
CUBE_RULE(results_have_whole_fractals_of_columns)
CUBE_RULE(results_are_converted_to_the_output)
CUBE_RULE(rows_of_results_lie_apart)
CUBE_RULE(columns_of_results_lie_apart)
CUBE_RULE(channels_are_split_in_nz)
CUBE_RULE(l1_is_written_before_its_use)
CUBE_RULE(padding_may_be_garbage)
CUBE_RULE(garbage_is_garbage_when_transposed)
CUBE_RULE(sums_start_with_something)
CUBE_RULE(results_were_computed)
CUBE_RULE(constants_fill_what_is_missing)
CUBE_RULE(mte1_waits_for_mte2)
CUBE_RULE(mte2_waits_for_mte1)
CUBE_RULE(m_waits_for_mte1)
CUBE_RULE(mte1_waits_for_the_product)
CUBE_RULE(fix_waits_for_m)
CUBE_RULE(m_waits_for_fix)
CUBE_RULE(small_products_add_up_in_order)
CUBE_RULE(large_products_add_up_in_order)
CUBE_RULE(mte2_writes_l1_in_order)
CUBE_RULE(mte1_writes_l0_in_order)
CUBE_RULE(fix_writes_gm_in_order)
CUBE_RULE(mte2_reads_what_fix_wrote)
CUBE_RULE(l1_queues_take_tensors_back)
CUBE_RULE(matrices_are_read_inside)
CUBE_RULE(results_are_written_inside)
CUBE_RULE(results_go_to_outputs)
CUBE_RULE(workspaces_are_garbage)
