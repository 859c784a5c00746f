// Ascend C for a host compiler: what kernels include. See docs/simulated-device.md.
#pragma once

#include "ascendc_sim/arithmetic.h"
#include "ascendc_sim/cast.h"
#include "ascendc_sim/compare.h"
#include "ascendc_sim/copy.h"
#include "ascendc_sim/cube.h"
#include "ascendc_sim/fill.h"
#include "ascendc_sim/mask.h"
#include "ascendc_sim/params.h"
#include "ascendc_sim/pipe.h"
#include "ascendc_sim/reduce.h"
#include "ascendc_sim/sync.h"
#include "ascendc_sim/system.h"
#include "ascendc_sim/tensor.h"
#include "ascendc_sim/types.h"
