// From a plan of op_host to a kernel in a stream. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "npu/acl.h"
#include "op_host/soc.h"

namespace paged::npu {

// The chip of a device, with the cores that this device has. Throws std::runtime_error if neither
// the device nor the project knows them, or the kernels aren't for such chips.
const Soc& this_soc(int device);

// Where a launch goes. The device must be current while it is launched.
struct Target {
  int device;
  Stream stream;
};

// An entry point of op_kernel/<stem>.cpp.
struct Kernel {
  std::string stem;
  std::string name;
};

// Puts a kernel into the stream. Its parameters are the pointers, in order, and then the device
// address of a copy of `tiling`, which is taken before launch returns: a captured graph keeps its
// own. Throws std::runtime_error.
void launch(const Target& target, const Kernel& kernel, int64_t num_cores,
            std::span<const void* const> pointers, std::span<const std::byte> tiling);

}  // namespace paged::npu
