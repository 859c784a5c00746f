// The launch of echo_arguments, which computes nothing.
#pragma once

#include "op_host/launch_plan.h"
#include "op_host/soc.h"
#include "op_kernel/echo_arguments_tiling_data.h"

namespace paged {

// Every vector core answers, with these words beside its arguments.
inline LaunchPlan<EchoArgumentsTilingData> plan_echo_arguments(
    const EchoArgumentsTilingData& tiling, const Soc& soc) {
  return {"echo_arguments", "paged_echo_arguments", tiling, soc.vector_cores, 0};
}

}  // namespace paged
