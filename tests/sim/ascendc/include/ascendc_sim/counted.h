// The functions of runtime.h for a build that counts a kernel's own scalar instructions.
//
// An instruction for another pipe does nothing here, but what it takes is computed: its addresses,
// and its strides and counts packed into a word, as the scalar unit hands them over. Scalar reads
// of GM are real, so that lengths and tables lead the kernel its usual way; nothing else is read
// and nothing is written. tests/sim/scalar.py adds the counters to the compiler's output; a line
// "# sim-event K N" of it is one call of runtime.h, of kind K (`EventKind` in core.h), that counts
// as N instructions, "# sim-issue" is one more instruction.
#pragma once

#include "runtime.h"

#define SIM_COUNTED [[gnu::always_inline]] inline
#define SIM_EVENT(kind, instructions) asm volatile("# sim-event " #kind " " #instructions)
#define SIM_ISSUE() asm volatile("# sim-issue")

namespace sim {

// The core whose instructions are counted, and the type that the kernel states.
struct CountedCore {
  int64_t block;
  int64_t blocks;
  int64_t number;  // of its kind in the group
  int64_t ratio;   // cores of its kind in a group
  int64_t type;
};
static CountedCore counted_core;

// Makes the compiler compute values.
template <typename... Values>
SIM_COUNTED void Need(Values... values) {
  (..., ([](auto value) __attribute__((always_inline)) { asm volatile("" ::"g"(value)); }(values)));
}

// ---- Instructions of the vector pipe

SIM_COUNTED uint64_t Packed(const Strides& strides, int shift) {
  const auto block = static_cast<uint64_t>(strides.block);
  const auto repeat = static_cast<uint64_t>(strides.repeat);
  return (block << shift) | (repeat << (shift + 32));
}

// The lanes go to the mask's two registers; a count by the counter mode, which is switched on and
// off again around the instruction.
SIM_COUNTED uint64_t SetLanes(const Lanes& lanes) {
  if (lanes.form == Lanes::kCount) {
    Need(lanes.low);
    SIM_ISSUE();
    SIM_ISSUE();
    return uint64_t{1} << 56;
  }
  if (lanes.form == Lanes::kLength) {
    Need((uint64_t{1} << lanes.low) - 1);
    SIM_ISSUE();
  } else if (lanes.form == Lanes::kBits) {
    Need(lanes.low, lanes.high);
    SIM_ISSUE();
  }
  return static_cast<uint64_t>(lanes.repeat) << 56;
}

SIM_COUNTED void ResetLanes(const Lanes& lanes) {
  if (lanes.form != Lanes::kCount) return;
  SIM_ISSUE();
  SIM_ISSUE();
}

template <typename... Operands>
SIM_COUNTED void Vector(const Lanes& lanes, const Operands&... operands) {
  const uint64_t repeat = SetLanes(lanes);
  uint64_t config = repeat;
  int shift = 0;
  ((config |= Packed(operands.strides, shift), shift += 8), ...);
  Need(operands.view.addr..., config);
  SIM_EVENT(1, 1);
  ResetLanes(lanes);
}

SIM_COUNTED void Unary(const char*, UnaryOp, const Operand& dst, const Operand& src,
                       const Lanes& lanes, Site) {
  Vector(lanes, dst, src);
}
SIM_COUNTED void Binary(const char*, BinaryOp, const Operand& dst, const Operand& src0,
                        const Operand& src1, const Lanes& lanes, Site) {
  Vector(lanes, dst, src0, src1);
}
SIM_COUNTED void WithScalar(const char*, ScalarOp, const Operand& dst, const Operand& src,
                            double scalar, const Lanes& lanes, Site) {
  Need(static_cast<float>(scalar));
  Vector(lanes, dst, src);
}
SIM_COUNTED void Cast(const Operand& dst, const Operand& src, AscendC::RoundMode,
                      const Lanes& lanes, Site) {
  Vector(lanes, dst, src);
}
SIM_COUNTED void Duplicate(const Operand& dst, uint32_t bits, const Lanes& lanes, Site) {
  Need(bits);
  Vector(lanes, dst);
}
SIM_COUNTED void CreateVecIndex(const Operand& dst, double first, const Lanes& lanes, Site) {
  Need(static_cast<float>(first));
  Vector(lanes, dst);
}
SIM_COUNTED void Brcb(const Operand& dst, const Operand& src, int64_t repeat, Site) {
  Vector({Lanes::kPlaceholder, 0, 0, repeat}, dst, src);
}
SIM_COUNTED void Gather(const Operand& dst, const Operand& src, const Operand& offsets,
                        uint32_t base, const Lanes& lanes, Site) {
  Need(src.view.addr + base);
  Vector(lanes, dst, offsets);
}
SIM_COUNTED void Compare(const char*, const Operand& dst, const Operand& src0, const Operand* src1,
                         double scalar, AscendC::CMPMODE, const Lanes& lanes, Site) {
  if (src1) {
    Vector(lanes, dst, src0, *src1);
  } else {
    Need(static_cast<float>(scalar));
    Vector(lanes, dst, src0);
  }
}
SIM_COUNTED void Select(const Operand& dst, const Operand& mask, const Operand& src0,
                        const Operand* src1, double scalar, AscendC::SELMODE, const Lanes& lanes,
                        Site) {
  Need(mask.view.addr);
  if (src1) {
    Vector(lanes, dst, src0, *src1);
  } else {
    Need(static_cast<float>(scalar));
    Vector(lanes, dst, src0);
  }
}
SIM_COUNTED void WholeReduce(const char*, ReduceOp, const Operand& dst, const Operand& src,
                             AscendC::ReduceOrder, const Lanes& lanes, Site) {
  Vector(lanes, dst, src);
}
SIM_COUNTED void GroupReduce(const char*, ReduceOp, int64_t, const Operand& dst, const Operand& src,
                             const Lanes& lanes, Site) {
  Vector(lanes, dst, src);
}
SIM_COUNTED void FullReduce(const char*, ReduceOp, const Operand& dst, const Operand& src,
                            const Operand& work, bool, const Lanes& lanes, Site) {
  Vector(lanes, dst, src, work);
}
SIM_COUNTED void TransposeB16(const Operand& dst, const Operand& src, Site) {
  Vector({Lanes::kPlaceholder, 0, 0, 1}, dst, src);
}

SIM_COUNTED void SetMaskMode(bool) { SIM_ISSUE(); }
SIM_COUNTED void SetVectorMask(uint64_t high, uint64_t low) {
  Need(high, low);
  SIM_ISSUE();
}
SIM_COUNTED void SetVectorMaskLength(int64_t length, uint64_t, Site) {
  Need((uint64_t{1} << length) - 1);
  SIM_ISSUE();
}
SIM_COUNTED void ResetMask() { SIM_ISSUE(); }

// ---- Copies

SIM_COUNTED void Copy(uint64_t from, uint64_t to, const CopyShape& shape) {
  Need(from, to,
       (static_cast<uint64_t>(shape.blocks) << 4) | static_cast<uint64_t>(shape.bytes) << 16,
       static_cast<uint64_t>(shape.gm_gap) | static_cast<uint64_t>(shape.local_gap) << 32);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void CopyIn(const char*, const LocalView& dst, const GmView& src,
                        const CopyShape& shape, Site) {
  if (shape.pad_value_set) {
    Need(shape.pad_value);
    SIM_ISSUE();
  }
  Copy(src.addr, dst.addr, shape);
}
SIM_COUNTED void CopyOut(const char*, const GmView& dst, const LocalView& src,
                         const CopyShape& shape, Site) {
  Copy(src.addr, dst.addr, shape);
}
SIM_COUNTED void CopyLocal(const LocalView& dst, const LocalView& src, int64_t blocks,
                           int64_t length, int64_t src_gap, int64_t dst_gap, Site) {
  Copy(src.addr, dst.addr, {blocks, length, src_gap, dst_gap, 1, false, false, 0, 0, 0});
}
SIM_COUNTED void CopyNdToNz(const LocalView& dst, const GmView& src, const NzShape& shape, Site) {
  const auto word = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return static_cast<uint64_t>(a) | static_cast<uint64_t>(b) << 16 |
           static_cast<uint64_t>(c) << 32 | static_cast<uint64_t>(d) << 48;
  };
  Need(src.addr, dst.addr, word(shape.matrices, shape.rows, shape.columns, shape.src_matrix_stride),
       word(shape.src_row_stride, shape.dst_column_stride, shape.dst_row_stride,
            shape.dst_matrix_stride));
  SIM_EVENT(1, 1);
}
SIM_COUNTED void LoadFractals(const char*, const LocalView& dst, const LocalView& src,
                              const FractalShape& shape, Site) {
  Need(src.addr, dst.addr,
       static_cast<uint64_t>(shape.first) | static_cast<uint64_t>(shape.repeat) << 16 |
           static_cast<uint64_t>(shape.src_stride) << 24 |
           static_cast<uint64_t>(shape.dst_gap) << 44);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void DescribeImage(const ImageSize& size) {
  Need(static_cast<uint64_t>(size.height) << 16 | static_cast<uint64_t>(size.width) |
       static_cast<uint64_t>(size.left) << 32 | static_cast<uint64_t>(size.right) << 40 |
       static_cast<uint64_t>(size.top) << 48 | static_cast<uint64_t>(size.bottom) << 56);
}
SIM_COUNTED void SetImage(const ImageSize& size, bool, Site) {
  DescribeImage(size);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void LoadImage(const LocalView& dst, const LocalView& src, const ImageSize& size,
                           const ImageShape& shape, Site) {
  if (size.sets_image) {
    DescribeImage(size);
    SIM_ISSUE();
  }
  if (size.sets_padding) SIM_ISSUE();
  Need(src.addr, dst.addr,
       static_cast<uint64_t>(shape.columns) | static_cast<uint64_t>(shape.rows) << 16 |
           static_cast<uint64_t>(shape.first_column) << 32 |
           static_cast<uint64_t>(shape.first_row) << 48,
       static_cast<uint64_t>(shape.stride_w) | static_cast<uint64_t>(shape.stride_h) << 6 |
           static_cast<uint64_t>(shape.filter_w) << 12 |
           static_cast<uint64_t>(shape.filter_h) << 20 |
           static_cast<uint64_t>(shape.dilation_w) << 28 |
           static_cast<uint64_t>(shape.dilation_h) << 36 |
           static_cast<uint64_t>(shape.channels) << 48);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void FillConstant(const LocalView& dst, int64_t repeat, int64_t blocks, int64_t gap,
                              uint64_t value, int64_t, Site) {
  Need(dst.addr, value,
       static_cast<uint64_t>(repeat) | static_cast<uint64_t>(blocks) << 16 |
           static_cast<uint64_t>(gap) << 32);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void Mmad(const LocalView& c, const LocalView& a, const LocalView& b, Type,
                      const MmadShape& shape, Site) {
  Need(c.addr, a.addr, b.addr,
       static_cast<uint64_t>(shape.m) | static_cast<uint64_t>(shape.k) << 12 |
           static_cast<uint64_t>(shape.n) << 24 | static_cast<uint64_t>(shape.initialise) << 63);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void Fixpipe(const GmView& dst, const LocalView& src, Type, const FixpipeShape& shape,
                         Site) {
  if (!shape.nz) {
    Need(static_cast<uint64_t>(shape.matrices) |
         static_cast<uint64_t>(shape.src_matrix_stride) << 16 |
         static_cast<uint64_t>(shape.dst_matrix_stride) << 32);
    SIM_ISSUE();
  }
  Need(dst.addr, src.addr,
       static_cast<uint64_t>(shape.n) << 4 | static_cast<uint64_t>(shape.m) << 16 |
           static_cast<uint64_t>(shape.dst_stride) << 32,
       static_cast<uint64_t>(shape.src_stride) | static_cast<uint64_t>(shape.quant) << 34);
  SIM_EVENT(1, 1);
}

// ---- Scalar access. What lies in UB isn't there; the kernels of op_kernel/ don't ask.

SIM_COUNTED GmView GmTensor(const void* base, uint64_t bytes, Site) {
  const auto address = reinterpret_cast<uint64_t>(base);
  return {address, address, address + bytes};
}
SIM_COUNTED void ReadLocal(const LocalView& view, void* out, int64_t bytes, Site) {
  Need(view.addr);
  SIM_EVENT(1, 1);
  __builtin_memset(out, 0, static_cast<size_t>(bytes));
}
SIM_COUNTED void WriteLocal(const LocalView& view, const void*, int64_t, Site) {
  Need(view.addr);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void ReadGm(const GmView& view, void* out, int64_t bytes, Site) {
  SIM_EVENT(1, 0);  // the load that follows is the instruction
  __builtin_memcpy(out, reinterpret_cast<const void*>(view.addr), static_cast<size_t>(bytes));
}
SIM_COUNTED void WriteGm(const GmView& view, const void*, int64_t, Site) {
  Need(view.addr);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void CleanAndInvalidate(const GmView& view, bool, Site) {
  Need(view.addr);
  SIM_EVENT(1, 1);
}

// ---- Order

SIM_COUNTED void SetFlag(AscendC::HardEvent, int64_t id, Site) {
  Need(id);
  SIM_EVENT(3, 1);
}
SIM_COUNTED void WaitFlag(AscendC::HardEvent, int64_t id, Site) {
  Need(id);
  SIM_EVENT(4, 1);
}
SIM_COUNTED void PipeBarrier(pipe_t, Site) { SIM_EVENT(5, 1); }
SIM_COUNTED void SyncAll(bool, Site) {
  SIM_ISSUE();
  SIM_ISSUE();
  SIM_EVENT(6, 1);
}
SIM_COUNTED void SyncAllSoft(const GmView& workspace, const LocalView& local, int64_t cores, Site) {
  Need(workspace.addr, local.addr, cores);
  SIM_EVENT(1, 1);
}
SIM_COUNTED void CrossCoreSet(int mode, pipe_t, int64_t id, Site) {
  Need(static_cast<uint64_t>(mode) << 4 | static_cast<uint64_t>(id) << 8);
  SIM_EVENT(7, 1);
}
SIM_COUNTED void CrossCoreWait(int64_t id, Site) {
  Need(id);
  SIM_EVENT(8, 1);
}

// ---- Buffers, queues and event ids: what a framework that keeps them in memory does

struct CountedBuffer {
  LocalView view;
  int32_t event;
  int32_t freed;
};
struct CountedQueue {
  uint32_t buffers;  // how many
  uint32_t cursor;
  uint32_t first;  // of those that wait
  uint32_t waiting;
  int filled_event;
  int freed_event;
  CountedBuffer buffer[8];
};
struct CountedPipe {
  void* pipe;
  uint32_t used[kSpaces];
  uint32_t queues;
  CountedQueue queue[16];
  uint32_t taken[static_cast<int>(AscendC::HardEvent::MAX)];  // ids, by event
};
static CountedPipe counted_pipe;

SIM_COUNTED int TakeCountedId(int event) {
  const int id = __builtin_ctz(~counted_pipe.taken[event]);
  counted_pipe.taken[event] |= 1u << id;
  return id;
}
SIM_COUNTED void ReturnCountedId(int event, int id) { counted_pipe.taken[event] &= ~(1u << id); }

SIM_COUNTED void PipeInit(void* pipe, Site) { counted_pipe.pipe = pipe; }
SIM_COUNTED void PipeReset(Site) { SIM_ISSUE(); }
SIM_COUNTED void PipeDestroy(Site) { SIM_ISSUE(); }
SIM_COUNTED void* CurrentPipe() { return counted_pipe.pipe; }

SIM_COUNTED LocalView NewCountedBuffer(Space space, uint32_t bytes) {
  uint32_t& used = counted_pipe.used[static_cast<int>(space)];
  const uint32_t begin = used;
  used = begin + (bytes + 31) / 32 * 32;
  return {begin, begin, used, 0, 0, space};
}
SIM_COUNTED LocalView InitTBuf(AscendC::TPosition position, uint32_t bytes, Site) {
  return NewCountedBuffer(SpaceOf(position), bytes);
}
SIM_COUNTED LocalView PlaceTensor(AscendC::TPosition position, uint32_t addr, uint64_t bytes,
                                  Site) {
  return {addr, addr, addr + static_cast<uint32_t>(bytes), 0, 0, SpaceOf(position)};
}
SIM_COUNTED int InitQueue(AscendC::TPosition src, AscendC::TPosition dst, int32_t, int64_t num,
                          uint32_t bytes, Site) {
  CountedQueue& queue = counted_pipe.queue[counted_pipe.queues];
  queue = {};
  queue.buffers = static_cast<uint32_t>(num);
  queue.filled_event = static_cast<int>(src);
  queue.freed_event = static_cast<int>(dst) + 1;
  for (uint32_t i = 0; i < queue.buffers; ++i) {
    queue.buffer[i].view = NewCountedBuffer(SpaceOf(src), bytes);
    queue.buffer[i].view.buffer = i;
  }
  return static_cast<int>(counted_pipe.queues++);
}
SIM_COUNTED void AwaitFreed(CountedQueue& queue, CountedBuffer& buffer) {
  if (!buffer.freed) return;
  Need(buffer.event);
  SIM_ISSUE();
  ReturnCountedId(queue.freed_event, buffer.event);
  buffer.freed = 0;
}
SIM_COUNTED LocalView QueueAlloc(int id, Site) {
  SIM_EVENT(2, 0);
  CountedQueue& queue = counted_pipe.queue[id];
  CountedBuffer& buffer = queue.buffer[queue.cursor];
  queue.cursor = queue.cursor + 1 == queue.buffers ? 0 : queue.cursor + 1;
  AwaitFreed(queue, buffer);
  return buffer.view;
}
SIM_COUNTED bool QueueEnque(int id, const LocalView& tensor, Site) {
  SIM_EVENT(2, 0);
  CountedQueue& queue = counted_pipe.queue[id];
  CountedBuffer& buffer = queue.buffer[tensor.buffer];
  buffer.event = TakeCountedId(queue.filled_event);
  Need(buffer.event);
  SIM_ISSUE();
  ++queue.waiting;
  return true;
}
SIM_COUNTED LocalView QueueDeque(int id, Site) {
  SIM_EVENT(2, 0);
  CountedQueue& queue = counted_pipe.queue[id];
  CountedBuffer& buffer = queue.buffer[queue.first];
  queue.first = queue.first + 1 == queue.buffers ? 0 : queue.first + 1;
  --queue.waiting;
  Need(buffer.event);
  SIM_ISSUE();
  ReturnCountedId(queue.filled_event, buffer.event);
  return buffer.view;
}
SIM_COUNTED void QueueFree(int id, const LocalView& tensor, Site) {
  SIM_EVENT(2, 0);
  CountedQueue& queue = counted_pipe.queue[id];
  CountedBuffer& buffer = queue.buffer[tensor.buffer];
  buffer.event = TakeCountedId(queue.freed_event);
  Need(buffer.event);
  SIM_ISSUE();
  buffer.freed = 1;
}
SIM_COUNTED int32_t QueueCount(int id, Site) {
  return static_cast<int32_t>(counted_pipe.queue[id].waiting);
}
SIM_COUNTED bool QueueVacant(int id, Site) {
  return counted_pipe.queue[id].waiting < counted_pipe.queue[id].buffers;
}
SIM_COUNTED bool QueueHasIdle(int id, Site) {
  return counted_pipe.queue[id].waiting < counted_pipe.queue[id].buffers;
}
SIM_COUNTED void QueueFreeAllEvents(int id, Site) {
  CountedQueue& queue = counted_pipe.queue[id];
  for (uint32_t i = 0; i < queue.buffers; ++i) AwaitFreed(queue, queue.buffer[i]);
}

SIM_COUNTED int8_t FetchEvent(AscendC::HardEvent event, Site) {
  return static_cast<int8_t>(__builtin_ctz(~counted_pipe.taken[static_cast<int>(event)]));
}
SIM_COUNTED int8_t AllocEvent(AscendC::HardEvent event, Site) {
  return static_cast<int8_t>(TakeCountedId(static_cast<int>(event)));
}
SIM_COUNTED void ReleaseEvent(AscendC::HardEvent event, int64_t id, Site) {
  ReturnCountedId(static_cast<int>(event), static_cast<int>(id));
}

// ---- The core. As for the device, a kernel is compiled once for each kind.

SIM_COUNTED constexpr bool IsCube() { return ASCENDC_SIM_COUNT == 2; }
SIM_COUNTED int64_t BlockIndex() { return counted_core.block; }
SIM_COUNTED int64_t BlockCount() { return counted_core.blocks; }
SIM_COUNTED int64_t SubBlockIndex() { return counted_core.number; }
SIM_COUNTED int64_t SubBlockCount() { return counted_core.ratio; }
SIM_COUNTED int64_t TaskRatio() { return counted_core.ratio; }
SIM_COUNTED int64_t SystemCycle() { return 0; }
SIM_COUNTED void SetKernelType(AscendC::KernelMetaType type, Site) { counted_core.type = type; }

}  // namespace sim

// For the one who counts: starts with another core; the type that the last one stated.
extern "C" __global__ __attribute__((used)) inline void sim_counted_start(int64_t block,
                                                                          int64_t blocks,
                                                                          int64_t number,
                                                                          int64_t ratio) {
  sim::counted_core = {block, blocks, number, ratio, AscendC::KERNEL_TYPE_AIV_ONLY};
  sim::counted_pipe = {};
}
extern "C" __global__ __attribute__((used)) inline int64_t sim_counted_type() {
  return sim::counted_core.type;
}
