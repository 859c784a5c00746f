// TPipe, its queues and buffers, events and barriers.
#include <algorithm>
#include <exception>

#include "core.h"
#include "memory.h"

namespace sim {
namespace {

using AscendC::HardEvent;
using AscendC::TPosition;

struct EventPipes {
  const char* name;
  Pipe from;
  Pipe to;
};
#define SIM_EVENT(from, to) {#from "_" #to, PipeOf(PIPE_##from), PipeOf(PIPE_##to)}

// In the order of HardEvent.
const EventPipes& PipesOf(HardEvent event) {
  static const EventPipes pipes[kEvents] = {
      SIM_EVENT(MTE2, MTE1), SIM_EVENT(MTE1, MTE2), SIM_EVENT(MTE1, M), SIM_EVENT(M, MTE1),
      SIM_EVENT(MTE2, V),    SIM_EVENT(V, MTE2),    SIM_EVENT(MTE3, V), SIM_EVENT(V, MTE3),
      SIM_EVENT(MTE2, M),    SIM_EVENT(M, MTE2),    SIM_EVENT(M, FIX),  SIM_EVENT(FIX, M),
      SIM_EVENT(MTE3, MTE2), SIM_EVENT(MTE2, MTE3), SIM_EVENT(S, V),    SIM_EVENT(V, S),
      SIM_EVENT(S, MTE2),    SIM_EVENT(MTE2, S),    SIM_EVENT(S, MTE3), SIM_EVENT(MTE3, S),
      SIM_EVENT(MTE2, FIX),  SIM_EVENT(FIX, MTE2),  SIM_EVENT(FIX, S),  SIM_EVENT(M, S),
      SIM_EVENT(MTE1, FIX),  SIM_EVENT(FIX, MTE1),
  };
  return pipes[static_cast<int>(event)];
}

int Index(HardEvent event) { return static_cast<int>(event); }
const char* NameOf(HardEvent event) { return PipesOf(event).name; }
Pipe SourceOf(HardEvent event) { return PipesOf(event).from; }
Pipe DestinationOf(HardEvent event) { return PipesOf(event).to; }

// What can't be continued from.
[[noreturn]] void Fail() { throw Abandon{}; }

int TakeId(Core& core, HardEvent event, Site site) {
  uint8_t& taken = core.taken[Index(event)];
  for (int id = 0; id < kEventIds; ++id) {
    if (!(taken & (1 << id))) {
      taken = static_cast<uint8_t>(taken | (1 << id));
      return id;
    }
  }
  Report(site, "event-id", "no %s id is free: queues and AllocEventID hold all %lld", NameOf(event),
         static_cast<long long>(kEventIds));
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
Buffer* Lent(Core& core, int queue, const LocalView& tensor, const char* call, Site site) {
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

LocalView Lend(const Core& core, uint32_t index) {
  const Buffer& buffer = core.buffers[index];
  return {buffer.begin, buffer.begin, buffer.end, index, buffer.generation, buffer.space};
}

// What kernels may use of a memory.
uint32_t UsableBytes(Space space) {
  const uint32_t bytes = kSpaceBytes[static_cast<size_t>(space)];
  if (space == Space::kL1) return bytes - kL1AlwaysReserved;
  if (space != Space::kUb) return bytes;
  return bytes - kUbAlwaysReserved - static_cast<uint32_t>(Setting("ub_reserved"));
}

const char* CapacityRule(Space space) {
  return space == Space::kUb ? "ub-capacity" : "cube-capacity";
}

void RequireSpace(const Core& core, Space space, const char* call, Site site) {
  if (HasSpace(core.place.kind, space)) return;
  Report(site, "core-kind", "%s in %s, which %s doesn't have", call,
         kSpaceNames[static_cast<size_t>(space)], NameOf(core.place.kind));
  Fail();
}

// Takes `bytes` of a memory, rounded up to whole blocks.
uint32_t NewBuffer(Core& core, Space space, uint32_t bytes, Site site) {
  if (!core.pipe) {
    Report(site, "pipe", "InitBuffer on a TPipe that is gone");
    Fail();
  }
  RequireSpace(core, space, "InitBuffer", site);
  LocalMemory& memory = core.Memory(space);
  const uint32_t usable = UsableBytes(space);
  const uint64_t rounded = (uint64_t{bytes} + kBlock - 1) / kBlock * kBlock;
  if (bytes == 0) Report(site, CapacityRule(space), "InitBuffer of 0 bytes");
  if (memory.used + rounded > usable) {
    Report(site, CapacityRule(space),
           "InitBuffer of %u bytes makes %llu in all, but %s has %u for kernels", bytes,
           static_cast<unsigned long long>(memory.used + rounded),
           kSpaceNames[static_cast<size_t>(space)], usable);
    Fail();
  }
  if (++core.pipe_buffers > kMaxBuffers) {
    Report(site, "pipe-buffers", "more than %lld buffers", static_cast<long long>(kMaxBuffers));
  }
  Buffer buffer;
  buffer.space = space;
  buffer.begin = memory.used;
  buffer.end = memory.used + static_cast<uint32_t>(rounded);
  buffer.site = site;
  memory.used = buffer.end;
  Poison(core, space, buffer.begin, buffer.end - buffer.begin);
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

namespace {

// On a cube core a TPipe takes ids of M_MTE1 for matrix multiplications that it doesn't know of,
// sets them, and waits for them in the end.
void SetPipeEvents(Core& core, Site site) {
  const int event = Index(HardEvent::M_MTE1);
  for (int id = 0; id < kPipeEvents; ++id) {
    core.taken[event] = static_cast<uint8_t>(core.taken[event] | (1 << id));
    core.flags[event][id] = {true, Send(core, kM), site};
  }
}

void AwaitPipeEvents(Core& core, Site site) {
  const int event = Index(HardEvent::M_MTE1);
  for (int id = 0; id < kPipeEvents; ++id) {
    Flag& flag = core.flags[event][id];
    if (!flag.set) {
      Report(site, "event-wait",
             "the TPipe ends with WaitFlag<M_MTE1>(%d), which it had set in the beginning and the "
             "kernel hasn't set again: it waits for ever",
             id);
    }
    flag.set = false;
    ReturnId(core, HardEvent::M_MTE1, id);
  }
}

}  // namespace

void PipeInit(void* pipe, Site site) {
  Core& core = Self();
  if (core.pipe) Report(site, "pipe", "a second TPipe while the first one lives");
  core.pipe = pipe;
  if (core.place.kind == Kind::kCube) SetPipeEvents(core, site);
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
  for (LocalMemory& memory : core.memory) memory.used = 0;
  core.pipe_buffers = 0;
  BarrierAll(core);
}

void PipeDestroy(Site site) {
  PipeReset(site);
  Core& core = Self();
  core.pipe = nullptr;
  if (core.place.kind == Kind::kCube && std::uncaught_exceptions() == 0) {
    AwaitPipeEvents(core, site);
  }
}

void* CurrentPipe() { return Self().pipe; }

LocalView InitTBuf(TPosition position, uint32_t bytes, Site site) {
  Core& core = Self();
  const uint32_t index = NewBuffer(core, SpaceOf(position), bytes, site);
  core.buffers[index].state = BufferState::kTBuf;
  return Lend(core, index);
}

LocalView PlaceTensor(TPosition position, uint32_t addr, uint64_t bytes, Site site) {
  const Space space = SpaceOf(position);
  RequireSpace(Self(), space, "a tensor", site);
  const uint32_t usable = UsableBytes(space);
  if (addr + bytes > usable) {
    const char* name = kSpaceNames[static_cast<size_t>(space)];
    Report(site, CapacityRule(space),
           "a tensor at %s %u with %llu bytes, but %s has %u for kernels", name, addr,
           static_cast<unsigned long long>(bytes), name, usable);
    Fail();
  }
  return {addr, addr, static_cast<uint32_t>(addr + bytes), 0, 0, space};
}

// ---- Queues
// --------------------------------------------------------------------------------------

namespace {

// Which flags a queue sets when a tensor is filled and when it is free again.
bool SetEvents(Queue& queue, TPosition src, TPosition dst) {
  struct Kind {
    TPosition src;
    TPosition dst;
    HardEvent filled;
    HardEvent freed;
  };
  static const Kind kinds[] = {
      {TPosition::VECIN, TPosition::VECIN, HardEvent::MTE2_V, HardEvent::V_MTE2},
      {TPosition::VECOUT, TPosition::VECOUT, HardEvent::V_MTE3, HardEvent::MTE3_V},
      {TPosition::VECIN, TPosition::VECOUT, HardEvent::MTE2_MTE3, HardEvent::MTE3_MTE2},
      {TPosition::A1, TPosition::A1, HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2},
      {TPosition::B1, TPosition::B1, HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2},
      {TPosition::A2, TPosition::A2, HardEvent::MTE1_M, HardEvent::M_MTE1},
      {TPosition::B2, TPosition::B2, HardEvent::MTE1_M, HardEvent::M_MTE1},
      {TPosition::CO1, TPosition::CO1, HardEvent::M_FIX, HardEvent::FIX_M},
  };
  for (const Kind& kind : kinds) {
    if (kind.src != src || kind.dst != dst) continue;
    queue.filled = kind.filled;
    queue.freed = kind.freed;
    return true;
  }
  return false;
}

}  // namespace

int InitQueue(TPosition src, TPosition dst, int32_t depth, int64_t num, uint32_t bytes, Site site) {
  Core& core = Self();
  Queue queue;
  queue.depth = depth;
  if (!SetEvents(queue, src, dst)) {
    Report(site, "queue-order", "no queue leads from the one position to the other");
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
    const uint32_t index = NewBuffer(core, SpaceOf(src), bytes, site);
    core.buffers[index].state = BufferState::kIdle;
    core.buffers[index].queue = static_cast<int>(core.queues.size());
    queue.buffers.push_back(index);
  }
  core.queues.push_back(queue);
  return static_cast<int>(core.queues.size() - 1);
}

LocalView QueueAlloc(int id, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "AllocTensor", site);
  Issue(core, EventKind::kQueueCall);
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
    Poison(core, buffer.space, buffer.begin, buffer.end - buffer.begin);
    return Lend(core, index);
  }
  Report(site, "queue-order", "AllocTensor: all %zu buffers of the queue are in use",
         queue.buffers.size());
  Fail();
}

bool QueueEnque(int id, const LocalView& tensor, Site site) {
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
  Issue(core, EventKind::kQueueCall);
  buffer->state = BufferState::kQueued;
  buffer->site = site;
  buffer->event = TakeId(core, queue.filled, site);
  buffer->signal = Send(core, SourceOf(queue.filled));
  queue.waiting.push_back(tensor.buffer);
  return true;
}

LocalView QueueDeque(int id, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "DeQue", site);
  if (queue.waiting.empty()) {
    Report(site, "queue-order", "DeQue from an empty queue");
    Fail();
  }
  Issue(core, EventKind::kQueueCall);
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

void QueueFree(int id, const LocalView& tensor, Site site) {
  Core& core = Self();
  Queue& queue = QueueOf(core, id, "FreeTensor", site);
  Buffer* buffer = Lent(core, id, tensor, "FreeTensor", site);
  if (!buffer) return;
  if (buffer->state == BufferState::kQueued) {
    Report(site, "queue-order", "FreeTensor of a tensor that is in the queue since line %d",
           buffer->site.line);
    return;
  }
  Issue(core, EventKind::kQueueCall);
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
  Report(site, "event-id", "FetchEventID: no %s id is free", NameOf(event));
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
           NameOf(event), static_cast<long long>(id));
    return;
  }
  core.user_taken[Index(event)] = static_cast<uint8_t>(core.user_taken[Index(event)] & ~(1 << id));
  ReturnId(core, event, static_cast<int>(id));
}

namespace {

bool IsPipeEvent(const Core& core, HardEvent event, int64_t id) {
  return core.pipe && core.place.kind == Kind::kCube && event == HardEvent::M_MTE1 &&
         id < kPipeEvents;
}

// Whether a kernel may use the id: one that it was given, or one below the reserved two that no
// queue holds.
bool MayUse(const Core& core, HardEvent event, int64_t id, const char* call, Site site) {
  const char* name = NameOf(event);
  const Kind kind = core.place.kind;
  if (!HasPipe(kind, SourceOf(event)) || !HasPipe(kind, DestinationOf(event))) {
    Report(site, "core-kind", "%s<%s>, but %s doesn't have both pipes", call, name, NameOf(kind));
    return false;
  }
  if (id < 0 || id >= kEventIds) {
    Report(site, "event-id", "%s<%s>(%lld), expected an id from 0 to 7", call, name,
           static_cast<long long>(id));
    return false;
  }
  const uint8_t bit = static_cast<uint8_t>(1 << id);
  if (core.user_taken[Index(event)] & bit) return true;
  if (IsPipeEvent(core, event, id)) return true;
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
  Issue(core, EventKind::kSetFlag);
  Flag& flag = core.flags[Index(event)][id];
  if (flag.set) {
    Report(site, "event-twice", "SetFlag<%s>(%lld) again, with no WaitFlag since line %d%s",
           NameOf(event), static_cast<long long>(id), flag.site.line,
           IsPipeEvent(core, event, id) ? ": the TPipe of a cube core sets 0, 1 and 2" : "");
  }
  flag = {true, Send(core, SourceOf(event)), site};
}

void WaitFlag(HardEvent event, int64_t id, Site site) {
  Core& core = Self();
  if (!MayUse(core, event, id, "WaitFlag", site)) return;
  Issue(core, EventKind::kWaitFlag);
  Flag& flag = core.flags[Index(event)][id];
  if (!flag.set) {
    Report(site, "event-wait", "WaitFlag<%s>(%lld) with no SetFlag before it waits for ever",
           NameOf(event), static_cast<long long>(id));
    return;
  }
  flag.set = false;
  Receive(core, DestinationOf(event), flag.signal);
}

void PipeBarrier(pipe_t pipe, Site site) {
  Core& core = Self();
  Issue(core, EventKind::kBarrier);
  if (pipe == PIPE_ALL) {
    BarrierAll(core);
    return;
  }
  const Pipe on = PipeOf(pipe);
  if (!HasPipe(core.place.kind, on)) {
    Report(site, "core-kind", "PipeBarrier<PIPE_%s>, which %s doesn't have", kPipeNames[on],
           NameOf(core.place.kind));
    return;
  }
  core.known[on][on] = core.count[on];
  core.line[on].ready = std::max(core.line[on].ready, core.line[on].done);
}

}  // namespace sim
