// Unary, binary and scalar instructions.
#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace sim {
namespace {

int64_t CyclesOf(bool slow, Type type) {
  if (!slow) return kPlainCycles;
  return type == Type::kHalf ? kSlowHalfCycles : kSlowFloatCycles;
}

template <typename Function>
void ByType(Type type, Function function) {
  switch (type) {
    case Type::kInt16:
      return function(int16_t{});
    case Type::kUint16:
      return function(uint16_t{});
    case Type::kHalf:
      return function(half{});
    case Type::kInt32:
      return function(int32_t{});
    case Type::kUint32:
      return function(uint32_t{});
    default:
      return function(float{});
  }
}

// One pass over the lanes of a repeat. half is computed as float, so these exist for float and for
// the integer types; integers wrap around.
template <typename V, typename Function>
void ForLanes(int64_t lanes, V* z, const V* x, const V* y, Function function) {
  for (int64_t i = 0; i < lanes; ++i) z[i] = function(z[i], x[i], y[i]);
}

float Larger(float x, float y) { return x != x ? x : (y > x || y != y ? y : x); }
float Smaller(float x, float y) { return x != x ? x : (y < x || y != y ? y : x); }

void Compute(BinaryOp op, int64_t n, float* z, const float* x, const float* y) {
  using F = float;
  switch (op) {
    case BinaryOp::kAdd:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return a + b; });
    case BinaryOp::kSub:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return a - b; });
    case BinaryOp::kMul:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return a * b; });
    case BinaryOp::kDiv:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return a / b; });
    case BinaryOp::kMax:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return Larger(a, b); });
    case BinaryOp::kMin:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return Smaller(a, b); });
    case BinaryOp::kMulAddDst:
      return ForLanes(n, z, x, y, [](F c, F a, F b) { return a * b + c; });
    case BinaryOp::kFusedMulAdd:
      return ForLanes(n, z, x, y, [](F c, F a, F b) { return a * c + b; });
    case BinaryOp::kAddRelu:
      return ForLanes(n, z, x, y, [](F, F a, F b) { return Larger(a + b, 0); });
    default:
      return;
  }
}

template <typename V>
void Compute(BinaryOp op, int64_t n, V* z, const V* x, const V* y) {
  switch (op) {
    case BinaryOp::kAdd:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return static_cast<V>(int64_t{a} + b); });
    case BinaryOp::kSub:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return static_cast<V>(int64_t{a} - b); });
    case BinaryOp::kMul:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return static_cast<V>(int64_t{a} * b); });
    case BinaryOp::kMax:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return std::max(a, b); });
    case BinaryOp::kMin:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return std::min(a, b); });
    case BinaryOp::kAnd:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return static_cast<V>(a & b); });
    case BinaryOp::kOr:
      return ForLanes(n, z, x, y, [](V, V a, V b) { return static_cast<V>(a | b); });
    case BinaryOp::kAddRelu:
      return ForLanes(n, z, x, y,
                      [](V, V a, V b) { return std::max(static_cast<V>(int64_t{a} + b), V{0}); });
    default:
      return;
  }
}

void Compute(ScalarOp op, int64_t n, float* z, const float* x, float scalar) {
  using F = float;
  switch (op) {
    case ScalarOp::kAdds:
      return ForLanes(n, z, x, x, [=](F, F a, F) { return a + scalar; });
    case ScalarOp::kMuls:
      return ForLanes(n, z, x, x, [=](F, F a, F) { return a * scalar; });
    case ScalarOp::kMaxs:
      return ForLanes(n, z, x, x, [=](F, F a, F) { return Larger(a, scalar); });
    case ScalarOp::kMins:
      return ForLanes(n, z, x, x, [=](F, F a, F) { return Smaller(a, scalar); });
    case ScalarOp::kLeakyRelu:
      return ForLanes(n, z, x, x, [=](F, F a, F) { return a >= 0 ? a : a * scalar; });
    case ScalarOp::kAxpy:
      return ForLanes(n, z, x, x, [=](F c, F a, F) { return a * scalar + c; });
    default:
      return;
  }
}

template <typename V>
void Compute(ScalarOp op, int64_t n, V* z, const V* x, V scalar) {
  constexpr int64_t bits = sizeof(V) * 8;
  const auto shift = static_cast<int64_t>(scalar);
  switch (op) {
    case ScalarOp::kAdds:
      return ForLanes(n, z, x, x, [=](V, V a, V) { return static_cast<V>(int64_t{a} + scalar); });
    case ScalarOp::kMuls:
      return ForLanes(n, z, x, x, [=](V, V a, V) { return static_cast<V>(int64_t{a} * scalar); });
    case ScalarOp::kMaxs:
      return ForLanes(n, z, x, x, [=](V, V a, V) { return std::max(a, scalar); });
    case ScalarOp::kMins:
      return ForLanes(n, z, x, x, [=](V, V a, V) { return std::min(a, scalar); });
    case ScalarOp::kShiftLeft:
      return ForLanes(n, z, x, x, [=](V, V a, V) {
        return shift >= bits ? V{0} : static_cast<V>(static_cast<uint64_t>(a) << shift);
      });
    case ScalarOp::kShiftRight:
      return ForLanes(n, z, x, x, [=](V, V a, V) {
        return static_cast<V>(int64_t{a} >> std::min(shift, bits - 1));
      });
    default:
      return;
  }
}

void Compute(UnaryOp op, int64_t n, float* z, const float* x) {
  using F = float;
  switch (op) {
    case UnaryOp::kExp:
      return ForLanes(n, z, x, x, [](F, F a, F) { return std::exp(a); });
    case UnaryOp::kLn:
      return ForLanes(n, z, x, x, [](F, F a, F) { return std::log(a); });
    case UnaryOp::kAbs:
      return ForLanes(n, z, x, x, [](F, F a, F) { return std::fabs(a); });
    case UnaryOp::kSqrt:
      return ForLanes(n, z, x, x, [](F, F a, F) { return std::sqrt(a); });
    case UnaryOp::kRsqrt:
      return ForLanes(n, z, x, x, [](F, F a, F) { return 1.0f / std::sqrt(a); });
    case UnaryOp::kReciprocal:
      return ForLanes(n, z, x, x, [](F, F a, F) { return 1.0f / a; });
    case UnaryOp::kRelu:
      return ForLanes(n, z, x, x, [](F, F a, F) { return Larger(a, 0); });
    default:
      return;
  }
}

template <typename V>
void Compute(UnaryOp op, int64_t n, V* z, const V* x) {
  if (op == UnaryOp::kRelu) {
    ForLanes(n, z, x, x, [](V, V a, V) { return std::max(a, V{0}); });
  } else {
    ForLanes(n, z, x, x, [](V, V a, V) { return static_cast<V>(~a); });
  }
}

template <typename T>
void RunUnary(Core& core, UnaryOp op, const Operand& dst, const Operand& src, const Plan& plan) {
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    Lane<T> x;
    Lane<T> z{};
    x.Get(core, src, plan, repeat);
    Compute(op, plan.lanes, z.value, x.value);
    z.Put(core, dst, plan, repeat);
  }
}

template <typename T>
void RunCopy(Core& core, const Operand& dst, const Operand& src, const Plan& plan) {
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    T lanes[kMaxLanes];
    Load(core, src, plan, repeat, lanes);
    Store(core, dst, plan, repeat, lanes);
  }
}

template <typename D, typename S>
void RunBinary(Core& core, BinaryOp op, const Operand& dst, const Operand& src0,
               const Operand& src1, const Plan& plan) {
  const bool reads_dst = op == BinaryOp::kMulAddDst || op == BinaryOp::kFusedMulAdd;
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    Lane<S> x;
    Lane<S> y;
    Lane<D> z{};
    x.Get(core, src0, plan, repeat);
    y.Get(core, src1, plan, repeat);
    if (reads_dst) z.Get(core, dst, plan, repeat);
    Compute(op, plan.lanes, z.value, x.value, y.value);
    z.Put(core, dst, plan, repeat);
  }
}

template <typename D, typename S>
void RunWithScalar(Core& core, ScalarOp op, const Operand& dst, const Operand& src, double scalar,
                   const Plan& plan) {
  const auto constant = static_cast<typename Lane<D>::Value>(scalar);
  for (int64_t repeat = 0; repeat < plan.repeats; ++repeat) {
    Lane<S> x;
    Lane<D> z{};
    x.Get(core, src, plan, repeat);
    if (op == ScalarOp::kAxpy) z.Get(core, dst, plan, repeat);
    Compute(op, plan.lanes, z.value, x.value, constant);
    z.Put(core, dst, plan, repeat);
  }
}

}  // namespace

void Unary(const char* name, UnaryOp op, const Operand& dst, const Operand& src, const Lanes& lanes,
           Site site) {
  const Instruction now(name, kV, site);
  const int64_t per_repeat = LanesFor({dst.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  const Operand from = Placed(src, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, from, plan, false, "src") ||
      !Access(now, to, plan, true, "dst")) {
    return;
  }
  CheckOverlap(now, to, from, plan, "src", false);
  const bool slow = op == UnaryOp::kExp || op == UnaryOp::kLn || op == UnaryOp::kSqrt;
  SpendRepeats(now, plan.repeats, CyclesOf(slow, dst.type));
  if (op == UnaryOp::kCopy) {
    if (SizeOf(dst.type) == 2) return RunCopy<uint16_t>(now.core, to, from, plan);
    return RunCopy<uint32_t>(now.core, to, from, plan);
  }
  ByType(dst.type, [&](auto type) { RunUnary<decltype(type)>(now.core, op, to, from, plan); });
}

void Binary(const char* name, BinaryOp op, const Operand& dst, const Operand& src0,
            const Operand& src1, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  const int64_t per_repeat = LanesFor({dst.type, src0.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  const Operand first = Placed(src0, lanes, per_repeat);
  const Operand second = Placed(src1, lanes, per_repeat);
  const bool reads_dst = op == BinaryOp::kMulAddDst || op == BinaryOp::kFusedMulAdd;
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, first, plan, false, "src0") ||
      !Access(now, second, plan, false, "src1") ||
      (reads_dst && !Access(now, to, plan, false, "dst")) || !Access(now, to, plan, true, "dst")) {
    return;
  }
  // Documented for these: repeats may accumulate into dst through src1 where one of them stands
  // still.
  const bool accumulates =
      (op == BinaryOp::kAdd || op == BinaryOp::kSub || op == BinaryOp::kMul ||
       op == BinaryOp::kMax || op == BinaryOp::kMin || op == BinaryOp::kAddRelu) &&
      (dst.type == Type::kHalf || dst.type == Type::kInt32 || dst.type == Type::kFloat) &&
      (second.strides.repeat == 0 || to.strides.repeat == 0);
  CheckOverlap(now, to, first, plan, "src0", false);
  CheckOverlap(now, to, second, plan, "src1", accumulates);
  SpendRepeats(now, plan.repeats, CyclesOf(op == BinaryOp::kDiv, dst.type),
               CountConflicts(plan, first, second));
  if (dst.type == Type::kFloat && src0.type == Type::kHalf) {
    return RunBinary<float, half>(now.core, op, to, first, second, plan);
  }
  ByType(dst.type, [&](auto type) {
    using T = decltype(type);
    RunBinary<T, T>(now.core, op, to, first, second, plan);
  });
}

void WithScalar(const char* name, ScalarOp op, const Operand& dst, const Operand& src,
                double scalar, const Lanes& lanes, Site site) {
  const Instruction now(name, kV, site);
  const int64_t per_repeat = LanesFor({dst.type, src.type});
  const Operand to = Placed(dst, lanes, per_repeat);
  const Operand from = Placed(src, lanes, per_repeat);
  Plan plan;
  if (!MakePlan(now, lanes, per_repeat, &plan) || !Access(now, from, plan, false, "src") ||
      (op == ScalarOp::kAxpy && !Access(now, to, plan, false, "dst")) ||
      !Access(now, to, plan, true, "dst")) {
    return;
  }
  if ((op == ScalarOp::kShiftLeft || op == ScalarOp::kShiftRight) &&
      (scalar < 0 || scalar > static_cast<double>(SizeOf(dst.type) * 8))) {
    Report(site, "vector-shift", "%s by %lld", name, static_cast<long long>(scalar));
    return;
  }
  CheckOverlap(now, to, from, plan, "src", false);
  SpendRepeats(now, plan.repeats, kPlainCycles);
  if (dst.type == Type::kFloat && src.type == Type::kHalf) {
    return RunWithScalar<float, half>(now.core, op, to, from, scalar, plan);
  }
  ByType(dst.type, [&](auto type) {
    using T = decltype(type);
    RunWithScalar<T, T>(now.core, op, to, from, scalar, plan);
  });
}

}  // namespace sim
