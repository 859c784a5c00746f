// Intel's matrix unit in software, so that the kernels for it run where there is none: the tile
// intrinsics that cpu/attention/amx.h uses, and a dispatcher that finds the unit. Included ahead of
// a unit.
//
// A tile has the rows and bytes that it was configured with. The order of a sum's additions is that
// of the manual: depth first, the pairs of a unit one after the other.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated_tiles {
namespace {

constexpr int kTiles = 8;
constexpr int kRows = 16;
constexpr int kUnits = 16;

// As ldtilecfg reads it.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

// Each unit of the library has tiles of its own, which is enough: none leaves anything in them.
thread_local Config config;
thread_local uint32_t tiles[kTiles][kRows][kUnits];

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// What the processor would refuse.
inline void require(bool holds) {
  if (!holds) std::abort();
}

inline void configure(const void* from) {
  std::memcpy(&config, from, sizeof(config));
  require(config.palette == 1);
  std::memset(tiles, 0, sizeof(tiles));
}

inline void release() { config = {}; }

inline void zero(int tile) {
  require(config.rows[tile] > 0);
  std::memset(tiles[tile], 0, sizeof(tiles[tile]));
}

inline void load(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int row = 0; row < config.rows[tile]; ++row) {
    std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride,
                config.row_bytes[tile]);
  }
}

inline void store(int tile, void* to, int64_t stride) {
  require(config.rows[tile] > 0);
  for (int row = 0; row < config.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], config.row_bytes[tile]);
  }
}

inline void require_shapes(int c, int a, int b) {
  require(config.rows[c] == config.rows[a] && config.rows[c] > 0);
  require(config.row_bytes[c] == config.row_bytes[b]);
  require(config.row_bytes[a] == 4 * config.rows[b]);
}

inline void multiply(int c, int a, int b) {
  require_shapes(c, a, b);
  for (int row = 0; row < config.rows[c]; ++row) {
    for (int column = 0; column < config.row_bytes[c] / 4; ++column) {
      float sum = as_float(tiles[c][row][column]);
      for (int k = 0; k < config.rows[b]; ++k) {
        const uint32_t left = tiles[a][row][k], right = tiles[b][k][column];
        sum += as_float(left << 16) * as_float(right << 16);
        sum += as_float(left & 0xffff0000u) * as_float(right & 0xffff0000u);
      }
      std::memcpy(&tiles[c][row][column], &sum, sizeof(sum));
    }
  }
}

// Bytes, those on the left of type Left, those on the right signed.
template <class Left>
void multiply_bytes(int c, int a, int b) {
  require_shapes(c, a, b);
  for (int row = 0; row < config.rows[c]; ++row) {
    for (int column = 0; column < config.row_bytes[c] / 4; ++column) {
      uint32_t sum = tiles[c][row][column];
      for (int k = 0; k < 4 * config.rows[b]; ++k) {
        const int left = static_cast<Left>(tiles[a][row][k / 4] >> k % 4 * 8);
        const int right = static_cast<int8_t>(tiles[b][k / 4][column] >> k % 4 * 8);
        sum += static_cast<uint32_t>(left * right);
      }
      tiles[c][row][column] = sum;
    }
  }
}

// Leaf 7 says that there are tiles and products of bfloat16 and of bytes; the rest is the
// machine's.
inline int get_cpuid_count(unsigned leaf, unsigned subleaf, unsigned* eax, unsigned* ebx,
                           unsigned* ecx, unsigned* edx) {
  const int known = __get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  if (leaf == 7 && subleaf == 0) *edx |= 1u << 22 | 1u << 24 | 1u << 25;
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
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(from) emulated_tiles::configure(from)
#define _tile_storeconfig(to) std::memcpy(to, &emulated_tiles::config, 64)
#define _tile_release() emulated_tiles::release()
#define _tile_zero(tile) emulated_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) emulated_tiles::load(tile, from, stride)
#define PAGED_TILE_AT(instruction, tile, base, offset) \
  emulated_tiles::load(tile, reinterpret_cast<const char*>(base) + (offset), 64)
#define PAGED_STORE_TILE_AT(tile, base, offset) \
  emulated_tiles::store(tile, reinterpret_cast<char*>(base) + (offset), 64)
#define _tile_stored(tile, to, stride) emulated_tiles::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_tiles::multiply(c, a, b)
#define _tile_dpbssd(c, a, b) emulated_tiles::multiply_bytes<int8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) emulated_tiles::multiply_bytes<uint8_t>(c, a, b)
#define __get_cpuid_count(...) emulated_tiles::get_cpuid_count(__VA_ARGS__)
#define syscall(...) emulated_tiles::system_call(__VA_ARGS__)
