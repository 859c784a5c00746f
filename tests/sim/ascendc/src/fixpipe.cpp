// Results from L0C to GM.
#include <algorithm>
#include <cstring>
#include <vector>

#include "limits.h"
#include "memory.h"
#include "transfer.h"

namespace sim {
namespace {

constexpr int64_t kRow = 64;       // bytes of a row of 16 floats in L0C
constexpr int64_t kFractals = 16;  // columns of a fractal

bool Holds(const Instruction& now, bool rule, const char* text) {
  if (!rule) Report(now.site, "fixpipe", "Fixpipe: %s", text);
  return rule;
}

QuantMode_t ModeFor(Type type) {
  return type == Type::kHalf ? F322F16 : type == Type::kBfloat16 ? F322BF16 : NoQuant;
}

bool FixpipeShapeIsAllowed(const Instruction& now, Type type, const FixpipeShape& shape) {
  const int64_t columns = shape.split_channels ? kFractals / 2 : kFractals;
  return InRange(now, "fixpipe", "nSize", shape.n, 1, kMaxMmad) &&
         InRange(now, "fixpipe", "mSize", shape.m, 1, shape.nz ? kMaxField : kMaxNdRows) &&
         Holds(now, shape.n % columns == 0,
               "nSize must be a multiple of 16, or of 8 with isChannelSplit") &&
         InRange(now, "fixpipe", "srcStride", shape.src_stride, 1, kMaxField) &&
         InRange(now, "fixpipe", "dstStride", shape.dst_stride, 1, kMaxPadGap) &&
         InRange(now, "fixpipe", "ndNum", shape.matrices, 1, kMaxField) &&
         InRange(now, "fixpipe", "srcNdStride", shape.src_matrix_stride, 0, kMaxNdGap) &&
         InRange(now, "fixpipe", "dstNdStride", shape.dst_matrix_stride, 0, kMaxField) &&
         InRange(now, "fixpipe", "unitFlag", shape.unit_flag, 0, 0) &&
         Holds(now, shape.quant == ModeFor(type),
               "quantPre must be F322F16 for half, F322BF16 for bfloat16_t, NoQuant for float") &&
         Holds(now, !shape.split_channels || (shape.nz && type == Type::kFloat),
               "isChannelSplit is for float and NZ") &&
         Holds(now, shape.nz || shape.dst_stride >= shape.n,
               "dstStride is less than nSize, so rows overwrite each other") &&
         Holds(now, !shape.nz || shape.dst_stride * kBlock >= shape.m * columns * SizeOf(type),
               "dstStride is less than the rows of a column, so columns overwrite each other") &&
         Holds(now, !shape.nz || shape.matrices == 1, "ndNum is for ROW_MAJOR");
}

// Converts `count` floats and writes them to GM.
bool Store(const Instruction& now, const GmView& dst, int64_t offset, const float* values,
           int64_t count, Type type, bool relu) {
  uint8_t bytes[kRow];
  const int64_t element = SizeOf(type);
  if (!TouchGm(now, dst, offset, count * element, true)) return false;
  for (int64_t i = 0; i < count; ++i) {
    const float value = relu && values[i] < 0.0f ? 0.0f : values[i];
    if (type == Type::kFloat) {
      std::memcpy(bytes + i * element, &value, sizeof value);
    } else {
      const uint16_t bits = type == Type::kHalf ? FloatToHalf(value) : FloatToBfloat(value);
      std::memcpy(bytes + i * element, &bits, sizeof bits);
    }
  }
  std::memcpy(reinterpret_cast<void*>(dst.addr + static_cast<uint64_t>(offset)), bytes,
              static_cast<size_t>(count * element));
  return true;
}

// Where row and column of a matrix lie in GM, in bytes.
int64_t OffsetInGm(const FixpipeShape& shape, int64_t matrix, int64_t row, int64_t column,
                   int64_t element) {
  if (!shape.nz) {
    return (matrix * shape.dst_matrix_stride + row * shape.dst_stride + column) * element;
  }
  const int64_t width = shape.split_channels ? kFractals / 2 : kFractals;
  return column / width * shape.dst_stride * kBlock + row * width * element;
}

// The pieces of GM that are written: rows, or columns of fractals.
void AddPieces(const GmView& dst, const FixpipeShape& shape, int64_t element, Transfer* transfer) {
  const int64_t width = shape.split_channels ? kFractals / 2 : kFractals;
  const int64_t pieces = shape.nz ? shape.n / width : shape.m;
  const int64_t bytes = (shape.nz ? shape.m * width : shape.n) * element;
  for (int64_t matrix = 0; matrix < shape.matrices; ++matrix) {
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t to =
          OffsetInGm(shape, matrix, shape.nz ? 0 : i, shape.nz ? i * width : 0, element);
      transfer->Add(dst.addr + static_cast<uint64_t>(to), bytes);
    }
  }
}

}  // namespace

void Fixpipe(const GmView& dst, const LocalView& src, Type type, const FixpipeShape& shape,
             Site site) {
  const Instruction now("Fixpipe", kFix, site);
  if (!FixpipeShapeIsAllowed(now, type, shape) || !Usable(now, src, "src", Space::kL0c) ||
      !Aligned(now, src, kRow, "src")) {
    return;
  }
  const int64_t element = SizeOf(type);
  const int64_t width = shape.split_channels ? kFractals / 2 : kFractals;
  const uint8_t* l0c = now.core.Memory(Space::kL0c).bytes.get();
  Transfer transfer(now, true);
  for (int64_t matrix = 0; matrix < shape.matrices; ++matrix) {
    for (int64_t row = 0; row < shape.m; ++row) {
      for (int64_t column = 0; column < shape.n; column += width) {
        const int64_t from = matrix * shape.src_matrix_stride * kFractals * kRow +
                             column / kFractals * shape.src_stride * kRow + row * kRow +
                             column % kFractals * int64_t{sizeof(float)};
        const int64_t bytes = width * int64_t{sizeof(float)};
        if (!Inside(now, src, from, bytes, "src")) return;
        const uint32_t addr = src.addr + static_cast<uint32_t>(from);
        Touch(now, Space::kL0c, addr, static_cast<uint32_t>(bytes), false, "src");
        float values[kFractals];
        std::memcpy(values, l0c + addr, static_cast<size_t>(bytes));
        const int64_t to = OffsetInGm(shape, matrix, row, column, element);
        if (!Store(now, dst, to, values, width, type, shape.relu)) return;
      }
    }
  }
  const int64_t elements = shape.matrices * shape.m * shape.n;
  now.core.counters.l0c_gm_bytes += static_cast<uint64_t>(elements * element);
  AddPieces(dst, shape, element, &transfer);
  const int64_t cycles = std::max(elements / kFixpipeElements, transfer.Cycles());
  ++now.core.counters.copy_calls;
  Spend(now, kCopyStart + cycles, transfer.Latency());
}

}  // namespace sim
