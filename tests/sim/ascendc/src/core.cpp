#include "core.h"

#include <algorithm>
#include <cstring>

namespace sim {

const char* const kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3"};

void Core::Reset(uint32_t core_index) {
  const uint32_t used = touched_blocks;
  std::memset(ub, 0xff, sizeof ub);
  std::fill_n(initialised, used, 0u);
  std::memset(blocks, 0, used * sizeof(BlockState));
  touched_blocks = 0;

  index = core_index;
  count = {};
  known = {};
  foreign = {};
  foreign_history.clear();
  for (auto& entries : log) entries.clear();
  now = 0;
  line = {};
  std::fill_n(&flags[0][0], kEvents * kEventIds, Flag{});
  std::memset(taken, 0, sizeof taken);
  std::memset(user_taken, 0, sizeof user_taken);
  std::memset(fetched, 0, sizeof fetched);
  pipe = nullptr;
  buffers.assign(1, Buffer{});
  queues.clear();
  ub_used = 0;
  pipe_buffers = 0;
  counter_mode = false;
  mask_low = mask_high = ~uint64_t{0};
  cached.clear();
  dirty.clear();
  dropped.clear();
  all_dropped = {};
  std::memset(cross_set, 0, sizeof cross_set);
  std::memset(cross_waited, 0, sizeof cross_waited);
  kernel_type = -1;
  counters = {};
}

Instruction::Instruction(const char* instruction_name, Pipe on, Site where)
    : core(Self()), name(instruction_name), pipe(on), clock(++core.count[on]), site(where) {
  core.log[on].push_back(where);
  Knowledge& mine = core.known[on];
  if (on == kS) {
    mine[kS] = clock - 1;  // the scalar unit works in order
  } else {
    // The scalar unit issues this, so what it has waited for has finished. Its own stores may not
    // have.
    for (int other = kV; other < kPipes; ++other) {
      mine[other] = std::max(mine[other], core.known[kS][other]);
    }
  }
  core.now += kIssueCycles;
  core.counters.busy_cycles[kS] += kIssueCycles;
}

void Spend(const Instruction& instruction, int64_t busy, int64_t latency) {
  Core& core = instruction.core;
  core.counters.busy_cycles[instruction.pipe] += static_cast<uint64_t>(busy);
  if (instruction.pipe == kS) {
    core.now += static_cast<uint64_t>(busy + latency);
    return;
  }
  Timeline& line = core.line[instruction.pipe];
  const uint64_t start = std::max({core.now, line.free, line.ready});
  line.free = start + static_cast<uint64_t>(busy);
  line.done = std::max(line.done, line.free + static_cast<uint64_t>(latency));
}

Signal Send(const Core& core, Pipe from) {
  Signal signal;
  signal.knowledge = core.known[from];
  signal.knowledge[from] = core.count[from];
  if (from != kS) {
    for (int other = kV; other < kPipes; ++other) {
      signal.knowledge[other] = std::max(signal.knowledge[other], core.known[kS][other]);
    }
  }
  signal.time = std::max(core.now, core.line[from].done) + kFlagCycles;
  return signal;
}

void Receive(Core& core, Pipe to, const Signal& signal) {
  for (int pipe = 0; pipe < kPipes; ++pipe) {
    core.known[to][pipe] = std::max(core.known[to][pipe], signal.knowledge[pipe]);
  }
  if (to == kS) {
    core.now = std::max(core.now, signal.time);
  } else {
    core.line[to].ready = std::max(core.line[to].ready, signal.time);
  }
}

void BarrierAll(Core& core) {
  for (auto& knowledge : core.known) knowledge = core.count;
  for (const auto& line : core.line) core.now = std::max(core.now, line.done);
}

}  // namespace sim
