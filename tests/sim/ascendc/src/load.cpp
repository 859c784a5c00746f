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

namespace {

bool ImageIsAllowed(const Instruction& now, const ImageSize& size, const ImageShape& shape) {
  if (size.left != 0 || size.right != 0 || size.top != 0 || size.bottom != 0 || shape.transpose ||
      shape.small_k || shape.wide_filter || shape.high_filter || shape.right_register) {
    Report(now.site, "image",
           "%s: here images have no padding, and no option of LoadData3DParamsV2 is on", now.name);
    return false;
  }
  return InRange(now, "image", "l1H", size.height, 1, kMaxImageSide) &&
         InRange(now, "image", "l1W", size.width, 1, kMaxImageSide) &&
         InRange(now, "image", "channelSize", shape.channels, 1, kMaxChannels) &&
         InRange(now, "image", "kExtension", shape.columns, 1, kMaxField) &&
         InRange(now, "image", "mExtension", shape.rows, 1, kMaxField) &&
         InRange(now, "image", "kStartPt", shape.first_column, 0, kMaxField) &&
         InRange(now, "image", "mStartPt", shape.first_row, 0, kMaxField) &&
         InRange(now, "image", "strideW", shape.stride_w, 1, kMaxFilterStride) &&
         InRange(now, "image", "strideH", shape.stride_h, 1, kMaxFilterStride) &&
         InRange(now, "image", "filterW", shape.filter_w, 1, kMaxFilter) &&
         InRange(now, "image", "filterH", shape.filter_h, 1, kMaxFilter) &&
         InRange(now, "image", "dilationFilterW", shape.dilation_w, 1, kMaxFilter) &&
         InRange(now, "image", "dilationFilterH", shape.dilation_h, 1, kMaxFilter);
}

bool IsMultiple(const Instruction& now, const char* field, int64_t value) {
  if (value % kSide == 0) return true;
  Report(now.site, "image", "%s: %s is %lld, expected a multiple of 16", now.name, field,
         static_cast<long long>(value));
  return false;
}

// The matrix of an image: how the places of the filter and what it covers are found.
class ImageMatrix {
 public:
  ImageMatrix(const ImageSize& size, const ImageShape& shape)
      : size_(size),
        shape_(shape),
        places_w_(Places(size.width, shape.filter_w, shape.dilation_w, shape.stride_w)),
        places_h_(Places(size.height, shape.filter_h, shape.dilation_h, shape.stride_h)) {}

  int64_t Rows() const { return places_w_ * places_h_; }
  int64_t Blocks() const { return shape_.channels / kSide * shape_.filter_h * shape_.filter_w; }

  // Where the 32 bytes lie, from the image's begin on, that are block `block` of a row.
  int64_t Find(int64_t row, int64_t block) const {
    const int64_t w =
        row % places_w_ * shape_.stride_w + block % shape_.filter_w * shape_.dilation_w;
    const int64_t filter_row = block / shape_.filter_w;
    const int64_t h =
        row / places_w_ * shape_.stride_h + filter_row % shape_.filter_h * shape_.dilation_h;
    const int64_t plane = filter_row / shape_.filter_h;
    return ((plane * size_.height + h) * size_.width + w) * kBlock;
  }

 private:
  static int64_t Places(int64_t size, int64_t filter, int64_t dilation, int64_t stride) {
    const int64_t covered = (filter - 1) * dilation + 1;
    return size < covered ? 0 : (size - covered) / stride + 1;
  }

  const ImageSize& size_;
  const ImageShape& shape_;
  int64_t places_w_;
  int64_t places_h_;
};

// 32 bytes of a row of a fractal of 16-bit elements; in L0B they are a column of it.
void PlaceBlock(const LocalMemory& from, uint32_t source, LocalMemory& to, uint32_t fractal,
                int64_t row, bool turned) {
  if (!turned) {
    const uint32_t target = fractal + static_cast<uint32_t>(row * kBlock);
    std::memcpy(to.bytes.get() + target, from.bytes.get() + source, kBlock);
    to.initialised[target / kBlock] = from.initialised[source / kBlock];
    return;
  }
  for (int64_t i = 0; i < kSide; ++i) {
    const auto block = static_cast<uint32_t>(fractal / kBlock + i);
    std::memcpy(to.bytes.get() + block * kBlock + row * 2, from.bytes.get() + source + i * 2, 2);
    const uint32_t mask = 3u << (row * 2);
    const bool known = from.initialised[source / kBlock] >> (i * 2) & 1;
    to.initialised[block] = known ? to.initialised[block] | mask : to.initialised[block] & ~mask;
  }
}

}  // namespace

void SetImage(const ImageSize& size, bool left_register, Site site) {
  const Instruction now("SetFmatrix", kS, site);
  if (!left_register) {
    Report(now.site, "image", "%s: loads read the register of the left matrix", now.name);
    return;
  }
  now.core.image = size;
}

void LoadImage(const LocalView& dst, const LocalView& src, const ImageSize& given,
               const ImageShape& shape, Site site) {
  const Instruction now("LoadData", kMte1, site);
  Core& core = now.core;
  const ImageSize& size = given.sets_image ? given : core.image;
  const bool to_b = dst.space == Space::kL0b;
  if (!given.sets_image && size.width == 0) {
    Report(now.site, "image", "%s: SetFmatrix was never called", now.name);
    return;
  }
  if (!ImageIsAllowed(now, size, shape) || !IsMultiple(now, "channelSize", shape.channels) ||
      !IsMultiple(now, "kExtension", shape.columns) ||
      !IsMultiple(now, "kStartPt", shape.first_column) ||
      !IsMultiple(now, "mExtension", shape.rows) || !IsMultiple(now, "mStartPt", shape.first_row) ||
      !Usable(now, dst, "dst", to_b ? Space::kL0b : Space::kL0a) ||
      !Usable(now, src, "src", Space::kL1) || !Aligned(now, dst, kFractal, "dst") ||
      !Aligned(now, src, kBlock, "src")) {
    return;
  }
  const ImageMatrix matrix(size, shape);
  const int64_t first_block = shape.first_column / kSide;
  const int64_t blocks = shape.columns / kSide;
  if (shape.first_row + shape.rows > matrix.Rows() || first_block + blocks > matrix.Blocks()) {
    Report(now.site, "image", "%s: rows to %lld and columns to %lld of a matrix of %lld x %lld",
           now.name, static_cast<long long>(shape.first_row + shape.rows),
           static_cast<long long>(shape.first_column + shape.columns),
           static_cast<long long>(matrix.Rows()), static_cast<long long>(matrix.Blocks() * kSide));
    return;
  }
  const LocalMemory& l1 = core.Memory(Space::kL1);
  LocalMemory& l0 = core.Memory(dst.space);
  const int64_t bytes = shape.rows * blocks * kBlock;
  if (!Inside(now, dst, 0, bytes, "dst")) return;
  TouchOnce(now, dst.space, dst.addr, static_cast<uint32_t>(bytes), "dst");
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t from = matrix.Find(shape.first_row + row, first_block + block);
      if (!Inside(now, src, from, kBlock, "src")) return;
      const uint32_t source = src.addr + static_cast<uint32_t>(from);
      TouchUnread(now, Space::kL1, source, kBlock, "src");
      const int64_t fractal = (row / kSide * blocks + block) * kFractal;
      PlaceBlock(l1, source, l0, dst.addr + static_cast<uint32_t>(fractal), row % kSide, to_b);
    }
  }
  SimCore& counters = core.counters;
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
