#include "core.h"

#include <algorithm>
#include <cstring>

namespace sim {

const char* const kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX"};
const char* const kSpaceNames[kSpaces] = {"UB", "L1", "L0A", "L0B", "L0C"};
const uint32_t kSpaceBytes[kSpaces] = {kUbBytes, kL1Bytes, kL0Bytes, kL0Bytes, kL0cBytes};
const Pipe kPipeOfSlot[kSpaces][kSlots] = {
    {kS, kV, kMte2, kMte3},   {kMte2, kMte1, kM, kFix}, {kMte2, kMte1, kM, kFix},
    {kMte2, kMte1, kM, kFix}, {kMte2, kMte1, kM, kFix},
};

Pipe PipeOf(pipe_t pipe) {
  switch (pipe) {
    case PIPE_V:
      return kV;
    case PIPE_M:
      return kM;
    case PIPE_MTE1:
      return kMte1;
    case PIPE_MTE2:
      return kMte2;
    case PIPE_MTE3:
      return kMte3;
    case PIPE_FIX:
      return kFix;
    default:
      return kS;
  }
}

bool HasPipe(Kind kind, Pipe pipe) {
  if (pipe == kS || pipe == kMte2) return true;
  return (kind == Kind::kVector) == (pipe == kV || pipe == kMte3);
}

bool HasSpace(Kind kind, Space space) { return (kind == Kind::kVector) == (space == Space::kUb); }

int64_t SizeOf(Type type) {
  switch (type) {
    case Type::kInt8:
    case Type::kUint8:
      return 1;
    case Type::kInt16:
    case Type::kUint16:
    case Type::kHalf:
    case Type::kBfloat16:
      return 2;
    case Type::kInt64:
    case Type::kUint64:
      return 8;
    default:
      return 4;
  }
}

const char* NameOf(Kind kind) { return kind == Kind::kVector ? "a vector core" : "a cube core"; }

void LocalMemory::Reset(Space space) {
  const uint32_t size = kSpaceBytes[static_cast<size_t>(space)];
  if (!bytes) {
    bytes = std::make_unique<uint8_t[]>(size + 2 * kRepeatBytes);
    initialised = std::make_unique<uint32_t[]>(size / kBlock);
    blocks = std::make_unique<BlockState[]>(size / kBlock);
    touched_blocks = size / kBlock;
  }
  std::memset(bytes.get(), 0xff, size_t{touched_blocks} * kBlock);
  std::fill_n(initialised.get(), touched_blocks, 0u);
  std::fill_n(blocks.get(), touched_blocks, BlockState{});
  touched_blocks = 0;
  used = 0;
}

void Core::Reset(const Place& where) {
  place = where;
  index = where.index;
  for (int i = 0; i < kSpaces; ++i) {
    const auto space = static_cast<Space>(i);
    if (HasSpace(place.kind, space)) Memory(space).Reset(space);
  }
  ub = Memory(Space::kUb).bytes.get();

  count = {};
  known = {};
  foreign = {};
  foreign_snapshot = nullptr;
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
  pipe_buffers = 0;
  counter_mode = false;
  mask_low = mask_high = ~uint64_t{0};
  cached.clear();
  dirty.clear();
  dropped.clear();
  all_dropped = {};
  kernel_type = -1;
  trace = {};
  counters = {};
}

Instruction::Instruction(const char* instruction_name, Pipe on, Site where)
    : core(Self()), name(instruction_name), pipe(on), clock(++core.count[on]), site(where) {
  if (!HasPipe(core.place.kind, on)) {
    Report(site, "core-kind", "%s works on the pipe %s, which %s doesn't have", name,
           kPipeNames[on], NameOf(core.place.kind));
    throw Abandon{};
  }
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
  Issue(core, EventKind::kInstruction);
}

void Spend(const Instruction& instruction, int64_t busy, int64_t latency) {
  Core& core = instruction.core;
  core.counters.busy_cycles[instruction.pipe] += static_cast<uint64_t>(busy);
  if (instruction.pipe == kS) {
    core.now += static_cast<uint64_t>(busy + latency);
    return;
  }
  Timeline& line = core.line[instruction.pipe];
  uint64_t& in_turn = line.starts[line.issued++ % kQueueDepth];
  if (instruction.pipe == kMte1 || instruction.pipe == kM) {
    core.now = std::max(core.now, in_turn);  // the scalar unit waits for a place in the queue
  }
  const uint64_t start = std::max({core.now, line.free, line.ready});
  in_turn = start;
  line.free = start + static_cast<uint64_t>(busy);
  line.done = std::max(line.done, line.free + static_cast<uint64_t>(latency));
}

namespace {

void ScalarTime(Core& core, uint64_t cycles) {
  core.now += cycles;
  core.counters.busy_cycles[kS] += cycles;
}

void ScalarInstructions(Core& core, uint64_t up_to) {
  ScalarTime(core, (up_to - core.trace.done) * kScalarCycles);
  core.trace.done = up_to;
}

}  // namespace

void Issue(Core& core, EventKind kind) {
  ScalarTrace& trace = core.trace;
  if (!trace.Exists()) {
    ScalarTime(core, kIssueCycles);
    return;
  }
  if (trace.next == trace.events.size() ||
      trace.events[trace.next] >> 32 != static_cast<uint64_t>(kind)) {
    trace.differs = true;
    ScalarTime(core, kIssueCycles);
    return;
  }
  ScalarInstructions(core, trace.events[trace.next++] & UINT32_MAX);
}

void FinishScalar(Core& core) {
  ScalarTrace& trace = core.trace;
  if (!trace.Exists()) return;
  trace.differs |= trace.next != trace.events.size();
  if (!trace.differs) ScalarInstructions(core, trace.instructions);
  core.counters.scalar_instructions = trace.instructions;
}

Signal Send(const Core& core, Pipe from) {
  Signal signal;
  signal.knowledge = core.known[from];
  signal.knowledge[from] = core.count[from];
  signal.knowledge[kWaits] = core.count[kWaits];  // whatever was issued since came after them
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
