// Limits of the numbers that instructions are given.
#pragma once

#include "core.h"

namespace sim {

// Reports a number outside [low, high] under `rule`.
inline bool InRange(const Instruction& now, const char* rule, const char* what, int64_t value,
                    int64_t low, int64_t high) {
  if (value >= low && value <= high) return true;
  Report(now.site, rule, "%s: %s is %lld, expected %lld to %lld", now.name, what,
         static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high));
  return false;
}

inline bool CopiesSomething(const Instruction& now, bool something) {
  if (!something) {
    Report(now.site, "copy-length", "%s of nothing: this device doesn't promise to ignore it",
           now.name);
  }
  return something;
}

}  // namespace sim
