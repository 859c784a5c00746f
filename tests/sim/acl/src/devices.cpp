// Start and end of the runtime, devices and their properties.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

namespace sim {
namespace {

constexpr Soc kSocs[] = {
    {"Ascend910B1", 24, 48},
    {"Ascend910B2", 24, 48},
    {"Ascend910B3", 20, 40},
    {"Ascend910B4", 20, 40},
};

// What PAGED_SIM_CORES may be instead of a number of cube cores: a device that doesn't say.
constexpr const char* kUnsaid = "unsaid";

const char* wanted_cores() { return std::getenv("PAGED_SIM_CORES"); }

bool says_cores() { return wanted_cores() == nullptr || std::strcmp(wanted_cores(), kUnsaid) != 0; }

Soc named_soc() {
  const char* wanted = std::getenv("PAGED_SIM_SOC");
  if (wanted == nullptr) return kSocs[0];
  for (const Soc& known : kSocs) {
    if (std::strcmp(known.name, wanted) == 0) return known;
  }
  std::fprintf(stderr, "PAGED_SIM_SOC is %s, expected Ascend910B1 to Ascend910B4\n", wanted);
  std::abort();
}

constexpr int64_t kL2Bytes = 192 << 20;
constexpr int64_t kUnifiedBufferBytes = 192 << 10;
constexpr int64_t kNpuArch = 2201;

thread_local int device_of_thread = -1;
bool initialised = false;
std::map<aclSysParamOpt, int64_t> system_options;

// What a thread's aclrtSetDevice makes current: one context per device.
struct Context {
  int device;
};
Context contexts[kNumDevices] = {{0}, {1}};

bool is_device(int64_t device) { return device >= 0 && device < kNumDevices; }

aclError no_such_device(int64_t device) {
  return fail(ACL_ERROR_RT_INVALID_DEVICEID, "device ", device, " doesn't exist, there are ",
              kNumDevices);
}

aclError no_device_set() {
  return fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no device: aclrtSetDevice comes first");
}

}  // namespace

const Soc& soc() {
  static const Soc chosen = [] {
    Soc named = named_soc();
    if (wanted_cores() != nullptr && says_cores()) {
      named.cube_cores = std::atoi(wanted_cores());
      named.vector_cores = 2 * named.cube_cores;
    }
    return named;
  }();
  return chosen;
}

int current_device() { return device_of_thread; }

}  // namespace sim

using sim::Lock;

aclError aclInit(const char*) {
  const Lock lock;
  if (sim::initialised) return ACL_ERROR_REPEAT_INITIALIZE;
  sim::initialised = true;
  return ACL_SUCCESS;
}

aclError aclFinalize() {
  const Lock lock;
  if (!sim::initialised) return ACL_ERROR_REPEAT_FINALIZE;
  sim::initialised = false;
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = sim::kNumDevices;
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (!sim::is_device(device)) return sim::no_such_device(device);
  sim::device_of_thread = device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
  if (!sim::is_device(device)) return sim::no_such_device(device);
  if (sim::device_of_thread == device) sim::device_of_thread = -1;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (sim::device_of_thread < 0) return sim::no_device_set();
  *device = sim::device_of_thread;
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (sim::device_of_thread < 0) return sim::no_device_set();
  *context = &sim::contexts[sim::device_of_thread];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context == nullptr) return sim::fail(ACL_ERROR_RT_CONTEXT_NULL, "the context is null");
  sim::device_of_thread = static_cast<sim::Context*>(context)->device;
  return ACL_SUCCESS;
}

const char* aclrtGetSocName() { return sim::soc().name; }

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  if (!sim::is_device(device)) return sim::no_such_device(device);
  const bool asks_cores =
      attribute == ACL_DEV_ATTR_CUBE_CORE_NUM || attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM;
  if (asks_cores && !sim::says_cores()) {
    return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "this device doesn't say how many cores it has");
  }
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM:
      *value = sim::soc().cube_cores;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
      *value = sim::soc().vector_cores;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE:
      *value = sim::kUnifiedBufferBytes;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      *value = static_cast<int64_t>(sim::device_bytes_total());
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE:
      *value = sim::kL2Bytes;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_NPU_ARCH:
      *value = sim::kNpuArch;
      return ACL_SUCCESS;
    default:
      return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "device attribute ", static_cast<int>(attribute),
                       " isn't implemented");
  }
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
      return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_AICORE_CORE_NUM, value);
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
      return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_VECTOR_CORE_NUM, value);
    case ACL_DEVICE_INFO_L2_SIZE:
      return aclrtGetDeviceInfo(device, ACL_DEV_ATTR_L2_CACHE_SIZE, value);
    default:
      return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "device capability ", static_cast<int>(info),
                       " doesn't exist");
  }
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  const Lock lock;
  if (sim::device_of_thread < 0) return sim::no_device_set();
  *total_bytes = sim::device_bytes_total();
  *free_bytes = *total_bytes - sim::device_bytes_used(sim::device_of_thread);
  return ACL_SUCCESS;
}

// Peers reach each other's memory only through copies.
aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  if (!sim::is_device(device)) return sim::no_such_device(device);
  if (!sim::is_device(peer)) return sim::no_such_device(peer);
  *can = 0;
  return ACL_SUCCESS;
}

// Infinities and NaN instead of saturation: the only mode that the simulated core knows.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  if (mode == ACL_RT_OVERFLOW_MODE_INFNAN) return ACL_SUCCESS;
  return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "saturating arithmetic isn't implemented");
}

// Nothing runs for long enough to time out.
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

// Whether operators are deterministic and the like: kept, though no implemented call has a choice.
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  const Lock lock;
  sim::system_options[option] = value;
  return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  const Lock lock;
  *value = sim::system_options[option];
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}
