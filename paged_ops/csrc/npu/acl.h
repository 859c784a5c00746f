// The calls of AscendCL that launching a kernel needs.
//
// They are looked up in libascendcl.so when the first npu tensor arrives, so the library is built
// and loaded without CANN, and one binary serves machines with and without it. Signatures are those
// of CANN 8.1 and later; handles are opaque.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged::npu {

using AclError = int;
using BinaryHandle = void*;
using FunctionHandle = void*;
using ArgumentsHandle = void*;
using ParameterHandle = void*;
using Stream = void*;

// How a kernel is launched: one attribute, and the list that the call takes.
struct LaunchAttribute {
  int id;
  union {
    uint8_t schedule;
    uint32_t all[4];
  };
};
struct LaunchConfiguration {
  LaunchAttribute* attributes;
  size_t count;
};
constexpr int kScheduleAttribute = 1;
constexpr uint8_t kBatchSchedule =
    1;  // start when all cores of the launch are free, not one by one

// What can be asked of a device.
constexpr uint32_t kCubeCores = 102;
constexpr uint32_t kVectorCores = 201;
constexpr uint32_t kArchitecture = 601;

struct Acl {
  const char* (*aclrtGetSocName)();
  const char* (*aclGetRecentErrMsg)();
  // Null in a CANN that hasn't got it.
  AclError (*aclrtGetDeviceInfo)(uint32_t device, uint32_t attribute, int64_t* value);

  // `path` is absolute. Null options: all defaults.
  AclError (*aclrtBinaryLoadFromFile)(const char* path, void* options, BinaryHandle* binary);
  // The function belongs to the device that is current.
  AclError (*aclrtBinaryGetFunction)(BinaryHandle binary, const char* name,
                                     FunctionHandle* function);

  // The arguments of one launch, in the order of the kernel's parameters. A place holder becomes
  // the device address of a copy of its buffer; buffers are asked for after the last argument.
  AclError (*aclrtKernelArgsInit)(FunctionHandle function, ArgumentsHandle* arguments);
  AclError (*aclrtKernelArgsAppend)(ArgumentsHandle arguments, void* value, size_t bytes,
                                    ParameterHandle* parameter);
  AclError (*aclrtKernelArgsAppendPlaceHolder)(ArgumentsHandle arguments,
                                               ParameterHandle* parameter);
  AclError (*aclrtKernelArgsGetPlaceHolderBuffer)(ArgumentsHandle arguments,
                                                  ParameterHandle parameter, size_t bytes,
                                                  void** buffer);
  AclError (*aclrtKernelArgsFinalize)(ArgumentsHandle arguments);

  // Returns before the kernel has run.
  AclError (*aclrtLaunchKernelWithConfig)(FunctionHandle function, uint32_t num_cores,
                                          Stream stream, LaunchConfiguration* configuration,
                                          ArgumentsHandle arguments, void* reserved);
};

// Throws std::runtime_error where CANN isn't installed or is too old.
const Acl& acl();

// Throws std::runtime_error with the call, the code and the runtime's text unless `error` is 0.
void check_acl(AclError error, const char* call);

}  // namespace paged::npu
