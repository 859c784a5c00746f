// Kernels: a binary is a shared library, built from the kernel sources against the simulated vector
// core, which it brings along as a dependency; a launch is a call of that core.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>

#include "runtime.h"
#include "sim_api.h"

namespace sim {
namespace {

// torch_npu asks for 32 bytes more than a tensor has. The core isn't told about them: a kernel that
// relies on them is at fault.
constexpr size_t kPaddingBytes = 32;

// What the runtime of a real device has room for: see aclrtKernelArgsInit.
constexpr size_t kMaxArguments = SIM_MAX_ARGS;
constexpr size_t kMaxPlaceHolderBytes = 64 << 10;

// The C interface of the simulated vector core, from the first kernel library that was loaded.
struct Core {
  decltype(&::sim_launch) launch = nullptr;
  decltype(&::sim_report) report = nullptr;
  decltype(&::sim_register) register_range = nullptr;
  decltype(&::sim_unregister) unregister_range = nullptr;
  decltype(&::sim_configure) configure = nullptr;
};
Core core;

template <class F>
bool find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

// Takes the core from a kernel library; false if the library has none.
bool attach_core(void* library) {
  if (core.launch != nullptr) return true;
  Core found;
  if (!find(library, "sim_launch", &found.launch) || !find(library, "sim_report", &found.report) ||
      !find(library, "sim_register", &found.register_range) ||
      !find(library, "sim_unregister", &found.unregister_range) ||
      !find(library, "sim_configure", &found.configure)) {
    return false;
  }
  core = found;
  core.configure("cores", soc().vector_cores);
  const DeviceAccess access;
  for_each_extent(core_learns);
  return true;
}

std::string core_report() {
  std::string text(core.report(nullptr, 0), '\0');
  core.report(text.data(), text.size());
  text.resize(std::strlen(text.c_str()));
  return text;
}

struct Binary {
  void* library;
};

struct Function {
  std::string name;
  const void* entry;
  int device;
};

// An argument of its own value, or one that becomes the device address of `contents` at launch.
struct Argument {
  uint64_t value = 0;
  bool is_place_holder = false;
  size_t bytes = 0;
  std::shared_ptr<std::byte[]> contents;
};

// The arguments that a thread is putting together: one list per thread, as in the real runtime.
struct Arguments {
  const Function* function = nullptr;
  std::array<Argument, kMaxArguments> list;
  size_t count = 0;
  size_t place_holder_bytes = 0;
  bool has_buffers = false;
  bool finished = false;
};

struct Launch {
  const Function* function;
  uint32_t blocks;
  aclrtStream stream;
  bool batch;  // starts only when all its cores are free
  std::vector<Argument> arguments;
};

int num_launches = 0;
std::string last_launch = "null";

void record(const Launch& launch) {
  std::ostringstream json;
  json << "{\"kernel\": \"" << launch.function->name
       << "\", \"device\": " << launch.function->device
       << ", \"stream\": " << reinterpret_cast<uintptr_t>(launch.stream)
       << ", \"blocks\": " << launch.blocks << ", \"batch\": " << (launch.batch ? "true" : "false")
       << ", \"arguments\": " << launch.arguments.size() << "}";
  last_launch = json.str();
  ++num_launches;
}

// Device memory for the contents of a launch's place holders.
class PlaceHolders {
 public:
  explicit PlaceHolders(int device) : device_(device) {}
  ~PlaceHolders() {
    for (std::byte* buffer : buffers_) free_device(buffer);
  }
  PlaceHolders(const PlaceHolders&) = delete;
  PlaceHolders& operator=(const PlaceHolders&) = delete;

  // The device address of a copy of the contents, or null if the device is full.
  std::byte* place(const Argument& argument) {
    std::byte* buffer = allocate_device(device_, argument.bytes + kPaddingBytes);
    if (buffer == nullptr) return nullptr;
    buffers_.push_back(buffer);
    std::memcpy(buffer, argument.contents.get(), argument.bytes);
    note_host_write(buffer, argument.bytes);
    return buffer;
  }

 private:
  int device_;
  std::vector<std::byte*> buffers_;
};

aclError run(const Launch& launch) {
  record(launch);
  const DeviceAccess access;
  PlaceHolders place_holders(launch.function->device);
  std::vector<uint64_t> values;
  for (const Argument& argument : launch.arguments) {
    uint64_t value = argument.value;
    if (argument.is_place_holder) {
      value = reinterpret_cast<uintptr_t>(place_holders.place(argument));
      if (value == 0) {
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no room for the arguments of ",
                    launch.function->name);
      }
    }
    values.push_back(value);
  }
  if (has_fault("idle", launch.function->name)) return ACL_SUCCESS;
  if (has_fault("hung", launch.function->name)) {
    hang_streams();
    return ACL_SUCCESS;
  }
  if (has_fault("shifted", launch.function->name)) values.insert(values.begin(), 0);
  // Each launch runs its cores in another order.
  const int violations = core.launch(launch.function->entry, launch.blocks, values.data(),
                                     values.size(), num_launches);
  if (violations == 0) return ACL_SUCCESS;
  const std::string report = core_report();
  std::fprintf(stderr, "simulated device: %s broke %d rules:\n%s\n", launch.function->name.c_str(),
               violations, report.c_str());
  return fail(ACL_ERROR_RT_VECTOR_CORE_EXCEPTION, launch.function->name, " broke ", violations,
              " rules:\n", report);
}

// The schedule is the only attribute that a launch may have: normal or batch.
aclError read_config(const aclrtLaunchKernelCfg* config, bool* batch) {
  if (config == nullptr) return ACL_SUCCESS;
  for (size_t i = 0; i < config->numAttrs; ++i) {
    const aclrtLaunchKernelAttr& attribute = config->attrs[i];
    if (attribute.id != ACL_RT_LAUNCH_KERNEL_ATTR_SCHEM_MODE || attribute.value.schemMode > 1) {
      return fail(ACL_ERROR_API_NOT_SUPPORT, "launch attribute ", static_cast<int>(attribute.id),
                  " isn't implemented, or not with that value");
    }
    *batch = attribute.value.schemMode == 1;
  }
  return ACL_SUCCESS;
}

Arguments* arguments_of(aclrtArgsHandle handle) { return static_cast<Arguments*>(handle); }

// The next free argument, or an error and null.
aclError next_argument(aclrtArgsHandle handle, Argument** argument) {
  Arguments* arguments = arguments_of(handle);
  *argument = nullptr;
  if (arguments->finished || arguments->has_buffers) {
    return fail(ACL_ERROR_API_NOT_SUPPORT, "an argument of ", arguments->function->name,
                " was appended after the first place holder's buffer or after the end");
  }
  if (arguments->count == kMaxArguments) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, arguments->function->name, " gets more than ",
                kMaxArguments, " arguments");
  }
  *argument = &arguments->list[arguments->count++];
  return ACL_SUCCESS;
}

}  // namespace

void core_learns(const Extent& extent) {
  if (core.register_range == nullptr || extent.bytes <= kPaddingBytes) return;
  std::ostringstream name;
  name << "npu:" << extent.device << " allocation " << static_cast<void*>(extent.begin);
  const int access = extent.written ? SIM_READ_WRITE : SIM_READ_WRITE | SIM_POISON;
  core.register_range(extent.begin, extent.bytes - kPaddingBytes, name.str().c_str(), access);
}

void core_forgets(const Extent& extent) {
  if (core.unregister_range == nullptr || extent.bytes <= kPaddingBytes) return;
  core.unregister_range(extent.begin);
}

std::string launches() {
  return "{\"count\": " + std::to_string(num_launches) + ", \"last\": " + last_launch + "}";
}

}  // namespace sim

using sim::Lock;

aclError aclrtBinaryLoadFromFile(const char* path, aclrtBinaryLoadOptions*,
                                 aclrtBinHandle* binary) {
  const Lock lock;
  if (path[0] != '/') {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "the path of a binary must be absolute: ", path);
  }
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return sim::fail(ACL_ERROR_RT_FILE_OPEN, dlerror());
  if (!sim::attach_core(library)) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, path, " isn't built for the simulated device");
  }
  *binary = new sim::Binary{library};
  return ACL_SUCCESS;
}

aclError aclrtBinaryUnLoad(aclrtBinHandle binary) {
  const Lock lock;
  delete static_cast<sim::Binary*>(binary);  // the library stays: functions may still be in use
  return ACL_SUCCESS;
}

// The function runs on the device that is current now, and on no other.
aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char* name,
                                aclrtFuncHandle* function) {
  const Lock lock;
  const void* entry = dlsym(static_cast<sim::Binary*>(binary)->library, name);
  if (entry == nullptr) {
    return sim::fail(ACL_ERROR_RT_KERNEL_LOOKUP, "the binary has no kernel ", name);
  }
  *function = new sim::Function{name, entry, sim::current_device()};
  return ACL_SUCCESS;
}

aclError aclrtKernelArgsInit(aclrtFuncHandle function, aclrtArgsHandle* handle) {
  static thread_local sim::Arguments arguments;
  arguments = {};
  arguments.function = static_cast<sim::Function*>(function);
  *handle = &arguments;
  return ACL_SUCCESS;
}

aclError aclrtKernelArgsAppend(aclrtArgsHandle handle, void* value, size_t bytes,
                               aclrtParamHandle* parameter) {
  if (bytes > sizeof(uint64_t)) {
    return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "an argument of ", bytes,
                     " bytes: kernels here take pointers and 64-bit integers");
  }
  sim::Argument* argument = nullptr;
  if (const aclError error = sim::next_argument(handle, &argument)) return error;
  std::memcpy(&argument->value, value, bytes);
  *parameter = argument;
  return ACL_SUCCESS;
}

aclError aclrtKernelArgsAppendPlaceHolder(aclrtArgsHandle handle, aclrtParamHandle* parameter) {
  sim::Argument* argument = nullptr;
  if (const aclError error = sim::next_argument(handle, &argument)) return error;
  argument->is_place_holder = true;
  *parameter = argument;
  return ACL_SUCCESS;
}

aclError aclrtKernelArgsGetPlaceHolderBuffer(aclrtArgsHandle handle, aclrtParamHandle parameter,
                                             size_t bytes, void** buffer) {
  sim::Arguments* arguments = sim::arguments_of(handle);
  auto* argument = static_cast<sim::Argument*>(parameter);
  if (!argument->is_place_holder || arguments->finished) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "a buffer for no place holder, or after the end");
  }
  arguments->has_buffers = true;
  arguments->place_holder_bytes += bytes;
  if (arguments->place_holder_bytes > sim::kMaxPlaceHolderBytes) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "place holders of more than ",
                     sim::kMaxPlaceHolderBytes, " bytes");
  }
  argument->bytes = bytes;
  argument->contents = std::make_shared<std::byte[]>(bytes);
  *buffer = argument->contents.get();
  return ACL_SUCCESS;
}

aclError aclrtKernelArgsFinalize(aclrtArgsHandle handle) {
  sim::arguments_of(handle)->finished = true;
  return ACL_SUCCESS;
}

aclError aclrtLaunchKernelWithConfig(aclrtFuncHandle function_handle, uint32_t blocks,
                                     aclrtStream stream, aclrtLaunchKernelCfg* config,
                                     aclrtArgsHandle handle, void*) {
  const Lock lock;
  bool batch = false;
  if (const aclError error = sim::read_config(config, &batch)) return error;
  const auto* function = static_cast<sim::Function*>(function_handle);
  const sim::Arguments& arguments = *sim::arguments_of(handle);
  if (arguments.function != function || !arguments.finished) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "the arguments of ", function->name,
                     " aren't complete, or belong to another kernel");
  }
  if (function->device != sim::current_device()) {
    return sim::fail(ACL_ERROR_RT_INVALID_DEVICE_FUNCTION, function->name, " was loaded on device ",
                     function->device, ", but device ", sim::current_device(), " is current");
  }
  if (blocks < 1 || blocks > static_cast<uint32_t>(sim::soc().vector_cores)) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, function->name, " on ", blocks,
                     " cores: ", sim::soc().name, " has ", sim::soc().vector_cores);
  }
  const sim::Launch launch = {
      function,
      blocks,
      stream,
      batch,
      {arguments.list.begin(), arguments.list.begin() + static_cast<int64_t>(arguments.count)}};
  return sim::submit(stream, [launch] { return sim::run(launch); });
}
