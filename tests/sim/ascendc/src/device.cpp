// Launches: cores as threads of which one runs at a time, the report, the counters, the C
// interface.
#include <algorithm>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core.h"
#include "memory.h"

namespace sim {
namespace {

struct Violation {
  std::string where;
  std::string rule;
  std::string text;
  std::string core;
  uint64_t times = 1;
  std::set<uint32_t> cores;
};

// A core's thread. It runs only while it holds the turn.
struct Runner {
  std::unique_ptr<Core> core = std::make_unique<Core>();
  std::thread thread;
  std::condition_variable turn_came;
  const Waiting* waiting = nullptr;
  std::string waits_in_vain;  // why its wait has no end
  Site waits_at{};
  bool started = false;
  bool finished = false;
};

// What a launch runs.
struct Entry {
  const void* function = nullptr;
  std::vector<uint64_t> arguments;
};

// Of each core of the next launch, where it was counted.
using ScalarTraces = std::map<uint32_t, ScalarTrace>;

struct Device {
  std::mutex launching;  // one launch at a time
  std::mutex mutex;      // guards the turn
  std::condition_variable launch_ended;
  int turn = -1;  // index of the core that runs; -1 is the launching thread
  Entry entry;
  ScalarTraces traces;
  uint32_t num_cores = 0;
  uint32_t num_groups = 0;
  uint32_t num_started = 0;
  int kernel_type = AscendC::KERNEL_TYPE_AIV_ONLY;
  bool deadlocked = false;
  bool abandoned = false;  // a core gave up, so waiting for it is no news
  bool refused = false;    // no core is to start
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Runner>> runners;

  std::vector<Violation> violations;
  std::map<std::tuple<std::string, std::string, int>, size_t> seen;  // by line, rule, kind

  std::map<std::string, int64_t> settings = {
      {"cores", 48}, {"ub_reserved", 8192}, {"max_violations", 100}, {"clock_mhz", kUsualMhz}};
  SimCounters counters{};
};

Device& device() {
  static Device* instance = new Device;  // never destroyed: threads and libraries end in any order
  return *instance;
}

std::string Base(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// The next core to run: any that can. Where none can and some wait, they wait for ever.
int NextTurn(Device& d) {
  std::vector<int> able;
  bool waiting = false;
  for (uint32_t i = 0; i < d.num_cores; ++i) {
    Runner& runner = *d.runners[i];
    if (runner.finished) continue;
    if (d.deadlocked || !runner.waiting || runner.waiting->ready(*runner.waiting)) {
      able.push_back(static_cast<int>(i));
    } else {
      waiting = true;
    }
  }
  if (able.empty() && waiting) {
    for (uint32_t i = 0; i < d.num_cores; ++i) {
      Runner& runner = *d.runners[i];
      if (!runner.finished) runner.waits_in_vain = runner.waiting->explain(*runner.waiting);
    }
    d.deadlocked = true;
    return NextTurn(d);
  }
  if (able.empty()) return -1;
  return able[d.random() % able.size()];
}

void PassTurn(Device& d) {
  d.turn = NextTurn(d);
  (d.turn < 0 ? d.launch_ended : d.runners[static_cast<size_t>(d.turn)]->turn_came).notify_one();
}

void AwaitTurn(Device& d, std::unique_lock<std::mutex>& lock, Runner& runner) {
  const int index = static_cast<int>(runner.core->index);
  runner.turn_came.wait(lock, [&] { return d.turn == index; });
}

template <size_t... I>
void CallWith(const void* entry, const uint64_t* args, std::index_sequence<I...>) {
  using Word = uint64_t;
  auto* function = reinterpret_cast<void (*)(decltype(I, Word{})...)>(const_cast<void*>(entry));
  function(args[I]...);
}

void Call(const Entry& entry) {
  // On the calling conventions of x86-64 and AArch64 a function may be given more arguments than it
  // has, so the count is rounded up.
  uint64_t padded[SIM_MAX_ARGS] = {};
  std::copy(entry.arguments.begin(), entry.arguments.end(), padded);
  CallWith(entry.function, padded, std::make_index_sequence<SIM_MAX_ARGS>{});
}

void CheckEnd(Core& core);

void RunCore(Device& d, Runner& runner) {
  std::unique_lock<std::mutex> lock(d.mutex);
  AwaitTurn(d, lock, runner);
  lock.unlock();
  runner.started = true;
  ++d.num_started;
  try {
    if (!d.deadlocked && !d.refused) {
      Call(d.entry);
      CheckEnd(*runner.core);
    }
  } catch (const Abandon&) {
    if (!d.deadlocked) d.abandoned = true;  // what made it stop is in the report
  }
  lock.lock();
  runner.finished = true;
  PassTurn(d);
}

// Makes runner `place.index` a core of this launch.
void AddCore(Device& d, const Place& place) {
  if (d.runners.size() <= place.index) d.runners.push_back(std::make_unique<Runner>());
  Runner& runner = *d.runners[place.index];
  runner.core->Reset(place);
  const auto counted = d.traces.find(place.index);
  if (counted != d.traces.end()) runner.core->trace = counted->second;
  if (runner.thread.joinable()) return;
  runner.waiting = nullptr;
  runner.started = runner.finished = false;
  runner.thread = std::thread(RunCore, std::ref(d), std::ref(runner));
}

// Where a core issued its first instruction to a pipe.
Site FirstSite(const Core& core) {
  for (const auto& sites : core.log) {
    if (!sites.empty()) return sites.front();
  }
  return {"kernel", 0};
}

void CheckEnd(Core& core) {
  for (const auto& event : core.flags) {
    for (const Flag& flag : event) {
      if (flag.set) {
        Report(flag.site, "event-left", "SetFlag has no WaitFlag by the end of the kernel");
      }
    }
  }
  ReportUncleaned(core);
  FinishScalar(core);
  if (core.trace.differs) {
    Report(FirstSite(core), "scalar",
           "the core issued other instructions than while its scalar instructions were counted");
  }
  if (core.kernel_type < 0) {
    Report(FirstSite(core), "kernel-type",
           "the kernel states no type, and in a unit with several kernels nobody infers it: "
           "KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY)");
  }
}

int64_t BlockIndexOf(const Place& place) {
  if (place.kind == Kind::kCube) return place.group;
  return place.group * VectorCoresOfGroup() + place.number;
}

void CollectCounters(Device& d) {
  d.counters = {};
  d.counters.num_cores = d.num_cores;
  d.counters.violations = static_cast<uint32_t>(d.violations.size());
  const uint64_t launch = static_cast<uint64_t>(kLaunchMicroseconds * d.settings["clock_mhz"]);
  for (uint32_t i = 0; i < d.num_cores; ++i) {
    Core& core = *d.runners[i]->core;
    uint64_t end = core.now;
    for (const Timeline& line : core.line) end = std::max(end, line.done);
    core.counters.total_cycles = end;
    core.counters.is_cube = core.place.kind == Kind::kCube;
    core.counters.block = static_cast<uint64_t>(BlockIndexOf(core.place));
    d.counters.core[i] = core.counters;
    d.counters.total_cycles = std::max(d.counters.total_cycles, launch + end);
    const auto* from = reinterpret_cast<const uint64_t*>(&core.counters);
    auto* to = reinterpret_cast<uint64_t*>(&d.counters.total);
    for (size_t word = 0; word < sizeof(SimCore) / sizeof(uint64_t); ++word) to[word] += from[word];
  }
}

void Refuse(Device& d, const std::string& text) {
  d.violations.push_back({"launch", "launch", text, "0", 1, {}});
}

}  // namespace

Core& Self() { return *device().runners[static_cast<size_t>(device().turn)]->core; }
uint32_t LaunchCores() { return device().num_cores; }
uint32_t LaunchGroups() { return device().num_groups; }
Core& CoreAt(uint32_t index) { return *device().runners[index]->core; }
int64_t Setting(const char* key) { return device().settings.at(key); }

uint32_t VectorCoresOfGroup() {
  return device().kernel_type == AscendC::KERNEL_TYPE_MIX_AIC_1_2 ? 2 : 1;
}

std::string NameOf(const Core& core) {
  const std::string number = std::to_string(BlockIndexOf(core.place));
  if (device().num_cores == device().num_groups) return number;
  return (core.place.kind == Kind::kCube ? "AIC " : "AIV ") + number;
}

std::string StateOf(const Core& core) {
  const Runner& runner = *device().runners[core.index];
  if (runner.finished) return "has ended";
  if (!runner.waiting) return "hasn't got there";
  return "waits at " + Base(runner.waits_at.file) + ":" + std::to_string(runner.waits_at.line);
}

namespace {

void Record(const Core& self, Site site, const char* rule, int kind, const char* format,
            va_list arguments) {
  Device& d = device();
  const std::string where = Base(site.file) + ":" + std::to_string(site.line);
  const auto key = std::make_tuple(where, std::string(rule), kind);
  const auto known = d.seen.find(key);
  if (known != d.seen.end()) {
    Violation& entry = d.violations[known->second];
    ++entry.times;
    entry.cores.insert(self.index);
    return;
  }
  if (static_cast<int64_t>(d.violations.size()) >= d.settings["max_violations"]) return;
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  d.seen[key] = d.violations.size();
  d.violations.push_back({where, rule, text, NameOf(self), 1, {self.index}});
}

}  // namespace

void Report(Site site, const char* rule, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Record(Self(), site, rule, 0, format, arguments);
  va_end(arguments);
}

void ReportKind(Site site, const char* rule, int kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Record(Self(), site, rule, kind, format, arguments);
  va_end(arguments);
}

void ReportFor(const Core& core, Site site, const char* rule, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Record(core, site, rule, 0, format, arguments);
  va_end(arguments);
}

void WaitUntil(const Waiting& waiting, Site site) {
  Device& d = device();
  Runner& runner = *d.runners[waiting.core->index];
  runner.waiting = &waiting;
  runner.waits_at = site;
  std::unique_lock<std::mutex> lock(d.mutex);
  PassTurn(d);
  AwaitTurn(d, lock, runner);
  lock.unlock();
  if (d.deadlocked) {
    if (!d.abandoned) Report(site, "deadlock", "%s", runner.waits_in_vain.c_str());
    runner.waiting = nullptr;
    throw Abandon{};
  }
  runner.waiting = nullptr;
}

bool IsCube() { return Self().place.kind == Kind::kCube; }
int64_t BlockIndex() { return BlockIndexOf(Self().place); }
int64_t BlockCount() { return LaunchGroups(); }
int64_t SubBlockIndex() { return Self().place.number; }
int64_t TaskRatio() { return IsCube() ? 1 : VectorCoresOfGroup(); }
int64_t SubBlockCount() { return TaskRatio(); }
int64_t SystemCycle() { return static_cast<int64_t>(Self().now); }

namespace {

bool HasCubeCores(int type) {
  return type == AscendC::KERNEL_TYPE_AIC_ONLY || type == AscendC::KERNEL_TYPE_MIX_AIC_1_0 ||
         type == AscendC::KERNEL_TYPE_MIX_AIC_1_1 || type == AscendC::KERNEL_TYPE_MIX_AIC_1_2;
}

bool HasVectorCores(int type) {
  return type != AscendC::KERNEL_TYPE_AIC_ONLY && type != AscendC::KERNEL_TYPE_MIX_AIC_1_0;
}

// Every group gets a cube core, and its vector cores if the kernel has any.
void FormGroups(Device& d) {
  const uint32_t vectors = HasVectorCores(d.kernel_type) ? VectorCoresOfGroup() : 0;
  for (uint32_t group = 0; group < d.num_groups; ++group) {
    AddCore(d, {group, Kind::kCube, group, 0});
  }
  uint32_t index = d.num_groups;
  for (uint32_t group = 0; group < d.num_groups; ++group) {
    for (uint32_t number = 0; number < vectors; ++number) {
      AddCore(d, {index++, Kind::kVector, group, number});
    }
  }
  d.num_cores = index;
}

}  // namespace

// The first core that runs states the kernel's type. Until then all cores are vector cores.
void SetKernelType(AscendC::KernelMetaType type, Site site) {
  Device& d = device();
  if (d.num_started == 1) {
    d.kernel_type = type;
    const int64_t cubes = d.settings["cores"] / 2;
    if (HasCubeCores(type) && d.num_groups > cubes) {
      Report(site, "launch",
             "block_dim is %u, expected 1 to %lld cube cores: all blocks must be resident at once",
             d.num_groups, static_cast<long long>(cubes));
      d.refused = true;
      throw Abandon{};
    }
    if (HasCubeCores(type)) {
      if (Self().now > 0 || Self().pipe) {
        Report(site, "kernel-type", "KERNEL_TASK_TYPE_DEFAULT must come before anything else");
      }
      FormGroups(d);
    }
  }
  if (type != d.kernel_type) {
    Report(site, "kernel-type", "KERNEL_TASK_TYPE_DEFAULT differs from that of another core");
  }
  Self().kernel_type = type;
}

}  // namespace sim

using sim::device;

extern "C" {

int sim_launch(const void* entry, uint32_t block_dim, const uint64_t* args, uint32_t num_args,
               uint64_t seed) {
  sim::Device& d = device();
  std::lock_guard<std::mutex> one_at_a_time(d.launching);
  d.violations.clear();
  d.seen.clear();
  d.deadlocked = d.abandoned = d.refused = false;
  d.num_cores = d.num_groups = d.num_started = 0;
  d.kernel_type = AscendC::KERNEL_TYPE_AIV_ONLY;
  d.counters = {};
  const int64_t cores = d.settings["cores"];
  if (block_dim == 0 || block_dim > cores) {
    sim::Refuse(d, "block_dim is " + std::to_string(block_dim) + ", expected 1 to " +
                       std::to_string(cores) + ": all blocks must be resident at once");
    return 1;
  }
  if (num_args > SIM_MAX_ARGS) {
    sim::Refuse(d, std::to_string(num_args) + " arguments, expected at most " +
                       std::to_string(SIM_MAX_ARGS));
    return 1;
  }
  d.entry = {entry, {args, args + num_args}};
  d.num_cores = d.num_groups = block_dim;
  d.random.seed(seed);
  sim::StartGm();
  sim::StartCrossCore();
  for (uint32_t i = 0; i < block_dim; ++i) {
    sim::AddCore(d, {i, sim::Kind::kVector, i, 0});
  }
  {
    std::unique_lock<std::mutex> lock(d.mutex);
    sim::PassTurn(d);
    d.launch_ended.wait(lock, [&] { return d.turn == -1; });
  }
  for (uint32_t i = 0; i < d.num_cores; ++i) d.runners[i]->thread.join();
  if (!d.abandoned && !d.deadlocked) sim::CheckCrossCoreEnd();
  sim::FinishGm();
  sim::CollectCounters(d);
  d.traces.clear();
  return static_cast<int>(d.violations.size());
}

size_t sim_report(char* out, size_t capacity) {
  std::string report;
  for (const auto& entry : device().violations) {
    report += entry.where + " core " + entry.core + " " + entry.rule + ": " + entry.text;
    if (entry.times > 1) {
      report += " (" + std::to_string(entry.times) + " times on " +
                std::to_string(entry.cores.size()) + " cores)";
    }
    report += "\n";
  }
  if (capacity > 0) {
    const size_t length = std::min(report.size(), capacity - 1);
    std::memcpy(out, report.data(), length);
    out[length] = 0;
  }
  return report.size() + 1;
}

void sim_scalar(uint32_t core, const uint64_t* events, size_t count, uint64_t instructions) {
  sim::ScalarTrace& trace = device().traces[core];
  trace = {};
  trace.events.assign(events, events + count);
  trace.instructions = instructions;
}

void sim_counters(SimCounters* out) { *out = device().counters; }

void sim_configure(const char* key, int64_t value) {
  const auto found = device().settings.find(key);
  const bool valid =
      found != device().settings.end() && value >= 0 &&
      !(std::string(key) == "cores" && (value < 1 || value > SIM_MAX_CORES * 2 / 3)) &&
      !(std::string(key) == "clock_mhz" && value < 100) &&
      !(std::string(key) == "ub_reserved" && value > 64 * 1024);
  if (!valid) {
    std::fprintf(stderr, "sim_configure: no setting %s, or %lld is out of its range\n", key,
                 static_cast<long long>(value));
    std::abort();
  }
  found->second = value;
}

}  // extern "C"
