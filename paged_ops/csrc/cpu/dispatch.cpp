// Chooses the ISA variant by what was built, what the machine has and what PAGED_CPU_ISA allows.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

#ifdef PAGED_BUILD_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace paged::cpu {
namespace {

struct Candidate {
  Isa isa;
  bool (*runs_here)();
};

#ifdef PAGED_BUILD_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}
#endif

#ifdef PAGED_BUILD_AMX
// Whether the machine has AMX for bfloat16, and Linux lets this process use it: the tiles are so
// large that a process must ask for them.
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22;
  constexpr unsigned kTiles = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & (kBf16 | kTiles)) != (kBf16 | kTiles)) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#define PAGED_ISA_TABLE(isa)                                                       \
  {#isa, &isa::attention_kernels, &isa::write_kv_kernels, &isa::gather_kv_kernels, \
   &isa::merge_states_kernels}

// Least capable first. What a variant may use is what its -march in setup.py says: x86-64-v3 and v4
// are the psABI's levels, tested here feature by feature because older compilers don't know the
// levels.
const Candidate kCandidates[] = {
    {PAGED_ISA_TABLE(generic), [] { return true; }},
#ifdef PAGED_BUILD_AVX2
    {PAGED_ISA_TABLE(avx2),
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
#ifdef PAGED_BUILD_AVX512
    {PAGED_ISA_TABLE(avx512), has_avx512},
#endif
#ifdef PAGED_BUILD_AVX512BF16
    {PAGED_ISA_TABLE(avx512bf16), has_avx512_bf16},
#endif
#ifdef PAGED_BUILD_AMX
    {PAGED_ISA_TABLE(amx), [] { return has_avx512_bf16() && has_amx(); }},
#endif
#ifdef PAGED_BUILD_NEON
    {PAGED_ISA_TABLE(neon),
     [] {
#if defined(__linux__)
       return (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0;
#else
       return true;  // every 64-bit Arm machine that macOS runs on
#endif
     }},
#endif
#ifdef PAGED_BUILD_NEONBF16
    {PAGED_ISA_TABLE(neonbf16),
     [] {
       return (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0 &&
              (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
     }},
#endif
};
constexpr int kNumCandidates = sizeof(kCandidates) / sizeof(kCandidates[0]);

// The index of the most capable variant that PAGED_CPU_ISA allows.
int highest_allowed() {
  const char* cap = std::getenv("PAGED_CPU_ISA");
  if (cap == nullptr || *cap == '\0') return kNumCandidates - 1;
  std::string built;
  for (int i = 0; i < kNumCandidates; ++i) {
    if (std::strcmp(cap, kCandidates[i].isa.name) == 0) return i;
    built += (i == 0 ? "" : ", ") + std::string(kCandidates[i].isa.name);
  }
  throw std::runtime_error("paged: PAGED_CPU_ISA is '" + std::string(cap) + "', expected one of " +
                           built);
}

}  // namespace

const Isa& selected_isa() {
  static const Isa& isa = []() -> const Isa& {
    int chosen = highest_allowed();
    while (!kCandidates[chosen].runs_here()) --chosen;  // generic runs everywhere
    return kCandidates[chosen].isa;
  }();
  return isa;
}

}  // namespace paged::cpu
