// Reductions.
#include <cmath>
#include <vector>

#include "lanes.h"

namespace sim {
namespace {

using AscendC::ReduceOrder;

// A result: its value and the lane that it came from.
struct Extreme {
  float value;
  uint32_t index;
};

float Round(float value, Type type) {
  return type == Type::kHalf ? HalfToFloat(FloatToHalf(value)) : value;
}

// Neighbours are added pairwise, then the sums of neighbours, and so on; the type rounds every sum.
float TreeSum(std::vector<float> values, Type type) {
  if (values.empty()) return 0;
  while (values.size() > 1) {
    if (values.size() % 2) values.push_back(0);
    for (size_t i = 0; i < values.size() / 2; ++i) {
      values[i] = Round(values[2 * i] + values[2 * i + 1], type);
    }
    values.resize(values.size() / 2);
  }
  return values[0];
}

bool Beats(ReduceOp op, float challenger, float champion) {
  if (champion != champion) return false;
  return challenger != challenger ||
         (op == ReduceOp::kMax ? challenger > champion : challenger < champion);
}

// Reduces the active lanes [first, first + lanes) of a repeat.
Extreme ReduceLanes(ReduceOp op, const float* value, const Mask& mask, int64_t first, int64_t lanes,
                    Type type) {
  if (op == ReduceOp::kSum) {
    std::vector<float> values(static_cast<size_t>(lanes));
    for (int64_t i = 0; i < lanes; ++i) {
      values[static_cast<size_t>(i)] = mask.Has(first + i) ? value[first + i] : 0;
    }
    return {TreeSum(std::move(values), type), 0};
  }
  Extreme best{0, 0};
  bool any = false;
  for (int64_t i = first; i < first + lanes; ++i) {
    if (mask.Has(i) && (!any || Beats(op, value[i], best.value))) {
      best = {value[i], static_cast<uint32_t>(i)};
      any = true;
    }
  }
  return best;
}

void GetLanes(const Core& core, const Operand& src, const Plan& plan, int64_t repeat,
              float* value) {
  if (src.type == Type::kHalf) {
    Lane<half> lanes;
    lanes.Get(core, src, plan, repeat);
    std::memcpy(value, lanes.value, sizeof lanes.value);
  } else {
    Lane<float> lanes;
    lanes.Get(core, src, plan, repeat);
    std::memcpy(value, lanes.value, sizeof lanes.value);
  }
}

void PutValue(Core& core, uint32_t addr, float value, Type type) {
  if (type == Type::kHalf) {
    const uint16_t bits = FloatToHalf(value);
    std::memcpy(core.ub + addr, &bits, sizeof bits);
  } else {
    std::memcpy(core.ub + addr, &value, sizeof value);
  }
}

void PutIndex(Core& core, uint32_t addr, uint32_t index, int64_t size) {
  std::memcpy(core.ub + addr, &index, static_cast<size_t>(size));
}

bool DstStrideIsAllowed(const Instruction& now, int64_t stride) {
  if (stride >= 0 && stride <= 0xffff) return true;
  Report(now.site, "vector-stride", "%s: dstRepStride is %lld, expected 0 to 65535", now.name,
         static_cast<long long>(stride));
  return false;
}

// The source of a reduction may have wide strides, unlike that of other instructions.
bool AccessSource(const Instruction& now, const Operand& src, const Plan& plan) {
  if (src.strides.repeat > kMaxRepeatStride && plan.repeats == 1) {
    Operand once = src;
    once.strides.repeat = 0;
    return Access(now, once, plan, false, "src");
  }
  return Access(now, src, plan, false, "src");
}

void ReportSelfOverlap(const Instruction& now, const Operand& dst, int64_t dst_bytes,
                       const Operand& src, const Plan& plan) {
  // Results are denser than sources, so a shared start is the one documented way to overlap.
  const int64_t src_bytes = ((plan.repeats - 1) * src.strides.repeat + 8) * kBlock;
  const bool apart = int64_t{dst.view.addr} + dst_bytes <= src.view.addr ||
                     int64_t{src.view.addr} + src_bytes <= dst.view.addr;
  if (!apart) Report(now.site, "overlap", "%s: dst and src overlap", now.name);
}

}  // namespace

void WholeReduce(const char* name, ReduceOp op, const Operand& dst, const Operand& src,
                 ReduceOrder order, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  Plan plan;
  if (!MakePlan(now, lanes, LanesFor({src.type}), &plan)) return;
  const int64_t size = SizeOf(src.type);
  const bool both =
      order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_INDEX_VALUE;
  const int64_t unit = both ? 2 * size : order == ReduceOrder::ORDER_ONLY_INDEX ? 4 : size;
  if (!DstStrideIsAllowed(now, dst.strides.repeat) || !AccessSource(now, src, plan) ||
      !Usable(now, dst.view, "dst") || !Aligned(now, dst.view, unit, "dst")) {
    return;
  }
  const int64_t step = dst.strides.repeat * unit;
  if (!Inside(now, dst.view, 0, (plan.repeats - 1) * step + unit, "dst")) return;
  ReportSelfOverlap(now, dst, (plan.repeats - 1) * step + unit, src, plan);
  SpendRepeats(now, plan.repeats, kWholeReduceCycles);
  Core& core = now.core;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    float value[kMaxLanes];
    GetLanes(core, src, plan, repeat, value);
    const Extreme result = ReduceLanes(op, value, plan.At(repeat), 0, plan.lanes, src.type);
    const uint32_t addr = dst.view.addr + static_cast<uint32_t>(repeat * step);
    Touch(now, Space::kUb, addr, static_cast<uint32_t>(unit), true, "dst");
    switch (order) {
      case ReduceOrder::ORDER_VALUE_INDEX:
        PutValue(core, addr, result.value, src.type);
        PutIndex(core, addr + static_cast<uint32_t>(size), result.index, size);
        break;
      case ReduceOrder::ORDER_INDEX_VALUE:
        PutIndex(core, addr, result.index, size);
        PutValue(core, addr + static_cast<uint32_t>(size), result.value, src.type);
        break;
      case ReduceOrder::ORDER_ONLY_VALUE:
        PutValue(core, addr, result.value, src.type);
        break;
      case ReduceOrder::ORDER_ONLY_INDEX:
        PutIndex(core, addr, result.index, 4);
        break;
    }
  }
}

void GroupReduce(const char* name, ReduceOp op, int64_t group, const Operand& dst,
                 const Operand& src, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  Plan plan;
  if (!MakePlan(now, lanes, LanesFor({src.type}), &plan)) return;
  const int64_t size = SizeOf(src.type);
  const int64_t per_group = group == 2 ? 2 : kBlock / size;
  const int64_t groups = plan.lanes / per_group;
  const int64_t unit = groups * size;  // the results of one repeat
  if (!DstStrideIsAllowed(now, dst.strides.repeat) || !AccessSource(now, src, plan) ||
      !Usable(now, dst.view, "dst") ||
      !Aligned(now, dst.view, std::min<int64_t>(unit, kBlock), "dst")) {
    return;
  }
  const int64_t step = dst.strides.repeat * unit;
  SpendRepeats(now, plan.repeats,
               group == kBlock && src.type == Type::kHalf ? kBlockReduceHalfCycles : kPlainCycles);
  Core& core = now.core;
  int64_t last = 0;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    float value[kMaxLanes];
    GetLanes(core, src, plan, repeat, value);
    const Mask mask = plan.At(repeat);
    for (int64_t i = 0; i < groups; ++i) {
      if (!mask.Slice(i * per_group, per_group)) continue;  // dst keeps what it had
      const int64_t offset = repeat * step + i * size;
      if (!Inside(now, dst.view, offset, size, "dst")) return;
      const uint32_t addr = dst.view.addr + static_cast<uint32_t>(offset);
      Touch(now, Space::kUb, addr, static_cast<uint32_t>(size), true, "dst");
      const Extreme result = ReduceLanes(op, value, mask, i * per_group, per_group, src.type);
      PutValue(core, addr, result.value, src.type);
      last = offset + size;
    }
  }
  ReportSelfOverlap(now, dst, last, src, plan);
}

void FullReduce(const char* name, ReduceOp op, const Operand& dst, const Operand& src,
                const Operand& work, bool index, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  const int64_t per_repeat = LanesFor({src.type});
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan)) return;
  const Operand from = Placed(src, lanes, per_repeat);
  const int64_t size = SizeOf(src.type);
  const int64_t per_block = kBlock / size;

  // Partial results, rounded up to blocks: one for each repeat, or a value and an index; with an
  // index every further round needs its own place.
  int64_t needed = 0;
  int64_t repeats = 0;
  for (int64_t left = plan.total; left > 1;) {
    const int64_t round = (left + per_repeat - 1) / per_repeat;
    repeats += round;
    const int64_t results = op == ReduceOp::kSum ? round : 2 * round;
    const int64_t rounded = (results + per_block - 1) / per_block * per_block;
    if (needed == 0 || index) needed += rounded;
    if (round == 1) break;
    left = results;
  }
  const int64_t unit = index ? 2 * size : size;
  if (!Access(now, from, plan, false, "src") || !Usable(now, work.view, "sharedTmpBuffer") ||
      !Aligned(now, work.view, kBlock, "sharedTmpBuffer") ||
      !Inside(now, work.view, 0, needed * size, "sharedTmpBuffer") ||
      !Usable(now, dst.view, "dst") || !Aligned(now, dst.view, unit, "dst") ||
      !Inside(now, dst.view, 0, unit, "dst")) {
    return;
  }
  Core& core = now.core;
  Touch(now, Space::kUb, work.view.addr, static_cast<uint32_t>(needed * size), true,
        "sharedTmpBuffer");
  Poison(core, Space::kUb, work.view.addr, static_cast<uint32_t>(needed * size));
  Touch(now, Space::kUb, dst.view.addr, static_cast<uint32_t>(unit), true, "dst");
  // Rounds depend on each other, so the pipe runs empty between them.
  SpendRepeats(now, std::max<int64_t>(repeats, 1), kWholeReduceCycles);
  core.line[kV].free = core.line[kV].done;

  std::vector<float> sums;
  Extreme best{0, 0};
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    float value[kMaxLanes];
    GetLanes(core, from, plan, repeat, value);
    const Extreme result = ReduceLanes(op, value, plan.At(repeat), 0, plan.lanes, src.type);
    sums.push_back(result.value);
    if (repeat == 0 || Beats(op, result.value, best.value)) {
      best = {result.value, result.index + static_cast<uint32_t>(repeat * per_repeat)};
    }
  }
  PutValue(core, dst.view.addr, op == ReduceOp::kSum ? TreeSum(sums, src.type) : best.value,
           src.type);
  if (index) PutIndex(core, dst.view.addr + static_cast<uint32_t>(size), best.index, size);
}

}  // namespace sim
