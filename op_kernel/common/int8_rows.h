// Rows of int8 elements and their scales in UB.
//
// A 910B casts int8 to and from half alone, and half to and from float. Every int8 is exact in
// half, so nothing is rounded on the way to float.
#pragma once

#include "common/lanes.h"
#include "common/row_copy.h"
#include "common/scalar.h"
#include "kernel_operator.h"

// Elements of one repeat of a cast between int8 and half, and half elements of a granule.
constexpr int64_t kCastLanes = 128;
constexpr int64_t kHalfGranule = 16;

// to[r] = from[r]: `rows` rows, up to 255, of `width` elements. Pitches count elements, and are
// whole granules.
template <typename To, typename From>
__aicore__ inline void CastRows(const AscendC::LocalTensor<To>& to, int64_t to_pitch,
                                const AscendC::LocalTensor<From>& from, int64_t from_pitch,
                                int64_t rows, int64_t width, AscendC::RoundMode mode) {
  constexpr int64_t kToGranule = kGranuleBytes / sizeof(To);
  constexpr int64_t kFromGranule = kGranuleBytes / sizeof(From);
  const AscendC::UnaryRepeatParams params(1, 1, static_cast<uint8_t>(to_pitch / kToGranule),
                                          static_cast<uint8_t>(from_pitch / kFromGranule));
  for (int64_t c = 0; c < width; c += kCastLanes) {
    AscendC::Cast(to[c], from[c], mode, static_cast<uint64_t>(Smaller(width - c, kCastLanes)),
                  static_cast<uint8_t>(rows), params);
  }
}

__aicore__ inline void RowsToHalf(const AscendC::LocalTensor<half>& to, int64_t to_pitch,
                                  const AscendC::LocalTensor<int8_t>& from, int64_t from_pitch,
                                  int64_t rows, int64_t width) {
  CastRows(to, to_pitch, from, from_pitch, rows, width, AscendC::RoundMode::CAST_NONE);
}

// Of integers that int8 holds.
__aicore__ inline void RowsToInt8(const AscendC::LocalTensor<int8_t>& to, int64_t to_pitch,
                                  const AscendC::LocalTensor<half>& from, int64_t from_pitch,
                                  int64_t rows, int64_t width) {
  CastRows(to, to_pitch, from, from_pitch, rows, width, AscendC::RoundMode::CAST_RINT);
}

// Floats that lie anywhere in GM, each the first of a granule in UB, become neighbouring lanes.
class FirstLanes {
 public:
  __aicore__ inline void Init(AscendC::TPipe* pipe) {
    const AscendC::LocalTensor<int32_t> offsets = NewBuffer<int32_t>(pipe, kRepeatLanes);
    AscendC::CreateVecIndex(offsets, 0, static_cast<uint32_t>(kRepeatLanes));
    Barrier();
    AscendC::Muls(offsets, offsets, static_cast<int32_t>(kGranuleBytes), kRepeatLanes);
    Barrier();
    offsets_ = offsets.ReinterpretCast<uint32_t>();
  }

  // lanes[i] = granules[i][0], for up to 64. The barrier after it is left to the caller.
  __aicore__ inline void Take(const Float& lanes, const Float& granules, int64_t count) const {
    AscendC::Gather(lanes, granules, offsets_, 0, static_cast<uint32_t>(count));
  }

 private:
  AscendC::LocalTensor<uint32_t> offsets_;  // of each granule, in bytes
};
