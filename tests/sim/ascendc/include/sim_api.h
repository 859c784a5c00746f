// The C interface of the simulated vector core (libascendc_sim.so).
//
// Used by the Python harness (tests/sim/harness.py) and by the host-side ACL stubs. One process has
// one simulated device; calls are serialised, so a launch has finished when sim_launch returns.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum SimAccess {
  SIM_READ = 1,        // the kernel may read it
  SIM_WRITE = 2,       // the kernel may write it
  SIM_READ_WRITE = 3,  //
  SIM_POISON = 4,      // or-ed in: garbage until written; reading a byte before that is a violation
};

// The pipes of a vector core that the model keeps apart.
enum SimPipe { SIM_PIPE_S, SIM_PIPE_V, SIM_PIPE_MTE2, SIM_PIPE_MTE3, SIM_NUM_PIPES };

enum { SIM_MAX_CORES = 64, SIM_MAX_ARGS = 24 };

// What one core did in one launch. Cycles are modelled (docs/simulated-device.md), never measured.
struct SimCore {
  uint64_t gm_read_bytes;               // GM -> UB by DataCopy and DataCopyPad
  uint64_t gm_written_bytes;            // UB -> GM by DataCopy and DataCopyPad
  uint64_t scalar_gm_reads;             // GlobalTensor::GetValue calls
  uint64_t scalar_gm_writes;            // GlobalTensor::SetValue calls
  uint64_t copy_calls;                  // DataCopy and DataCopyPad calls that touch GM
  uint64_t vector_instructions;         // vector instructions issued
  uint64_t vector_repeats;              // 256-byte repeats they ran
  uint64_t busy_cycles[SIM_NUM_PIPES];  // cycles in which the pipe works
  uint64_t total_cycles;                // when the last pipe of the core falls idle
};

struct SimCounters {
  uint32_t num_cores;     // block_dim of the last launch
  uint32_t violations;    // distinct violations of the last launch
  uint64_t total_cycles;  // the slowest core's total_cycles
  struct SimCore total;   // sums over the cores (total.total_cycles too)
  struct SimCore core[SIM_MAX_CORES];
};

// Runs `entry`, an `extern "C" __global__ __aicore__` kernel whose parameters are all GM_ADDR or
// 64-bit integers, on `block_dim` simulated vector cores. `seed` fixes the order in which cores
// run. Returns the number of violations: 0 means that every rule was kept.
int sim_launch(const void* entry, uint32_t block_dim, const uint64_t* args, uint32_t num_args,
               uint64_t seed);

// Text of the last launch's violations, one a line: "file:line core N rule: text". Returns the
// number of bytes it needs, the terminating zero included; writes at most `capacity` of them.
size_t sim_report(char* out, size_t capacity);

// Counters of the last launch.
void sim_counters(struct SimCounters* out);

// Makes [p, p + bytes) global memory under `name`; `access` is an or of SimAccess. Every GM access
// must lie inside one registered range. Registering a range inside another one makes a sub-tensor:
// the smallest range that contains the address given to SetGlobalBuffer is that tensor's bound.
// Registering the same address again replaces it.
void sim_register(const void* p, size_t bytes, const char* name, int access);
void sim_unregister(const void* p);
void sim_clear(void);

// Settings. Unknown keys abort. Keys and defaults:
//   "cores"           48    vector cores; a larger block_dim is refused
//   "ub_reserved"     8192  bytes of UB that the toolchain keeps for Select and its like, besides
//   the
//                           256 bytes that are always reserved; 0 is a build with
//                           --cce-disable-asc-reserved-ubuf, where Select with a mask tensor is
//                           refused
//   "max_violations"  100   entries kept per launch
void sim_configure(const char* key, int64_t value);

#ifdef __cplusplus
}
#endif
