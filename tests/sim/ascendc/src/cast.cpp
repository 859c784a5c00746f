// Cast, with every rounding mode that a pair of types has.
#include <cmath>
#include <limits>

#include "lanes.h"

namespace sim {
namespace {

using AscendC::RoundMode;

constexpr unsigned Bit(RoundMode mode) { return 1u << static_cast<unsigned>(mode); }
constexpr unsigned kNone = Bit(RoundMode::CAST_NONE);
constexpr unsigned kDirected = Bit(RoundMode::CAST_RINT) | Bit(RoundMode::CAST_FLOOR) |
                               Bit(RoundMode::CAST_CEIL) | Bit(RoundMode::CAST_ROUND) |
                               Bit(RoundMode::CAST_TRUNC);

const char* ModeName(RoundMode mode) {
  static const char* const names[] = {"CAST_NONE",  "CAST_RINT",  "CAST_FLOOR", "CAST_CEIL",
                                      "CAST_ROUND", "CAST_TRUNC", "CAST_ODD"};
  return names[static_cast<size_t>(mode)];
}

// The modes of a pair of types on the 910B.
unsigned AllowedModes(Type from, Type to) {
  const auto pair = [](Type a, Type b) { return static_cast<int>(a) * 16 + static_cast<int>(b); };
  const int both = pair(from, to);
  if (both == pair(Type::kInt8, Type::kHalf) || both == pair(Type::kUint8, Type::kHalf) ||
      both == pair(Type::kInt16, Type::kFloat) || both == pair(Type::kHalf, Type::kFloat) ||
      both == pair(Type::kBfloat16, Type::kFloat) || both == pair(Type::kInt32, Type::kInt16) ||
      both == pair(Type::kInt32, Type::kInt64) || both == pair(Type::kInt64, Type::kInt32)) {
    return kNone;
  }
  if (both == pair(Type::kInt16, Type::kHalf) || both == pair(Type::kHalf, Type::kInt8) ||
      both == pair(Type::kHalf, Type::kUint8) || both == pair(Type::kInt32, Type::kFloat)) {
    return kDirected | kNone;
  }
  if (both == pair(Type::kFloat, Type::kHalf)) return kDirected | kNone | Bit(RoundMode::CAST_ODD);
  return kDirected;
}

// Rounds a float to a smaller format of `exponent` and `fraction` bits with the same kind of
// encoding.
uint32_t RoundFloat(float value, int exponent, int fraction, RoundMode mode) {
  const uint32_t bits = BitsOf(value);
  const bool negative = (bits >> 31) != 0;
  const uint32_t sign = static_cast<uint32_t>(negative) << (exponent + fraction);
  const uint32_t infinity = ((1u << exponent) - 1) << fraction;
  if (std::isnan(value)) return sign | infinity | (1u << (fraction - 1));
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  // |value| = significand * 2^(power - 23), with 24 bits unless it is subnormal.
  int power = static_cast<int>((bits >> 23) & 0xff) - 127;
  uint64_t significand = bits & 0x7fffffu;
  if (power == -127) {
    power = -126;
  } else {
    significand |= 0x800000u;
  }
  const int bias = (1 << (exponent - 1)) - 1;
  int target = power + bias;
  int shift = 23 - fraction;
  if (target < 1) {  // subnormal there: more bits fall off
    shift += 1 - target;
    target = 1;
  }
  if (shift > 40) shift = 40;
  uint64_t kept = significand >> shift;
  const uint64_t lost = significand & ((uint64_t{1} << shift) - 1);
  const uint64_t middle = shift > 0 ? uint64_t{1} << (shift - 1) : 0;
  bool up = false;
  switch (mode) {
    case RoundMode::CAST_NONE:
    case RoundMode::CAST_RINT:
      up = lost > middle || (lost == middle && lost != 0 && (kept & 1) != 0);
      break;
    case RoundMode::CAST_ROUND:
      up = lost >= middle && lost != 0;
      break;
    case RoundMode::CAST_FLOOR:
      up = negative && lost != 0;
      break;
    case RoundMode::CAST_CEIL:
      up = !negative && lost != 0;
      break;
    case RoundMode::CAST_TRUNC:
      break;
    case RoundMode::CAST_ODD:
      if (lost != 0) kept |= 1;
      break;
  }
  kept += up;
  // The hidden bit, where there is one, adds one to the exponent field.
  const uint64_t encoded = (static_cast<uint64_t>(target - 1) << fraction) + kept;
  if (encoded >= infinity) {
    const bool outward = mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT ||
                         mode == RoundMode::CAST_ROUND ||
                         (mode == RoundMode::CAST_FLOOR && negative) ||
                         (mode == RoundMode::CAST_CEIL && !negative);
    return sign | (outward ? infinity : infinity - 1);
  }
  return sign | static_cast<uint32_t>(encoded);
}

double RoundToInteger(double value, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(value);
    case RoundMode::CAST_CEIL:
      return std::ceil(value);
    case RoundMode::CAST_ROUND:
      return std::round(value);
    case RoundMode::CAST_TRUNC:
      return std::trunc(value);
    default:
      return std::nearbyint(value);
  }
}

template <typename I>
I ToInteger(double value, RoundMode mode) {
  const double rounded = RoundToInteger(value, mode);
  if (!(rounded == rounded)) return 0;
  if (rounded <= static_cast<double>(std::numeric_limits<I>::min()))
    return std::numeric_limits<I>::min();
  if (rounded >= static_cast<double>(std::numeric_limits<I>::max()))
    return std::numeric_limits<I>::max();
  return static_cast<I>(rounded);
}

// An integer of up to 64 bits to float, in the given mode.
float IntegerToFloat(int64_t value, RoundMode mode) {
  const float nearest = static_cast<float>(value);
  if (mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT) return nearest;
  const long double exact = static_cast<long double>(value);
  const long double error = static_cast<long double>(nearest) - exact;
  if (error == 0) return nearest;
  const float other = std::nextafter(nearest, error > 0 ? -INFINITY : INFINITY);
  const float low = error > 0 ? other : nearest;
  const float high = error > 0 ? nearest : other;
  if (mode == RoundMode::CAST_FLOOR) return low;
  if (mode == RoundMode::CAST_CEIL) return high;
  if (mode == RoundMode::CAST_TRUNC) return value > 0 ? low : high;
  const long double to_low = exact - static_cast<long double>(low);
  const long double to_high = static_cast<long double>(high) - exact;
  if (to_low == to_high) return value > 0 ? high : low;
  return to_low < to_high ? low : high;
}

// Values of bfloat16_t and half travel as their bits.
template <typename S>
double Exact(S value, Type type) {
  if (type == Type::kHalf) return static_cast<double>(HalfToFloat(static_cast<uint16_t>(value)));
  if (type == Type::kBfloat16)
    return static_cast<double>(BfloatToFloat(static_cast<uint16_t>(value)));
  return static_cast<double>(value);
}

template <typename D, typename S>
D Convert(S value, Type from, Type to, RoundMode mode) {
  if (to == Type::kHalf) {
    return static_cast<D>(RoundFloat(static_cast<float>(Exact(value, from)), 5, 10, mode));
  }
  if (to == Type::kBfloat16) {
    return static_cast<D>(RoundFloat(static_cast<float>(Exact(value, from)), 8, 7, mode));
  }
  if constexpr (std::is_same_v<D, float>) {
    if constexpr (std::is_same_v<S, float>) {
      return static_cast<float>(RoundToInteger(static_cast<double>(value), mode));
    } else if constexpr (sizeof(S) >= 4 && std::is_integral_v<S>) {
      return IntegerToFloat(value, mode);
    } else {
      return static_cast<float>(Exact(value, from));
    }
  } else if constexpr (std::is_integral_v<S>) {
    if (from == Type::kInt32 || from == Type::kInt64) {  // saturates
      const auto wide = static_cast<int64_t>(value);
      if (wide < static_cast<int64_t>(std::numeric_limits<D>::min()))
        return std::numeric_limits<D>::min();
      if (wide > static_cast<int64_t>(std::numeric_limits<D>::max()))
        return std::numeric_limits<D>::max();
      return static_cast<D>(wide);
    }
    return ToInteger<D>(Exact(value, from), mode);
  } else {
    return ToInteger<D>(static_cast<double>(value), mode);
  }
}

template <typename D, typename S>
void Run(Core& core, const Operand& dst, const Operand& src, RoundMode mode, const Plan& plan) {
  const bool nearest = mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_RINT;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    S in[kMaxLanes];
    D out[kMaxLanes];
    Load(core, src, plan, repeat, in);
    if constexpr (std::is_same_v<S, uint16_t> && std::is_same_v<D, float>) {
      if (src.type == Type::kHalf) {
        for (int64_t i = 0; i < plan.lanes; ++i) out[i] = HalfToFloat(in[i]);
      } else {
        for (int64_t i = 0; i < plan.lanes; ++i) out[i] = BfloatToFloat(in[i]);
      }
    } else if constexpr (std::is_same_v<S, float> && std::is_same_v<D, uint16_t>) {
      if (nearest && dst.type == Type::kHalf) {
        for (int64_t i = 0; i < plan.lanes; ++i) out[i] = FloatToHalf(in[i]);
      } else if (nearest) {
        for (int64_t i = 0; i < plan.lanes; ++i) out[i] = FloatToBfloat(in[i]);
      } else {
        for (int64_t i = 0; i < plan.lanes; ++i) {
          out[i] = Convert<D, S>(in[i], src.type, dst.type, mode);
        }
      }
    } else {
      const Mask mask = plan.At(repeat);
      for (int64_t i = 0; i < plan.lanes; ++i) {
        out[i] = mask.Has(i) ? Convert<D, S>(in[i], src.type, dst.type, mode) : D{};
      }
    }
    Store(core, dst, plan, repeat, out);
  }
}

template <typename D>
void FromType(Core& core, const Operand& dst, const Operand& src, RoundMode mode,
              const Plan& plan) {
  switch (src.type) {
    case Type::kInt8:
      return Run<D, int8_t>(core, dst, src, mode, plan);
    case Type::kUint8:
      return Run<D, uint8_t>(core, dst, src, mode, plan);
    case Type::kInt16:
      return Run<D, int16_t>(core, dst, src, mode, plan);
    case Type::kHalf:
    case Type::kBfloat16:
      return Run<D, uint16_t>(core, dst, src, mode, plan);
    case Type::kInt32:
      return Run<D, int32_t>(core, dst, src, mode, plan);
    case Type::kInt64:
      return Run<D, int64_t>(core, dst, src, mode, plan);
    default:
      return Run<D, float>(core, dst, src, mode, plan);
  }
}

}  // namespace

void Cast(const Operand& dst, const Operand& src, RoundMode mode, const Lanes& lanes, Site site) {
  const Instruction now("Cast", kV, site);
  if (!(AllowedModes(src.type, dst.type) & Bit(mode))) {
    Report(site, "cast-mode", "Cast from %s to %s has no mode %s", NameOf(src.type),
           NameOf(dst.type), ModeName(mode));
    return;
  }
  const int64_t per_repeat = LanesFor({dst.type, src.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  const Operand from = Placed(src, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, from, plan, false, "src") ||
      !Access(now, to, plan, true, "dst")) {
    return;
  }
  CheckOverlap(now, to, from, plan, "src", false);
  SpendRepeats(now, plan.repeats, kPlainCycles);
  switch (dst.type) {
    case Type::kInt8:
      return FromType<int8_t>(now.core, to, from, mode, plan);
    case Type::kUint8:
      return FromType<uint8_t>(now.core, to, from, mode, plan);
    case Type::kInt16:
      return FromType<int16_t>(now.core, to, from, mode, plan);
    case Type::kHalf:
    case Type::kBfloat16:
      return FromType<uint16_t>(now.core, to, from, mode, plan);
    case Type::kInt32:
      return FromType<int32_t>(now.core, to, from, mode, plan);
    case Type::kInt64:
      return FromType<int64_t>(now.core, to, from, mode, plan);
    default:
      return FromType<float>(now.core, to, from, mode, plan);
  }
}

}  // namespace sim
