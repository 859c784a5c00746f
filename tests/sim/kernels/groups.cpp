// The rules between cube cores and vector cores. Each kernel runs on two groups of an AIC and two
// AIVs.
#include "kernel_operator.h"

#define GROUP_RULE(name)                                                         \
  extern "C" __global__ __aicore__ void name##_broken(GM_ADDR in, GM_ADDR out) { \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                           \
    name<false>(in, out);                                                        \
  }                                                                              \
  extern "C" __global__ __aicore__ void name##_kept(GM_ADDR in, GM_ADDR out) {   \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                           \
    name<true>(in, out);                                                         \
  }

namespace {

using AscendC::CrossCoreSetFlag;
using AscendC::CrossCoreWaitFlag;
using AscendC::DataCopy;
using AscendC::GetBlockIdx;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TBuf;
using AscendC::TPosition;

constexpr uint32_t kTile = 512;  // floats of `out` that a group writes: 16 x 32
constexpr uint32_t kPart = 256;  // those that one of its AIVs reads

__aicore__ inline bool OnCube() {
  if ASCEND_IS_AIC
    return true;
  return false;
}

template <HardEvent event>
__aicore__ inline void Order() {
  AscendC::SetFlag<event>(EVENT_ID0);
  AscendC::WaitFlag<event>(EVENT_ID0);
}

// What an AIC does: it has a product in L0C and may write it to `out`.
class Cube {
 public:
  __aicore__ inline Cube(GM_ADDR in, GM_ADDR out_address) {
    out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out_address));
    to_gm.nSize = to_gm.dstStride = 32;
    to_gm.mSize = to_gm.srcStride = 16;
    pipe_.InitBuffer(l1_, 2048);
    pipe_.InitBuffer(a2_, 1024);
    pipe_.InitBuffer(b2_, 2048);
    pipe_.InitBuffer(c_, kTile * sizeof(float));
    GlobalTensor<half> source;
    source.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(in));
    DataCopy(l1_.Get<half>(), source, 1024);
    Order<HardEvent::MTE2_MTE1>();
    AscendC::LoadData2DParams load;
    load.repeatTimes = 2;
    load.srcStride = 1;
    AscendC::LoadData(a2_.Get<half>(), l1_.Get<half>(), load);
    load.repeatTimes = 4;
    AscendC::LoadData(b2_.Get<half>(), l1_.Get<half>(), load);
    Order<HardEvent::MTE1_M>();
    AscendC::MmadParams product;
    product.m = 16;
    product.n = product.k = 32;
    AscendC::Mmad(c_.Get<float>(), a2_.Get<half>(), b2_.Get<half>(), product);
    Order<HardEvent::M_FIX>();
  }

  // The tile of a group, or of the one that is `next` to it.
  __aicore__ inline GlobalTensor<float> Tile(int64_t next = 0) {
    return out[static_cast<uint64_t>((GetBlockIdx() + next) % 2 * kTile)];
  }

  __aicore__ inline void Write(const GlobalTensor<float>& to) {
    AscendC::Fixpipe(to, Product(), to_gm);
  }

  __aicore__ inline LocalTensor<float> Product() { return c_.Get<float>(); }

  AscendC::FixpipeParamsV220 to_gm;
  GlobalTensor<float> out;

 private:
  AscendC::TPipe pipe_;
  TBuf<TPosition::A1> l1_;
  TBuf<TPosition::A2> a2_;
  TBuf<TPosition::B2> b2_;
  TBuf<TPosition::CO1> c_;
};

// What an AIV does with its half of the tile.
class Vector {
 public:
  __aicore__ inline explicit Vector(GM_ADDR out_address) {
    out.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(out_address));
    pipe_.InitBuffer(buffer_, kPart * sizeof(float));
    values = buffer_.Get<float>();
  }

  __aicore__ inline GlobalTensor<float> Part(int64_t next = 0) {
    return out[static_cast<uint64_t>((GetBlockIdx() + next) % 4 * kPart)];
  }

  __aicore__ inline void Write(const GlobalTensor<float>& to) {
    AscendC::Duplicate(values, 1.0f, kPart);
    Order<HardEvent::V_MTE3>();
    DataCopy(to, values, kPart);
  }

  GlobalTensor<float> out;
  LocalTensor<float> values;

 private:
  AscendC::TPipe pipe_;
  TBuf<TPosition::VECCALC> buffer_;
};

// ---- Races
// ----------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void vectors_wait_for_their_cube(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    if constexpr (kept) CrossCoreSetFlag<2, PIPE_FIX>(0);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    if constexpr (kept) CrossCoreWaitFlag(0);
    DataCopy(vector.values, vector.Part(), kPart);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void flags_follow_the_pipe_that_writes(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    CrossCoreSetFlag<2, kept ? PIPE_FIX : PIPE_M>(0);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    CrossCoreWaitFlag(0);
    DataCopy(vector.values, vector.Part(), kPart);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void cubes_wait_for_their_vectors(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    CrossCoreWaitFlag(0);
    DataCopy(LocalTensor<float>(TPosition::A1, 8192, kPart), cube.Tile(), kPart);  // breaks here
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    if constexpr (!kept) CrossCoreSetFlag<2, PIPE_MTE3>(0);
    vector.Write(vector.Part());
    if constexpr (kept) CrossCoreSetFlag<2, PIPE_MTE3>(0);
  }
}

// A tile is written again only after it was read.
template <bool kept>
__aicore__ inline void tiles_are_read_before_the_next(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    CrossCoreSetFlag<2, PIPE_FIX>(0);
    CrossCoreWaitFlag(1);
    AscendC::PipeBarrier<PIPE_FIX>();
    AscendC::Fixpipe(cube.Tile(), cube.Product(), cube.to_gm);  // breaks here
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    CrossCoreWaitFlag(0);
    if constexpr (!kept) CrossCoreSetFlag<2, PIPE_MTE2>(1);
    DataCopy(vector.values, vector.Part(), kPart);
    if constexpr (kept) CrossCoreSetFlag<2, PIPE_MTE2>(1);
  }
}

// What one AIV has done reaches the other through their AIC.
template <bool kept>
__aicore__ inline void order_goes_through_the_cube(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreWaitFlag(0);
    CrossCoreSetFlag<2, PIPE_FIX>(1);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    const bool first = AscendC::GetSubBlockIdx() == 0;
    if (first) vector.Write(vector.Part());
    CrossCoreSetFlag<2, kept ? PIPE_MTE3 : PIPE_MTE2>(0);
    CrossCoreWaitFlag(1);
    if (!first) {
      DataCopy(vector.values, vector.Part(3), kPart);  // breaks here
    }
  }
}

template <bool kept>
__aicore__ inline void groups_do_not_wait_for_each_other(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    CrossCoreSetFlag<2, PIPE_FIX>(0);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    CrossCoreWaitFlag(0);
    if constexpr (kept) AscendC::SyncAll();
    DataCopy(vector.values, vector.Part(2), kPart);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void vectors_of_a_group_meet(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIV {
    Vector vector(out);
    const bool first = AscendC::GetSubBlockIdx() == 0;
    if (first) vector.Write(vector.Part());
    if constexpr (kept) {
      CrossCoreSetFlag<1, PIPE_MTE3>(0);
      CrossCoreWaitFlag(0);
    }
    if (!first) {
      DataCopy(vector.values, vector.Part(3), kPart);  // breaks here
    }
  }
}

template <bool kept>
__aicore__ inline void cubes_meet(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    if constexpr (kept) {
      CrossCoreSetFlag<0, PIPE_FIX>(0);
      CrossCoreWaitFlag(0);
    }
    DataCopy(LocalTensor<float>(TPosition::A1, 8192, kPart), cube.Tile(1), kPart);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void all_cores_meet(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    cube.Write(cube.Tile());
    if constexpr (kept) AscendC::SyncAll<false>();
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    if constexpr (kept) {
      AscendC::SyncAll<false>();
    } else {
      AscendC::SyncAll();
    }
    DataCopy(vector.values, vector.Part(2), kPart);  // breaks here
  }
}

// A core's own work is known to be done, once another core knows it and says so.
template <bool kept>
__aicore__ inline void answers_tell_of_the_own_past(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreWaitFlag(0);
    CrossCoreSetFlag<2, PIPE_FIX>(1);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    vector.Write(vector.Part());
    CrossCoreSetFlag<2, kept ? PIPE_MTE3 : PIPE_V>(0);
    CrossCoreWaitFlag(1);
    AscendC::Duplicate(vector.values, 2.0f, kPart);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void workspaces_are_written_by_someone(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    Cube cube(in, out);
    if (kept || GetBlockIdx() == 0) cube.Write(cube.Tile());
    CrossCoreSetFlag<2, PIPE_FIX>(0);
  }
  if ASCEND_IS_AIV {
    Vector vector(out);
    CrossCoreWaitFlag(0);
    DataCopy(vector.values, vector.Part(), kPart);  // breaks here
  }
}

// ---- Flags
// ----------------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void cubes_wait_for_both_vectors(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreWaitFlag(3);  // breaks here
  }
  if ASCEND_IS_AIV {
    if (kept || AscendC::GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(3);
  }
}

template <bool kept>
__aicore__ inline void flags_have_an_id(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(1);
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(kept ? 1 : 2);  // breaks here
  }
}

// Each waits for the other first.
template <bool kept>
__aicore__ inline void someone_sets_first(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    if constexpr (kept) CrossCoreSetFlag<2, PIPE_FIX>(1);
    CrossCoreWaitFlag(0);
    if constexpr (!kept) CrossCoreSetFlag<2, PIPE_FIX>(1);
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);  // breaks here
    CrossCoreSetFlag<2, PIPE_MTE3>(0);
  }
}

template <bool kept>
__aicore__ inline void vectors_wait_for_every_flag(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(1);  // breaks here
  }
  if ASCEND_IS_AIV {
    if (kept || AscendC::GetSubBlockIdx() == 0) CrossCoreWaitFlag(1);
  }
}

template <bool kept>
__aicore__ inline void counters_of_a_group_end_at_fifteen(GM_ADDR in, GM_ADDR out) {
  constexpr int kTimes = kept ? 15 : 16;
  if ASCEND_IS_AIC {
    for (int i = 0; i < kTimes; ++i) {
      CrossCoreSetFlag<2, PIPE_FIX>(1);  // breaks here
    }
  }
  if ASCEND_IS_AIV {
    for (int i = 0; i < kTimes; ++i) CrossCoreWaitFlag(1);
  }
}

// Whoever hears from the other side may go on; `kept` hears often enough.
template <bool kept>
__aicore__ inline void answers_hold_the_setter_back(GM_ADDR in, GM_ADDR out) {
  constexpr int kDepth = kept ? 15 : 16;  // sets for each answer
  for (int i = 0; i < 3; ++i) {
    if ASCEND_IS_AIC {
      for (int j = 0; j < kDepth; ++j) {
        CrossCoreSetFlag<2, PIPE_FIX>(1);  // breaks here
      }
      CrossCoreWaitFlag(2);
    }
    if ASCEND_IS_AIV {
      for (int j = 0; j < kDepth; ++j) CrossCoreWaitFlag(1);
      CrossCoreSetFlag<2, PIPE_MTE2>(2);
    }
  }
}

template <bool kept>
__aicore__ inline void flags_have_one_mode_at_a_time(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(1);
    CrossCoreWaitFlag(2);
  }
  if ASCEND_IS_AIV {
    CrossCoreSetFlag<2, PIPE_MTE2>(2);
    if constexpr (kept) CrossCoreWaitFlag(1);
    CrossCoreSetFlag<1, PIPE_MTE3>(1);  // breaks here
    CrossCoreWaitFlag(1);
    if constexpr (!kept) CrossCoreWaitFlag(1);
  }
}

template <bool kept>
__aicore__ inline void mode_1_is_for_vectors(GM_ADDR in, GM_ADDR out) {
  if (kept != OnCube()) {
    CrossCoreSetFlag<1, PIPE_MTE2>(1);  // breaks here
    CrossCoreWaitFlag(1);
  }
}

template <bool kept>
__aicore__ inline void sync_all_by_default_is_for_vectors(GM_ADDR in, GM_ADDR out) {
  if (kept != OnCube()) {
    AscendC::SyncAll();  // breaks here
  }
}

template <bool kept>
__aicore__ inline void cubes_set_flags_on_their_pipes(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, kept ? PIPE_MTE1 : PIPE_MTE3>(1);  // breaks here
  }
  if ASCEND_IS_AIV {
    CrossCoreWaitFlag(1);
  }
}

template <bool kept>
__aicore__ inline void types_are_the_same_on_all_cores(GM_ADDR in, GM_ADDR out) {
  if constexpr (!kept) {
    const auto other = OnCube() ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_MIX_AIC_1_1;
    KERNEL_TASK_TYPE_DEFAULT(other);  // breaks here
  }
}

// ---- Kinds of core
// --------------------------------------------------------------------------------

template <bool kept>
__aicore__ inline void vectors_have_no_l1(GM_ADDR in, GM_ADDR out) {
  if (kept == OnCube()) {
    AscendC::TPipe pipe;
    TBuf<TPosition::A1> buffer;
    pipe.InitBuffer(buffer, 1024);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void vectors_have_no_matrix_unit(GM_ADDR in, GM_ADDR out) {
  if ASCEND_IS_AIV {
    LocalTensor<float> c;
    LocalTensor<half> a;
    if constexpr (!kept) {
      AscendC::Mmad(c, a, a, AscendC::MmadParams(16, 16, 16, 0, false, true));  // breaks here
    }
  }
}

}  // namespace

GROUP_RULE(vectors_wait_for_their_cube)
GROUP_RULE(flags_follow_the_pipe_that_writes)
GROUP_RULE(cubes_wait_for_their_vectors)
GROUP_RULE(tiles_are_read_before_the_next)
GROUP_RULE(order_goes_through_the_cube)
GROUP_RULE(groups_do_not_wait_for_each_other)
GROUP_RULE(vectors_of_a_group_meet)
GROUP_RULE(cubes_meet)
GROUP_RULE(all_cores_meet)
GROUP_RULE(answers_tell_of_the_own_past)
GROUP_RULE(workspaces_are_written_by_someone)
GROUP_RULE(cubes_wait_for_both_vectors)
GROUP_RULE(flags_have_an_id)
GROUP_RULE(someone_sets_first)
GROUP_RULE(vectors_wait_for_every_flag)
GROUP_RULE(counters_of_a_group_end_at_fifteen)
GROUP_RULE(answers_hold_the_setter_back)
GROUP_RULE(flags_have_one_mode_at_a_time)
GROUP_RULE(mode_1_is_for_vectors)
GROUP_RULE(sync_all_by_default_is_for_vectors)
GROUP_RULE(cubes_set_flags_on_their_pipes)
GROUP_RULE(vectors_have_no_l1)
GROUP_RULE(vectors_have_no_matrix_unit)
GROUP_RULE(types_are_the_same_on_all_cores)

extern "C" __global__ __aicore__ void types_are_stated_first_broken(GM_ADDR in, GM_ADDR out) {
  AscendC::TPipe pipe;
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);  // breaks here
}

extern "C" __global__ __aicore__ void types_are_stated_first_kept(GM_ADDR in, GM_ADDR out) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  AscendC::TPipe pipe;
}
