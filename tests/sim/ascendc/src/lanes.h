// How vector instructions walk over their operands: repeats, blocks, lanes, masks.
#pragma once

#include <cstring>

#include "memory.h"

namespace sim {

constexpr int kMaxLanes = 128;

// A bit for each lane of a repeat.
struct Mask {
  uint64_t low = 0;
  uint64_t high = 0;

  static Mask First(int64_t lanes) {
    if (lanes >= 128) return {~uint64_t{0}, ~uint64_t{0}};
    if (lanes >= 64) return {~uint64_t{0}, (uint64_t{1} << (lanes - 64)) - 1};
    return {(uint64_t{1} << lanes) - 1, 0};
  }
  bool Has(int64_t lane) const {
    return ((lane < 64 ? low >> lane : high >> (lane - 64)) & 1) != 0;
  }
  bool operator==(const Mask& other) const { return low == other.low && high == other.high; }
  bool Empty() const { return low == 0 && high == 0; }
  // Bits [first, first + count), with count at most 32.
  uint32_t Slice(int64_t first, int64_t count) const {
    const uint64_t word = first < 64 ? low >> first : high >> (first - 64);
    return static_cast<uint32_t>(word & ((uint64_t{1} << count) - 1));
  }
};

// An instruction's repeats: `body` for all but the last, which has `last`.
struct Plan {
  int64_t repeats = 0;
  int64_t lanes = 0;  // of a full repeat
  Mask body;
  Mask last;
  bool prefix = false;  // the active lanes lie side by side from the first: `total` of them
  int64_t total = 0;

  Mask At(int64_t repeat) const { return repeat == repeats - 1 ? last : body; }
};

const char* NameOf(Type type);

// Lanes of a repeat: 256 bytes of the widest operand.
int64_t LanesFor(std::initializer_list<Type> types);

// The plan of a call. False where there is nothing to do, or the call breaks a limit.
bool MakePlan(const Instruction& instruction, const Lanes& lanes, int64_t per_repeat, Plan* plan);

// Checks strides, alignment, bounds, and records the access. False where memory would be overrun.
bool Access(const Instruction& instruction, const Operand& operand, const Plan& plan, bool write,
            const char* role);

// A destination may be one of its sources only if both are the same blocks in each repeat, and must
// not be read by a later repeat. `accumulates` allows the second, as documented for a few
// instructions.
void CheckOverlap(const Instruction& instruction, const Operand& dst, const Operand& src,
                  const Plan& plan, const char* role, bool accumulates);

// Repeats in which two sources want different blocks of one group of UB's banks.
int64_t CountConflicts(const Plan& plan, const Operand& first, const Operand& second);

// Books an instruction's repeats on the vector pipe.
void SpendRepeats(const Instruction& instruction, int64_t repeats, int64_t cycles_each,
                  int64_t conflicts = 0);

// The operand as a count-form call means it: repeats side by side. Other calls give their strides.
inline Operand Placed(const Operand& operand, const Lanes& lanes, int64_t per_repeat) {
  Operand placed = operand;
  if (lanes.form == Lanes::kCount) {
    placed.strides = {1, per_repeat * SizeOf(operand.type) / kBlock};
  }
  return placed;
}

inline uint32_t RepeatAddress(const Operand& operand, int64_t repeat) {
  return operand.view.addr + static_cast<uint32_t>(repeat * operand.strides.repeat * kBlock);
}

// Loads the lanes of one repeat. Lanes that the mask leaves out may hold anything.
template <typename T>
void Load(const Core& core, const Operand& operand, const Plan& plan, int64_t repeat, T* lanes) {
  const uint8_t* from = core.ub + RepeatAddress(operand, repeat);
  if (operand.strides.block == 1) {
    std::memcpy(lanes, from, static_cast<size_t>(plan.lanes) * sizeof(T));
    return;
  }
  constexpr int64_t per_block = kBlock / sizeof(T);
  const Mask mask = plan.At(repeat);
  for (int64_t first = 0; first < plan.lanes; first += per_block) {
    if (!mask.Slice(first, per_block)) continue;
    const int64_t offset = first / per_block * operand.strides.block * kBlock;
    std::memcpy(lanes + first, from + offset, kBlock);
  }
}

template <typename T>
void Store(Core& core, const Operand& operand, const Plan& plan, int64_t repeat, const T* lanes) {
  uint8_t* to = core.ub + RepeatAddress(operand, repeat);
  const Mask mask = plan.At(repeat);
  constexpr int64_t per_block = kBlock / sizeof(T);
  constexpr uint32_t all = static_cast<uint32_t>((uint64_t{1} << per_block) - 1);
  for (int64_t first = 0; first < plan.lanes; first += per_block) {
    const uint32_t active = mask.Slice(first, per_block);
    uint8_t* block = to + first / per_block * operand.strides.block * kBlock;
    if (active == all) {
      std::memcpy(block, lanes + first, kBlock);
    } else if (active) {
      for (int64_t lane = 0; lane < per_block; ++lane) {
        if (active >> lane & 1) {
          std::memcpy(block + static_cast<size_t>(lane) * sizeof(T), lanes + first + lane,
                      sizeof(T));
        }
      }
    }
  }
}

// half is computed in float and rounded; everything else in its own type.
template <typename T>
struct Computed {
  using type = T;
};
template <>
struct Computed<half> {
  using type = float;
};
template <>
struct Computed<bfloat16_t> {
  using type = float;
};

inline void Widen(const half* from, float* to, int64_t lanes) {
  uint16_t bits[kMaxLanes];
  std::memcpy(bits, from, static_cast<size_t>(lanes) * sizeof(half));
  for (int64_t i = 0; i < lanes; ++i) to[i] = HalfToFloat(bits[i]);
}

inline void Narrow(const float* from, half* to, int64_t lanes) {
  uint16_t bits[kMaxLanes];
  for (int64_t i = 0; i < lanes; ++i) bits[i] = FloatToHalf(from[i]);
  std::memcpy(to, bits, static_cast<size_t>(lanes) * sizeof(half));
}

template <typename T>
void Widen(const T* from, T* to, int64_t lanes) {
  std::memcpy(to, from, static_cast<size_t>(lanes) * sizeof(T));
}

template <typename T>
void Narrow(const T* from, T* to, int64_t lanes) {
  std::memcpy(to, from, static_cast<size_t>(lanes) * sizeof(T));
}

// The lanes of one operand in one repeat, ready to compute with.
template <typename T>
struct Lane {
  using Value = typename Computed<T>::type;
  Value value[kMaxLanes];

  void Get(const Core& core, const Operand& operand, const Plan& plan, int64_t repeat) {
    T raw[kMaxLanes];
    Load(core, operand, plan, repeat, raw);
    Widen(raw, value, plan.lanes);
  }
  void Put(Core& core, const Operand& operand, const Plan& plan, int64_t repeat) const {
    T raw[kMaxLanes];
    Narrow(value, raw, plan.lanes);
    Store(core, operand, plan, repeat, raw);
  }
};

}  // namespace sim
