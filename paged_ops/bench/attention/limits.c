// What limits.py times: whole blocks read, and products out of registers. Compiled for the machine
// at hand, when the benchmark first asks for it.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// Each piece is a multiple of 256 bytes. The sum is what keeps the reads from being left out.
uint64_t read_pieces(const char* pool, const int64_t* pieces, ptrdiff_t count, size_t size,
                     int threads) {
  uint64_t all = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : all)
  for (ptrdiff_t i = 0; i < count; ++i) {
    const char* piece = pool + pieces[i] * size;
    const char* next = pool + pieces[i + 1 < count ? i + 1 : i] * size;
    uint64_t sums[32] = {0};
    for (size_t at = 0; at < size; at += 256) {
      const uint64_t* words = (const uint64_t*)(piece + at);
      for (int line = 0; line < 4; ++line) __builtin_prefetch(next + at + 64 * line);
      for (int k = 0; k < 32; ++k) sums[k] += words[k];
    }
    for (int k = 0; k < 32; ++k) all += sums[k];
  }
  return all;
}

// Each function multiplies and adds what is in registers, `rounds` times on every thread, and
// returns the operations of one round; 0 if the compiler knows no such instruction.

// The matrix unit: two tiles of rows with two tiles of columns, four sums.
int64_t products_by_tiles(int64_t rounds, int threads) {
#if defined(__AMX_BF16__)
#pragma omp parallel num_threads(threads)
  {
    struct {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shape;
    memset(&shape, 0, sizeof(shape));
    shape.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shape.row_bytes[tile] = 64;
      shape.rows[tile] = 16;
    }
    __asm__ volatile("" : : "r"(&shape) : "memory");  // GCC takes it that 8 bytes will be read
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t round = 0; round < rounds; ++round) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
  }
  return 4 * 2 * 16 * 16 * 32;
#else
  (void)rounds, (void)threads;
  return 0;
#endif
}

// More sums than an instruction has latency times units; each is a variable, so in a register.
#define SUMS 12
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)

// An empty use of a register that may change it: nothing is known of what it holds, nor left out.
#if defined(__AVX512F__)
#define TOUCH(i) __asm__ volatile("" : "+v"(sum##i));
#elif defined(__x86_64__)
#define TOUCH(i) __asm__ volatile("" : "+x"(sum##i));
#else
#define TOUCH(i) __asm__ volatile("" : "+w"(sum##i));
#endif

// Pairs of bfloat16, in vectors.
int64_t products_by_pairs(int64_t rounds, int threads) {
#if defined(__AVX512BF16__)
#pragma omp parallel num_threads(threads)
  {
    const __m512bh pairs = (__m512bh)_mm512_set1_epi16(0x3f80);
#define BEGIN(i) __m512 sum##i = _mm512_setzero_ps();
#define MULTIPLY(i) sum##i = _mm512_dpbf16_ps(sum##i, pairs, pairs);
    EACH(BEGIN)
    for (int64_t round = 0; round < rounds; ++round) {
      EACH(MULTIPLY)
      EACH(TOUCH)
    }
#undef BEGIN
#undef MULTIPLY
  }
  return SUMS * 2 * 32;
#else
  (void)rounds, (void)threads;
  return 0;
#endif
}

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));

// float32, in vectors. Each sum goes to 1, so none is denormal or infinite.
int64_t products_by_floats(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Vector half;
    for (size_t i = 0; i < sizeof(half) / sizeof(float); ++i) half[i] = 0.5f;
#define BEGIN(i) Vector sum##i = half;
#define MULTIPLY(i) sum##i = sum##i * half + half;
    EACH(BEGIN)
    for (int64_t round = 0; round < rounds; ++round) {
      EACH(MULTIPLY)
      EACH(TOUCH)
    }
#undef BEGIN
#undef MULTIPLY
  }
  return SUMS * 2 * (VECTOR_BYTES / sizeof(float));
}
