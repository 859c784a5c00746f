// Chooses the ISA variant by what was built, what the machine has and what PAGED_CPU_ISA allows.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

#if defined(__x86_64__) && defined(__linux__)
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

// Whether this machine runs a variant, which may use what its flags in setup.py say: a function for
// each.
struct RunsHere {
  static bool generic() { return true; }

#if defined(__x86_64__)
  // x86-64-v3 and v4 are the psABI's levels, tested feature by feature because older compilers
  // don't know the levels.
  static bool avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("f16c");
  }
  static bool avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
  static bool avx512bf16() {
    return avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  }
#if defined(__linux__)
  // Linux must let this process use the tiles, too: they are so large that a process must ask.
  static bool amx() {
    constexpr unsigned kBf16 = 1u << 22;
    constexpr unsigned kTiles = 1u << 24;
    constexpr unsigned kInt8 = 1u << 25;
    constexpr unsigned kAll = kBf16 | kTiles | kInt8;
    unsigned eax, ebx, ecx, edx;
    if (!avx512bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    if ((edx & kAll) != kAll) return false;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILE_DATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
#endif
#endif

#if defined(__aarch64__) && defined(__linux__)
  static bool neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0; }
  static bool neonbf16() { return neon() && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }
#elif defined(__aarch64__)
  static bool neon() { return true; }  // every 64-bit Arm machine that macOS runs on
#endif
};

}  // namespace

#define PAGED_DECLARE_ISA(isa)                          \
  namespace isa {                                       \
  extern const AttentionKernels attention_kernels;      \
  extern const WriteKvKernels write_kv_kernels;         \
  extern const GatherKvKernels gather_kv_kernels;       \
  extern const MergeStatesKernels merge_states_kernels; \
  }
PAGED_EACH_ISA(PAGED_DECLARE_ISA)

namespace {

struct Candidate {
  Isa isa;
  bool (*runs_here)();
};

#define PAGED_CANDIDATE(isa)                                                        \
  {{#isa, &isa::attention_kernels, &isa::write_kv_kernels, &isa::gather_kv_kernels, \
    &isa::merge_states_kernels},                                                    \
   RunsHere::isa},

// The variants that setup.py lists, least capable first.
const Candidate kCandidates[] = {PAGED_EACH_ISA(PAGED_CANDIDATE)};
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
