#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace sim {
namespace {

// ---- Global memory: ranges ----------------------------------------------------------------------

// History is kept in chunks of this many bytes of GM.
constexpr uint64_t kChunk = 512;

// What one instruction did to bytes [begin, end) of a chunk in this launch.
struct Use {
  uint32_t next;  // index of the next entry, 0 at the end
  Clock clock;
  Clock cleaned;  // the scalar instruction that wrote a SetValue back, 0 while none has
  uint16_t begin;
  uint16_t end;
  uint8_t core;
  uint8_t pipe;
  bool write;
};

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::string name;
  int access = 0;
  std::vector<uint64_t> valid;  // a bit for each byte, where the range was registered as poison
  std::vector<uint64_t> in_l2;  // a bit for each line that this launch has touched
  uint64_t read_bytes = 0;      // of this launch
  uint64_t written_bytes = 0;
  uint64_t hbm_bytes = 0;
  std::unique_ptr<uint32_t[], FreeDeleter> chunks;  // heads of lists of Use, for this launch

  uint64_t bytes() const { return end - begin; }
};

struct GlobalMemory {
  std::vector<std::unique_ptr<Range>> ranges;  // by first address, the larger first
  std::vector<uint64_t> highest_end;           // of this range and all before it
  std::vector<Use> uses;

  void Sort() {
    std::stable_sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
      return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
    });
    highest_end.clear();
    uint64_t highest = 0;
    for (const auto& range : ranges) {
      highest = std::max(highest, range->end);
      highest_end.push_back(highest);
    }
  }
};

GlobalMemory& gm() {
  static GlobalMemory* instance = new GlobalMemory;
  return *instance;
}

// The smallest range that contains the address (the tensor), or the largest (the allocation, which
// holds the history of its lines for all tensors in it).
Range* Find(uint64_t address, bool smallest) {
  GlobalMemory& memory = gm();
  const auto after =
      std::upper_bound(memory.ranges.begin(), memory.ranges.end(), address,
                       [](uint64_t value, const auto& range) { return value < range->begin; });
  Range* best = nullptr;
  for (size_t i = static_cast<size_t>(after - memory.ranges.begin()); i-- > 0;) {
    if (memory.highest_end[i] <= address) break;
    Range& range = *memory.ranges[i];
    if (address >= range.end) continue;
    if (!best || (smallest ? range.bytes() < best->bytes() : range.bytes() > best->bytes())) {
      best = &range;
    }
  }
  return best;
}

uint32_t MaskOf(uint64_t first, uint64_t last) {  // bytes [first, last) of a block
  const uint64_t mask = (uint64_t{1} << last) - (uint64_t{1} << first);
  return static_cast<uint32_t>(mask);
}

// ---- Global memory: order between pipes and cores
// -------------------------------------------------

// Whether an instruction of a core has finished before the running one starts.
bool Finished(const Instruction& now, uint32_t core, int pipe, Clock clock) {
  if (core != now.core.index) return clock <= now.core.foreign[core][static_cast<size_t>(pipe)];
  return clock <= now.core.known[now.pipe][static_cast<size_t>(pipe)];
}

bool Ordered(const Instruction& now, const Use& before) {
  return Finished(now, before.core, before.pipe, before.clock);
}

bool SameInstruction(const Instruction& now, const Use& before) {
  return before.clock == now.clock && before.pipe == now.pipe && before.core == now.core.index;
}

// The scalar unit sees its own writes through its cache; so do all other pipes without it.
bool SameAgent(const Instruction& now, const Use& before) {
  return before.core == now.core.index && (before.pipe == kS) == (now.pipe == kS);
}

// Whether a SetValue reached memory before the running instruction starts.
bool WrittenBack(const Instruction& now, const Use& before) {
  return before.cleaned != 0 && Finished(now, before.core, kS, before.cleaned);
}

// Whether the running core dropped the line from its data cache after `before` was known to be
// done.
bool DroppedSince(const Core& core, uint64_t address, const Use& before) {
  const auto known = [&](const Drop& drop) {
    if (!drop.foreign) return false;
    if (before.core == core.index) return before.clock <= drop.own[before.pipe];
    return before.clock <= (*drop.foreign)[before.core][before.pipe];
  };
  const auto line = core.dropped.find(address & ~static_cast<uint64_t>(kCacheLine - 1));
  return known(core.all_dropped) || (line != core.dropped.end() && known(line->second));
}

void ReportConflict(const Instruction& now, const Range& range, uint64_t address, const Use& before,
                    bool write) {
  const Core& other = CoreAt(before.core);
  const std::string where = Where(other, before.pipe, before.clock);
  if (before.core != now.core.index) {
    Report(now.site, "gm-race",
           "%s %s %s[%llu], which core %s %s at %s, with no SyncAll or cross-core flag between",
           now.name, write ? "writes" : "reads", range.name.c_str(),
           static_cast<unsigned long long>(address - range.begin), NameOf(other).c_str(),
           before.write ? "wrote" : "read", where.c_str());
  } else if (before.pipe == now.pipe) {
    ReportKind(now.site, "gm-order", before.pipe,
               "%s %s %s[%llu], which %s %s at %s; PipeBarrier<PIPE_%s> is missing", now.name,
               write ? "writes" : "reads", range.name.c_str(),
               static_cast<unsigned long long>(address - range.begin), kPipeNames[before.pipe],
               before.write ? "wrote" : "read", where.c_str(), kPipeNames[now.pipe]);
  } else {
    ReportKind(now.site, "gm-order", before.pipe,
               "%s %s %s[%llu], which %s %s at %s; SetFlag and WaitFlag<%s_%s> are missing",
               now.name, write ? "writes" : "reads", range.name.c_str(),
               static_cast<unsigned long long>(address - range.begin), kPipeNames[before.pipe],
               before.write ? "wrote" : "read", where.c_str(), kPipeNames[before.pipe],
               kPipeNames[now.pipe]);
  }
}

// Order is kept, but the scalar unit's cache may still hide the write.
void CheckCache(const Instruction& now, const Range& range, uint64_t address, const Use& before) {
  if (SameAgent(now, before)) return;
  const Core& writer = CoreAt(before.core);
  if (before.pipe == kS && !WrittenBack(now, before)) {
    Report(now.site, "gm-cache",
           "%s uses %s[%llu], which SetValue at %s left in the data cache of core %s; "
           "DataCacheCleanAndInvalid is missing after it",
           now.name, range.name.c_str(), static_cast<unsigned long long>(address - range.begin),
           Where(writer, kS, before.clock).c_str(), NameOf(writer).c_str());
  } else if (now.pipe == kS && !DroppedSince(now.core, address, before)) {
    Report(now.site, "gm-cache",
           "%s may find an old copy of %s[%llu] in the data cache: %s of core %s wrote it at %s; "
           "DataCacheCleanAndInvalid is missing before it",
           now.name, range.name.c_str(), static_cast<unsigned long long>(address - range.begin),
           kPipeNames[before.pipe], NameOf(writer).c_str(),
           Where(writer, before.pipe, before.clock).c_str());
  }
}

// The scalar unit writes back whole 64-byte lines, so nobody else may write anywhere in such a
// line.
void CheckSharedLine(const Instruction& now, const Range& range, uint64_t address,
                     const Use& before) {
  if (SameAgent(now, before)) return;
  const bool harmless = Ordered(now, before) && (before.pipe != kS || WrittenBack(now, before)) &&
                        (now.pipe != kS || DroppedSince(now.core, address, before));
  if (harmless) return;
  Report(
      now.site, "gm-line",
      "%s writes %s[%llu] in a 64-byte line that %s of core %s writes at %s; SetValue writes back "
      "whole lines, so one of the two is lost",
      now.name, range.name.c_str(), static_cast<unsigned long long>(address - range.begin),
      kPipeNames[before.pipe], NameOf(CoreAt(before.core)).c_str(),
      Where(CoreAt(before.core), before.pipe, before.clock).c_str());
}

// Whether two pieces of a chunk touch the same lines of the data cache.
bool ShareLine(const Use& before, uint64_t begin, uint64_t end) {
  return before.begin / kCacheLine <= (end - 1) / kCacheLine &&
         begin / kCacheLine <= (before.end - 1u) / kCacheLine;
}

// Checks and records the use of bytes [begin, end) of a chunk.
void VisitChunk(const Instruction& now, Range& range, uint64_t chunk, uint64_t begin, uint64_t end,
                bool write) {
  auto& uses = gm().uses;
  uint32_t* const head = &range.chunks[chunk - range.begin / kChunk];
  bool recorded = false;
  for (uint32_t* link = head; *link;) {
    Use& before = uses[*link];
    const bool overlaps = before.begin < end && begin < before.end;
    if (overlaps && (before.write || write) && !SameInstruction(now, before)) {
      const uint64_t address = chunk * kChunk + std::max<uint64_t>(begin, before.begin);
      if (!Ordered(now, before)) {
        ReportConflict(now, range, address, before, write);
      } else if (before.write) {
        CheckCache(now, range, address, before);
      }
    } else if (write && before.write && (now.pipe == kS || before.pipe == kS) &&
               ShareLine(before, begin, end)) {
      CheckSharedLine(now, range, chunk * kChunk + begin, before);
    }
    const bool same =
        before.core == now.core.index && before.pipe == now.pipe && before.write == write;
    const bool covered = begin <= before.begin && before.end <= end;
    // A scalar read extends an earlier one; anything else only replaces what it covers, because
    // what was done earlier to other bytes may be known to have finished.
    const bool extends = now.pipe == kS && !write && before.begin <= end && begin <= before.end;
    if (same && (covered || extends) && !recorded) {
      before.begin = static_cast<uint16_t>(std::min<uint64_t>(before.begin, begin));
      before.end = static_cast<uint16_t>(std::max<uint64_t>(before.end, end));
      before.clock = now.clock;
      before.cleaned = 0;
      recorded = true;
    } else if (covered && write && !(before.write && before.pipe == kS)) {
      *link = before.next;  // whoever comes after this write comes after that use, too
      continue;
    }
    link = &before.next;
  }
  if (recorded) return;
  const uint32_t next = *head;
  uses.push_back({next, now.clock, 0, static_cast<uint16_t>(begin), static_cast<uint16_t>(end),
                  static_cast<uint8_t>(now.core.index), static_cast<uint8_t>(now.pipe), write});
  *head = static_cast<uint32_t>(uses.size() - 1);
}

void TrackOrder(const Instruction& now, uint64_t address, uint64_t bytes, bool write) {
  Range& range = *Find(address, false);
  if (!(range.access & SIM_WRITE)) return;  // nobody writes it in a launch
  if (!range.chunks) {
    const uint64_t chunks = (range.end + kChunk - 1) / kChunk - range.begin / kChunk;
    range.chunks.reset(static_cast<uint32_t*>(std::calloc(chunks, sizeof(uint32_t))));
  }
  const uint64_t end = address + bytes;
  for (uint64_t at = address; at < end;) {
    const uint64_t chunk = at / kChunk;
    const uint64_t stop = std::min(end, (chunk + 1) * kChunk);
    VisitChunk(now, range, chunk, at % kChunk, stop - chunk * kChunk, write);
    at = stop;
  }
}

// ---- Global memory: garbage --------------------------------------------------------------------

// Visits the words of the bitmap that cover [from, to) with the mask of the bits inside.
template <typename Visit>
void ForWords(std::vector<uint64_t>& words, uint64_t from, uint64_t to, Visit visit) {
  for (uint64_t at = from; at < to;) {
    const uint64_t word = at / 64;
    const uint64_t stop = std::min(to, (word + 1) * 64);
    const uint64_t high =
        stop == (word + 1) * 64 ? ~uint64_t{0} : (uint64_t{1} << (stop - word * 64)) - 1;
    visit(words[word], high & ~((uint64_t{1} << (at % 64)) - 1), word);
    at = stop;
  }
}

void TrackGarbage(const Instruction& now, Range& range, uint64_t address, uint64_t bytes,
                  bool write) {
  if (range.valid.empty()) return;
  const uint64_t from = address - range.begin;
  ForWords(range.valid, from, from + bytes, [&](uint64_t& word, uint64_t mask, uint64_t index) {
    if (write) {
      word |= mask;
    } else if (const uint64_t garbage = mask & ~word) {
      const uint64_t offset = index * 64 + static_cast<uint64_t>(__builtin_ctzll(garbage));
      Report(now.site, "gm-garbage", "%s reads %s[%llu], which nobody has written", now.name,
             range.name.c_str(), static_cast<unsigned long long>(offset));
      word |= mask;  // once is enough
    }
  });
}

// ---- Global memory: traffic ---------------------------------------------------------------------

// Brings the bytes into L2 and returns how many of those that are read came from HBM. L2 counts as
// large enough for a launch; what is written stays there.
uint64_t PassL2(uint64_t address, uint64_t bytes, bool write) {
  Range& range = *Find(address, false);
  if (range.in_l2.empty()) range.in_l2.resize(range.bytes() / kL2Line / 64 + 2);
  const uint64_t base = range.begin / kL2Line;
  uint64_t lines = 0;
  ForWords(range.in_l2, address / kL2Line - base, (address + bytes - 1) / kL2Line - base + 1,
           [&](uint64_t& word, uint64_t mask, uint64_t) {
             lines += static_cast<uint64_t>(__builtin_popcountll(mask & ~word));
             word |= mask;
           });
  return write ? 0 : std::min(lines * kL2Line, bytes);
}

void CountTraffic(const Instruction& now, Range& range, uint64_t address, uint64_t bytes,
                  bool write) {
  if (bytes == 0) return;
  const uint64_t from_hbm = PassL2(address, bytes, write);
  (write ? range.written_bytes : range.read_bytes) += bytes;
  range.hbm_bytes += from_hbm;
  now.core.counters.hbm_bytes += from_hbm;
}

// ---- The core's own memories
// ------------------------------------------------------------------------------

// The rules of UB and those of the cube core's memories have names of their own.
const char* RuleOf(Space space, const char* of_ub, const char* of_cube) {
  return space == Space::kUb ? of_ub : of_cube;
}

const char* NameOf(Space space) { return kSpaceNames[static_cast<size_t>(space)]; }

void ReportHazard(const Instruction& now, Space space, uint32_t block, bool write, const char* role,
                  int pipe, Clock clock, bool wrote) {
  const std::string where = Where(now.core, pipe, clock);
  const char* rule = RuleOf(space, "ub-order", "cube-order");
  if (pipe == now.pipe) {
    ReportKind(now.site, rule, pipe,
               "%s %s %s at %s %u, which %s %s at %s; PipeBarrier<PIPE_%s> is missing", now.name,
               write ? "writes" : "reads", role, NameOf(space), block * kBlock, kPipeNames[pipe],
               wrote ? "wrote" : "read", where.c_str(), kPipeNames[pipe]);
  } else {
    ReportKind(now.site, rule, pipe,
               "%s %s %s at %s %u, which %s %s at %s; SetFlag and WaitFlag<%s_%s> are missing",
               now.name, write ? "writes" : "reads", role, NameOf(space), block * kBlock,
               kPipeNames[pipe], wrote ? "wrote" : "read", where.c_str(), kPipeNames[pipe],
               kPipeNames[now.pipe]);
  }
}

int SlotOf(Space space, Pipe pipe) {
  const Pipe* slots = kPipeOfSlot[static_cast<size_t>(space)];
  int slot = 0;
  while (slots[slot] != pipe) ++slot;
  return slot;
}

// Records an access and reports what it isn't ordered with.
void TrackOrder(const Instruction& now, Space space, uint32_t block, uint32_t mask, bool write,
                const char* role) {
  LocalMemory& memory = now.core.Memory(space);
  BlockState& state = memory.blocks[block];
  memory.touched_blocks = std::max(memory.touched_blocks, block + 1);
  const Knowledge& known = now.core.known[now.pipe];
  const int mine = SlotOf(space, now.pipe);
  for (int slot = 0; slot < kSlots; ++slot) {
    const Pipe pipe = kPipeOfSlot[static_cast<size_t>(space)][slot];
    const Clock done = known[static_cast<size_t>(pipe)];
    const bool own = slot == mine;
    if ((state.write_mask[slot] & mask) && state.write_clock[slot] > done &&
        !(own && state.write_clock[slot] == now.clock)) {
      ReportHazard(now, space, block, write, role, pipe, state.write_clock[slot], true);
    }
    if (write && (state.read_mask[slot] & mask) && state.read_clock[slot] > done &&
        !(own && state.read_clock[slot] == now.clock)) {
      ReportHazard(now, space, block, write, role, pipe, state.read_clock[slot], false);
    }
  }
  if (write) {
    for (int slot = 0; slot < kSlots; ++slot) {
      state.write_mask[slot] &= ~mask;
      state.read_mask[slot] &= ~mask;
    }
    state.write_mask[mine] |= mask;
    state.write_clock[mine] = now.clock;
  } else {
    state.read_mask[mine] |= mask;
    state.read_clock[mine] = now.clock;
  }
}

// Visits the blocks of [addr, addr + bytes) with the mask of the bytes inside.
template <typename Visit>
void ForBlocks(uint32_t addr, uint32_t bytes, Visit visit) {
  const uint32_t end = addr + bytes;
  for (uint32_t at = addr; at < end;) {
    const uint32_t block = at / kBlock;
    const uint32_t stop = std::min(end, (block + 1) * kBlock);
    visit(block, MaskOf(at % kBlock, stop - block * kBlock));
    at = stop;
  }
}

}  // namespace

bool Usable(const Instruction& instruction, const LocalView& view, const char* role,
            Space expected) {
  if (view.end == 0) {
    Report(instruction.site, "tensor", "%s: %s was never given memory", instruction.name, role);
    return false;
  }
  if (view.space != expected) {
    Report(instruction.site, "position", "%s: %s lies in %s, expected %s", instruction.name, role,
           NameOf(view.space), NameOf(expected));
    return false;
  }
  if (view.buffer == 0) return true;
  const Buffer& buffer = instruction.core.buffers[view.buffer];
  const bool current = buffer.generation == view.generation;
  if (current && (buffer.state == BufferState::kTBuf || buffer.state == BufferState::kAllocated ||
                  buffer.state == BufferState::kDequeued)) {
    return true;
  }
  const char* why = !current || buffer.state == BufferState::kIdle ? "was freed by FreeTensor"
                    : buffer.state == BufferState::kQueued ? "is in its queue (EnQue)"
                                                           : "belongs to a TPipe that is gone";
  Report(instruction.site, "queue-use", "%s: %s %s at line %d", instruction.name, role, why,
         buffer.site.line);
  return true;  // the memory is there, so the run can go on
}

bool Inside(const Instruction& instruction, const LocalView& view, int64_t offset, int64_t bytes,
            const char* role) {
  const int64_t from = int64_t{view.addr} + offset;
  if (from >= view.begin && from + bytes <= view.end) return true;
  Report(instruction.site, RuleOf(view.space, "ub-bounds", "cube-bounds"),
         "%s: %s uses bytes [%lld, %lld) of a tensor that has [0, %u)", instruction.name, role,
         static_cast<long long>(from - view.begin),
         static_cast<long long>(from - view.begin + bytes), view.end - view.begin);
  return false;
}

bool Aligned(const Instruction& instruction, const LocalView& view, int64_t alignment,
             const char* role) {
  if (view.addr % static_cast<uint32_t>(alignment) == 0) return true;
  Report(instruction.site, RuleOf(view.space, "ub-alignment", "cube-alignment"),
         "%s: %s starts at %s %u, expected a multiple of %lld bytes", instruction.name, role,
         NameOf(view.space), view.addr, static_cast<long long>(alignment));
  return false;
}

void CheckInitialised(const Instruction& now, Space space, uint32_t block, uint32_t mask,
                      const char* role) {
  uint32_t& initialised = now.core.Memory(space).initialised[block];
  const uint32_t garbage = mask & ~initialised;
  if (!garbage) return;
  Report(now.site, RuleOf(space, "ub-garbage", "cube-garbage"),
         "%s reads %s at %s %u, which nobody has written", now.name, role, NameOf(space),
         block * kBlock + static_cast<uint32_t>(__builtin_ctz(garbage)));
  initialised |= mask;  // once is enough
}

void TouchBlock(const Instruction& now, Space space, uint32_t block, uint32_t mask, bool write,
                const char* role) {
  TrackOrder(now, space, block, mask, write, role);
  if (write) {
    now.core.Memory(space).initialised[block] |= mask;
  } else {
    CheckInitialised(now, space, block, mask, role);
  }
}

void Touch(const Instruction& now, Space space, uint32_t addr, uint32_t bytes, bool write,
           const char* role) {
  ForBlocks(addr, bytes, [&](uint32_t block, uint32_t mask) {
    TouchBlock(now, space, block, mask, write, role);
  });
}

void TouchOnce(const Instruction& now, Space space, uint32_t addr, uint32_t bytes,
               const char* role) {
  const int slot = SlotOf(space, now.pipe);
  ForBlocks(addr, bytes, [&](uint32_t block, uint32_t mask) {
    const BlockState& state = now.core.Memory(space).blocks[block];
    if (state.write_clock[slot] == now.clock && (state.write_mask[slot] & mask)) {
      Report(now.site, "overlap", "%s writes %s at %s %u twice", now.name, role, NameOf(space),
             block * kBlock);
    }
    TouchBlock(now, space, block, mask, true, role);
  });
}

void TouchUnread(const Instruction& now, Space space, uint32_t addr, uint32_t bytes,
                 const char* role) {
  ForBlocks(addr, bytes, [&](uint32_t block, uint32_t mask) {
    TrackOrder(now, space, block, mask, false, role);
  });
}

void Poison(Core& core, Space space, uint32_t addr, uint32_t bytes) {
  LocalMemory& memory = core.Memory(space);
  std::memset(memory.bytes.get() + addr, 0xff, bytes);
  ForBlocks(addr, bytes,
            [&](uint32_t block, uint32_t mask) { memory.initialised[block] &= ~mask; });
}

bool TouchGm(const Instruction& now, const GmView& view, int64_t offset, int64_t bytes,
             bool write) {
  const uint64_t address = view.addr + static_cast<uint64_t>(offset);
  const uint64_t end = address + static_cast<uint64_t>(bytes);
  if (view.base == 0 && view.end == 0) {
    Report(now.site, "tensor", "%s: SetGlobalBuffer was never called", now.name);
    return false;
  }
  Range* range = Find(view.base, true);
  if (!range) {
    Report(now.site, "gm-bounds", "%s: the address given to SetGlobalBuffer is in no tensor",
           now.name);
    return false;
  }
  if (address < range->begin || end > range->end || end < address) {
    Report(now.site, "gm-bounds", "%s %s bytes [%lld, %lld) of %s, which has [0, %llu)", now.name,
           write ? "writes" : "reads", static_cast<long long>(address - range->begin),
           static_cast<long long>(end - range->begin), range->name.c_str(),
           static_cast<unsigned long long>(range->bytes()));
    return false;
  }
  if (address < view.base || end > view.end) {
    Report(
        now.site, "gm-bounds",
        "%s %s bytes [%lld, %lld) of a GlobalTensor in %s whose SetGlobalBuffer gave it [0, %llu)",
        now.name, write ? "writes" : "reads", static_cast<long long>(address - view.base),
        static_cast<long long>(end - view.base), range->name.c_str(),
        static_cast<unsigned long long>(view.end - view.base));
    return false;
  }
  if (!(range->access & (write ? SIM_WRITE : SIM_READ))) {
    Report(now.site, "gm-access", "%s %s %s, which the kernel may not %s", now.name,
           write ? "writes" : "reads", range->name.c_str(), write ? "write" : "read");
    return !write;
  }
  CountTraffic(now, *range, address, static_cast<uint64_t>(bytes), write);
  TrackGarbage(now, *range, address, static_cast<uint64_t>(bytes), write);
  TrackOrder(now, address, static_cast<uint64_t>(bytes), write);
  return true;
}

namespace {

// Notes on the SetValues of a line that they are in memory now.
void MarkWrittenBack(const Instruction& now, uint64_t line) {
  const Range* range = Find(line, false);
  if (!range) range = Find(line + kCacheLine - 1, false);
  if (!range || !range->chunks) return;
  auto& uses = gm().uses;
  const uint64_t begin = line % kChunk;
  for (uint32_t i = range->chunks[line / kChunk - range->begin / kChunk]; i; i = uses[i].next) {
    Use& use = uses[i];
    const bool mine = use.write && use.pipe == kS && use.core == now.core.index;
    if (mine && use.cleaned == 0 && ShareLine(use, begin, begin + kCacheLine)) {
      use.cleaned = now.clock;
    }
  }
}

}  // namespace

void CleanLines(const Instruction& now, uint64_t address, bool whole_cache) {
  Core& core = now.core;
  if (!core.foreign_snapshot) core.foreign_snapshot = std::make_shared<Foreign>(core.foreign);
  const Drop drop{core.known[kS], core.foreign_snapshot};
  if (whole_cache) {
    for (const auto& [line, site] : core.dirty) MarkWrittenBack(now, line);
    core.all_dropped = drop;
    core.dropped.clear();
    core.cached.clear();
    core.dirty.clear();
  } else {
    const uint64_t line = address & ~static_cast<uint64_t>(kCacheLine - 1);
    MarkWrittenBack(now, line);
    core.dropped[line] = drop;
    core.cached.erase(line);
    core.dirty.erase(line);
  }
}

void ReportUncleaned(Core& core) {
  std::vector<Site> sites;
  for (const auto& [line, site] : core.dirty) sites.push_back(site);
  std::sort(sites.begin(), sites.end(), [](Site a, Site b) { return a.line < b.line; });
  for (const Site& site : sites) {
    Report(site, "gm-cache",
           "SetValue is still in the data cache when the kernel ends; "
           "DataCacheCleanAndInvalid is missing after it");
  }
}

void CheckSyncWorkspace(const Instruction& now, const GmView& view, int64_t bytes) {
  const Range* range = Find(view.base, true);
  if (!range || view.addr + static_cast<uint64_t>(bytes) > std::min(range->end, view.end)) {
    Report(now.site, "gm-bounds", "SyncAll: the workspace has less than %lld bytes, 32 a core",
           static_cast<long long>(bytes));
    return;
  }
  const auto* words = reinterpret_cast<const uint8_t*>(view.addr);
  if (!range->valid.empty() ||
      std::any_of(words, words + bytes, [](uint8_t b) { return b != 0; })) {
    Report(now.site, "sync-all", "SyncAll: the workspace must be zero before the launch");
  }
}

void StartGm() {
  gm().uses.assign(1, Use{});
  for (auto& range : gm().ranges) range->read_bytes = range->written_bytes = range->hbm_bytes = 0;
}

void FinishGm() {
  for (auto& range : gm().ranges) {
    range->chunks.reset();
    range->in_l2.clear();
  }
  gm().uses.clear();
}

}  // namespace sim

extern "C" {

void sim_register(const void* p, size_t bytes, const char* name, int access) {
  auto range = std::make_unique<sim::Range>();
  range->begin = reinterpret_cast<uint64_t>(p);
  range->end = range->begin + bytes;
  range->name = name ? name : "?";
  range->access = access;
  if (access & SIM_POISON) range->valid.assign(bytes / 64 + 1, 0);
  auto& ranges = sim::gm().ranges;
  const auto same = std::find_if(ranges.begin(), ranges.end(), [&](const auto& other) {
    return other->begin == range->begin && other->end == range->end;
  });
  if (same != ranges.end()) {
    *same = std::move(range);
  } else {
    ranges.push_back(std::move(range));
  }
  sim::gm().Sort();
}

void sim_unregister(const void* p) {
  auto& ranges = sim::gm().ranges;
  const uint64_t begin = reinterpret_cast<uint64_t>(p);
  for (size_t i = ranges.size(); i-- > 0;) {  // the smallest one that starts there
    if (ranges[i]->begin == begin) {
      ranges.erase(ranges.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
  }
  sim::gm().Sort();
}

size_t sim_traffic(SimTraffic* out, size_t capacity) {
  const auto& ranges = sim::gm().ranges;
  for (size_t i = 0; i < std::min(capacity, ranges.size()); ++i) {
    const sim::Range& range = *ranges[i];
    out[i] = {range.name.c_str(), range.read_bytes, range.written_bytes, range.hbm_bytes};
  }
  return ranges.size();
}

void sim_clear(void) {
  sim::gm().ranges.clear();
  sim::gm().Sort();
}

}  // extern "C"
