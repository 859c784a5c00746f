#include "npu/launch.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

namespace paged::npu {
namespace {

// Each source of op_kernel is one binary, <stem>.o, in a folder per chip beside this library.
// PAGED_KERNELS names another folder.
std::filesystem::path binaries_folder(const std::string& chip) {
  const char* named = std::getenv("PAGED_KERNELS");
  if (named != nullptr) return std::filesystem::absolute(named);
  Dl_info self;
  dladdr(reinterpret_cast<const void*>(&binaries_folder), &self);
  return std::filesystem::absolute(self.dli_fname).parent_path() / "kernels" / chip;
}

BinaryHandle load_binary(const std::string& stem, const std::string& chip) {
  const std::string path = binaries_folder(chip) / (stem + ".o");
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error("there is no NPU kernel at " + path +
                             ": build paged_ops with PAGED_SOC=" + chip +
                             " where ASCEND_HOME_PATH names a CANN");
  }
  BinaryHandle binary = nullptr;
  check_acl(acl().aclrtBinaryLoadFromFile(path.c_str(), nullptr, &binary),
            "aclrtBinaryLoadFromFile");
  return binary;
}

// The kernel on the device that is current. A binary is loaded once per device, because a loaded
// one lies in the memory of one device.
FunctionHandle find_kernel(int device, const Kernel& kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, BinaryHandle> binaries;
  static std::map<std::pair<int, std::string>, FunctionHandle> functions;
  const std::lock_guard lock(mutex);
  FunctionHandle& function = functions[{device, kernel.name}];
  if (function == nullptr) {
    BinaryHandle& binary = binaries[{device, kernel.stem}];
    if (binary == nullptr) binary = load_binary(kernel.stem, this_soc(device).name);
    check_acl(acl().aclrtBinaryGetFunction(binary, kernel.name.c_str(), &function),
              "aclrtBinaryGetFunction");
  }
  return function;
}

// What a device says of itself, 0 where it doesn't.
int64_t ask(int device, uint32_t attribute) {
  int64_t answer = 0;
  const auto get = acl().aclrtGetDeviceInfo;
  const bool answered =
      get != nullptr && get(static_cast<uint32_t>(device), attribute, &answer) == 0;
  return answered ? answer : 0;
}

}  // namespace

const Soc& this_soc(int device) {
  static std::mutex mutex;
  static std::map<int, Soc> socs;
  const std::lock_guard lock(mutex);
  if (const auto found = socs.find(device); found != socs.end()) return found->second;
  const std::string name = acl().aclrtGetSocName();
  const std::optional<Soc> soc = soc_of_device(
      name, {ask(device, kCubeCores), ask(device, kVectorCores), ask(device, kArchitecture)});
  if (!soc) throw std::runtime_error("there are no kernels for the chip " + name);
  return socs.emplace(device, *soc).first->second;
}

void launch(const Target& target, const Kernel& kernel, int64_t num_cores,
            std::span<const void* const> pointers, std::span<const std::byte> tiling) {
  FunctionHandle function = find_kernel(target.device, kernel);
  ArgumentsHandle arguments;
  check_acl(acl().aclrtKernelArgsInit(function, &arguments), "aclrtKernelArgsInit");
  ParameterHandle parameter;
  for (const void* pointer : pointers) {
    check_acl(acl().aclrtKernelArgsAppend(arguments, &pointer, sizeof(pointer), &parameter),
              "aclrtKernelArgsAppend");
  }
  check_acl(acl().aclrtKernelArgsAppendPlaceHolder(arguments, &parameter),
            "aclrtKernelArgsAppendPlaceHolder");
  void* buffer;
  check_acl(acl().aclrtKernelArgsGetPlaceHolderBuffer(arguments, parameter, tiling.size(), &buffer),
            "aclrtKernelArgsGetPlaceHolderBuffer");
  std::memcpy(buffer, tiling.data(), tiling.size());
  check_acl(acl().aclrtKernelArgsFinalize(arguments), "aclrtKernelArgsFinalize");
  // Cores of a kernel may wait for each other. Were they started as they become free, two kernels
  // in two streams could each hold what the other waits for.
  LaunchAttribute schedule = {.id = kScheduleAttribute, .schedule = kBatchSchedule};
  LaunchConfiguration configuration = {&schedule, 1};
  check_acl(acl().aclrtLaunchKernelWithConfig(function, static_cast<uint32_t>(num_cores),
                                              target.stream, &configuration, arguments, nullptr),
            "aclrtLaunchKernelWithConfig");
}

}  // namespace paged::npu
