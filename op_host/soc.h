// What the tiling must know of a chip.
#pragma once

#include <cstdint>
#include <string>

namespace paged {

struct Soc {
  const char* name;
  int64_t cube_cores;
  int64_t vector_cores;  // two for each cube core
};

// Bytes of a vector core's unified buffer that a kernel may use: 192 KB, less 256 bytes that CANN 9
// keeps and the 8 KB that the compiler reserves unless told otherwise.
constexpr int64_t kUsableUb = 192 * 1024 - 256 - 8 * 1024;

// Bytes of a cube core's L1 that a kernel may use: 512 KB, less 256 bytes that CANN 9 keeps.
constexpr int64_t kUsableL1 = 512 * 1024 - 256;

// The chip of that name, as aclrtGetSocName gives it; null if the project doesn't know it.
const Soc* find_soc(const std::string& name);

}  // namespace paged
