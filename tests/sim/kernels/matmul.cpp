// Products of whole matrices on the cube cores, and mixed kernels, that keep all the rules.
#include "kernel_operator.h"

namespace {

using AscendC::DataCopy;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TBuf;
using AscendC::TPosition;

__aicore__ inline int64_t CeilTo(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

template <HardEvent event>
__aicore__ inline void Order() {
  AscendC::SetFlag<event>(EVENT_ID0);
  AscendC::WaitFlag<event>(EVENT_ID0);
}

// One product that fits into the buffers. a is [m, k]; b is [n, k], or [k, n] where it is turned.
template <typename T, bool turned>
class Product {
 public:
  static constexpr int64_t kWidth = 32 / sizeof(T);     // elements of k in a row of a fractal
  static constexpr int64_t kFractal = 512 / sizeof(T);  // elements of a fractal

  __aicore__ inline Product(int64_t m, int64_t n, int64_t k)
      : m_(m), n_(n), k_(k), m16_(CeilTo(m, 16)), n16_(CeilTo(n, 16)), k16_(CeilTo(k, 16)) {
    pipe_.InitBuffer(a1_buffer_, 128 * 1024);
    pipe_.InitBuffer(b1_buffer_, 128 * 1024);
    pipe_.InitBuffer(a2_buffer_, 64 * 1024);
    pipe_.InitBuffer(b2_buffer_, 64 * 1024);
    pipe_.InitBuffer(c_buffer_, 128 * 1024);
    a1_ = a1_buffer_.Get<T>();
    b1_ = b1_buffer_.Get<T>();
    a2_ = a2_buffer_.Get<T>();
    b2_ = b2_buffer_.Get<T>();
    c_ = c_buffer_.Get<float>();
  }

  __aicore__ inline void CopyIn(const GlobalTensor<T>& a, const GlobalTensor<T>& b) {
    ToL1(a1_, a, m_, k_);
    if constexpr (!turned) {
      ToL1(b1_, b, n_, k_);
    } else if constexpr (sizeof(T) == 2) {
      ToL1(b1_, b, k_, n_);
    } else {
      // Squares of 16 rows of k each: two neighbouring fractals side by side are one square.
      for (int64_t row = 0; row < k_; row += 16) {
        const int64_t rows = row + 16 <= k_ ? 16 : k_ - row;
        ToL1(b1_[static_cast<uint32_t>(row * n16_)], b[row * n_], rows, n_, 16);
      }
    }
  }

  __aicore__ inline void Load() {
    const int64_t depth = CeilTo(k_, kWidth) / kWidth;
    AscendC::LoadData2DParams rows;
    rows.repeatTimes = depth;
    rows.srcStride = m16_ / 16;
    for (int64_t i = 0; i < m16_ / 16; ++i) {
      AscendC::LoadData(a2_[static_cast<uint32_t>(i * depth * kFractal)],
                        a1_[static_cast<uint32_t>(i * kFractal)], rows);
    }
    if constexpr (!turned) {
      rows.repeatTimes = n16_ / 16;
      rows.srcStride = 1;
      for (int64_t i = 0; i < depth; ++i) {
        const auto at = static_cast<uint32_t>(i * (n16_ / 16) * kFractal);
        AscendC::LoadData(b2_[at], b1_[at], rows);
      }
    } else if constexpr (sizeof(T) == 2) {
      rows.repeatTimes = n16_ / 16;
      rows.srcStride = k16_ / 16;
      rows.ifTranspose = true;
      for (int64_t i = 0; i < k16_ / 16; ++i) {
        AscendC::LoadData(b2_[static_cast<uint32_t>(i * (n16_ / 16) * kFractal)],
                          b1_[static_cast<uint32_t>(i * kFractal)], rows);
      }
    } else {
      AscendC::LoadData2dTransposeParams squares;
      squares.repeatTimes = n16_ / 16;
      squares.srcStride = 1;
      squares.dstFracGap = n16_ / 16 - 1;
      for (int64_t i = 0; i < k16_ / 16; ++i) {
        const auto at = static_cast<uint32_t>(i * n16_ * 16);
        AscendC::LoadDataWithTranspose(b2_[at], b1_[at], squares);
      }
    }
  }

  __aicore__ inline void CopyVector(const GlobalTensor<T>& a) {
    DataCopy(a1_, a, static_cast<uint32_t>(k_));
  }

  __aicore__ inline void LoadVector() {
    AscendC::LoadData2DParams row;
    row.repeatTimes = CeilTo(k_, kFractal) / kFractal;
    row.srcStride = 1;
    AscendC::LoadData(a2_, a1_, row);
  }

  __aicore__ inline void Multiply() {
    AscendC::MmadParams params;
    params.m = m_;
    params.n = n_;
    params.k = k_;
    AscendC::Mmad(c_, a2_, b2_, params);
  }

  template <typename O>
  __aicore__ inline void CopyOut(const GlobalTensor<O>& c) {
    AscendC::FixpipeParamsV220 params;
    params.nSize = n16_;
    params.mSize = m_;
    params.srcStride = m16_;
    params.dstStride = n16_;
    if constexpr (std::is_same_v<O, half>) params.quantPre = QuantMode_t::F322F16;
    if constexpr (std::is_same_v<O, bfloat16_t>) params.quantPre = QuantMode_t::F322BF16;
    AscendC::Fixpipe<O, float, AscendC::CFG_ROW_MAJOR>(c, c_, params);
  }

  template <typename O>
  __aicore__ inline void Run(const GlobalTensor<T>& a, const GlobalTensor<T>& b,
                             const GlobalTensor<O>& c) {
    CopyIn(a, b);
    Order<HardEvent::MTE2_MTE1>();
    Load();
    Order<HardEvent::MTE1_M>();
    Multiply();
    Order<HardEvent::M_FIX>();
    CopyOut(c);
  }

 private:
  // The columns of blocks have room for `height` rows; what lies behind the last row is zero,
  // because LoadData takes whole fractals. 0 stands for the rows, rounded up.
  __aicore__ inline void ToL1(const LocalTensor<T>& dst, const GlobalTensor<T>& src, int64_t rows,
                              int64_t columns, int64_t height = 0) {
    AscendC::Nd2NzParams params;
    params.ndNum = 1;
    params.nValue = rows;
    params.dValue = columns;
    params.srcDValue = columns;
    params.dstNzC0Stride = height == 0 ? CeilTo(rows, 16) : height;
    params.dstNzNStride = 1;
    DataCopy(dst, src, params);
  }

  int64_t m_;
  int64_t n_;
  int64_t k_;
  int64_t m16_;
  int64_t n16_;
  int64_t k16_;
  AscendC::TPipe pipe_;
  TBuf<TPosition::A1> a1_buffer_;
  TBuf<TPosition::B1> b1_buffer_;
  TBuf<TPosition::A2> a2_buffer_;
  TBuf<TPosition::B2> b2_buffer_;
  TBuf<TPosition::CO1> c_buffer_;
  LocalTensor<T> a1_;
  LocalTensor<T> b1_;
  LocalTensor<T> a2_;
  LocalTensor<T> b2_;
  LocalTensor<float> c_;
};

template <typename T, bool turned, typename O>
__aicore__ inline void RunProduct(GM_ADDR a_address, GM_ADDR b_address, GM_ADDR c_address,
                                  int64_t m, int64_t n, int64_t k) {
  GlobalTensor<T> a;
  GlobalTensor<T> b;
  GlobalTensor<O> c;
  a.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(a_address));
  b.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(b_address));
  c.SetGlobalBuffer(reinterpret_cast<__gm__ O*>(c_address));
  Product<T, turned>(m, n, k).Run(a, b, c);
}

// Rows of c that an AIV takes, doubled.
__aicore__ inline void Double(const GlobalTensor<float>& c, const GlobalTensor<float>& out,
                              uint32_t count) {
  AscendC::TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, count * sizeof(float));
  const LocalTensor<float> values = buffer.Get<float>();
  DataCopy(values, c, count);
  Order<HardEvent::MTE2_V>();
  AscendC::Muls(values, values, 2.0f, count);
  Order<HardEvent::V_MTE3>();
  DataCopy(out, values, count);
}

}  // namespace

#define PRODUCT(name, T, turned, O)                                                      \
  extern "C" __global__ __aicore__ void name(GM_ADDR a, GM_ADDR b, GM_ADDR c, int64_t m, \
                                             int64_t n, int64_t k) {                     \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                                      \
    RunProduct<T, turned, O>(a, b, c, m, n, k);                                          \
  }

// One product [m, n] of a [m, k] and b [k, n], whose rows lie in L1 as they do in GM: the loads of
// L0 take them for images, a filter as wide as a row, and the half of the columns at a time.
template <typename T>
class DenseProduct {
 public:
  __aicore__ inline DenseProduct(int64_t m, int64_t n, int64_t k) : m_(m), n_(n), k_(k) {
    pipe_.InitBuffer(a1_buffer_, 128 * 1024);
    pipe_.InitBuffer(b1_buffer_, 128 * 1024);
    pipe_.InitBuffer(a2_buffer_, 64 * 1024);
    pipe_.InitBuffer(b2_buffer_, 64 * 1024);
    pipe_.InitBuffer(c_buffer_, 128 * 1024);
  }

  __aicore__ inline void Run(const GlobalTensor<T>& a, const GlobalTensor<T>& b,
                             const GlobalTensor<float>& c) {
    const LocalTensor<T> a1 = a1_buffer_.template Get<T>();
    const LocalTensor<T> b1 = b1_buffer_.template Get<T>();
    const LocalTensor<T> a2 = a2_buffer_.template Get<T>();
    const LocalTensor<T> b2 = b2_buffer_.template Get<T>();
    const LocalTensor<float> c1 = c_buffer_.template Get<float>();
    DataCopy(a1, a, static_cast<uint32_t>(m_ * k_));
    DataCopy(b1, b, static_cast<uint32_t>(k_ * n_));
    Order<HardEvent::MTE2_MTE1>();
    AscendC::LoadData3DParamsV2<T> rows = RowsOf(m_, k_);
    AscendC::LoadData(a2, a1, rows);
    const uint8_t no_padding[4] = {0, 0, 0, 0};
    const AscendC::LoadData3DParamsV2<T> others = RowsOf(k_, n_);
    AscendC::SetFmatrix(1, others.l1W, no_padding, AscendC::FmatrixMode::FMATRIX_LEFT);
    rows = others;
    rows.kExtension = 16;
    for (int64_t column = 0; column < n_; column += 16) {
      rows.kStartPt = column;
      AscendC::LoadData<T, kKeep>(b2[static_cast<uint32_t>(column * k_)], b1, rows);
    }
    Order<HardEvent::MTE1_M>();
    for (int64_t column = 0; column < n_; column += 16) {
      AscendC::MmadParams params;
      params.m = m_;
      params.n = 16;
      params.k = k_;
      AscendC::Mmad(c1[static_cast<uint32_t>(column * m_)], a2,
                    b2[static_cast<uint32_t>(column * k_)], params);
    }
    Order<HardEvent::M_FIX>();
    AscendC::FixpipeParamsV220 out;
    out.nSize = out.dstStride = n_;
    out.mSize = out.srcStride = m_;
    AscendC::Fixpipe<float, float, AscendC::CFG_ROW_MAJOR>(c, c1, out);
  }

 private:
  static constexpr AscendC::IsResetLoad3dConfig kKeep = {false, false};

  // A row of `width` elements is a place of the filter.
  __aicore__ inline AscendC::LoadData3DParamsV2<T> RowsOf(int64_t rows, int64_t width) const {
    AscendC::LoadData3DParamsV2<T> params;
    params.l1H = 1;
    params.l1W = rows * width / 16;
    params.channelSize = 16;
    params.filterW = params.strideW = width / 16;
    params.mExtension = rows;
    params.kExtension = width;
    return params;
  }

  AscendC::TPipe pipe_;
  TBuf<TPosition::A1> a1_buffer_;
  TBuf<TPosition::B1> b1_buffer_;
  TBuf<TPosition::A2> a2_buffer_;
  TBuf<TPosition::B2> b2_buffer_;
  TBuf<TPosition::CO1> c_buffer_;
  int64_t m_;
  int64_t n_;
  int64_t k_;
};

#define DENSE_PRODUCT(name, type)                                                                  \
  extern "C" __global__ __aicore__ void name(GM_ADDR a_address, GM_ADDR b_address,                 \
                                             GM_ADDR c_address, int64_t m, int64_t n, int64_t k) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);                                                \
    GlobalTensor<type> a;                                                                          \
    GlobalTensor<type> b;                                                                          \
    GlobalTensor<float> c;                                                                         \
    a.SetGlobalBuffer(reinterpret_cast<__gm__ type*>(a_address));                                  \
    b.SetGlobalBuffer(reinterpret_cast<__gm__ type*>(b_address));                                  \
    c.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(c_address));                                 \
    DenseProduct<type>(m, n, k).Run(a, b, c);                                                      \
  }

DENSE_PRODUCT(half_dense_turned, half)
DENSE_PRODUCT(bfloat16_dense_turned, bfloat16_t)

PRODUCT(half_straight, half, false, float)
PRODUCT(half_turned, half, true, float)
PRODUCT(bfloat16_straight, bfloat16_t, false, float)
PRODUCT(bfloat16_turned, bfloat16_t, true, float)
PRODUCT(float_straight, float, false, float)
PRODUCT(float_turned, float, true, float)
PRODUCT(half_to_half, half, false, half)
PRODUCT(half_to_bfloat16, half, false, bfloat16_t)

// One row of 256 is a vector for the unit: it lies in L0A side by side, not in the rows of
// fractals.
extern "C" __global__ __aicore__ void half_vector(GM_ADDR a_address, GM_ADDR b_address,
                                                  GM_ADDR c_address, int64_t n) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
  GlobalTensor<half> a;
  GlobalTensor<half> b;
  GlobalTensor<float> c;
  a.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(a_address));
  b.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(b_address));
  c.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(c_address));
  Product<half, false> product(1, n, 256);
  product.CopyIn(a, b);
  AscendC::PipeBarrier<PIPE_MTE2>();
  product.CopyVector(a);
  Order<HardEvent::MTE2_MTE1>();
  product.Load();
  AscendC::PipeBarrier<PIPE_MTE1>();
  product.LoadVector();
  Order<HardEvent::MTE1_M>();
  product.Multiply();
  Order<HardEvent::M_FIX>();
  product.CopyOut(c);
}

// Each group multiplies 16 rows of a with b, into the workspace; its two AIVs double eight of them.
extern "C" __global__ __aicore__ void doubled_product(GM_ADDR a_address, GM_ADDR b_address,
                                                      GM_ADDR c_address, GM_ADDR out_address,
                                                      int64_t n, int64_t k) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  GlobalTensor<float> c;
  c.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(c_address));
  if ASCEND_IS_AIC {
    const int64_t first = AscendC::GetBlockIdx() * 16;
    GlobalTensor<half> a;
    GlobalTensor<half> b;
    a.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(a_address));
    b.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(b_address));
    Product<half, false>(16, n, k).Run(a[first * k], b, c[first * n]);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(0);
  }
  if ASCEND_IS_AIV {
    const int64_t first = AscendC::GetBlockIdx() * 8;
    GlobalTensor<float> out;
    out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out_address));
    AscendC::CrossCoreWaitFlag(0);
    Double(c[first * n], out[first * n], static_cast<uint32_t>(8 * n));
  }
}
