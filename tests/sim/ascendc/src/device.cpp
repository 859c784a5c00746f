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
  uint32_t core;
  uint64_t times = 1;
  std::set<uint32_t> cores;
};

// A core's thread. It runs only while it holds the turn.
struct Runner {
  std::unique_ptr<Core> core = std::make_unique<Core>();
  std::thread thread;
  bool (*ready)(void*) = nullptr;  // what it waits for
  void* context = nullptr;
  const char* waits_for = nullptr;
  Site waits_at{};
  bool finished = false;
};

struct Device {
  std::mutex launching;  // one launch at a time
  std::mutex mutex;      // guards the turn
  std::condition_variable turn_changed;
  int turn = -1;  // index of the core that runs; -1 is the launching thread
  uint32_t num_cores = 0;
  bool deadlocked = false;
  bool abandoned = false;  // a core gave up, so waiting for it is no news
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Runner>> runners;

  std::vector<Violation> violations;
  std::map<std::tuple<std::string, std::string, int>, size_t> seen;  // by line, rule, kind

  std::map<std::string, int64_t> settings = {
      {"cores", 48}, {"ub_reserved", 8192}, {"max_violations", 100}};
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
    if (d.deadlocked || !runner.ready || runner.ready(runner.context)) {
      able.push_back(static_cast<int>(i));
    } else {
      waiting = true;
    }
  }
  if (able.empty() && waiting) {
    d.deadlocked = true;
    return NextTurn(d);
  }
  if (able.empty()) return -1;
  return able[d.random() % able.size()];
}

void PassTurn(Device& d, std::unique_lock<std::mutex>& lock, int self) {
  d.turn = NextTurn(d);
  d.turn_changed.notify_all();
  if (self >= 0) d.turn_changed.wait(lock, [&] { return d.turn == self; });
}

template <size_t... I>
void CallWith(const void* entry, const uint64_t* args, std::index_sequence<I...>) {
  using Word = uint64_t;
  auto* function = reinterpret_cast<void (*)(decltype(I, Word{})...)>(const_cast<void*>(entry));
  function(args[I]...);
}

void Call(const void* entry, const uint64_t* args, uint32_t num_args) {
  // On the calling conventions of x86-64 and AArch64 a function may be given more arguments than it
  // has, so the count is rounded up.
  uint64_t padded[SIM_MAX_ARGS] = {};
  std::copy_n(args, num_args, padded);
  CallWith(entry, padded, std::make_index_sequence<SIM_MAX_ARGS>{});
}

void CheckEnd(Core& core);

void RunCore(Device& d, uint32_t index, const void* entry, const uint64_t* args,
             uint32_t num_args) {
  std::unique_lock<std::mutex> lock(d.mutex);
  d.turn_changed.wait(lock, [&] { return d.turn == static_cast<int>(index); });
  lock.unlock();
  try {
    if (!d.deadlocked) {
      Call(entry, args, num_args);
      CheckEnd(*d.runners[index]->core);
    }
  } catch (const Abandon&) {
    d.abandoned = true;  // what made it stop is in the report
  }
  lock.lock();
  d.runners[index]->finished = true;
  PassTurn(d, lock, -1);
}

void CheckEnd(Core& core) {
  for (const auto& event : core.flags) {
    for (const Flag& flag : event) {
      if (flag.set) {
        Report(flag.site, "event-left", "SetFlag has no WaitFlag by the end of the kernel");
      }
    }
  }
  for (int id = 0; id < kCrossCoreFlags; ++id) {
    if (core.cross_set[id] > core.cross_waited[id]) {
      Report(core.cross_site[id], "cross-core",
             "CrossCoreSetFlag(%d) has no CrossCoreWaitFlag by the end of the kernel", id);
    }
  }
  ReportUncleaned(core);
}

void CollectCounters(Device& d) {
  d.counters = {};
  d.counters.num_cores = d.num_cores;
  d.counters.violations = static_cast<uint32_t>(d.violations.size());
  for (uint32_t i = 0; i < d.num_cores; ++i) {
    Core& core = *d.runners[i]->core;
    uint64_t end = core.now;
    for (const Timeline& line : core.line) end = std::max(end, line.done);
    core.counters.total_cycles = end;
    d.counters.core[i] = core.counters;
    d.counters.total_cycles = std::max(d.counters.total_cycles, end);
    const auto* from = reinterpret_cast<const uint64_t*>(&core.counters);
    auto* to = reinterpret_cast<uint64_t*>(&d.counters.total);
    for (size_t word = 0; word < sizeof(SimCore) / sizeof(uint64_t); ++word) to[word] += from[word];
  }
}

void Refuse(Device& d, const std::string& text) {
  d.violations.push_back({"launch", "launch", text, 0, 1, {}});
}

}  // namespace

Core& Self() { return *device().runners[static_cast<size_t>(device().turn)]->core; }
uint32_t LaunchCores() { return device().num_cores; }
Core& CoreAt(uint32_t index) { return *device().runners[index]->core; }
int64_t Setting(const char* key) { return device().settings.at(key); }

namespace {

void Record(Site site, const char* rule, int kind, const char* format, va_list arguments) {
  Device& d = device();
  const std::string where = Base(site.file) + ":" + std::to_string(site.line);
  const uint32_t core = static_cast<uint32_t>(d.turn);
  const auto key = std::make_tuple(where, std::string(rule), kind);
  const auto known = d.seen.find(key);
  if (known != d.seen.end()) {
    Violation& entry = d.violations[known->second];
    ++entry.times;
    entry.cores.insert(core);
    return;
  }
  if (static_cast<int64_t>(d.violations.size()) >= d.settings["max_violations"]) return;
  char text[1024];
  std::vsnprintf(text, sizeof text, format, arguments);
  d.seen[key] = d.violations.size();
  d.violations.push_back({where, rule, text, core, 1, {core}});
}

}  // namespace

void Report(Site site, const char* rule, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Record(site, rule, 0, format, arguments);
  va_end(arguments);
}

void ReportKind(Site site, const char* rule, int kind, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  Record(site, rule, kind, format, arguments);
  va_end(arguments);
}

void WaitUntil(bool (*ready)(void*), void* context, const char* what, Site site) {
  Device& d = device();
  const int self = d.turn;
  Runner& runner = *d.runners[static_cast<size_t>(self)];
  runner.ready = ready;
  runner.context = context;
  runner.waits_for = what;
  runner.waits_at = site;
  std::unique_lock<std::mutex> lock(d.mutex);
  PassTurn(d, lock, self);
  lock.unlock();
  runner.ready = nullptr;
  if (d.deadlocked) {
    if (!d.abandoned) {
      Report(site, "deadlock", "%s waits for ever: not every core gets there", what);
    }
    throw Abandon{};
  }
}

int64_t BlockIndex() { return Self().index; }
int64_t BlockCount() { return LaunchCores(); }
int64_t SystemCycle() { return static_cast<int64_t>(Self().now); }
void SetKernelType(AscendC::KernelMetaType type) { Self().kernel_type = type; }

}  // namespace sim

using sim::device;

extern "C" {

int sim_launch(const void* entry, uint32_t block_dim, const uint64_t* args, uint32_t num_args,
               uint64_t seed) {
  sim::Device& d = device();
  std::lock_guard<std::mutex> one_at_a_time(d.launching);
  d.violations.clear();
  d.seen.clear();
  d.deadlocked = false;
  d.abandoned = false;
  d.num_cores = 0;
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
  d.num_cores = block_dim;
  d.random.seed(seed);
  while (d.runners.size() < block_dim) d.runners.push_back(std::make_unique<sim::Runner>());
  sim::StartGm();
  sim::StartRendezvous();
  for (uint32_t i = 0; i < block_dim; ++i) {
    sim::Runner& runner = *d.runners[i];
    runner.core->Reset(i);
    runner.ready = nullptr;
    runner.finished = false;
    runner.thread = std::thread(sim::RunCore, std::ref(d), i, entry, args, num_args);
  }
  {
    std::unique_lock<std::mutex> lock(d.mutex);
    sim::PassTurn(d, lock, -1);
    d.turn_changed.wait(lock, [&] { return d.turn == -1; });
  }
  for (uint32_t i = 0; i < block_dim; ++i) d.runners[i]->thread.join();
  sim::FinishGm();
  sim::CollectCounters(d);
  return static_cast<int>(d.violations.size());
}

size_t sim_report(char* out, size_t capacity) {
  std::string report;
  for (const auto& entry : device().violations) {
    report +=
        entry.where + " core " + std::to_string(entry.core) + " " + entry.rule + ": " + entry.text;
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

void sim_counters(SimCounters* out) { *out = device().counters; }

void sim_configure(const char* key, int64_t value) {
  const auto found = device().settings.find(key);
  const bool valid = found != device().settings.end() && value >= 0 &&
                     !(std::string(key) == "cores" && (value < 1 || value > SIM_MAX_CORES)) &&
                     !(std::string(key) == "ub_reserved" && value > 64 * 1024);
  if (!valid) {
    std::fprintf(stderr, "sim_configure: no setting %s, or %lld is out of its range\n", key,
                 static_cast<long long>(value));
    std::abort();
  }
  found->second = value;
}

}  // extern "C"
