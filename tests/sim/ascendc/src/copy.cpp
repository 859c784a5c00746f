// DataCopy and DataCopyPad, and scalar access to both memories.
#include <algorithm>
#include <cstring>

#include "limits.h"
#include "memory.h"
#include "transfer.h"

namespace sim {
namespace {

bool ShapeIsAllowed(const Instruction& now, const CopyShape& shape) {
  if (!InRange(now, "copy-limits", "blockCount", shape.blocks, 0, kMaxPieces)) return false;
  if (!CopiesSomething(now, shape.blocks != 0 && shape.bytes != 0)) return false;
  if (shape.padded) {
    if (shape.bytes % shape.element != 0) {
      Report(now.site, "copy-length",
             "%s: blockLen is %lld bytes, expected a multiple of %lld (the type)", now.name,
             static_cast<long long>(shape.bytes), static_cast<long long>(shape.element));
      return false;
    }
    if (shape.pad_value_set && shape.element == 8 && shape.pad_value != 0) {
      Report(now.site, "copy-limits", "%s: paddingValue of a 64-bit type must be 0", now.name);
    }
    return InRange(now, "copy-limits", "blockLen", shape.bytes, 1, kMaxPadPiece) &&
           InRange(now, "copy-limits", "the gap in GM", shape.gm_gap, 0, kMaxPadGap) &&
           InRange(now, "copy-limits", "the local gap", shape.local_gap, 0, kMaxPadGap) &&
           InRange(now, "copy-limits", "leftPadding in bytes", shape.left, 0, kBlock) &&
           InRange(now, "copy-limits", "rightPadding in bytes", shape.right, 0, kBlock);
  }
  if (shape.bytes % kBlock != 0) {
    Report(now.site, "copy-length",
           "%s of %lld bytes, expected a multiple of 32 (DataCopyPad takes any)", now.name,
           static_cast<long long>(shape.bytes));
    return false;
  }
  if (shape.blocks == 1 && shape.gm_gap == 0 && shape.local_gap == 0) return true;
  return InRange(now, "copy-limits", "blockLen", shape.bytes / kBlock, 1, kMaxPiece) &&
         InRange(now, "copy-limits", "the gap in GM", shape.gm_gap / kBlock, 0, kMaxGap) &&
         InRange(now, "copy-limits", "the local gap", shape.local_gap, 0, kMaxGap);
}

// Bytes of the core's memory that one piece takes, paddings and tail included.
int64_t PieceInside(const CopyShape& shape) {
  return (shape.left + shape.bytes + shape.right + kBlock - 1) / kBlock * kBlock;
}

bool GmIsAligned(const Instruction& now, const GmView& view, const CopyShape& shape) {
  if (shape.padded || view.addr % static_cast<uint64_t>(shape.element) == 0) return true;
  Report(now.site, "gm-alignment", "%s: the GM address is no multiple of %lld bytes (the type)",
         now.name, static_cast<long long>(shape.element));
  return false;
}

void Fill(uint8_t* to, int64_t bytes, const CopyShape& shape) {
  for (int64_t at = 0; at < bytes; at += shape.element) {
    std::memcpy(to + at, &shape.pad_value, static_cast<size_t>(shape.element));
  }
}

}  // namespace

void CopyIn(const char* name, const LocalView& dst, const GmView& src, const CopyShape& shape,
            Site site) {
  const Instruction now(name, kMte2, site);
  const bool to_l1 = dst.space == Space::kL1 && !shape.padded;
  const Space space = to_l1 ? Space::kL1 : Space::kUb;
  if (!ShapeIsAllowed(now, shape) || !GmIsAligned(now, src, shape) ||
      !Usable(now, dst, "dst", space) || !Aligned(now, dst, kBlock, "dst")) {
    return;
  }
  Core& core = now.core;
  Transfer transfer(now, false);
  const int64_t piece = PieceInside(shape);
  // Paddings hold the value; the rest of the last block does too, but only if there is a padding.
  const bool tail_is_filled = shape.pad_value_set && (shape.left > 0 || shape.right > 0);
  for (int64_t i = 0; i < shape.blocks; ++i) {
    const int64_t from = i * (shape.bytes + shape.gm_gap);
    const int64_t to = i * (piece + shape.local_gap * kBlock);
    if (!Inside(now, dst, to, piece, "dst") || !TouchGm(now, src, from, shape.bytes, false)) return;
    transfer.Add(src.addr + static_cast<uint64_t>(from), shape.bytes);
    const uint32_t addr = dst.addr + static_cast<uint32_t>(to);
    Touch(now, space, addr, static_cast<uint32_t>(piece), true, "dst");
    uint8_t* out = core.Memory(space).bytes.get() + addr;
    std::memcpy(out + shape.left,
                reinterpret_cast<const void*>(src.addr + static_cast<uint64_t>(from)),
                static_cast<size_t>(shape.bytes));
    const int64_t filled = shape.left + shape.bytes;
    if (tail_is_filled) {
      Fill(out, shape.left, shape);
      Fill(out + filled, piece - filled, shape);
    } else {
      Poison(core, space, addr, static_cast<uint32_t>(shape.left));
      Poison(core, space, addr + static_cast<uint32_t>(filled),
             static_cast<uint32_t>(piece - filled));
    }
    (to_l1 ? core.counters.gm_l1_bytes : core.counters.gm_read_bytes) +=
        static_cast<uint64_t>(shape.bytes);
  }
  SpendCopy(now, transfer);
}

void CopyOut(const char* name, const GmView& dst, const LocalView& src, const CopyShape& shape,
             Site site) {
  const Instruction now(name, kMte3, site);
  if (!ShapeIsAllowed(now, shape) || !GmIsAligned(now, dst, shape) || !Usable(now, src, "src") ||
      !Aligned(now, src, kBlock, "src")) {
    return;
  }
  Core& core = now.core;
  Transfer transfer(now, true);
  const int64_t piece = PieceInside(shape);
  for (int64_t i = 0; i < shape.blocks; ++i) {
    const int64_t from = i * (piece + shape.local_gap * kBlock);
    const int64_t to = i * (shape.bytes + shape.gm_gap);
    if (!Inside(now, src, from, shape.bytes, "src") || !TouchGm(now, dst, to, shape.bytes, true)) {
      return;
    }
    transfer.Add(dst.addr + static_cast<uint64_t>(to), shape.bytes);
    const uint32_t addr = src.addr + static_cast<uint32_t>(from);
    Touch(now, Space::kUb, addr, static_cast<uint32_t>(shape.bytes), false, "src");
    std::memcpy(reinterpret_cast<void*>(dst.addr + static_cast<uint64_t>(to)), core.ub + addr,
                static_cast<size_t>(shape.bytes));
    core.counters.gm_written_bytes += static_cast<uint64_t>(shape.bytes);
  }
  SpendCopy(now, transfer);
}

void CopyLocal(const LocalView& dst, const LocalView& src, int64_t blocks, int64_t length,
               int64_t src_gap, int64_t dst_gap, Site site) {
  const Instruction now("DataCopy", kV, site);
  const CopyShape shape{blocks, length, src_gap * kBlock, dst_gap, 1, false, false, 0, 0, 0};
  if (!ShapeIsAllowed(now, shape) || !Usable(now, dst, "dst") || !Usable(now, src, "src") ||
      !Aligned(now, dst, kBlock, "dst") || !Aligned(now, src, kBlock, "src")) {
    return;
  }
  Core& core = now.core;
  Spend(now, kVectorStart + blocks * ((length + kUbBytesPerCycle - 1) / kUbBytesPerCycle),
        kVectorLatency);
  ++core.counters.vector_instructions;
  core.counters.vector_repeats +=
      static_cast<uint64_t>(blocks * ((length + kRepeatBytes - 1) / kRepeatBytes));
  const auto bytes = static_cast<uint32_t>(length);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t from = i * (length + src_gap * kBlock);
    const int64_t to = i * (length + dst_gap * kBlock);
    if (!Inside(now, src, from, length, "src") || !Inside(now, dst, to, length, "dst")) return;
    const uint32_t source = src.addr + static_cast<uint32_t>(from);
    const uint32_t target = dst.addr + static_cast<uint32_t>(to);
    if (source != target && source < target + bytes && target < source + bytes) {
      Report(site, "overlap", "DataCopy: src and dst overlap in part");
    }
    Touch(now, Space::kUb, source, bytes, false, "src");
    Touch(now, Space::kUb, target, bytes, true, "dst");
    std::memmove(core.ub + target, core.ub + source, bytes);
  }
}

// ---- Scalar access
// -------------------------------------------------------------------------------

void ReadLocal(const LocalView& view, void* out, int64_t bytes, Site site) {
  const Instruction now("GetValue", kS, site);
  Spend(now, kScalarUbCycles, 0);
  std::memset(out, 0, static_cast<size_t>(bytes));
  if (!Usable(now, view, "the tensor") || !Inside(now, view, 0, bytes, "the tensor")) return;
  Touch(now, Space::kUb, view.addr, static_cast<uint32_t>(bytes), false, "the tensor");
  std::memcpy(out, now.core.ub + view.addr, static_cast<size_t>(bytes));
}

void WriteLocal(const LocalView& view, const void* in, int64_t bytes, Site site) {
  const Instruction now("SetValue", kS, site);
  Spend(now, kScalarUbCycles, 0);
  if (!Usable(now, view, "the tensor") || !Inside(now, view, 0, bytes, "the tensor")) return;
  Touch(now, Space::kUb, view.addr, static_cast<uint32_t>(bytes), true, "the tensor");
  std::memcpy(now.core.ub + view.addr, in, static_cast<size_t>(bytes));
}

GmView GmTensor(const void* base, uint64_t bytes, Site) {
  const auto address = reinterpret_cast<uint64_t>(base);
  return {address, address, bytes > UINT64_MAX - address ? UINT64_MAX : address + bytes};
}

namespace {

void SpendCacheAccess(const Instruction& now, uint64_t address) {
  const uint64_t line = address & ~static_cast<uint64_t>(kCacheLine - 1);
  const bool hit = !now.core.cached.insert(line).second;
  Spend(now, kCacheHitCycles, hit ? 0 : kCacheMissCycles);
}

bool ScalarGmIsAligned(const Instruction& now, const GmView& view, int64_t bytes) {
  if (view.addr % static_cast<uint64_t>(bytes) == 0) return true;
  Report(now.site, "gm-alignment", "%s: the GM address is no multiple of %lld bytes (the type)",
         now.name, static_cast<long long>(bytes));
  return false;
}

}  // namespace

void ReadGm(const GmView& view, void* out, int64_t bytes, Site site) {
  const Instruction now("GetValue", kS, site);
  std::memset(out, 0, static_cast<size_t>(bytes));
  ++now.core.counters.scalar_gm_reads;
  if (!ScalarGmIsAligned(now, view, bytes) || !TouchGm(now, view, 0, bytes, false)) return;
  SpendCacheAccess(now, view.addr);
  std::memcpy(out, reinterpret_cast<const void*>(view.addr), static_cast<size_t>(bytes));
}

void WriteGm(const GmView& view, const void* in, int64_t bytes, Site site) {
  const Instruction now("SetValue", kS, site);
  ++now.core.counters.scalar_gm_writes;
  if (!ScalarGmIsAligned(now, view, bytes) || !TouchGm(now, view, 0, bytes, true)) return;
  SpendCacheAccess(now, view.addr);
  now.core.dirty[view.addr & ~static_cast<uint64_t>(kCacheLine - 1)] = site;
  std::memcpy(reinterpret_cast<void*>(view.addr), in, static_cast<size_t>(bytes));
}

void CleanAndInvalidate(const GmView& view, bool whole_cache, Site site) {
  const Instruction now("DataCacheCleanAndInvalid", kS, site);
  Spend(now, kCacheCleanCycles, 0);
  CleanLines(now, view.addr, whole_cache);
}

}  // namespace sim
