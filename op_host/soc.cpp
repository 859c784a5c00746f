#include "op_host/soc.h"

#include <algorithm>

namespace paged {

std::optional<Soc> find_soc(const std::string& name) {
  static const Soc known[] = {
      {"Ascend910B1", 24, 48},    {"Ascend910B2", 24, 48},    {"Ascend910B2C", 24, 48},
      {"Ascend910B3", 20, 40},    {"Ascend910B4", 20, 40},    {"Ascend910B4-1", 20, 40},
      {"Ascend910_9362", 20, 40}, {"Ascend910_9372", 20, 40}, {"Ascend910_9381", 24, 48},
      {"Ascend910_9382", 24, 48}, {"Ascend910_9391", 24, 48}, {"Ascend910_9392", 24, 48},
  };
  for (const Soc& soc : known) {
    if (name == soc.name) return soc;
  }
  return std::nullopt;
}

std::optional<Soc> soc_of_device(const std::string& name, const DeviceAnswers& device) {
  const std::optional<Soc> known = find_soc(name);
  if (device.arch != 0 && device.arch != kNpuArch) return std::nullopt;
  if (!known && device.arch == 0) return std::nullopt;
  if (device.cube_cores < 1 || device.vector_cores < 2) return known;
  // A group is one cube core and two vector cores. A kernel that leaves cores idle is slower, one
  // that waits for cores that aren't there never ends.
  const int64_t groups = std::min(device.cube_cores, device.vector_cores / 2);
  return Soc{name, groups, 2 * groups};
}

}  // namespace paged
