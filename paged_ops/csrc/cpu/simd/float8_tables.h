// The bfloat16 that each magnitude of a float8 stands for, as two tables of bytes for AVX-512
// VBMI's lookups among 128.
#pragma once

namespace paged::cpu {
namespace {

// A float8 of kFractionBits whose exponents are kBias below those of bfloat16.
template <int kFractionBits, int kBias>
constexpr uint16_t finite_bfloat16(int magnitude) {
  const int shift = 7 - kFractionBits;
  if (magnitude >> kFractionBits != 0) {
    return static_cast<uint16_t>((magnitude << shift) + (kBias << 7));
  }
  if (magnitude == 0) return 0;
  // A subnormal: its highest bit becomes the leading one that bfloat16 leaves out.
  int places = 0;
  while (magnitude >> (kFractionBits - places) == 0) ++places;
  return static_cast<uint16_t>(((kBias + 1 - places) << 7) +
                               ((magnitude << (shift + places)) & 0x7f));
}

constexpr uint16_t bfloat16_of(int magnitude, Float8E4M3) {
  return magnitude == 0x7f ? 0x7fc0 : finite_bfloat16<3, 120>(magnitude);
}
constexpr uint16_t bfloat16_of(int magnitude, Float8E5M2) {
  if (magnitude < 0x7c) return finite_bfloat16<2, 112>(magnitude);
  return magnitude == 0x7c ? 0x7f80 : 0x7fc0;
}

template <class T>
struct Float8Tables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];

  constexpr Float8Tables() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(bfloat16_of(i, T{}) & 0xff);
      high[i] = static_cast<uint8_t>(bfloat16_of(i, T{}) >> 8);
    }
  }
};

template <class T>
constexpr Float8Tables<T> kFloat8Tables;

}  // namespace
}  // namespace paged::cpu
