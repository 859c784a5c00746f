// Order between cores: SyncAll and cross-core flags.
#include <algorithm>
#include <map>
#include <tuple>

#include "core.h"
#include "memory.h"

namespace sim {
namespace {

[[noreturn]] void Fail() { throw Abandon{}; }

// What is certainly done when a flag arrives, and when that is. From the last core that set it.
struct Delivery {
  Foreign knowledge{};
  uint64_t time = 0;
  uint32_t setter = 0;
  int mode = 0;
  Site site{};
};

// A flag of a core: its counter is the number of deliveries that it hasn't waited for.
struct Inbox {
  std::deque<std::shared_ptr<const Delivery>> waiting;
  size_t delivered = 0;
  std::vector<Clock> waits;  // the core's count of waits after each wait for this flag
};

// The sets of a flag by cores that have to set it together. Its rounds are complete in order.
struct Meeting {
  struct Round {
    uint32_t arrived = 0;
    std::shared_ptr<Delivery> delivery = std::make_shared<Delivery>();
  };
  std::deque<Round> open;
  size_t complete = 0;
  std::map<uint32_t, size_t> given;  // by core
};

// 0 to 15 are the flags of CrossCoreSetFlag, then come those of SyncAll.
constexpr int kHardSync = kCrossCoreFlags;
constexpr int kSoftSync = kCrossCoreFlags + 1;
constexpr int kMixedSync = kCrossCoreFlags + 2;
constexpr int kFlags = kCrossCoreFlags + 3;
constexpr int kSyncMode = -1;  // instead of a mode of CrossCoreSetFlag

// By mode, kind of core, group (0 where all groups meet) and flag.
using MeetingKey = std::tuple<int, Kind, uint32_t, int>;

struct CrossCore {
  std::map<MeetingKey, Meeting> meetings;
  Inbox inboxes[SIM_MAX_CORES][kFlags];
};

CrossCore& state() {
  static CrossCore* instance = new CrossCore;
  return *instance;
}

using Cores = std::vector<uint32_t>;

template <typename Chosen>
Cores Choose(Chosen chosen) {
  Cores cores;
  for (uint32_t i = 0; i < LaunchCores(); ++i) {
    if (chosen(CoreAt(i).place)) cores.push_back(i);
  }
  return cores;
}

Cores OfKind(Kind kind) {
  return Choose([&](const Place& place) { return place.kind == kind; });
}

Cores OfGroup(uint32_t group, Kind kind) {
  return Choose([&](const Place& place) { return place.group == group && place.kind == kind; });
}

// The knowledge that a core's signal carries about all cores.
void Merge(Delivery& delivery, const Core& core, const Signal& signal) {
  for (uint32_t other = 0; other < LaunchCores(); ++other) {
    const Knowledge& known = other == core.index ? signal.knowledge : core.foreign[other];
    for (size_t pipe = 0; pipe < known.size(); ++pipe) {
      Clock& clock = delivery.knowledge[other][pipe];
      clock = std::max(clock, known[pipe]);
    }
  }
  delivery.time = std::max(delivery.time, signal.time);
  delivery.setter = core.index;
}

// A counter may rise above its limit unless the setter knows of enough waits.
void CheckCounter(const Inbox& inbox, const Delivery& delivery, uint32_t target, int flag) {
  constexpr size_t kLimit = kCrossCoreLimit;
  if (inbox.delivered <= kLimit) return;
  const size_t needed = inbox.delivered - kLimit - 1;  // index of the wait that makes room
  if (needed < inbox.waits.size() &&
      inbox.waits[needed] <= delivery.knowledge[target][static_cast<size_t>(kWaits)]) {
    return;
  }
  Report(
      delivery.site, "cross-core",
      "CrossCoreSetFlag(%d) is up to %zu ahead of CrossCoreWaitFlag on core %s: its counter ends "
      "at %zu",
      flag, kLimit + 1, NameOf(CoreAt(target)).c_str(), kLimit);
}

void CheckMode(const Inbox& inbox, const Delivery& delivery, uint32_t target, int flag) {
  if (inbox.waiting.empty() || inbox.waiting.back()->mode == delivery.mode) return;
  Report(delivery.site, "cross-core",
         "CrossCoreSetFlag(%d) of mode %d, while core %s hasn't waited for one of mode %d", flag,
         delivery.mode, NameOf(CoreAt(target)).c_str(), inbox.waiting.back()->mode);
}

void Deliver(const std::shared_ptr<const Delivery>& delivery, const Cores& targets, int flag) {
  for (const uint32_t target : targets) {
    Inbox& inbox = state().inboxes[target][flag];
    ++inbox.delivered;
    if (delivery->mode != kSyncMode) {
      CheckCounter(inbox, *delivery, target, flag);
      CheckMode(inbox, *delivery, target, flag);
    }
    inbox.waiting.push_back(delivery);
  }
}

// The running core's part of a signal that `members` give together to `targets`.
void Give(const MeetingKey& key, const Signal& signal, size_t members, const Cores& targets,
          Site site) {
  Core& core = Self();
  Meeting& meeting = state().meetings[key];
  const size_t number = meeting.given[core.index]++;
  while (meeting.complete + meeting.open.size() <= number) meeting.open.emplace_back();
  Meeting::Round& round = meeting.open[number - meeting.complete];
  Merge(*round.delivery, core, signal);
  round.delivery->mode = std::get<0>(key);
  round.delivery->site = site;
  if (++round.arrived < members) return;
  const std::shared_ptr<const Delivery> delivery = round.delivery;
  meeting.open.pop_front();
  ++meeting.complete;
  Deliver(delivery, targets, std::get<3>(key));
}

bool HasArrived(const Waiting& waiting) {
  return !state().inboxes[waiting.core->index][waiting.flag].waiting.empty();
}

// Who else is in the core's group, and where they are.
std::string Mates(const Core& core) {
  std::string text;
  for (uint32_t i = 0; i < LaunchCores(); ++i) {
    const Core& other = CoreAt(i);
    if (other.place.group != core.place.group || i == core.index) continue;
    text += (text.empty() ? "" : ", ") + ("core " + NameOf(other) + " " + StateOf(other));
  }
  return text;
}

std::string ExplainFlag(const Waiting& waiting) {
  std::string text = "CrossCoreWaitFlag(" + std::to_string(waiting.flag) + ") waits for ever: ";
  const std::string mates = Mates(*waiting.core);
  return text + (mates.empty() ? "not every core gets there" : mates);
}

std::string ExplainSync(const Waiting&) {
  return "SyncAll waits for ever: not every core gets there";
}

void Take(int flag, int64_t cycles, Site site) {
  Core& core = Self();
  WaitUntil({HasArrived, flag < kCrossCoreFlags ? ExplainFlag : ExplainSync, &core, flag}, site);
  Inbox& inbox = state().inboxes[core.index][flag];
  const std::shared_ptr<const Delivery> delivery = inbox.waiting.front();
  inbox.waiting.pop_front();
  inbox.waits.push_back(++core.count[kWaits]);
  for (uint32_t other = 0; other < LaunchCores(); ++other) {
    const Knowledge& news = delivery->knowledge[other];
    for (size_t pipe = 0; pipe < news.size(); ++pipe) {
      Clock& clock = core.foreign[other][pipe];
      clock = std::max(clock, news[pipe]);
    }
  }
  // All that the core issues from now on comes after what the others knew of its own pipes.
  for (Knowledge& known : core.known) {
    for (int pipe = kV; pipe < kPipes; ++pipe) {
      known[static_cast<size_t>(pipe)] =
          std::max(known[static_cast<size_t>(pipe)],
                   delivery->knowledge[core.index][static_cast<size_t>(pipe)]);
    }
  }
  core.foreign_snapshot = nullptr;
  core.now = std::max(core.now, delivery->time + static_cast<uint64_t>(cycles));
}

bool IsMixed(int type) {
  return type == AscendC::KERNEL_TYPE_MIX_AIV_1_0 || type == AscendC::KERNEL_TYPE_MIX_AIC_1_0 ||
         type == AscendC::KERNEL_TYPE_MIX_AIC_1_1 || type == AscendC::KERNEL_TYPE_MIX_AIC_1_2;
}

bool HasBothKinds(int type) {
  return type == AscendC::KERNEL_TYPE_MIX_AIC_1_1 || type == AscendC::KERNEL_TYPE_MIX_AIC_1_2;
}

void RequireMixed(const Core& core, const char* call, Site site) {
  if (IsMixed(core.kernel_type)) return;
  Report(site, "kernel-type",
         "%s in a kernel that isn't mixed hangs: state "
         "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0)",
         call);
}

void RequireFlag(const char* call, int64_t id, Site site) {
  if (id < kCrossCoreFlags) return;
  Report(site, "cross-core", "%s(%lld), expected an id from 0 to 15", call,
         static_cast<long long>(id));
  Fail();
}

}  // namespace

void StartCrossCore() {
  state().meetings.clear();
  for (auto& inboxes : state().inboxes) {
    for (Inbox& inbox : inboxes) inbox = Inbox{};
  }
}

void CheckCrossCoreEnd() {
  const auto report = [](const Delivery& delivery, int flag) {
    ReportFor(CoreAt(delivery.setter), delivery.site, "cross-core",
              "CrossCoreSetFlag(%d) has no CrossCoreWaitFlag by the end of the kernel", flag);
  };
  for (const auto& [key, meeting] : state().meetings) {
    if (std::get<0>(key) == kSyncMode) continue;
    for (const Meeting::Round& round : meeting.open) report(*round.delivery, std::get<3>(key));
  }
  for (uint32_t i = 0; i < LaunchCores(); ++i) {
    for (int flag = 0; flag < kCrossCoreFlags; ++flag) {
      for (const auto& delivery : state().inboxes[i][flag].waiting) report(*delivery, flag);
    }
  }
}

void SyncAll(bool aiv_only, Site site) {
  Core& core = Self();
  Issue(core, EventKind::kSyncAll);
  RequireMixed(core, "SyncAll", site);
  if (!aiv_only && !HasBothKinds(core.kernel_type)) {
    Report(site, "deadlock",
           "SyncAll<false> waits for cube cores and vector cores; this kernel lacks one kind");
    Fail();
  }
  if (aiv_only && core.place.kind == Kind::kCube) {
    Report(site, "core-kind", "SyncAll<true> on a cube core: it is for the vector cores");
    Fail();
  }
  BarrierAll(core);
  const int flag = aiv_only ? kHardSync : kMixedSync;
  const Cores cores = aiv_only ? OfKind(Kind::kVector) : Choose([](const Place&) { return true; });
  Give({kSyncMode, Kind::kVector, 0, flag}, Send(core, kMte2), cores.size(), cores, site);
  Take(flag, kSyncAllCycles, site);
}

void SyncAllSoft(const GmView& workspace, const LocalView& local, int64_t used_cores, Site site) {
  Core& core = Self();
  const Cores all = OfKind(Kind::kVector);
  const auto cores = static_cast<int64_t>(all.size());
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
      Touch(poll, Space::kUb, local.addr, static_cast<uint32_t>(bytes), true, "ubWorkspace");
    }
    CheckSyncWorkspace(poll, workspace, bytes);
  }
  BarrierAll(core);
  const auto members = static_cast<size_t>(used_cores == 0 ? cores : used_cores);
  Give({kSyncMode, Kind::kVector, 0, kSoftSync}, Send(core, kMte2), members, all, site);
  Take(kSoftSync, 2 * kSyncAllCycles, site);
}

void CrossCoreSet(int mode, pipe_t pipe, int64_t id, Site site) {
  Core& core = Self();
  const Place& place = core.place;
  RequireMixed(core, "CrossCoreSetFlag", site);
  if (mode != 0 && !HasBothKinds(core.kernel_type)) {
    Report(site, "cross-core",
           "CrossCoreSetFlag of mode %d needs cube cores and vector cores: state "
           "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2)",
           mode);
    Fail();
  }
  if (mode == 1 && place.kind == Kind::kCube) {
    Report(site, "core-kind", "CrossCoreSetFlag of mode 1 on a cube core: it is for vector cores");
    Fail();
  }
  RequireFlag("CrossCoreSetFlag", id, site);
  if (id >= kFirstSyncAllFlag && id <= kLastSyncAllFlag) {
    Report(site, "cross-core", "CrossCoreSetFlag(%lld): SyncAll uses 11 to 14",
           static_cast<long long>(id));
  }
  const Pipe from = PipeOf(pipe);
  if (!HasPipe(place.kind, from)) {
    Report(site, "core-kind", "CrossCoreSetFlag on the pipe %s, which %s doesn't have",
           kPipeNames[from], NameOf(place.kind));
    Fail();
  }
  Issue(core, EventKind::kCrossCoreSet);
  const uint32_t group = mode == 0 ? 0 : place.group;
  const Cores members = mode == 0 ? OfKind(place.kind) : OfGroup(group, place.kind);
  const Kind others = place.kind == Kind::kCube ? Kind::kVector : Kind::kCube;
  const Cores targets = mode == 2 ? OfGroup(group, others) : members;
  Give({mode, place.kind, group, static_cast<int>(id)}, Send(core, from), members.size(), targets,
       site);
}

void CrossCoreWait(int64_t id, Site site) {
  Core& core = Self();
  RequireMixed(core, "CrossCoreWaitFlag", site);
  RequireFlag("CrossCoreWaitFlag", id, site);
  Issue(core, EventKind::kCrossCoreWait);
  const bool in_group = HasBothKinds(core.kernel_type);
  Take(static_cast<int>(id), in_group ? kGroupFlagCycles : kSyncAllCycles, site);
}

}  // namespace sim
