// Reductions over a repeat, a 32-byte block, a pair of lanes, or a whole tensor.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

// One result a repeat, `dstRepStride` results apart.
template <typename T, bool isSetMask = true>
SIM_API void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                            const int32_t mask, const int32_t repeatTime,
                            const int32_t dstRepStride, const int32_t srcBlkStride,
                            const int32_t srcRepStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("WholeReduceSum", T, half, float);
  sim::WholeReduce("WholeReduceSum", sim::ReduceOp::kSum, dst.sim_operand(0, dstRepStride),
                   src.sim_operand(srcBlkStride, srcRepStride), ReduceOrder::ORDER_ONLY_VALUE,
                   sim::Repeats<isSetMask>(static_cast<uint64_t>(mask), repeatTime), SIM_HERE);
}

template <typename T, bool isSetMask = true>
SIM_API void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                            const uint64_t mask[], const int32_t repeatTime,
                            const int32_t dstRepStride, const int32_t srcBlkStride,
                            const int32_t srcRepStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("WholeReduceSum", T, half, float);
  sim::WholeReduce("WholeReduceSum", sim::ReduceOp::kSum, dst.sim_operand(0, dstRepStride),
                   src.sim_operand(srcBlkStride, srcRepStride), ReduceOrder::ORDER_ONLY_VALUE,
                   sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);
}

// Value and index of the extreme of each repeat, in the order asked for.
#define SIM_WHOLE_EXTREME(Name, Op)                                                               \
  template <typename T, bool isSetMask = true>                                                    \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,     \
                    const int32_t repeatTime, const int32_t dstRepStride,                         \
                    const int32_t srcBlkStride, const int32_t srcRepStride,                       \
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, SIM_SITE) {               \
    SIM_REQUIRE_TYPE(#Name, T, half, float);                                                      \
    sim::WholeReduce(#Name, sim::ReduceOp::Op, dst.sim_operand(0, dstRepStride),                  \
                     src.sim_operand(srcBlkStride, srcRepStride), order,                          \
                     sim::Repeats<isSetMask>(static_cast<uint64_t>(mask), repeatTime), SIM_HERE); \
  }                                                                                               \
  template <typename T, bool isSetMask = true>                                                    \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[],  \
                    const int32_t repeatTime, const int32_t dstRepStride,                         \
                    const int32_t srcBlkStride, const int32_t srcRepStride,                       \
                    ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, SIM_SITE) {               \
    SIM_REQUIRE_TYPE(#Name, T, half, float);                                                      \
    sim::WholeReduce(#Name, sim::ReduceOp::Op, dst.sim_operand(0, dstRepStride),                  \
                     src.sim_operand(srcBlkStride, srcRepStride), order,                          \
                     sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                        \
  }

SIM_WHOLE_EXTREME(WholeReduceMax, kMax)
SIM_WHOLE_EXTREME(WholeReduceMin, kMin)
#undef SIM_WHOLE_EXTREME

// One result for every 32-byte block, or every pair of lanes; a repeat's results lie side by side.
// Beware the order of `repeatTime` and `mask`.
#define SIM_GROUP_REDUCE(Name, Op, Group)                                                         \
  template <typename T, bool isSetMask = true>                                                    \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src,                         \
                    const int32_t repeatTime, const int32_t mask, const int32_t dstRepStride,     \
                    const int32_t srcBlkStride, const int32_t srcRepStride, SIM_SITE) {           \
    SIM_REQUIRE_TYPE(#Name, T, half, float);                                                      \
    sim::GroupReduce(#Name, sim::ReduceOp::Op, Group, dst.sim_operand(0, dstRepStride),           \
                     src.sim_operand(srcBlkStride, srcRepStride),                                 \
                     sim::Repeats<isSetMask>(static_cast<uint64_t>(mask), repeatTime), SIM_HERE); \
  }                                                                                               \
  template <typename T, bool isSetMask = true>                                                    \
  SIM_API void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src,                         \
                    const int32_t repeatTime, const uint64_t mask[], const int32_t dstRepStride,  \
                    const int32_t srcBlkStride, const int32_t srcRepStride, SIM_SITE) {           \
    SIM_REQUIRE_TYPE(#Name, T, half, float);                                                      \
    sim::GroupReduce(#Name, sim::ReduceOp::Op, Group, dst.sim_operand(0, dstRepStride),           \
                     src.sim_operand(srcBlkStride, srcRepStride),                                 \
                     sim::Repeats<isSetMask>(mask, repeatTime), SIM_HERE);                        \
  }

SIM_GROUP_REDUCE(BlockReduceSum, kSum, 32)
SIM_GROUP_REDUCE(BlockReduceMax, kMax, 32)
SIM_GROUP_REDUCE(BlockReduceMin, kMin, 32)
SIM_GROUP_REDUCE(PairReduceSum, kSum, 2)
#undef SIM_GROUP_REDUCE

// WholeReduceSum with other argument order; dstBlkStride has no effect.
template <typename T, bool isSetMask = true>
SIM_API void RepeatReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                             const int32_t repeatTime, const int32_t mask,
                             const int32_t /*dstBlkStride*/, const int32_t srcBlkStride,
                             const int32_t dstRepStride, const int32_t srcRepStride, SIM_SITE) {
  SIM_REQUIRE_TYPE("RepeatReduceSum", T, half, float);
  sim::WholeReduce("RepeatReduceSum", sim::ReduceOp::kSum, dst.sim_operand(0, dstRepStride),
                   src.sim_operand(srcBlkStride, srcRepStride), ReduceOrder::ORDER_ONLY_VALUE,
                   sim::Repeats<isSetMask>(static_cast<uint64_t>(mask), repeatTime), SIM_HERE);
}

// The first `count` elements to one. The work buffer takes the results of the repeats.
template <typename T, bool isSetMask = true>
SIM_API void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                       const LocalTensor<T>& sharedTmpBuffer, const int32_t count, SIM_SITE) {
  SIM_REQUIRE_TYPE("ReduceSum", T, half, float);
  sim::FullReduce("ReduceSum", sim::ReduceOp::kSum, dst.sim_operand(), src.sim_operand(),
                  sharedTmpBuffer.sim_operand(), false, sim::Count(count), SIM_HERE);
}

template <typename T>
SIM_API void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                       const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                       bool calIndex = false, SIM_SITE) {
  SIM_REQUIRE_TYPE("ReduceMax", T, half, float);
  sim::FullReduce("ReduceMax", sim::ReduceOp::kMax, dst.sim_operand(), src.sim_operand(),
                  sharedTmpBuffer.sim_operand(), calIndex, sim::Count(count), SIM_HERE);
}

template <typename T>
SIM_API void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                       const LocalTensor<T>& sharedTmpBuffer, const int32_t count,
                       bool calIndex = false, SIM_SITE) {
  SIM_REQUIRE_TYPE("ReduceMin", T, half, float);
  sim::FullReduce("ReduceMin", sim::ReduceOp::kMin, dst.sim_operand(), src.sim_operand(),
                  sharedTmpBuffer.sim_operand(), calIndex, sim::Count(count), SIM_HERE);
}

}  // namespace AscendC
