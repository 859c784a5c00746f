// The C interface of the simulated device (libascendc_sim.so).
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

// The pipes that the model keeps apart. A vector core has the first four; a cube core has S, MTE2
// and the last three.
enum SimPipe {
  SIM_PIPE_S,
  SIM_PIPE_V,
  SIM_PIPE_MTE2,
  SIM_PIPE_MTE3,
  SIM_PIPE_MTE1,
  SIM_PIPE_M,
  SIM_PIPE_FIX,
  SIM_NUM_PIPES
};

enum { SIM_MAX_CORES = 96, SIM_MAX_ARGS = 24 };

// What one core did in one launch. Cycles are modelled (docs/simulated-device.md), never measured.
struct SimCore {
  uint64_t is_cube;                     // 1 for an AIC, 0 for an AIV
  uint64_t block;                       // what GetBlockIdx gives
  uint64_t gm_read_bytes;               // GM -> UB by DataCopy and DataCopyPad
  uint64_t gm_written_bytes;            // UB -> GM by DataCopy and DataCopyPad
  uint64_t scalar_gm_reads;             // GlobalTensor::GetValue calls
  uint64_t scalar_gm_writes;            // GlobalTensor::SetValue calls
  uint64_t copy_calls;                  // DataCopy and DataCopyPad calls that touch GM
  uint64_t gm_l1_bytes;                 // GM -> L1
  uint64_t l1_l0a_bytes;                // L1 -> L0A
  uint64_t l1_l0b_bytes;                // L1 -> L0B
  uint64_t l0c_gm_bytes;                // L0C -> GM by Fixpipe, as it lies in GM
  uint64_t hbm_bytes;                   // of all GM bytes, those that L2 didn't hold
  uint64_t mmad_instructions;           // Mmad calls
  uint64_t mmad_steps;                  // fractals of 16 x 16 x 32 bytes that they multiplied
  uint64_t vector_instructions;         // vector instructions issued
  uint64_t vector_repeats;              // 256-byte repeats they ran
  uint64_t bank_conflicts;              // of these, those whose sources share a group of banks
  uint64_t busy_cycles[SIM_NUM_PIPES];  // cycles in which the pipe works
  uint64_t scalar_instructions;         // its own ones, where they were counted
  uint64_t total_cycles;                // when the last pipe of the core falls idle
};

struct SimCounters {
  uint32_t num_cores;     // cores of the last launch: the AICs, then the AIVs
  uint32_t violations;    // distinct violations of the last launch
  uint64_t total_cycles;  // the start of the launch and the slowest core's total_cycles
  struct SimCore total;   // sums over the cores (total.total_cycles too)
  struct SimCore core[SIM_MAX_CORES];
};

// Runs `entry`, an `extern "C" __global__ __aicore__` kernel whose parameters are all GM_ADDR or
// 64-bit integers, on `block_dim` simulated vector cores; if it states a type with an AIC, on as
// many cube cores and the vector cores of their groups. `seed` fixes the order in which cores run.
// Returns the number of violations: 0 means that every rule was kept.
int sim_launch(const void* entry, uint32_t block_dim, const uint64_t* args, uint32_t num_args,
               uint64_t seed);

// What was counted of a core's scalar instructions for the next launch: of each instruction that it
// issues, its kind (high half) and how many were executed up to it (low half); and all. The
// modelled time is then made of them. A launch that issues something else is reported.
void sim_scalar(uint32_t core, const uint64_t* events, size_t count, uint64_t instructions);

// Text of the last launch's violations, one a line: "file:line core N rule: text". Returns the
// number of bytes it needs, the terminating zero included; writes at most `capacity` of them.
size_t sim_report(char* out, size_t capacity);

// Counters of the last launch.
void sim_counters(struct SimCounters* out);

// Bytes of a registered range that the last launch moved: those of the tensors that were given to
// SetGlobalBuffer inside it, and inside no smaller range.
struct SimTraffic {
  const char* name;  // as long as the range is registered
  uint64_t read_bytes;
  uint64_t written_bytes;
  uint64_t hbm_bytes;  // of those read, what L2 didn't hold
};

// Writes the traffic of at most `capacity` ranges; returns how many there are.
size_t sim_traffic(struct SimTraffic* out, size_t capacity);

// Makes [p, p + bytes) global memory under `name`; `access` is an or of SimAccess. Every GM access
// must lie inside one registered range. Registering a range inside another one makes a sub-tensor:
// the smallest range that contains the address given to SetGlobalBuffer is that tensor's bound.
// Registering the same address again replaces it.
void sim_register(const void* p, size_t bytes, const char* name, int access);
void sim_unregister(const void* p);
void sim_clear(void);

// Settings. Unknown keys abort. Keys and defaults:
//   "cores"           48    vector cores, and half as many cube cores; a larger block_dim is
//   refused "ub_reserved"     8192  bytes of UB that the toolchain keeps for Select and its like,
//   besides the
//                           256 bytes that are always reserved; 0 is a build with
//                           --cce-disable-asc-reserved-ubuf, where Select with a mask tensor is
//                           refused
//   "max_violations"  100   entries kept per launch
//   "clock_mhz"       1800  of the cores; GM keeps its own time
void sim_configure(const char* key, int64_t value);

#ifdef __cplusplus
}
#endif
