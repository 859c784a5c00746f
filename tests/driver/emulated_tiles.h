// Intel's matrix unit in software, so that the kernels for it run where there is none: the tile
// intrinsics that cpu/attention/amx.h uses, and a dispatcher that finds the unit. Included ahead of
// a unit.
//
// A tile is 16 rows of 64 bytes, as TileSession configures it. The order of a sum's additions is
// that of the manual: depth first, the pairs of a unit one after the other.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated_tiles {
namespace {

constexpr int kTiles = 8;
constexpr int kRows = 16;
constexpr int kUnits = 16;

// Each unit of the library has tiles of its own, which is enough: none leaves anything in them.
thread_local uint32_t tiles[kTiles][kRows][kUnits];

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, kUnits * 4);
  }
}

inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], kUnits * 4);
  }
}

inline void multiply(int c, int a, int b) {
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kUnits; ++column) {
      float sum = as_float(tiles[c][row][column]);
      for (int k = 0; k < kUnits; ++k) {
        const uint32_t left = tiles[a][row][k], right = tiles[b][k][column];
        sum += as_float(left << 16) * as_float(right << 16);
        sum += as_float(left & 0xffff0000u) * as_float(right & 0xffff0000u);
      }
      std::memcpy(&tiles[c][row][column], &sum, sizeof(sum));
    }
  }
}

// Leaf 7 says that there are tiles and products of bfloat16; the rest is the machine's.
inline int get_cpuid_count(unsigned leaf, unsigned subleaf, unsigned* eax, unsigned* ebx,
                           unsigned* ecx, unsigned* edx) {
  const int known = __get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  if (leaf == 7 && subleaf == 0) *edx |= 1u << 22 | 1u << 24;
  return known;
}

// The system lets the process use the tiles.
template <class... Arguments>
long system_call(long number, Arguments... arguments) {
  return number == SYS_arch_prctl ? 0 : syscall(number, arguments...);
}

}  // namespace
}  // namespace emulated_tiles

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero(tile) \
  std::memset(emulated_tiles::tiles[tile], 0, sizeof(emulated_tiles::tiles[0]))
#define _tile_loadd(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_tiles::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_tiles::multiply(c, a, b)
#define __get_cpuid_count(...) emulated_tiles::get_cpuid_count(__VA_ARGS__)
#define syscall(...) emulated_tiles::system_call(__VA_ARGS__)

// The instructions of TileSession, which configures what isn't there.
asm(".macro sttilecfg to\n.endm\n.macro ldtilecfg from\n.endm\n.macro tilerelease\n.endm\n");
