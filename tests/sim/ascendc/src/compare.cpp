// Compare and Select.
#include "lanes.h"

namespace sim {
namespace {

using AscendC::CMPMODE;
using AscendC::SELMODE;

bool Holds(CMPMODE mode, double a, double b) {
  switch (mode) {
    case CMPMODE::LT:
      return a < b;
    case CMPMODE::GT:
      return a > b;
    case CMPMODE::EQ:
      return a == b;
    case CMPMODE::LE:
      return a <= b;
    case CMPMODE::GE:
      return a >= b;
    default:
      return a != b;
  }
}

void GetValues(const Core& core, const Operand& operand, const Plan& plan, int64_t repeat,
               double* value) {
  if (operand.type == Type::kHalf) {
    Lane<half> lanes;
    lanes.Get(core, operand, plan, repeat);
    for (int64_t i = 0; i < plan.lanes; ++i) value[i] = static_cast<double>(lanes.value[i]);
  } else if (operand.type == Type::kInt32) {
    Lane<int32_t> lanes;
    lanes.Get(core, operand, plan, repeat);
    for (int64_t i = 0; i < plan.lanes; ++i) value[i] = lanes.value[i];
  } else {
    Lane<float> lanes;
    lanes.Get(core, operand, plan, repeat);
    for (int64_t i = 0; i < plan.lanes; ++i) value[i] = static_cast<double>(lanes.value[i]);
  }
}

template <typename T>
void RunSelect(Core& core, const Operand& dst, uint32_t mask_addr, int64_t mask_step,
               const Operand& src0, const Operand* src1, T scalar, const Plan& plan) {
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    T first[kMaxLanes];
    T second[kMaxLanes];
    Load(core, src0, plan, repeat, first);
    if (src1) {
      Load(core, *src1, plan, repeat, second);
    } else {
      for (T& value : second) value = scalar;
    }
    const uint8_t* bits = core.ub + mask_addr + repeat * mask_step;
    for (int64_t i = 0; i < plan.lanes; ++i) {
      if (!(bits[i / 8] >> (i % 8) & 1)) first[i] = second[i];
    }
    Store(core, dst, plan, repeat, first);
  }
}

}  // namespace

void Compare(const char* name, const Operand& dst, const Operand& src0, const Operand* src1,
             double scalar, CMPMODE mode, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  if (src0.type == Type::kInt32 && mode != CMPMODE::EQ) {
    Report(site, "types", "%s of int32_t has only CMPMODE::EQ", name);
    return;
  }
  const int64_t per_repeat = LanesFor({src0.type});
  Lanes all = lanes;
  if (lanes.form == Lanes::kCount) {
    if (lanes.low % static_cast<uint64_t>(per_repeat) != 0) {
      Report(site, "vector-count", "%s of %lld elements, expected a multiple of %lld (256 bytes)",
             name, static_cast<long long>(lanes.low), static_cast<long long>(per_repeat));
      return;
    }
  } else {  // this device ignores the mask of a compare
    all = {Lanes::kLength, static_cast<uint64_t>(per_repeat), 0, lanes.repeat};
  }
  Plan plan;
  const Operand first = Placed(src0, lanes, per_repeat);
  Operand second = src1 ? Placed(*src1, lanes, per_repeat) : first;
  if (!MakePlan(now, all, per_repeat, &plan)) return;
  const int64_t step = per_repeat / 8;
  const int64_t bytes = plan.repeats * step;
  if (!Access(now, first, plan, false, "src0") ||
      (src1 && !Access(now, second, plan, false, "src1")) || !Usable(now, dst.view, "dst") ||
      !Aligned(now, dst.view, kBlock, "dst") || !Inside(now, dst.view, 0, bytes, "dst")) {
    return;
  }
  Touch(now, Space::kUb, dst.view.addr, static_cast<uint32_t>(bytes), true, "dst");
  SpendRepeats(now, plan.repeats, kPlainCycles, src1 ? CountConflicts(plan, first, second) : 0);
  Core& core = now.core;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    double a[kMaxLanes];
    double b[kMaxLanes];
    GetValues(core, first, plan, repeat, a);
    if (src1) {
      GetValues(core, second, plan, repeat, b);
    } else {
      for (double& value : b) value = scalar;
    }
    uint8_t* bits = core.ub + dst.view.addr + repeat * step;
    for (int64_t byte = 0; byte < step; ++byte) {
      unsigned packed = 0;
      for (int64_t bit = 0; bit < 8; ++bit) {
        packed |= static_cast<unsigned>(Holds(mode, a[byte * 8 + bit], b[byte * 8 + bit])) << bit;
      }
      bits[byte] = static_cast<uint8_t>(packed);
    }
  }
}

void Select(const Operand& dst, const Operand& mask, const Operand& src0, const Operand* src1,
            double scalar, SELMODE mode, const Lanes& lanes, Site site) {
  const Instruction now("Select", kV, site);
  if ((mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) != (src1 == nullptr)) {
    Report(site, "types",
           "Select: VSEL_TENSOR_SCALAR_MODE takes a scalar, the other modes a tensor");
    return;
  }
  if (mode != SELMODE::VSEL_CMPMASK_SPR && Setting("ub_reserved") == 0) {
    Report(site, "ub-reserved", "Select with a mask for each repeat needs the reserved 8 KB of UB");
  }
  const int64_t per_repeat = LanesFor({dst.type});
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan)) return;
  const Operand to = Placed(dst, lanes, per_repeat);
  const Operand first = Placed(src0, lanes, per_repeat);
  const Operand second = src1 ? Placed(*src1, lanes, per_repeat) : first;
  // Mode 0 has one repeat's bits for all repeats.
  const int64_t step = mode == SELMODE::VSEL_CMPMASK_SPR ? 0 : per_repeat / 8;
  const int64_t bits = step == 0     ? std::min(plan.total, per_repeat)
                       : plan.prefix ? plan.total
                                     : plan.repeats * per_repeat;
  const int64_t bytes = (bits + 7) / 8;
  if (!Usable(now, mask.view, "selMask") || !Aligned(now, mask.view, kBlock, "selMask") ||
      !Inside(now, mask.view, 0, bytes, "selMask") || !Access(now, first, plan, false, "src0") ||
      (src1 && !Access(now, second, plan, false, "src1")) || !Access(now, to, plan, true, "dst")) {
    return;
  }
  Touch(now, Space::kUb, mask.view.addr, static_cast<uint32_t>(bytes), false, "selMask");
  CheckOverlap(now, to, first, plan, "src0", false);
  if (src1) CheckOverlap(now, to, second, plan, "src1", false);
  SpendRepeats(now, plan.repeats, kPlainCycles, src1 ? CountConflicts(plan, first, second) : 0);
  if (SizeOf(dst.type) == 2) {
    RunSelect<uint16_t>(now.core, to, mask.view.addr, step, first, src1 ? &second : nullptr,
                        FloatToHalf(static_cast<float>(scalar)), plan);
  } else {
    RunSelect<uint32_t>(now.core, to, mask.view.addr, step, first, src1 ? &second : nullptr,
                        BitsOf(static_cast<float>(scalar)), plan);
  }
}

}  // namespace sim
