// Parameter structs of the vector and copy instructions.
//
// The hardware's fields are narrow, and a value too large for them is cut silently. To report it,
// the fields here keep the whole value and the instruction checks it. Where ASCENDC_SIM_NARROW is
// defined they have their real types instead: the harness compiles every kernel once more that way,
// so that what a device compiler rejects as a narrowing conversion is rejected here too.
#pragma once

#include "types.h"

namespace sim {

#if defined(ASCENDC_SIM_NARROW) || defined(ASCENDC_SIM_COUNT)
template <typename Real>
using Field = Real;
#else
template <typename Real>
class Field {
 public:
  template <typename I, std::enable_if_t<std::is_integral_v<I>, bool> = true>
  constexpr Field(I value) : value_(static_cast<int64_t>(value)) {}  // NOLINT
  template <typename Other>
  constexpr Field(const Field<Other>& other) : value_(other) {}  // NOLINT
  constexpr operator int64_t() const { return value_; }          // NOLINT

 private:
  int64_t value_;
};
#endif

}  // namespace sim

namespace AscendC {

struct UnaryRepeatParams {
  UnaryRepeatParams() = default;
  UnaryRepeatParams(sim::Field<uint16_t> dst_block, sim::Field<uint16_t> src_block,
                    sim::Field<uint8_t> dst_repeat, sim::Field<uint8_t> src_repeat)
      : dstBlkStride(dst_block),
        srcBlkStride(src_block),
        dstRepStride(dst_repeat),
        srcRepStride(src_repeat) {}

  sim::Field<uint16_t> dstBlkStride = 1;
  sim::Field<uint16_t> srcBlkStride = 1;
  sim::Field<uint8_t> dstRepStride = 8;
  sim::Field<uint8_t> srcRepStride = 8;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() = default;
  BinaryRepeatParams(sim::Field<uint8_t> dst_block, sim::Field<uint8_t> src0_block,
                     sim::Field<uint8_t> src1_block, sim::Field<uint8_t> dst_repeat,
                     sim::Field<uint8_t> src0_repeat, sim::Field<uint8_t> src1_repeat)
      : dstBlkStride(dst_block),
        src0BlkStride(src0_block),
        src1BlkStride(src1_block),
        dstRepStride(dst_repeat),
        src0RepStride(src0_repeat),
        src1RepStride(src1_repeat) {}

  sim::Field<uint8_t> dstBlkStride = 1;
  sim::Field<uint8_t> src0BlkStride = 1;
  sim::Field<uint8_t> src1BlkStride = 1;
  sim::Field<uint8_t> dstRepStride = 8;
  sim::Field<uint8_t> src0RepStride = 8;
  sim::Field<uint8_t> src1RepStride = 8;
};

struct CopyRepeatParams {
  CopyRepeatParams() = default;
  CopyRepeatParams(sim::Field<uint16_t> dst_stride, sim::Field<uint16_t> src_stride,
                   sim::Field<uint16_t> dst_repeat, sim::Field<uint16_t> src_repeat)
      : dstStride(dst_stride),
        srcStride(src_stride),
        dstRepeatSize(dst_repeat),
        srcRepeatSize(src_repeat) {}

  sim::Field<uint16_t> dstStride = 1;
  sim::Field<uint16_t> srcStride = 1;
  sim::Field<uint16_t> dstRepeatSize = 8;
  sim::Field<uint16_t> srcRepeatSize = 8;
};

struct BrcbRepeatParams {
  BrcbRepeatParams() = default;
  BrcbRepeatParams(sim::Field<uint16_t> dst_block, sim::Field<uint16_t> dst_repeat)
      : dstRepStride(dst_repeat), dstBlkStride(dst_block) {}

  sim::Field<uint16_t> dstRepStride = 8;
  sim::Field<uint16_t> dstBlkStride = 1;
};

// Lengths and gaps in 32-byte blocks.
struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(sim::Field<uint16_t> count, sim::Field<uint16_t> len, sim::Field<uint16_t> src_gap,
                 sim::Field<uint16_t> dst_gap)
      : blockCount(count), blockLen(len), srcStride(src_gap), dstStride(dst_gap) {}

  sim::Field<uint16_t> blockCount = 1;
  sim::Field<uint16_t> blockLen = 0;
  sim::Field<uint16_t> srcStride = 0;
  sim::Field<uint16_t> dstStride = 0;
};

// blockLen and the gap on the GM side in bytes, the gap on the UB side in 32-byte blocks.
struct DataCopyExtParams {
  DataCopyExtParams() = default;
  DataCopyExtParams(sim::Field<uint16_t> count, sim::Field<uint32_t> len,
                    sim::Field<uint32_t> src_gap, sim::Field<uint32_t> dst_gap,
                    sim::Field<uint32_t> reserved)
      : blockCount(count), blockLen(len), srcStride(src_gap), dstStride(dst_gap), rsv(reserved) {}

  sim::Field<uint16_t> blockCount = 1;
  sim::Field<uint32_t> blockLen = 0;
  sim::Field<uint32_t> srcStride = 0;
  sim::Field<uint32_t> dstStride = 0;
  sim::Field<uint32_t> rsv = 0;
};

// Paddings in elements.
template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool is_pad, sim::Field<uint8_t> left, sim::Field<uint8_t> right, T value)
      : isPad(is_pad), leftPadding(left), rightPadding(right), paddingValue(value) {}

  bool isPad = false;
  sim::Field<uint8_t> leftPadding = 0;
  sim::Field<uint8_t> rightPadding = 0;
  T paddingValue = 0;
};

}  // namespace AscendC
