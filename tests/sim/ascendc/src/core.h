// One core: its memories, what it knows of its pipes, its timelines, buffers and flags.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../include/ascendc_sim/runtime.h"
#include "../include/sim_api.h"
#include "model.h"

namespace sim {

enum Pipe : int {
  kS = SIM_PIPE_S,
  kV = SIM_PIPE_V,
  kMte2 = SIM_PIPE_MTE2,
  kMte3 = SIM_PIPE_MTE3,
  kMte1 = SIM_PIPE_MTE1,
  kM = SIM_PIPE_M,
  kFix = SIM_PIPE_FIX,
};
constexpr int kPipes = SIM_NUM_PIPES;
extern const char* const kPipeNames[kPipes];
Pipe PipeOf(pipe_t pipe);

enum class Kind : uint8_t { kVector, kCube };
bool HasPipe(Kind kind, Pipe pipe);
bool HasSpace(Kind kind, Space space);
const char* NameOf(Kind kind);

int64_t SizeOf(Type type);

// Instructions of a pipe are numbered from 1. A pipe's knowledge holds, for each pipe, the number
// of the latest instruction that has certainly finished before its own next instruction starts.
//
// The last entry counts the cross-core flags that the core has waited for.
using Clock = uint32_t;
constexpr int kWaits = kPipes;
using Knowledge = std::array<Clock, kPipes + 1>;

// A memory is used by at most four of its core's pipes: its slots.
constexpr int kSlots = 4;
extern const Pipe kPipeOfSlot[kSpaces][kSlots];
extern const char* const kSpaceNames[kSpaces];
extern const uint32_t kSpaceBytes[kSpaces];

// What the pipes last did to one 32-byte block: the number of the instruction and the bytes.
struct BlockState {
  Clock write_clock[kSlots];
  uint32_t write_mask[kSlots];
  Clock read_clock[kSlots];
  uint32_t read_mask[kSlots];
};

struct LocalMemory {
  std::unique_ptr<uint8_t[]> bytes;         // and slack, so that whole repeats can be loaded
  std::unique_ptr<uint32_t[]> initialised;  // for each block a bit for each byte
  std::unique_ptr<BlockState[]> blocks;
  uint32_t touched_blocks = 0;  // blocks from here on are as Reset left them
  uint32_t used = 0;            // by the buffers of the TPipe

  void Reset(Space space);
};

// When a pipe is free for its next instruction, may start it, and has finished all so far.
struct Timeline {
  uint64_t free = 0;
  uint64_t ready = 0;
  uint64_t done = 0;
  std::array<uint64_t, kQueueDepth> starts{};  // of the latest instructions, in turn
  size_t issued = 0;
};

// What is known of the pipes of all cores of a launch.
using Foreign = std::array<Knowledge, SIM_MAX_CORES>;

// What the scalar unit knew when it last dropped a line of its data cache: of its own pipes, and of
// the other cores'.
struct Drop {
  Knowledge own{};
  std::shared_ptr<const Foreign> foreign;  // null while no line was dropped
};

// A signal from one pipe to another.
struct Signal {
  Knowledge knowledge{};
  uint64_t time = 0;
};

struct Flag {
  bool set = false;
  Signal signal;
  Site site{};
};

enum class BufferState : uint8_t { kDead, kTBuf, kIdle, kAllocated, kQueued, kDequeued };

struct Buffer {
  Space space = Space::kUb;
  uint32_t begin = 0;
  uint32_t end = 0;
  BufferState state = BufferState::kDead;
  uint32_t generation = 0;
  int queue = -1;
  int event = -1;      // id held while queued, or since it was freed
  bool freed = false;  // `signal` is what its last consumer left
  Signal signal;
  Site site{};  // of the last change of state
};

struct Queue {
  AscendC::HardEvent filled;  // from the producer to the consumer
  AscendC::HardEvent freed;   // back
  int32_t depth = 0;
  int place = 0;
  std::vector<uint32_t> buffers;
  uint32_t cursor = 0;
  std::deque<uint32_t> waiting;
};

constexpr int kEvents = static_cast<int>(AscendC::HardEvent::MAX);

// What a core's scalar unit issues, as counted.h numbers it.
enum class EventKind : uint32_t {
  kInstruction = 1,  // of a pipe, or a scalar access to a memory
  kQueueCall,
  kSetFlag,
  kWaitFlag,
  kBarrier,
  kSyncAll,
  kCrossCoreSet,
  kCrossCoreWait,
};

// What was counted of a core's scalar instructions: of each that it issues, its kind (high half)
// and how many were executed up to it (low half).
struct ScalarTrace {
  std::vector<uint64_t> events;
  uint64_t instructions = 0;  // in all
  size_t next = 0;
  uint64_t done = 0;
  bool differs = false;  // the launch issues something else

  bool Exists() const { return instructions != 0; }
};

// Where a core stands in its launch.
struct Place {
  uint32_t index = 0;  // among all cores
  Kind kind = Kind::kVector;
  uint32_t group = 0;
  uint32_t number = 0;  // of its kind in the group
};

struct Core {
  uint32_t index = 0;
  Place place;

  std::array<LocalMemory, kSpaces> memory;
  uint8_t* ub = nullptr;  // the bytes of its unified buffer

  // Order.
  Knowledge count{};
  std::array<Knowledge, kPipes> known{};
  Foreign foreign{};                                // known of the other cores
  std::shared_ptr<const Foreign> foreign_snapshot;  // of `foreign`, if it hasn't changed since
  std::array<std::vector<Site>, kPipes> log;        // instruction number - 1 -> where

  // Time.
  uint64_t now = 0;  // of the scalar unit
  std::array<Timeline, kPipes> line{};
  ScalarTrace trace;

  // Flags and ids. An id is taken while a queue or AllocEventID holds it.
  Flag flags[kEvents][kEventIds];
  uint8_t taken[kEvents] = {};
  uint8_t user_taken[kEvents] = {};
  uint8_t fetched[kEvents] = {};

  // TPipe.
  void* pipe = nullptr;
  std::vector<Buffer> buffers;  // index 0 is unused
  std::vector<Queue> queues;
  int64_t pipe_buffers = 0;

  // Vector mask.
  bool counter_mode = false;
  uint64_t mask_low = ~uint64_t{0};
  uint64_t mask_high = ~uint64_t{0};

  // What describes images to loads that don't say it; width 0: nothing yet.
  ImageSize image{};

  // The scalar unit's data cache: lines held, lines changed, and when lines were last dropped.
  std::unordered_set<uint64_t> cached;
  std::unordered_map<uint64_t, Site> dirty;
  std::unordered_map<uint64_t, Drop> dropped;
  Drop all_dropped;

  int kernel_type = -1;
  SimCore counters{};

  void Reset(const Place& where);
  LocalMemory& Memory(Space space) { return memory[static_cast<size_t>(space)]; }
};

Core& Self();

// One instruction while it is checked and executed.
struct Instruction {
  Instruction(const char* name, Pipe pipe, Site site);

  Core& core;
  const char* name;
  Pipe pipe;
  Clock clock;
  Site site;
};

// Books the pipe for `busy` cycles; the result is there `latency` cycles later.
void Spend(const Instruction& instruction, int64_t busy, int64_t latency);

// Books the scalar unit for an instruction that it issues, and for its own ones before it.
void Issue(Core& core, EventKind kind);
// Books its own instructions after the last one that it issued.
void FinishScalar(Core& core);

// Signals between pipes.
Signal Send(const Core& core, Pipe from);
void Receive(Core& core, Pipe to, const Signal& signal);
void BarrierAll(Core& core);

// Records a violation of the running core. Of each rule, a line has one entry; ReportKind keeps one
// for each `kind` of a rule apart.
void Report(Site site, const char* rule, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
void ReportKind(Site site, const char* rule, int kind, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// Of a core that needn't be the one that runs.
void ReportFor(const Core& core, Site site, const char* rule, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// Ends the running core's kernel.
struct Abandon {};

// Waits until `ready` holds, letting other cores run. Where that never comes, `explain` says why in
// the report of the deadlock.
struct Waiting {
  bool (*ready)(const Waiting&);
  std::string (*explain)(const Waiting&);
  Core* core;
  int64_t flag;
};
void WaitUntil(const Waiting& waiting, Site site);

// The launch: its cores, and the groups they form.
uint32_t LaunchCores();
uint32_t LaunchGroups();
uint32_t VectorCoresOfGroup();
Core& CoreAt(uint32_t index);
std::string NameOf(const Core& core);
// What a core does, for the report of a deadlock: "waits at kernel.cpp:12" or "has ended".
std::string StateOf(const Core& core);
int64_t Setting(const char* key);

void StartCrossCore();
void CheckCrossCoreEnd();

inline std::string Where(const Core& core, int pipe, Clock clock) {
  const Site site = core.log[static_cast<size_t>(pipe)][clock - 1];
  const char* slash = site.file;
  for (const char* c = site.file; *c; ++c) {
    if (*c == '/') slash = c + 1;
  }
  return std::string(slash) + ":" + std::to_string(site.line);
}

}  // namespace sim
