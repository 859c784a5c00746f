// What the files of the simulated AscendCL runtime share.
//
// One process has one simulated machine of kNumDevices devices. Every entry point holds the lock of
// this header while it runs, so calls are serialised and a stream's task has finished when the call
// that submitted it returns. Pointers that the runtime hands out (streams, events, functions, ...)
// point at the structs declared here.
#pragma once

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace sim {

inline constexpr int kNumDevices = 2;

// Held by every entry point. Recursive, because some are written in terms of others.
class Lock {
 public:
  Lock() : lock_(mutex()) {}

 private:
  static std::recursive_mutex& mutex() {
    static std::recursive_mutex the_mutex;
    return the_mutex;
  }
  std::lock_guard<std::recursive_mutex> lock_;
};

// --- errors.cpp

// Keeps `text` for this thread's aclGetRecentErrMsg and returns `code`.
aclError remember_error(aclError code, const std::string& text);

template <class... Parts>
aclError fail(aclError code, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return remember_error(code, text.str());
}

// The entry points without an implementation that were called: a JSON object of name and count.
std::string unimplemented_calls();

// --- devices.cpp

// The model that the machine is made of: PAGED_SIM_SOC, Ascend910B1 where it isn't set, with as
// many cube cores as PAGED_SIM_CORES says, where that is a number.
struct Soc {
  const char* name;
  int cube_cores;
  int vector_cores;
};
const Soc& soc();

// The device of this thread, or -1 before aclrtSetDevice.
int current_device();

// --- faults.cpp

// Whether a launch of that kernel is to have a fault. "shifted": all its arguments arrive one place
// later. "idle": it ends and has done nothing. "hung": it never ends.
bool has_fault(const char* fault, const std::string& kernel);

// --- streams.cpp

// From now on nothing that is submitted runs, and whoever waits for a stream waits for ever.
void hang_streams();

using Task = std::function<aclError()>;

// The tasks of a captured stream, in the order in which they were submitted.
struct Graph {
  std::vector<Task> tasks;
  uint32_t id;
};

struct Stream {
  int device;
  Graph* capture = nullptr;  // what the stream's tasks are being recorded into
  bool began_capture = false;
};

// The stream behind a handle; the default stream of the current device for a null handle.
Stream* stream_of(aclrtStream handle);

// Runs a task in its stream's order: now, or, while the stream is captured, on each replay.
aclError submit(aclrtStream stream, Task task);

// Whether this thread may make a call that a capture of any stream forbids.
aclError check_not_capturing(const char* call);

// --- memory.cpp

// Device memory can be touched by the process only while one of these lives: the host of a real NPU
// can't touch it at all, and code that tries should fail here too. Needs the lock to be held.
class DeviceAccess {
 public:
  DeviceAccess();
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  static inline int depth_ = 0;
};

// One allocation of device memory.
struct Extent {
  std::byte* begin;
  size_t bytes;
  int device;
  bool written;  // by the host, in part at least; else it is garbage until a kernel writes it
};

// The allocation that [p, p + bytes) lies in, or null.
Extent* find_extent(const void* p, size_t bytes);

// Takes the allocation of these bytes for written: it no longer counts as garbage.
void note_host_write(void* p, size_t bytes);

// Calls `visit` for every allocation.
void for_each_extent(const std::function<void(const Extent&)>& visit);

// Device memory filled with garbage, or null if the device has no room.
std::byte* allocate_device(int device, size_t bytes);
void free_device(void* p);

size_t device_bytes_total();
size_t device_bytes_used(int device);

// --- kernels.cpp

// Tells the simulated vector core about an allocation, once a kernel library has brought the core.
void core_learns(const Extent& extent);
void core_forgets(const Extent& extent);

// The launches so far and the last one: a JSON object.
std::string launches();

}  // namespace sim
