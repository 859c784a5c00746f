// Faults of a device, for tests of what has to recognise them.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace sim {

// PAGED_SIM_FAULT is a fault and how the names of the kernels begin that have it: hung:paged_write.
bool has_fault(const char* fault, const std::string& kernel) {
  const char* wanted = std::getenv("PAGED_SIM_FAULT");
  const char* colon = wanted == nullptr ? nullptr : std::strchr(wanted, ':');
  if (colon == nullptr) return false;
  return std::string(wanted, colon) == fault && kernel.rfind(colon + 1, 0) == 0;
}

}  // namespace sim
