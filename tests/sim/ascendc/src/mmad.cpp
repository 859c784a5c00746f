// The matrix unit.
#include <algorithm>
#include <cstring>
#include <vector>

#include "limits.h"
#include "memory.h"

namespace sim {
namespace {

constexpr uint32_t kProduct = 1024;  // bytes of a fractal of L0C: 16 x 16 floats

int64_t Ceil(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// A matrix cut into fractals, as A in L0A (rows are m) and B in L0B (rows are n): 16 rows of 32
// bytes of k. Their order in memory differs, so the caller says where each lies.
struct Operands {
  int64_t rows;
  int64_t depth;
  int64_t element;
};

int64_t DepthOfFractal(int64_t element) { return kBlock / element; }

uint32_t MaskOfElements(int64_t count, int64_t element) {
  const int64_t bytes = std::min<int64_t>(count * element, kBlock);
  return static_cast<uint32_t>((uint64_t{1} << bytes) - 1);
}

float ToFloat(const uint8_t* at, Type type) {
  if (type == Type::kFloat) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return type == Type::kHalf ? HalfToFloat(bits) : BfloatToFloat(bits);
}

// Reads a matrix out of its fractals into rows x depth floats. `at(row, depth)` is the address of a
// fractal. What lies beyond rows and depth isn't looked at.
template <typename Address>
bool ReadFractals(const Instruction& now, const LocalView& view, Type type, const Operands& shape,
                  Address at, const char* role, std::vector<float>* values) {
  const int64_t per_row = DepthOfFractal(shape.element);
  values->resize(static_cast<size_t>(shape.rows * shape.depth));
  const LocalMemory& memory = now.core.Memory(view.space);
  for (int64_t row = 0; row < shape.rows; row += kSide) {
    for (int64_t depth = 0; depth < shape.depth; depth += per_row) {
      const int64_t offset = at(row / kSide, depth / per_row) * kFractal;
      if (!Inside(now, view, offset, kFractal, role)) return false;
      const uint32_t addr = view.addr + static_cast<uint32_t>(offset);
      TouchUnread(now, view.space, addr, kFractal, role);
      const int64_t columns = std::min(per_row, shape.depth - depth);
      const uint32_t mask = MaskOfElements(columns, shape.element);
      for (int64_t r = 0; r < std::min(kSide, shape.rows - row); ++r) {
        const uint32_t block = addr / kBlock + static_cast<uint32_t>(r);
        CheckInitialised(now, view.space, block, mask, role);
        float* out = values->data() + (row + r) * shape.depth + depth;
        const uint8_t* in = memory.bytes.get() + block * kBlock;
        for (int64_t c = 0; c < columns; ++c) out[c] = ToFloat(in + c * shape.element, type);
      }
    }
  }
  return true;
}

// With a single row, A is a vector of k elements side by side.
bool ReadVector(const Instruction& now, const LocalView& view, Type type, int64_t depth,
                int64_t element, std::vector<float>* values) {
  if (!Inside(now, view, 0, depth * element, "fm")) return false;
  Touch(now, view.space, view.addr, static_cast<uint32_t>(depth * element), false, "fm");
  values->resize(static_cast<size_t>(depth));
  const uint8_t* in = now.core.Memory(view.space).bytes.get() + view.addr;
  for (int64_t i = 0; i < depth; ++i)
    (*values)[static_cast<size_t>(i)] = ToFloat(in + i * element, type);
  return true;
}

// c [m, n] += a [m, k] * b [n, k] transposed. Each sum is taken in the order of k.
__attribute__((target_clones("avx512f", "avx2", "default"))) void Multiply(const float* a,
                                                                           const float* b, float* c,
                                                                           int64_t m, int64_t n,
                                                                           int64_t k) {
  for (int64_t i = 0; i < m; ++i) {
    float* row = c + i * n;
    for (int64_t depth = 0; depth < k; ++depth) {
      const float factor = a[i * k + depth];
      const float* other = b + depth * n;
      for (int64_t j = 0; j < n; ++j) row[j] += factor * other[j];
    }
  }
}

void TransposeInto(const std::vector<float>& from, int64_t rows, int64_t columns,
                   std::vector<float>* to) {
  to->resize(from.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      (*to)[static_cast<size_t>(c * rows + r)] = from[static_cast<size_t>(r * columns + c)];
    }
  }
}

// Visits the rows of C's fractals that hold results: address of 64 bytes, first column, and the
// number of columns.
template <typename Visit>
void ForProductRows(const LocalView& c, const MmadShape& shape, Visit visit) {
  const int64_t height = Ceil(shape.m, kSide);
  for (int64_t column = 0; column < shape.n; column += kSide) {
    for (int64_t row = 0; row < shape.m; ++row) {
      const int64_t fractal = column / kSide * height + row / kSide;
      const auto addr = static_cast<uint32_t>(c.addr + fractal * kProduct + row % kSide * 64);
      visit(addr, row, column, std::min(kSide, shape.n - column));
    }
  }
}

bool MmadShapeIsAllowed(const Instruction& now, const MmadShape& shape) {
  if (!InRange(now, "mmad", "m", shape.m, 1, kMaxMmad) ||
      !InRange(now, "mmad", "n", shape.n, 1, kMaxMmad) ||
      !InRange(now, "mmad", "k", shape.k, 1, kMaxMmad) ||
      !InRange(now, "mmad", "unitFlag", shape.unit_flag, 0, 0)) {
    return false;
  }
  if (shape.from_bias) {
    Report(now.site, "mmad", "Mmad: this device has no bias table, cmatrixSource must be false");
    return false;
  }
  return true;
}

// What the unit reads and writes, as rows of floats. One core runs at a time, so all share it.
struct Matrices {
  std::vector<float> a;           // [m, k]
  std::vector<float> b;           // [n, k]
  std::vector<float> b_by_depth;  // [k, n]
  std::vector<float> c;           // [m, n]
};

bool ReadOperands(const Instruction& now, const LocalView& a, const LocalView& b, Type type,
                  const MmadShape& shape, Matrices* matrices) {
  const int64_t element = SizeOf(type);
  const int64_t per_row = DepthOfFractal(element);
  const int64_t depth_of_a =
      shape.align_k_to_16 ? Ceil(shape.k, kSide) * kSide / per_row : Ceil(shape.k, per_row);
  const int64_t width_of_b = Ceil(shape.n, kSide);
  const auto in_a = [&](int64_t row, int64_t depth) { return row * depth_of_a + depth; };
  const auto in_b = [&](int64_t row, int64_t depth) { return depth * width_of_b + row; };
  const Operands of_a{shape.m, shape.k, element};
  const Operands of_b{shape.n, shape.k, element};
  return (shape.m == 1 ? ReadVector(now, a, type, shape.k, element, &matrices->a)
                       : ReadFractals(now, a, type, of_a, in_a, "fm", &matrices->a)) &&
         ReadFractals(now, b, type, of_b, in_b, "filter", &matrices->b);
}

void ReadSums(const Instruction& now, const LocalView& c, const MmadShape& shape, float* sums) {
  const uint8_t* l0c = now.core.Memory(Space::kL0c).bytes.get();
  ForProductRows(c, shape, [&](uint32_t addr, int64_t row, int64_t column, int64_t count) {
    const auto bytes = static_cast<size_t>(count) * sizeof(float);
    Touch(now, Space::kL0c, addr, static_cast<uint32_t>(bytes), false, "dst");
    std::memcpy(sums + row * shape.n + column, l0c + addr, bytes);
  });
}

// The unit writes whole fractals; what lies beyond m and n isn't defined.
void WriteSums(const Instruction& now, const LocalView& c, const MmadShape& shape, uint32_t size,
               const float* sums) {
  Touch(now, Space::kL0c, c.addr, size, true, "dst");
  Poison(now.core, Space::kL0c, c.addr, size);
  uint8_t* l0c = now.core.Memory(Space::kL0c).bytes.get();
  ForProductRows(c, shape, [&](uint32_t addr, int64_t row, int64_t column, int64_t count) {
    const auto bytes = static_cast<size_t>(count) * sizeof(float);
    Touch(now, Space::kL0c, addr, static_cast<uint32_t>(bytes), true, "dst");
    std::memcpy(l0c + addr, sums + row * shape.n + column, bytes);
  });
}

}  // namespace

void Mmad(const LocalView& c, const LocalView& a, const LocalView& b, Type type,
          const MmadShape& shape, Site site) {
  const Instruction now("Mmad", kM, site);
  if (!MmadShapeIsAllowed(now, shape) || !Usable(now, c, "dst", Space::kL0c) ||
      !Usable(now, a, "fm", Space::kL0a) || !Usable(now, b, "filter", Space::kL0b) ||
      !Aligned(now, c, kProduct, "dst") || !Aligned(now, a, kFractal, "fm") ||
      !Aligned(now, b, kFractal, "filter")) {
    return;
  }
  static Matrices matrices;
  const int64_t products = Ceil(shape.m, kSide) * Ceil(shape.n, kSide);
  if (!ReadOperands(now, a, b, type, shape, &matrices) ||
      !Inside(now, c, 0, products * kProduct, "dst")) {
    return;
  }
  TransposeInto(matrices.b, shape.n, shape.k, &matrices.b_by_depth);
  matrices.c.assign(static_cast<size_t>(shape.m * shape.n), 0.0f);
  if (!shape.initialise) ReadSums(now, c, shape, matrices.c.data());
  Multiply(matrices.a.data(), matrices.b_by_depth.data(), matrices.c.data(), shape.m, shape.n,
           shape.k);
  WriteSums(now, c, shape, static_cast<uint32_t>(products * kProduct), matrices.c.data());
  const int64_t steps = products * Ceil(shape.k, type == Type::kFloat ? 4 : kSide);
  ++now.core.counters.mmad_instructions;
  now.core.counters.mmad_steps += static_cast<uint64_t>(steps);
  Spend(now, kMmadStart + steps, kMmadLatency);
  // Large products keep their order without a barrier.
  if (shape.m / kSide * (shape.n / kSide) >= kOrderedProducts) {
    now.core.known[kM][kM] = now.clock;
  }
}

}  // namespace sim
