// One vector core: its memory, what it knows of its pipes, its timelines, buffers and flags.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../include/ascendc_sim/runtime.h"
#include "../include/sim_api.h"
#include "model.h"

namespace sim {

enum Pipe : int { kS = SIM_PIPE_S, kV = SIM_PIPE_V, kMte2 = SIM_PIPE_MTE2, kMte3 = SIM_PIPE_MTE3 };
constexpr int kPipes = SIM_NUM_PIPES;
extern const char* const kPipeNames[kPipes];

// Instructions of a pipe are numbered from 1. A pipe's knowledge holds, for each pipe, the number
// of the latest instruction that has certainly finished before its own next instruction starts.
using Clock = uint32_t;
using Knowledge = std::array<Clock, kPipes>;

// What the pipes last did to one 32-byte block of UB: the number of the instruction and the bytes.
struct BlockState {
  Clock write_clock[kPipes];
  uint32_t write_mask[kPipes];
  Clock read_clock[kPipes];
  uint32_t read_mask[kPipes];
};

// When a pipe is free for its next instruction, may start it, and has finished all so far.
struct Timeline {
  uint64_t free = 0;
  uint64_t ready = 0;
  uint64_t done = 0;
};

// What the scalar unit knew when it last dropped a line of its data cache: of its own pipes, and
// which of the core's records of the other cores held then.
struct Drop {
  Knowledge own{};
  uint32_t meetings = 0;
  bool happened = false;
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

struct Core {
  uint32_t index = 0;

  // Unified buffer. The slack lets whole repeats be loaded where only a part of one is used.
  alignas(64) uint8_t ub[kUbBytes + 2 * kRepeatBytes];
  uint32_t initialised[kUbBlocks];  // a bit for each byte
  BlockState blocks[kUbBlocks];
  uint32_t touched_blocks = 0;  // blocks from here on are as Reset left them

  // Order.
  Knowledge count{};
  std::array<Knowledge, kPipes> known{};
  std::array<Knowledge, SIM_MAX_CORES> foreign{};                     // known of the other cores
  std::vector<std::array<Knowledge, SIM_MAX_CORES>> foreign_history;  // before each meeting
  std::array<std::vector<Site>, kPipes> log;  // instruction number - 1 -> where

  // Time.
  uint64_t now = 0;  // of the scalar unit
  std::array<Timeline, kPipes> line{};

  // Flags and ids. An id is taken while a queue or AllocEventID holds it.
  Flag flags[kEvents][kEventIds];
  uint8_t taken[kEvents] = {};
  uint8_t user_taken[kEvents] = {};
  uint8_t fetched[kEvents] = {};

  // TPipe.
  void* pipe = nullptr;
  std::vector<Buffer> buffers;  // index 0 is unused
  std::vector<Queue> queues;
  uint32_t ub_used = 0;
  int64_t pipe_buffers = 0;

  // Vector mask.
  bool counter_mode = false;
  uint64_t mask_low = ~uint64_t{0};
  uint64_t mask_high = ~uint64_t{0};

  // The scalar unit's data cache: lines held, lines changed, and when lines were last dropped.
  std::unordered_set<uint64_t> cached;
  std::unordered_map<uint64_t, Site> dirty;
  std::unordered_map<uint64_t, Drop> dropped;
  Drop all_dropped;

  // Cross-core flags: how often set, and how often waited for.
  int64_t cross_set[kCrossCoreFlags] = {};
  int64_t cross_waited[kCrossCoreFlags] = {};
  Site cross_site[kCrossCoreFlags] = {};

  int kernel_type = -1;
  SimCore counters{};

  void Reset(uint32_t core_index);
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

// Ends the running core's kernel.
struct Abandon {};

// Waits until `ready` holds, letting other cores run. `what` is for the report of a deadlock.
void WaitUntil(bool (*ready)(void*), void* context, const char* what, Site site);

void StartRendezvous();
uint32_t LaunchCores();
Core& CoreAt(uint32_t index);
int64_t Setting(const char* key);

inline std::string Where(const Core& core, int pipe, Clock clock) {
  const Site site = core.log[static_cast<size_t>(pipe)][clock - 1];
  const char* slash = site.file;
  for (const char* c = site.file; *c; ++c) {
    if (*c == '/') slash = c + 1;
  }
  return std::string(slash) + ":" + std::to_string(site.line);
}

}  // namespace sim
