// The vector mask register, for calls with isSetMask = false, and the counter mode.
#pragma once

#include "runtime.h"

namespace AscendC {

inline void SetMaskNorm() { sim::SetMaskMode(false); }
inline void SetMaskCount() { sim::SetMaskMode(true); }
inline void ResetMask() { sim::ResetMask(); }

template <typename T, MaskMode mode = MaskMode::NORMAL>
SIM_API void SetVectorMask(const uint64_t maskHigh, const uint64_t maskLow) {
  sim::SetVectorMask(maskHigh, maskLow);
}

template <typename T, MaskMode mode = MaskMode::NORMAL>
SIM_API void SetVectorMask(int32_t len, SIM_SITE) {
  if constexpr (mode == MaskMode::COUNTER) {
    sim::SetVectorMask(0, static_cast<uint64_t>(len));
  } else {
    sim::SetVectorMaskLength(len, 256 / sizeof(T), SIM_HERE);
  }
}

}  // namespace AscendC
