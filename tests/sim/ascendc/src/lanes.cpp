#include "lanes.h"

#include <algorithm>
#include <initializer_list>

namespace sim {

const char* NameOf(Type type) {
  static const char* const names[] = {"int8_t", "uint8_t",    "int16_t", "uint16_t",
                                      "half",   "bfloat16_t", "int32_t", "uint32_t",
                                      "float",  "int64_t",    "uint64_t"};
  return type == Type::kOther ? "?" : names[static_cast<int>(type)];
}

int64_t LanesFor(std::initializer_list<Type> types) {
  int64_t widest = 2;  // 8-bit types are handled 128 at a time, like 16-bit ones
  for (const Type type : types) widest = std::max(widest, SizeOf(type));
  return kRepeatBytes / widest;
}

namespace {

// count elements from the first, in as many repeats as they need.
Plan PrefixPlan(int64_t count, int64_t per_repeat) {
  Plan plan;
  plan.lanes = per_repeat;
  plan.repeats = (count + per_repeat - 1) / per_repeat;
  plan.body = Mask::First(per_repeat);
  plan.last = Mask::First(count - (plan.repeats - 1) * per_repeat);
  plan.prefix = true;
  plan.total = count;
  return plan;
}

}  // namespace

bool MakePlan(const Instruction& now, const Lanes& lanes, int64_t per_repeat, Plan* plan) {
  const Core& core = now.core;
  if (lanes.form == Lanes::kCount) {
    const auto count = static_cast<int64_t>(lanes.low);
    if (count < 0 || count > kUbBytes) {
      Report(now.site, "vector-count", "%s of %lld elements", now.name,
             static_cast<long long>(count));
      return false;
    }
    if (core.counter_mode) {
      Report(now.site, "mask", "%s with a count after SetMaskCount; SetMaskNorm is missing",
             now.name);
    }
    *plan = PrefixPlan(count, per_repeat);
    return count > 0;
  }
  if (lanes.repeat < 0 || lanes.repeat > kMaxRepeat) {
    Report(now.site, "vector-repeat", "%s: repeatTime is %lld, expected 0 to 255", now.name,
           static_cast<long long>(lanes.repeat));
    return false;
  }
  Mask mask{lanes.low, lanes.high};
  if (lanes.form == Lanes::kPlaceholder) mask = {core.mask_low, core.mask_high};
  if (core.counter_mode) {  // the mask is the number of elements, and repeatTime has no effect
    if (mask.low > kUbBytes) {
      Report(now.site, "mask", "%s: the mask counts %llu elements", now.name,
             static_cast<unsigned long long>(mask.low));
      return false;
    }
    *plan = PrefixPlan(static_cast<int64_t>(mask.low), per_repeat);
    return plan->total > 0;
  }
  if (lanes.form == Lanes::kLength) {
    if (lanes.low > static_cast<uint64_t>(per_repeat)) {
      Report(now.site, "mask", "%s: mask is %lld lanes, expected at most %lld for this type",
             now.name, static_cast<long long>(lanes.low), static_cast<long long>(per_repeat));
      return false;
    }
    mask = Mask::First(static_cast<int64_t>(lanes.low));
  } else {
    const Mask possible = Mask::First(per_repeat);
    const bool beyond = (mask.low & ~possible.low) != 0 || (mask.high & ~possible.high) != 0;
    if (beyond && lanes.form == Lanes::kBits) {
      Report(now.site, "mask", "%s: mask has bits beyond lane %lld", now.name,
             static_cast<long long>(per_repeat - 1));
      return false;
    }
    mask.low &= possible.low;
    mask.high &= possible.high;
  }
  plan->lanes = per_repeat;
  plan->repeats = lanes.repeat;
  plan->body = plan->last = mask;
  const Mask full = Mask::First(per_repeat);
  plan->prefix = mask == full;
  plan->total = per_repeat * lanes.repeat;
  return lanes.repeat > 0 && !mask.Empty();
}

bool Access(const Instruction& now, const Operand& operand, const Plan& plan, bool write,
            const char* role) {
  if (!Usable(now, operand.view, role) || !Aligned(now, operand.view, kBlock, role)) return false;
  const int64_t size = SizeOf(operand.type);
  const Strides& strides = operand.strides;
  if (strides.repeat < 0 || strides.repeat > kMaxRepeatStride || strides.block < 0 ||
      strides.block > 0xffff) {
    Report(now.site, "vector-stride",
           "%s: %s has block stride %lld and repeat stride %lld, at most 65535 "
           "and 255",
           now.name, role, static_cast<long long>(strides.block),
           static_cast<long long>(strides.repeat));
    return false;
  }
  const int64_t per_block = kBlock / size;
  const int64_t blocks = plan.lanes / per_block;
  if (write && strides.block == 0 && blocks > 1) {
    Report(now.site, "vector-stride",
           "%s: %s has block stride 0, so its blocks overwrite each other", now.name, role);
    return false;
  }
  const bool dense = strides.block == 1 && (strides.repeat == blocks || plan.repeats == 1);
  if (dense && plan.prefix) {
    if (!Inside(now, operand.view, 0, plan.total * size, role)) return false;
    Touch(now, Space::kUb, operand.view.addr, static_cast<uint32_t>(plan.total * size), write,
          role);
    return true;
  }
  // Bounds first, so that nothing is recorded of an instruction that isn't executed.
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
      const Mask mask = plan.At(repeat);
      for (int64_t block = 0; block < blocks; ++block) {
        const uint32_t active = mask.Slice(block * per_block, per_block);
        if (!active) continue;
        const int64_t offset = (repeat * strides.repeat + block * strides.block) * kBlock;
        if (pass == 0) {
          const int64_t lanes_used = 32 - __builtin_clz(active);
          if (!Inside(now, operand.view, offset, lanes_used * size, role)) return false;
          continue;
        }
        uint32_t bytes = 0;
        if (active == static_cast<uint32_t>((uint64_t{1} << per_block) - 1)) {
          bytes = ~0u;
        } else {
          const uint32_t lane_bytes = (1u << size) - 1;
          for (int64_t lane = 0; lane < per_block; ++lane) {
            if (active >> lane & 1) bytes |= lane_bytes << (lane * size);
          }
        }
        TouchBlock(now, Space::kUb, (operand.view.addr + static_cast<uint32_t>(offset)) / kBlock,
                   bytes, write, role);
      }
    }
  }
  return true;
}

void CheckOverlap(const Instruction& now, const Operand& dst, const Operand& src, const Plan& plan,
                  const char* role, bool accumulates) {
  const auto extent = [&](const Operand& operand) {
    const int64_t blocks = plan.lanes * SizeOf(operand.type) / kBlock;
    return ((plan.repeats - 1) * operand.strides.repeat + (blocks - 1) * operand.strides.block +
            1) *
           kBlock;
  };
  const int64_t dst_from = dst.view.addr;
  const int64_t src_from = src.view.addr;
  if (dst_from + extent(dst) <= src_from || src_from + extent(src) <= dst_from) return;

  const int64_t dst_size = SizeOf(dst.type);
  const int64_t src_size = SizeOf(src.type);
  const bool same_strides = (dst.strides.block == src.strides.block) &&
                            (dst.strides.repeat == src.strides.repeat || plan.repeats == 1);
  if (dst_from == src_from && dst_size == src_size && same_strides &&
      (plan.repeats == 1 || dst.strides.repeat * kBlock >= plan.lanes * dst_size)) {
    return;
  }
  // Which repeat wrote each block, 1 for the first.
  static std::array<uint32_t, kUbBlocks + 4096> written;
  std::fill(written.begin(), written.end(), 0u);
  const auto blocks_of = [&](const Operand& operand, int64_t size, int64_t repeat, auto visit) {
    const int64_t per_block = kBlock / size;
    const Mask mask = plan.At(repeat);
    for (int64_t block = 0; block < plan.lanes / per_block; ++block) {
      if (!mask.Slice(block * per_block, per_block)) continue;
      visit(static_cast<size_t>(operand.view.addr / kBlock) +
            static_cast<size_t>(repeat * operand.strides.repeat + block * operand.strides.block));
    }
  };
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    const auto number = static_cast<uint32_t>(repeat + 1);
    bool feeds = false;
    blocks_of(src, src_size, repeat, [&](size_t block) { feeds |= written[block] != 0; });
    if (feeds && !accumulates) {
      Report(now.site, "overlap", "%s: dst of an earlier repeat is %s of repeat %lld", now.name,
             role, static_cast<long long>(repeat));
      return;
    }
    size_t shared = 0;
    size_t total = 0;
    blocks_of(dst, dst_size, repeat, [&](size_t block) { written[block] = number; });
    blocks_of(src, src_size, repeat, [&](size_t block) {
      shared += written[block] == number;
      ++total;
    });
    const bool identical = dst.view.addr + repeat * dst.strides.repeat * kBlock ==
                               src.view.addr + repeat * src.strides.repeat * kBlock &&
                           dst_size == src_size && dst.strides.block == src.strides.block;
    if (shared != 0 && !identical) {
      Report(now.site, "overlap",
             "%s: dst and %s overlap in part in repeat %lld (%zu of %zu blocks)", now.name, role,
             static_cast<long long>(repeat), shared, total);
      return;
    }
  }
}

int64_t CountConflicts(const Plan& plan, const Operand& first, const Operand& second) {
  // The block that the first source wants of each group.
  std::array<int64_t, kBankGroups> wanted{};
  const auto visit = [&](const Operand& operand, int64_t repeat, auto use) {
    const int64_t per_block = kBlock / SizeOf(operand.type);
    const Mask mask = plan.At(repeat);
    const int64_t begin = RepeatAddress(operand, repeat) / kBlock;
    for (int64_t i = 0; i < plan.lanes / per_block; ++i) {
      if (mask.Slice(i * per_block, per_block)) use(begin + i * operand.strides.block);
    }
  };
  int64_t conflicts = 0;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    wanted.fill(-1);
    bool shared = false;
    visit(first, repeat, [&](int64_t block) { wanted[block % kBankGroups] = block; });
    visit(second, repeat, [&](int64_t block) {
      const int64_t other = wanted[block % kBankGroups];
      shared |= other >= 0 && other != block;
    });
    conflicts += shared;
  }
  return conflicts;
}

void SpendRepeats(const Instruction& now, int64_t repeats, int64_t cycles_each, int64_t conflicts) {
  const int64_t taken = repeats + conflicts * (kBankConflict - 1);
  Spend(now, kVectorStart + taken * cycles_each, kVectorLatency);
  now.core.counters.bank_conflicts += static_cast<uint64_t>(conflicts);
  ++now.core.counters.vector_instructions;
  now.core.counters.vector_repeats += static_cast<uint64_t>(repeats);
}

void SetMaskMode(bool counter) { Self().counter_mode = counter; }

void SetVectorMask(uint64_t high, uint64_t low) {
  Self().mask_high = high;
  Self().mask_low = low;
}

void SetVectorMaskLength(int64_t length, uint64_t lanes, Site site) {
  if (Self().counter_mode) {
    SetVectorMask(0, static_cast<uint64_t>(length));
    return;
  }
  if (length < 0 || length > static_cast<int64_t>(lanes)) {
    Report(site, "mask", "SetVectorMask of %lld lanes, expected at most %llu for this type",
           static_cast<long long>(length), static_cast<unsigned long long>(lanes));
    return;
  }
  const Mask mask = Mask::First(length);
  SetVectorMask(mask.high, mask.low);
}

void ResetMask() { SetVectorMask(~uint64_t{0}, ~uint64_t{0}); }

}  // namespace sim
