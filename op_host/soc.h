// What the tiling must know of a chip.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace paged {

struct Soc {
  std::string name;
  int64_t cube_cores;
  int64_t vector_cores;  // two for each cube core
};

// Bytes of a vector core's unified buffer that a kernel may use: 192 KB, less 256 bytes that CANN 9
// keeps and the 8 KB that the compiler reserves unless told otherwise.
constexpr int64_t kUsableUb = 192 * 1024 - 256 - 8 * 1024;

// Bytes of a cube core's L1 that a kernel may use: 512 KB, less 256 bytes that CANN 9 keeps.
constexpr int64_t kUsableL1 = 512 * 1024 - 256;

// The architecture of the chips that the kernels are compiled for, as the runtime counts them.
constexpr int64_t kNpuArch = 2201;

// The chip of that name, as aclrtGetSocName gives it; nothing if the project doesn't know it.
std::optional<Soc> find_soc(const std::string& name);

// What a device says of itself, 0 for what it doesn't say.
struct DeviceAnswers {
  int64_t cube_cores;
  int64_t vector_cores;
  int64_t arch;
};

// The chip with the cores that a device has: fewer than the chip where it is divided among users.
// find_soc's where it doesn't say; nothing where neither knows, or it is of another architecture.
std::optional<Soc> soc_of_device(const std::string& name, const DeviceAnswers& device);

}  // namespace paged
