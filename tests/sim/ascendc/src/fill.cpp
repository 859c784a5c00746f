// Duplicate, Brcb, CreateVecIndex, Gather, Transpose.
#include "lanes.h"

namespace sim {
namespace {

template <typename T>
void RunDuplicate(Core& core, const Operand& dst, T value, const Plan& plan) {
  T lanes[kMaxLanes];
  for (T& lane : lanes) lane = value;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) Store(core, dst, plan, repeat, lanes);
}

template <typename T>
void RunIndex(Core& core, const Operand& dst, double first, const Plan& plan) {
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    Lane<T> lanes;
    for (int64_t i = 0; i < plan.lanes; ++i) {
      using Value = typename Lane<T>::Value;
      lanes.value[i] = static_cast<Value>(first + static_cast<double>(repeat * plan.lanes + i));
    }
    lanes.Put(core, dst, plan, repeat);
  }
}

template <typename T>
bool RunGather(const Instruction& now, const Operand& dst, const Operand& src,
               const Operand& offsets, uint32_t base, const Plan& plan) {
  Core& core = now.core;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    T lanes[kMaxLanes] = {};
    const Mask mask = plan.At(repeat);
    for (int64_t i = 0; i < plan.lanes; ++i) {
      if (!mask.Has(i)) continue;
      uint32_t offset;
      const uint32_t at = offsets.view.addr + static_cast<uint32_t>((repeat * plan.lanes + i) * 4);
      std::memcpy(&offset, core.ub + at, sizeof offset);
      const int64_t from = int64_t{base} + offset;
      if (from % static_cast<int64_t>(sizeof(T)) != 0) {
        Report(now.site, "gather",
               "Gather: byte offset %lld of lane %lld is no multiple of %zu (the type)",
               static_cast<long long>(from), static_cast<long long>(i), sizeof(T));
        return false;
      }
      if (!Inside(now, src.view, from, sizeof(T), "src")) return false;
      const uint32_t addr = src.view.addr + static_cast<uint32_t>(from);
      Touch(now, Space::kUb, addr, sizeof(T), false, "src");
      std::memcpy(&lanes[i], core.ub + addr, sizeof(T));
    }
    Store(core, dst, plan, repeat, lanes);
  }
  return true;
}

}  // namespace

void Duplicate(const Operand& dst, uint32_t bits, const Lanes& lanes, Site site) {
  const Instruction now("Duplicate", kV, site);
  const int64_t per_repeat = LanesFor({dst.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, to, plan, true, "dst")) return;
  SpendRepeats(now, plan.repeats, kPlainCycles);
  if (SizeOf(dst.type) == 2) {
    RunDuplicate(now.core, to, static_cast<uint16_t>(bits), plan);
  } else {
    RunDuplicate(now.core, to, bits, plan);
  }
}

void CreateVecIndex(const Operand& dst, double first, const Lanes& lanes, Site site) {
  const Instruction now("CreateVecIndex", kV, site);
  const int64_t per_repeat = LanesFor({dst.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, to, plan, true, "dst")) return;
  SpendRepeats(now, plan.repeats, kPlainCycles);
  switch (dst.type) {
    case Type::kInt16:
      return RunIndex<int16_t>(now.core, to, first, plan);
    case Type::kHalf:
      return RunIndex<half>(now.core, to, first, plan);
    case Type::kInt32:
      return RunIndex<int32_t>(now.core, to, first, plan);
    default:
      return RunIndex<float>(now.core, to, first, plan);
  }
}

void Brcb(const Operand& dst, const Operand& src, int64_t repeat, Site site) {
  const Instruction now("Brcb", kV, site);
  if (repeat < 0 || repeat > kMaxRepeat) {
    Report(site, "vector-repeat", "Brcb: repeatTime is %lld, expected 0 to 255",
           static_cast<long long>(repeat));
    return;
  }
  if (repeat == 0) return;
  if (dst.strides.block < 1 || dst.strides.block > 0xffff || dst.strides.repeat < 0 ||
      dst.strides.repeat > 0xffff) {
    Report(site, "vector-stride",
           "Brcb: dst has block stride %lld and repeat stride %lld, expected 1 to "
           "65535 and 0 to 65535",
           static_cast<long long>(dst.strides.block), static_cast<long long>(dst.strides.repeat));
    return;
  }
  const int64_t size = SizeOf(src.type);
  const int64_t read = 8 * repeat * size;
  if (!Usable(now, src.view, "src") || !Aligned(now, src.view, kBlock, "src") ||
      !Inside(now, src.view, 0, read, "src") || !Usable(now, dst.view, "dst") ||
      !Aligned(now, dst.view, kBlock, "dst")) {
    return;
  }
  const int64_t reach = ((repeat - 1) * dst.strides.repeat + 7 * dst.strides.block + 1) * kBlock;
  if (!Inside(now, dst.view, 0, reach, "dst")) return;
  if (int64_t{dst.view.addr} < src.view.addr + read && src.view.addr < dst.view.addr + reach) {
    Report(site, "overlap", "Brcb: dst and src overlap");
  }
  Touch(now, Space::kUb, src.view.addr, static_cast<uint32_t>(read), false, "src");
  SpendRepeats(now, repeat, kPlainCycles);
  Core& core = now.core;
  std::vector<uint8_t> values(core.ub + src.view.addr, core.ub + src.view.addr + read);
  for (int64_t i = 0; i < repeat * 8; ++i) {
    const int64_t blocks = i / 8 * dst.strides.repeat + i % 8 * dst.strides.block;
    const uint32_t addr = dst.view.addr + static_cast<uint32_t>(blocks * kBlock);
    Touch(now, Space::kUb, addr, kBlock, true, "dst");
    for (int64_t at = 0; at < kBlock; at += size) {
      std::memcpy(core.ub + addr + at, values.data() + i * size, static_cast<size_t>(size));
    }
  }
}

void Gather(const Operand& dst, const Operand& src, const Operand& offsets, uint32_t base,
            const Lanes& lanes, Site site) {
  const Instruction now("Gather", kV, site);
  const int64_t per_repeat = LanesFor({dst.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan)) return;
  Operand indices = offsets;
  indices.strides = {1, per_repeat * 4 / kBlock};
  if (!Access(now, indices, plan, false, "srcOffset") || !Usable(now, src.view, "src") ||
      !Aligned(now, src.view, kBlock, "src") || !Access(now, to, plan, true, "dst")) {
    return;
  }
  SpendRepeats(now, plan.repeats, kGatherCycles);
  if (SizeOf(dst.type) == 2) {
    RunGather<uint16_t>(now, to, src, indices, base, plan);
  } else {
    RunGather<uint32_t>(now, to, src, indices, base, plan);
  }
}

void TransposeB16(const Operand& dst, const Operand& src, Site site) {
  const Instruction now("Transpose", kV, site);
  constexpr int64_t kBytes = 512;
  if (!Usable(now, src.view, "src") || !Usable(now, dst.view, "dst") ||
      !Aligned(now, src.view, kBlock, "src") || !Aligned(now, dst.view, kBlock, "dst") ||
      !Inside(now, src.view, 0, kBytes, "src") || !Inside(now, dst.view, 0, kBytes, "dst")) {
    return;
  }
  const int64_t apart = int64_t{dst.view.addr} - int64_t{src.view.addr};
  if (apart != 0 && apart > -kBytes && apart < kBytes) {
    Report(site, "overlap", "Transpose: dst and src overlap in part");
  }
  Touch(now, Space::kUb, src.view.addr, kBytes, false, "src");
  Touch(now, Space::kUb, dst.view.addr, kBytes, true, "dst");
  SpendRepeats(now, 2, kTransposeCycles);
  uint16_t in[256];
  uint16_t out[256];
  std::memcpy(in, now.core.ub + src.view.addr, kBytes);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) out[column * 16 + row] = in[row * 16 + column];
  }
  std::memcpy(now.core.ub + dst.view.addr, out, kBytes);
}

}  // namespace sim
