#include "op_host/soc.h"

namespace paged {
namespace {

// B1 and B2 have 24 cube cores, B3 and B4 have 20; each comes with two vector cores. For the chips
// of the 910_93 family the smaller of the two counts is taken: a kernel that leaves cores idle is
// slower, one that waits for cores that aren't there never ends.
constexpr Soc kSocs[] = {
    {"Ascend910B1", 24, 48},    {"Ascend910B2", 24, 48},    {"Ascend910B3", 20, 40},
    {"Ascend910B4", 20, 40},    {"Ascend910_9362", 20, 40}, {"Ascend910_9372", 20, 40},
    {"Ascend910_9381", 20, 40}, {"Ascend910_9382", 20, 40}, {"Ascend910_9391", 20, 40},
    {"Ascend910_9392", 20, 40},
};

}  // namespace

const Soc* find_soc(const std::string& name) {
  for (const Soc& soc : kSocs) {
    if (name == soc.name) return &soc;
  }
  return nullptr;
}

}  // namespace paged
