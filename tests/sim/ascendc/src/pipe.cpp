// TPipe, its queues and buffers, events and barriers.
#include <algorithm>
#include <exception>

#include "core.h"
#include "memory.h"

namespace sim {
namespace {

using AscendC::HardEvent;
using AscendC::TPosition;

const char* const kEventNames[kEvents] = {"MTE2_V",    "V_MTE2",    "MTE3_V", "V_MTE3",
                                          "MTE3_MTE2", "MTE2_MTE3", "S_V",    "V_S",
                                          "S_MTE2",    "MTE2_S",    "S_MTE3", "MTE3_S"};

int Index(HardEvent event) { return static_cast<int>(event); }

Pipe SourceOf(HardEvent event) {
  static const Pipe pipes[kEvents] = {kMte2, kV, kMte3, kV,    kMte3, kMte2,
                                      kS,    kV, kS,    kMte2, kS,    kMte3};
  return pipes[Index(event)];
}

Pipe DestinationOf(HardEvent event) {
  static const Pipe pipes[kEvents] = {kV, kMte2, kV,    kMte3, kMte2, kMte3,
                                      kV, kS,    kMte2, kS,    kMte3, kS};
  return pipes[Index(event)];
}

// What can't be continued from.
[[noreturn]] void Fail() { throw Abandon{}; }

void ScalarWork(Core& core, int64_t cycles) {
  core.now += static_cast<uint64_t>(cycles);
  core.counters.busy_cycles[kS] += static_cast<uint64_t>(cycles);
}

int TakeId(Core& core, HardEvent event, Site site) {
  uint8_t& taken = core.taken[Index(event)];
  for (int id = 0; id < kEventIds; ++id) {
    if (!(taken & (1 << id))) {
      taken = static_cast<uint8_t>(taken | (1 << id));
      return id;
    }
  }
  Report(site, "event-id", "no %s id is free: queues and AllocEventID hold all %lld",
         kEventNames[Index(event)], static_cast<long long>(kEventIds));
  Fail();
}

void ReturnId(Core& core, HardEvent event, int id) {
  core.taken[Index(event)] = static_cast<uint8_t>(core.taken[Index(event)] & ~(1 << id));
}

Queue& QueueOf(Core& core, int queue, const char* call, Site site) {
  if (queue < 0 || queue >= static_cast<int>(core.queues.size())) {
    Report(site, "queue-order", "%s on a queue without InitBuffer", call);
    Fail();
  }
  return core.queues[static_cast<size_t>(queue)];
}

// The buffer of a tensor that the queue lent out, or null.
Buffer* Lent(Core& core, int queue, const UbView& tensor, const char* call, Site site) {
  if (tensor.buffer == 0 || tensor.buffer >= core.buffers.size() ||
      core.buffers[tensor.buffer].queue != queue) {
    Report(site, "queue-order", "%s of a tensor that isn't from this queue", call);
    return nullptr;
  }
  Buffer& buffer = core.buffers[tensor.buffer];
  if (buffer.generation != tensor.generation) {
    Report(site, "queue-order", "%s of a tensor that was freed by FreeTensor at line %d", call,
           buffer.site.line);
    return nullptr;
  }
  return &buffer;
}

UbView Lend(const Core& core, uint32_t index) {
  const Buffer& buffer = core.buffers[index];
  return {buffer.begin, buffer.begin, buffer.end, index, buffer.generation};
}

// Takes `bytes` of UB, rounded up to whole blocks.
uint32_t NewBuffer(Core& core, uint32_t bytes, Site site) {
  if (!core.pipe) {
    Report(site, "pipe", "InitBuffer on a TPipe that is gone");
    Fail();
  }
  const uint32_t usable =
      kUbBytes - kUbAlwaysReserved - static_cast<uint32_t>(Setting("ub_reserved"));
  const uint64_t rounded = (uint64_t{bytes} + kBlock - 1) / kBlock * kBlock;
  if (bytes == 0) Report(site, "ub-capacity", "InitBuffer of 0 bytes");
  if (core.ub_used + rounded > usable) {
    Report(site, "ub-capacity",
           "InitBuffer of %u bytes makes %llu in all, but UB has %u for kernels", bytes,
           static_cast<unsigned long long>(core.ub_used + rounded), usable);
    Fail();
  }
  if (++core.pipe_buffers > kMaxBuffers) {
    Report(site, "pipe-buffers", "more than %lld buffers", static_cast<long long>(kMaxBuffers));
  }
  Buffer buffer;
  buffer.begin = core.ub_used;
  buffer.end = core.ub_used + static_cast<uint32_t>(rounded);
  buffer.site = site;
  core.ub_used = buffer.end;
  Poison(core, buffer.begin, buffer.end - buffer.begin);
  core.buffers.push_back(buffer);
  return static_cast<uint32_t>(core.buffers.size() - 1);
}

void CheckReturned(const Buffer& buffer) {
  if (buffer.queue < 0) return;
  if (buffer.state == BufferState::kQueued) {
    Report(buffer.site, "queue-left", "EnQue has no DeQue by the end");
  } else if (buffer.state == BufferState::kAllocated) {
    Report(buffer.site, "queue-left", "AllocTensor has no EnQue and FreeTensor by the end");
  } else if (buffer.state == BufferState::kDequeued) {
    Report(buffer.site, "queue-left", "DeQue has no FreeTensor by the end");
  }
}

}  // namespace

// ---- TPipe
// ---------------------------------------------------------------------------------------

void PipeInit(void* pipe, Site site) {
  Core& core = Self();
  if (core.pipe) Report(site, "pipe", "a second TPipe while the first one lives");
  core.pipe = pipe;
}

void PipeReset(Site site) {
  Core& core = Self();
  if (std::uncaught_exceptions() > 0) return;
  for (Buffer& buffer : core.buffers) {
    CheckReturned(buffer);
    if (buffer.queue >= 0 && buffer.event >= 0) {
      ReturnId(core, core.queues[static_cast<size_t>(buffer.queue)].freed, buffer.event);
    }
    buffer.queue = -1;
    buffer.event = -1;
    buffer.state = BufferState::kDead;
    buffer.site = site;
  }
  core.queues.clear();
  core.ub_used = 0;
  core.pipe_buffers = 0;
  BarrierAll(core);
}

void PipeDestroy(Site site) {
  PipeReset(site);
  Self().pipe = nullptr;
}

void* CurrentPipe() { return Self().pipe; }

UbView InitTBuf(uint32_t bytes, Site site) {
  Core& core = Self();
  const uint32_t index = NewBuffer(core, bytes, site);
  core.buffers[index].state = BufferState::kTBuf;
  return Lend(core, index);
}

UbView PlaceTensor(uint32_t addr, uint64_t bytes, Site site) {
  const uint32_t usable =
      kUbBytes - kUbAlwaysReserved - static_cast<uint32_t>(Setting("ub_reserved"));
  if (addr + bytes > usable) {
    Report(site, "ub-capacity", "a tensor at UB %u with %llu bytes, but UB has %u for kernels",
           addr, static_cast<unsigned long long>(bytes), usable);
    Fail();
  }
  return {addr, addr, static_cast<uint32_t>(addr + bytes), 0, 0};
}

// ---- Queues
// --------------------------------------------------------------------------------------

int InitQueue(TPosition src, TPosition dst, int32_t depth, int64_t num, uint32_t bytes, Site site) {
  Core& core = Self();
  Queue queue;
  queue.depth = depth;
  if (src == TPosition::VECIN && dst == TPosition::VECIN) {
    queue.filled = HardEvent::MTE2_V;
    queue.freed = HardEvent::V_MTE2;
  } else if (src == TPosition::VECOUT && dst == TPosition::VECOUT) {
    queue.filled = HardEvent::V_MTE3;
    queue.freed = HardEvent::MTE3_V;
  } else if (src == TPosition::VECIN && dst == TPosition::VECOUT) {
    queue.filled = HardEvent::MTE2_MTE3;
    queue.freed = HardEvent::MTE3_MTE2;
  } else {
    Report(site, "queue-order", "a queue from VECOUT to VECIN");
    Fail();
  }
  queue.place = static_cast<int>(src);
  if (num < 1 || num > kMaxBuffers) {
    Report(site, "pipe-buffers", "InitBuffer of %lld buffers", static_cast<long long>(num));
    Fail();
  }
  int64_t at_place = num;
  for (const Queue& other : core.queues) {
    if (other.place == queue.place) at_place += static_cast<int64_t>(other.buffers.size());
  }
  if (at_place > kMaxBuffersPerPlace) {
    Report(site, "pipe-buffers", "%lld queue buffers at one position, expected at most %lld",
           static_cast<long long>(at_place), static_cast<long long>(kMaxBuffersPerPlace));
  }
  for (int64_t i = 0; i < num; ++i) {
    const uint32_t index = NewBuffer(core, bytes, site);
    core.buffers[index].state = BufferState::kIdle;
    core.buffers[index].queue = static_cast<int>(core.queues.size());
    queue.buffers.push_back(index);
  }
  core.queues.push_back(queue);
  return static_cast<int>(core.queues.size() - 1);
}

UbView QueueAlloc(int id, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "AllocTensor", site);
  ScalarWork(core, kIssueCycles);
  for (size_t tries = 0; tries < queue.buffers.size(); ++tries) {
    const uint32_t index = queue.buffers[queue.cursor];
    queue.cursor = (queue.cursor + 1) % static_cast<uint32_t>(queue.buffers.size());
    Buffer& buffer = core.buffers[index];
    if (buffer.state != BufferState::kIdle) continue;
    if (buffer.freed) {
      Receive(core, DestinationOf(queue.freed), buffer.signal);
      ReturnId(core, queue.freed, buffer.event);
      buffer.event = -1;
      buffer.freed = false;
    }
    buffer.state = BufferState::kAllocated;
    buffer.site = site;
    Poison(core, buffer.begin, buffer.end - buffer.begin);
    return Lend(core, index);
  }
  Report(site, "queue-order", "AllocTensor: all %zu buffers of the queue are in use",
         queue.buffers.size());
  Fail();
}

bool QueueEnque(int id, const UbView& tensor, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "EnQue", site);
  Buffer* buffer = Lent(core, id, tensor, "EnQue", site);
  if (!buffer) return false;
  if (buffer->state == BufferState::kQueued) {
    Report(site, "queue-order", "EnQue of a tensor that is in the queue since line %d",
           buffer->site.line);
    return false;
  }
  if (static_cast<int32_t>(queue.waiting.size()) >= queue.depth) {
    Report(site, "queue-depth", "EnQue of tensor %zu into a queue of depth %d",
           queue.waiting.size() + 1, queue.depth);
    return false;
  }
  ScalarWork(core, kIssueCycles);
  buffer->state = BufferState::kQueued;
  buffer->site = site;
  buffer->event = TakeId(core, queue.filled, site);
  buffer->signal = Send(core, SourceOf(queue.filled));
  queue.waiting.push_back(tensor.buffer);
  return true;
}

UbView QueueDeque(int id, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "DeQue", site);
  if (queue.waiting.empty()) {
    Report(site, "queue-order", "DeQue from an empty queue");
    Fail();
  }
  ScalarWork(core, kIssueCycles);
  const uint32_t index = queue.waiting.front();
  queue.waiting.pop_front();
  Buffer& buffer = core.buffers[index];
  Receive(core, DestinationOf(queue.filled), buffer.signal);
  ReturnId(core, queue.filled, buffer.event);
  buffer.event = -1;
  buffer.state = BufferState::kDequeued;
  buffer.site = site;
  return Lend(core, index);
}

void QueueFree(int id, const UbView& tensor, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "FreeTensor", site);
  Buffer* buffer = Lent(core, id, tensor, "FreeTensor", site);
  if (!buffer) return;
  if (buffer->state == BufferState::kQueued) {
    Report(site, "queue-order", "FreeTensor of a tensor that is in the queue since line %d",
           buffer->site.line);
    return;
  }
  ScalarWork(core, kIssueCycles);
  buffer->state = BufferState::kIdle;
  buffer->site = site;
  ++buffer->generation;
  buffer->event = TakeId(core, queue.freed, site);
  buffer->freed = true;
  buffer->signal = Send(core, SourceOf(queue.freed));
}

int32_t QueueCount(int id, Site site) {
  return static_cast<int32_t>(QueueOf(Self(), id, "GetTensorCountInQue", site).waiting.size());
}

bool QueueVacant(int id, Site site) {
  const Queue& queue = QueueOf(Self(), id, "VacantInQue", site);
  return static_cast<int32_t>(queue.waiting.size()) < queue.depth;
}

bool QueueHasIdle(int id, Site site) {
  Core& core = Self();
  const Queue& queue = QueueOf(core, id, "HasIdleBuffer", site);
  return std::any_of(queue.buffers.begin(), queue.buffers.end(), [&](uint32_t index) {
    return core.buffers[index].state == BufferState::kIdle;
  });
}

void QueueFreeAllEvents(int id, Site site) {
  Core& core = Self();
  const Queue& queue = QueueOf(core, id, "FreeAllEvent", site);
  for (const uint32_t index : queue.buffers) {
    Buffer& buffer = core.buffers[index];
    if (!buffer.freed) continue;
    Receive(core, DestinationOf(queue.freed), buffer.signal);
    ReturnId(core, queue.freed, buffer.event);
    buffer.event = -1;
    buffer.freed = false;
  }
}

// ---- Events
// --------------------------------------------------------------------------------------

int8_t FetchEvent(HardEvent event, Site site) {
  Core& core = Self();
  for (int id = 0; id < kEventIds; ++id) {
    if (!(core.taken[Index(event)] & (1 << id))) {
      core.fetched[Index(event)] = static_cast<uint8_t>(core.fetched[Index(event)] | (1 << id));
      return static_cast<int8_t>(id);
    }
  }
  Report(site, "event-id", "FetchEventID: no %s id is free", kEventNames[Index(event)]);
  Fail();
}

int8_t AllocEvent(HardEvent event, Site site) {
  Core& core = Self();
  const int id = TakeId(core, event, site);
  core.user_taken[Index(event)] = static_cast<uint8_t>(core.user_taken[Index(event)] | (1 << id));
  return static_cast<int8_t>(id);
}

void ReleaseEvent(HardEvent event, int64_t id, Site site) {
  Core& core = Self();
  if (id < 0 || id >= kEventIds || !(core.user_taken[Index(event)] & (1 << id))) {
    Report(site, "event-id", "ReleaseEventID<%s>(%lld), which AllocEventID didn't give",
           kEventNames[Index(event)], static_cast<long long>(id));
    return;
  }
  core.user_taken[Index(event)] = static_cast<uint8_t>(core.user_taken[Index(event)] & ~(1 << id));
  ReturnId(core, event, static_cast<int>(id));
}

namespace {

// Whether a kernel may use the id: one that it was given, or one below the reserved two that no
// queue holds.
bool MayUse(const Core& core, HardEvent event, int64_t id, const char* call, Site site) {
  const char* name = kEventNames[Index(event)];
  if (id < 0 || id >= kEventIds) {
    Report(site, "event-id", "%s<%s>(%lld), expected an id from 0 to 7", call, name,
           static_cast<long long>(id));
    return false;
  }
  const uint8_t bit = static_cast<uint8_t>(1 << id);
  if (core.user_taken[Index(event)] & bit) return true;
  if (core.taken[Index(event)] & bit) {
    Report(site, "event-id",
           "%s<%s>(%lld), which a queue holds; AllocEventID or FetchEventID gives a "
           "free one",
           call, name, static_cast<long long>(id));
    return false;
  }
  if (id >= kFirstReservedEvent && !(core.fetched[Index(event)] & bit)) {
    Report(site, "event-id", "%s<%s>(%lld): ids 6 and 7 are reserved", call, name,
           static_cast<long long>(id));
  }
  return true;
}

}  // namespace

void SetFlag(HardEvent event, int64_t id, Site site) {
  Core& core = Self();
  if (!MayUse(core, event, id, "SetFlag", site)) return;
  ScalarWork(core, kIssueCycles);
  Flag& flag = core.flags[Index(event)][id];
  if (flag.set) {
    Report(site, "event-twice", "SetFlag<%s>(%lld) again, with no WaitFlag since line %d",
           kEventNames[Index(event)], static_cast<long long>(id), flag.site.line);
  }
  flag = {true, Send(core, SourceOf(event)), site};
}

void WaitFlag(HardEvent event, int64_t id, Site site) {
  Core& core = Self();
  if (!MayUse(core, event, id, "WaitFlag", site)) return;
  ScalarWork(core, kIssueCycles);
  Flag& flag = core.flags[Index(event)][id];
  if (!flag.set) {
    Report(site, "event-wait", "WaitFlag<%s>(%lld) with no SetFlag before it waits for ever",
           kEventNames[Index(event)], static_cast<long long>(id));
    return;
  }
  flag.set = false;
  Receive(core, DestinationOf(event), flag.signal);
}

void PipeBarrier(pipe_t pipe, Site) {
  Core& core = Self();
  ScalarWork(core, kIssueCycles);
  if (pipe == PIPE_ALL) {
    BarrierAll(core);
    return;
  }
  const Pipe on = pipe == PIPE_V ? kV : pipe == PIPE_MTE2 ? kMte2 : kMte3;
  core.known[on][on] = core.count[on];
  core.line[on].ready = std::max(core.line[on].ready, core.line[on].done);
}

// ---- Between cores
// -------------------------------------------------------------------------------

namespace {

// A signal that every core gives and every core waits for. `given[i]` counts core i's.
struct Rendezvous {
  struct Round {
    uint32_t arrived = 0;
    std::array<Knowledge, SIM_MAX_CORES> knowledge{};
    uint64_t time = 0;
  };
  std::deque<Round> rounds;
  std::array<int64_t, SIM_MAX_CORES> given{};
  std::array<int64_t, SIM_MAX_CORES> taken{};
  uint32_t members = 0;
};

// 0 to 15 are the flags of CrossCoreSetFlag, then the two SyncAll.
constexpr int kHardSync = kCrossCoreFlags;
constexpr int kSoftSync = kCrossCoreFlags + 1;
Rendezvous g_rendezvous[kCrossCoreFlags + 2];

// What all cores are known to have finished when this core's signal is given.
void Give(Core& core, int which, const Signal& signal, uint32_t members) {
  Rendezvous& meeting = g_rendezvous[which];
  const size_t number = static_cast<size_t>(meeting.given[core.index]++);
  while (meeting.rounds.size() <= number) meeting.rounds.emplace_back();
  Rendezvous::Round& round = meeting.rounds[number];
  meeting.members = members;
  ++round.arrived;
  for (uint32_t other = 0; other < LaunchCores(); ++other) {
    const Knowledge& known = other == core.index ? signal.knowledge : core.foreign[other];
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      round.knowledge[other][pipe] = std::max(round.knowledge[other][pipe], known[pipe]);
    }
  }
  round.time = std::max(round.time, signal.time);
}

struct Wait {
  int which;
  uint32_t core;
};

bool Complete(void* context) {
  const Wait& wait = *static_cast<Wait*>(context);
  const Rendezvous& meeting = g_rendezvous[wait.which];
  const size_t number = static_cast<size_t>(meeting.taken[wait.core]);
  return number < meeting.rounds.size() && meeting.rounds[number].arrived >= meeting.members;
}

void Take(int which, const char* call, int64_t cycles, Site site) {
  const uint32_t index = Self().index;
  Wait wait{which, index};
  WaitUntil(Complete, &wait, call, site);
  Core& core = Self();
  Rendezvous& meeting = g_rendezvous[which];
  const Rendezvous::Round& round = meeting.rounds[static_cast<size_t>(meeting.taken[index]++)];
  core.foreign_history.push_back(core.foreign);
  for (uint32_t other = 0; other < LaunchCores(); ++other) {
    for (int pipe = 0; pipe < kPipes; ++pipe) {
      core.foreign[other][pipe] = std::max(core.foreign[other][pipe], round.knowledge[other][pipe]);
    }
  }
  core.now = std::max(core.now, round.time + static_cast<uint64_t>(cycles));
}

void RequireMixed(const Core& core, const char* call, Site site) {
  if (core.kernel_type == AscendC::KERNEL_TYPE_MIX_AIV_1_0) return;
  Report(site, "kernel-type",
         "%s in a kernel that isn't mixed hangs: state "
         "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0)",
         call);
}

}  // namespace

void StartRendezvous() {
  for (Rendezvous& meeting : g_rendezvous) meeting = Rendezvous{};
}

void SyncAll(bool aiv_only, Site site) {
  Core& core = Self();
  RequireMixed(core, "SyncAll", site);
  if (!aiv_only) {
    Report(site, "deadlock", "SyncAll<false> waits for cube cores, which this kernel has none of");
    Fail();
  }
  BarrierAll(core);
  Give(core, kHardSync, Send(core, kMte3), LaunchCores());
  Take(kHardSync, "SyncAll", kSyncAllCycles, site);
}

void SyncAllSoft(const GmView& workspace, const UbView& local, int64_t used_cores, Site site) {
  Core& core = Self();
  const int64_t cores = LaunchCores();
  if (used_cores < 0 || used_cores > cores) {
    Report(site, "sync-all", "SyncAll of %lld cores in a launch of %lld",
           static_cast<long long>(used_cores), static_cast<long long>(cores));
    Fail();
  }
  BarrierAll(core);
  {
    Instruction poll("SyncAll", kMte2, site);
    const int64_t bytes = 32 * cores;
    if (Usable(poll, local, "ubWorkspace") && Aligned(poll, local, kBlock, "ubWorkspace") &&
        Inside(poll, local, 0, bytes, "ubWorkspace")) {
      Touch(poll, local.addr, static_cast<uint32_t>(bytes), true, "ubWorkspace");
    }
    CheckSyncWorkspace(poll, workspace, bytes);
  }
  BarrierAll(core);
  Give(core, kSoftSync, Send(core, kMte3),
       static_cast<uint32_t>(used_cores == 0 ? cores : used_cores));
  Take(kSoftSync, "SyncAll", 2 * kSyncAllCycles, site);
}

void CrossCoreSet(int mode, pipe_t pipe, int64_t id, Site site) {
  Core& core = Self();
  RequireMixed(core, "CrossCoreSetFlag", site);
  if (mode != 0) {
    Report(site, "cross-core",
           "CrossCoreSetFlag of mode %d needs cube cores, which this kernel has "
           "none of",
           mode);
    Fail();
  }
  if (id >= kCrossCoreFlags) {
    Report(site, "cross-core", "CrossCoreSetFlag(%lld), expected an id from 0 to 15",
           static_cast<long long>(id));
    Fail();
  }
  if (id >= kFirstSyncAllFlag && id <= kLastSyncAllFlag) {
    Report(site, "cross-core", "CrossCoreSetFlag(%lld): SyncAll uses 11 to 14",
           static_cast<long long>(id));
  }
  ScalarWork(core, kIssueCycles);
  core.cross_site[id] = site;
  if (++core.cross_set[id] - core.cross_waited[id] > kCrossCoreLimit) {
    Report(site, "cross-core",
           "CrossCoreSetFlag(%lld) is %lld ahead of CrossCoreWaitFlag, at most %lld",
           static_cast<long long>(id),
           static_cast<long long>(core.cross_set[id] - core.cross_waited[id]),
           static_cast<long long>(kCrossCoreLimit));
  }
  const Pipe from = pipe == PIPE_V ? kV : pipe == PIPE_MTE2 ? kMte2 : kMte3;
  Give(core, static_cast<int>(id), Send(core, from), LaunchCores());
}

void CrossCoreWait(int64_t id, Site site) {
  Core& core = Self();
  RequireMixed(core, "CrossCoreWaitFlag", site);
  if (id >= kCrossCoreFlags) {
    Report(site, "cross-core", "CrossCoreWaitFlag(%lld), expected an id from 0 to 15",
           static_cast<long long>(id));
    Fail();
  }
  ++core.cross_waited[id];
  Take(static_cast<int>(id), "CrossCoreWaitFlag", kSyncAllCycles, site);
}

}  // namespace sim
