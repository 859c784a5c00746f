// Matrices on their way to the matrix unit: GM to L1, L1 to L0A and L0B, constants.
#include <algorithm>
#include <cstring>

#include "limits.h"
#include "memory.h"
#include "transfer.h"

namespace sim {
namespace {

bool NzShapeIsAllowed(const Instruction& now, const NzShape& shape) {
  return InRange(now, "copy-limits", "ndNum", shape.matrices, 0, kMaxPieces) &&
         InRange(now, "copy-limits", "nValue", shape.rows, 0, kMaxNzRows) &&
         InRange(now, "copy-limits", "dValue", shape.columns, 0, kMaxField) &&
         CopiesSomething(now, shape.matrices > 0 && shape.rows > 0 && shape.columns > 0) &&
         InRange(now, "copy-limits", "srcNdMatrixStride", shape.src_matrix_stride, 0, kMaxField) &&
         InRange(now, "copy-limits", "srcDValue", shape.src_row_stride, 1, kMaxField) &&
         InRange(now, "copy-limits", "dstNzC0Stride", shape.dst_column_stride, 1, kMaxNzRows) &&
         InRange(now, "copy-limits", "dstNzNStride", shape.dst_row_stride, 1, kMaxNzRows) &&
         InRange(now, "copy-limits", "dstNzMatrixStride", shape.dst_matrix_stride, 0, kMaxNzRows);
}

// One row of a matrix: its blocks of 32 bytes go to the columns of blocks, the last one filled up.
bool PlaceRow(const Instruction& now, const LocalView& dst, int64_t first, const uint8_t* row,
              const NzShape& shape) {
  LocalMemory& l1 = now.core.Memory(Space::kL1);
  const int64_t bytes = shape.columns * shape.element;
  for (int64_t at = 0; at < bytes; at += kBlock) {
    const int64_t to = first + at / kBlock * shape.dst_column_stride * kBlock;
    if (!Inside(now, dst, to, kBlock, "dst")) return false;
    const uint32_t addr = dst.addr + static_cast<uint32_t>(to);
    TouchOnce(now, Space::kL1, addr, kBlock, "dst");
    uint8_t* block = l1.bytes.get() + addr;
    const int64_t used = std::min<int64_t>(bytes - at, kBlock);
    std::memcpy(block, row + at, static_cast<size_t>(used));
    std::memset(block + used, 0, static_cast<size_t>(kBlock - used));
  }
  return true;
}

}  // namespace

void CopyNdToNz(const LocalView& dst, const GmView& src, const NzShape& shape, Site site) {
  const Instruction now("DataCopy", kMte2, site);
  if (!NzShapeIsAllowed(now, shape) || !Usable(now, dst, "dst", Space::kL1) ||
      !Aligned(now, dst, kBlock, "dst")) {
    return;
  }
  const int64_t row_bytes = shape.columns * shape.element;
  Transfer transfer(now, false);
  const bool dense = shape.src_row_stride == shape.columns;
  for (int64_t matrix = 0; matrix < shape.matrices; ++matrix) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      const int64_t from =
          (matrix * shape.src_matrix_stride + row * shape.src_row_stride) * shape.element;
      const int64_t to =
          matrix * shape.dst_matrix_stride * shape.element + row * shape.dst_row_stride * kBlock;
      if (!TouchGm(now, src, from, row_bytes, false)) return;
      if (!dense) transfer.Add(src.addr + static_cast<uint64_t>(from), row_bytes);
      const auto* bytes = reinterpret_cast<const uint8_t*>(src.addr + static_cast<uint64_t>(from));
      if (!PlaceRow(now, dst, to, bytes, shape)) return;
    }
    const int64_t first = matrix * shape.src_matrix_stride * shape.element;
    const uint64_t address = src.addr + static_cast<uint64_t>(first);
    if (dense) transfer.Add(address, shape.rows * row_bytes, shape.rows);
  }
  const int64_t rows = shape.matrices * shape.rows;
  now.core.counters.gm_l1_bytes += static_cast<uint64_t>(rows * row_bytes);
  SpendCopy(now, transfer);
}

namespace {

// Copies a fractal, or a square of two, and turns it round. What is garbage stays garbage.
template <typename T>
void Transpose(const LocalMemory& from, uint32_t source, LocalMemory& to, const uint32_t* targets) {
  constexpr int64_t per_row = kBlock / sizeof(T);
  const uint32_t element = (1u << sizeof(T)) - 1;
  for (int64_t row = 0; row < kSide; ++row) {
    for (int64_t column = 0; column < kSide; ++column) {
      const auto source_block =
          static_cast<uint32_t>(source / kBlock + column / per_row * kSide + row);
      const int64_t source_lane = column % per_row;
      // Row and column change places.
      const uint32_t target_block = targets[row / per_row] / kBlock + static_cast<uint32_t>(column);
      const int64_t target_lane = row % per_row;
      std::memcpy(to.bytes.get() + target_block * kBlock + target_lane * sizeof(T),
                  from.bytes.get() + source_block * kBlock + source_lane * sizeof(T), sizeof(T));
      const uint32_t mask = element << (target_lane * sizeof(T));
      if (from.initialised[source_block] >> (source_lane * sizeof(T)) & 1) {
        to.initialised[target_block] |= mask;
      } else {
        to.initialised[target_block] &= ~mask;
      }
    }
  }
}

bool FractalShapeIsAllowed(const Instruction& now, const FractalShape& shape) {
  if (shape.transpose && shape.element != 2 * shape.square) {
    Report(now.site, "types", "%s transposes 16-bit types; LoadDataWithTranspose has the others",
           now.name);
    return false;
  }
  return InRange(now, "copy-limits", "startIndex", shape.first, 0, kMaxField) &&
         InRange(now, "copy-limits", "repeatTimes", shape.repeat, 0, kMaxRepeat) &&
         CopiesSomething(now, shape.repeat > 0) &&
         InRange(now, "copy-limits", "srcStride", shape.src_stride, 0, kMaxField) &&
         InRange(now, "copy-limits", "dstGap", shape.dst_gap, 0, kMaxField) &&
         InRange(now, "copy-limits", "dstFracGap", shape.dst_inner_gap, 0, kMaxField) &&
         InRange(now, "copy-limits", "addrMode", shape.addr_mode, 0, 0);
}

// Loads square number `i`. False where memory would be overrun.
bool LoadSquare(const Instruction& now, const LocalView& dst, const LocalView& src,
                const FractalShape& shape, int64_t i) {
  const LocalMemory& l1 = now.core.Memory(Space::kL1);
  LocalMemory& l0 = now.core.Memory(dst.space);
  const int64_t bytes = shape.square * kFractal;
  const int64_t from = (shape.first + i * shape.src_stride) * bytes;
  if (!Inside(now, src, from, bytes, "src")) return false;
  const uint32_t source = src.addr + static_cast<uint32_t>(from);
  TouchUnread(now, Space::kL1, source, static_cast<uint32_t>(bytes), "src");
  uint32_t targets[2] = {};
  for (int64_t part = 0; part < shape.square; ++part) {
    const int64_t to = (i * (1 + shape.dst_gap) + part * (1 + shape.dst_inner_gap)) * kFractal;
    if (!Inside(now, dst, to, kFractal, "dst")) return false;
    targets[part] = dst.addr + static_cast<uint32_t>(to);
    TouchOnce(now, dst.space, targets[part], kFractal, "dst");
  }
  if (!shape.transpose) {
    std::memcpy(l0.bytes.get() + targets[0], l1.bytes.get() + source, kFractal);
    std::copy_n(l1.initialised.get() + source / kBlock, kSide,
                l0.initialised.get() + targets[0] / kBlock);
  } else if (shape.element == 2) {
    Transpose<uint16_t>(l1, source, l0, targets);
  } else {
    Transpose<uint32_t>(l1, source, l0, targets);
  }
  return true;
}

}  // namespace

void LoadFractals(const char* name, const LocalView& dst, const LocalView& src,
                  const FractalShape& shape, Site site) {
  const Instruction now(name, kMte1, site);
  const bool to_b = dst.space == Space::kL0b;
  if (!FractalShapeIsAllowed(now, shape) ||
      !Usable(now, dst, "dst", to_b ? Space::kL0b : Space::kL0a) ||
      !Usable(now, src, "src", Space::kL1) || !Aligned(now, dst, kFractal, "dst") ||
      !Aligned(now, src, kBlock, "src")) {
    return;
  }
  for (int64_t i = 0; i < shape.repeat; ++i) {
    if (!LoadSquare(now, dst, src, shape, i)) return;
  }
  const int64_t bytes = shape.repeat * shape.square * kFractal;
  SimCore& counters = now.core.counters;
  (to_b ? counters.l1_l0b_bytes : counters.l1_l0a_bytes) += static_cast<uint64_t>(bytes);
  const int64_t speed = to_b ? kL0bBytesPerCycle : kL0aBytesPerCycle;
  Spend(now, kLoadStart + bytes / speed, kLoadLatency);
}

void FillConstant(const LocalView& dst, int64_t repeat, int64_t blocks, int64_t gap, uint64_t value,
                  int64_t element, Site site) {
  const bool in_l1 = dst.space == Space::kL1;
  const Instruction now("InitConstValue", in_l1 ? kMte2 : kMte1, site);
  const Space space = in_l1 || dst.space == Space::kL0b ? dst.space : Space::kL0a;
  const int64_t unit = in_l1 ? kBlock : kFractal;
  if (!InRange(now, "copy-limits", "repeatTimes", repeat, 0, kMaxFill) ||
      !InRange(now, "copy-limits", "blockNum", blocks, 0, kMaxFill) ||
      !InRange(now, "copy-limits", "dstGap", gap, 0, kMaxFill) ||
      !CopiesSomething(now, repeat > 0 && blocks > 0) || !Usable(now, dst, "dst", space) ||
      !Aligned(now, dst, unit, "dst")) {
    return;
  }
  uint8_t* memory = now.core.Memory(space).bytes.get();
  for (int64_t i = 0; i < repeat; ++i) {
    const int64_t to = i * (blocks + gap) * unit;
    if (!Inside(now, dst, to, blocks * unit, "dst")) return;
    const uint32_t addr = dst.addr + static_cast<uint32_t>(to);
    Touch(now, space, addr, static_cast<uint32_t>(blocks * unit), true, "dst");
    for (int64_t at = 0; at < blocks * unit; at += element) {
      std::memcpy(memory + addr + at, &value, static_cast<size_t>(element));
    }
  }
  Spend(now, kLoadStart + repeat * blocks * unit / kL0aBytesPerCycle, kLoadLatency);
}

}  // namespace sim
