// What the headers call in libascendc_sim.so. Kernels never name anything here.
//
// The headers turn each Ascend C call into one call of a function below, with types and shapes as
// values. All checking, execution and counting is done by the library.
#pragma once

#include <cstdint>

#include "types.h"

// Default arguments of every checked function: they name the kernel's own line.
#define SIM_SITE const char *site_file = __builtin_FILE(), int site_line = __builtin_LINE()
#define SIM_HERE \
  sim::Site { site_file, site_line }

// What kernels call. Where instructions are counted it has no call of its own.
#ifdef ASCENDC_SIM_COUNT
#define SIM_API [[gnu::always_inline]] inline
#else
#define SIM_API
#endif

namespace sim {

struct Site {
  const char* file;
  int line;
};

enum class Type : uint8_t {
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kHalf,
  kBfloat16,
  kInt32,
  kUint32,
  kFloat,
  kInt64,
  kUint64,
  kOther,
};

template <typename T>
constexpr Type TypeOf() {
  if constexpr (std::is_same_v<T, int8_t>) return Type::kInt8;
  if constexpr (std::is_same_v<T, uint8_t>) return Type::kUint8;
  if constexpr (std::is_same_v<T, int16_t>) return Type::kInt16;
  if constexpr (std::is_same_v<T, uint16_t>) return Type::kUint16;
  if constexpr (std::is_same_v<T, half>) return Type::kHalf;
  if constexpr (std::is_same_v<T, bfloat16_t>) return Type::kBfloat16;
  if constexpr (std::is_same_v<T, int32_t>) return Type::kInt32;
  if constexpr (std::is_same_v<T, uint32_t>) return Type::kUint32;
  if constexpr (std::is_same_v<T, float>) return Type::kFloat;
  if constexpr (std::is_same_v<T, int64_t>) return Type::kInt64;
  if constexpr (std::is_same_v<T, uint64_t>) return Type::kUint64;
  return Type::kOther;
}

template <typename T, typename... Allowed>
constexpr bool kIsOneOf = (std::is_same_v<T, Allowed> || ...);

// Why an instruction refuses a type. Used in static_assert, so that the compiler prints it.
#define SIM_REQUIRE_TYPE(name, T, ...)         \
  static_assert(sim::kIsOneOf<T, __VA_ARGS__>, \
                name ": the 910B vector core has this instruction for " #__VA_ARGS__ " only")

// The memories of a core: a vector core has the unified buffer, a cube core the others.
enum class Space : uint8_t { kUb, kL1, kL0a, kL0b, kL0c };
constexpr int kSpaces = 5;

constexpr Space SpaceOf(AscendC::TPosition position) {
  using AscendC::TPosition;
  switch (position) {
    case TPosition::A1:
    case TPosition::B1:
    case TPosition::C1:
      return Space::kL1;
    case TPosition::A2:
      return Space::kL0a;
    case TPosition::B2:
      return Space::kL0b;
    case TPosition::CO1:
      return Space::kL0c;
    default:
      return Space::kUb;
  }
}

// A part of a core's memory: where it starts, and what it may touch. `buffer` and `generation`
// name the TPipe buffer that it belongs to; buffer 0 is none (tensors placed by address).
struct LocalView {
  uint32_t addr = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t buffer = 0;
  uint32_t generation = 0;
  Space space = Space::kUb;
};

// A part of global memory: where it starts, the address given to SetGlobalBuffer, and the end that
// was given with it (or the highest address).
struct GmView {
  uint64_t addr = 0;
  uint64_t base = 0;
  uint64_t end = 0;
};

struct Strides {
  int64_t block = 1;   // between the 32-byte blocks of one repeat, in blocks
  int64_t repeat = 8;  // between repeats, in blocks
};

struct Operand {
  LocalView view;
  Type type;
  Strides strides;
};

// Which lanes take part: the first `low` of a count-form call, or per repeat the first `low` lanes,
// a bit for each lane, or what SetVectorMask left.
struct Lanes {
  enum Form : uint8_t { kCount, kLength, kBits, kPlaceholder } form;
  uint64_t low;
  uint64_t high;
  int64_t repeat;
};

inline Lanes Count(int64_t count) { return {Lanes::kCount, static_cast<uint64_t>(count), 0, 1}; }

template <bool isSetMask>
Lanes Repeats(uint64_t mask, int64_t repeat) {
  return {isSetMask ? Lanes::kLength : Lanes::kPlaceholder, mask, 0, repeat};
}

template <bool isSetMask>
Lanes Repeats(const uint64_t* mask, int64_t repeat) {
  return {isSetMask ? Lanes::kBits : Lanes::kPlaceholder, mask[0], mask[1], repeat};
}

enum class UnaryOp : uint8_t { kExp, kLn, kAbs, kSqrt, kRsqrt, kReciprocal, kRelu, kNot, kCopy };
enum class BinaryOp : uint8_t {
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kAnd,
  kOr,
  kMulAddDst,
  kFusedMulAdd,
  kAddRelu,
};
enum class ScalarOp : uint8_t {
  kAdds,
  kMuls,
  kMaxs,
  kMins,
  kShiftLeft,
  kShiftRight,
  kLeakyRelu,
  kAxpy,
};
enum class ReduceOp : uint8_t { kSum, kMax, kMin };

// Instructions of the vector pipe.
void Unary(const char* name, UnaryOp op, const Operand& dst, const Operand& src, const Lanes& lanes,
           Site site);
void Binary(const char* name, BinaryOp op, const Operand& dst, const Operand& src0,
            const Operand& src1, const Lanes& lanes, Site site);
void WithScalar(const char* name, ScalarOp op, const Operand& dst, const Operand& src,
                double scalar, const Lanes& lanes, Site site);
void Cast(const Operand& dst, const Operand& src, AscendC::RoundMode mode, const Lanes& lanes,
          Site site);
void Duplicate(const Operand& dst, uint32_t bits, const Lanes& lanes, Site site);
void CreateVecIndex(const Operand& dst, double first, const Lanes& lanes, Site site);
void Brcb(const Operand& dst, const Operand& src, int64_t repeat, Site site);
void Gather(const Operand& dst, const Operand& src, const Operand& offsets, uint32_t base,
            const Lanes& lanes, Site site);
void Compare(const char* name, const Operand& dst, const Operand& src0, const Operand* src1,
             double scalar, AscendC::CMPMODE mode, const Lanes& lanes, Site site);
void Select(const Operand& dst, const Operand& mask, const Operand& src0, const Operand* src1,
            double scalar, AscendC::SELMODE mode, const Lanes& lanes, Site site);
// One result a repeat. dst.strides.repeat is in units of the result.
void WholeReduce(const char* name, ReduceOp op, const Operand& dst, const Operand& src,
                 AscendC::ReduceOrder order, const Lanes& lanes, Site site);
// One result a 32-byte block (group 32) or a pair of lanes (group 0).
void GroupReduce(const char* name, ReduceOp op, int64_t group, const Operand& dst,
                 const Operand& src, const Lanes& lanes, Site site);
// One result in all. `work` must be large enough for the partial results.
void FullReduce(const char* name, ReduceOp op, const Operand& dst, const Operand& src,
                const Operand& work, bool index, const Lanes& lanes, Site site);
void TransposeB16(const Operand& dst, const Operand& src, Site site);

// Vector masks.
void SetMaskMode(bool counter);
void SetVectorMask(uint64_t high, uint64_t low);
void SetVectorMaskLength(int64_t length, uint64_t lanes, Site site);
void ResetMask();

// Copies. The GM side is dense or has gaps in bytes; the local side is cut into 32-byte blocks.
struct CopyShape {
  int64_t blocks;      // number of pieces
  int64_t bytes;       // length of a piece
  int64_t gm_gap;      // bytes between two pieces in GM, from tail to head
  int64_t local_gap;   // 32-byte blocks between two local pieces, from tail to head
  int64_t element;     // sizeof(T)
  bool padded;         // DataCopyPad: a piece need not be a multiple of 32 bytes
  bool pad_value_set;  // the value below fills paddings and the tail of the last block
  int64_t left;        // padding in bytes
  int64_t right;
  uint64_t pad_value;
};

void CopyIn(const char* name, const LocalView& dst, const GmView& src, const CopyShape& shape,
            Site site);
void CopyOut(const char* name, const GmView& dst, const LocalView& src, const CopyShape& shape,
             Site site);
void CopyLocal(const LocalView& dst, const LocalView& src, int64_t blocks, int64_t length,
               int64_t src_gap, int64_t dst_gap, Site site);

// Copies of matrices into L1, with strides as Nd2NzParams has them.
struct NzShape {
  int64_t matrices;
  int64_t rows;
  int64_t columns;
  int64_t src_matrix_stride;  // elements
  int64_t src_row_stride;     // elements
  int64_t dst_column_stride;  // 32-byte blocks between columns of blocks
  int64_t dst_row_stride;     // 32-byte blocks
  int64_t dst_matrix_stride;  // elements
  int64_t element;            // sizeof(T)
};
void CopyNdToNz(const LocalView& dst, const GmView& src, const NzShape& shape, Site site);

// Fractals of 512 bytes from L1 to L0A or L0B, in squares: of so many fractals as are transposed
// together, or one.
struct FractalShape {
  int64_t square;         // fractals of a square
  int64_t first;          // start, in squares
  int64_t repeat;         // squares
  int64_t src_stride;     // squares, from head to head
  int64_t dst_gap;        // fractals between the first ones of two squares, from tail to head
  int64_t dst_inner_gap;  // fractals between those of one square, from tail to head
  bool transpose;
  int64_t addr_mode;
  int64_t element;  // sizeof(T)
};
void LoadFractals(const char* name, const LocalView& dst, const LocalView& src,
                  const FractalShape& shape, Site site);

// An image in L1, and whether a load sets the registers that describe it and its padding.
struct ImageSize {
  int64_t height;
  int64_t width;
  int64_t left;  // paddings
  int64_t right;
  int64_t top;
  int64_t bottom;
  bool sets_image;
  bool sets_padding;
};
struct ImageShape {
  int64_t channels;
  int64_t columns;  // of the matrix, that are loaded
  int64_t rows;
  int64_t first_column;
  int64_t first_row;
  int64_t stride_w;
  int64_t stride_h;
  int64_t filter_w;
  int64_t filter_h;
  int64_t dilation_w;
  int64_t dilation_h;
  bool transpose;
  bool small_k;
  bool wide_filter;
  bool high_filter;
  bool right_register;
};
void LoadImage(const LocalView& dst, const LocalView& src, const ImageSize& size,
               const ImageShape& shape, Site site);
void SetImage(const ImageSize& size, bool left_register, Site site);

void FillConstant(const LocalView& dst, int64_t repeat, int64_t blocks, int64_t gap, uint64_t value,
                  int64_t element, Site site);

// c = a * b, or c += a * b.
struct MmadShape {
  int64_t m;
  int64_t n;
  int64_t k;
  bool initialise;     // c starts as zero
  bool from_bias;      // c starts as what lies in the bias table
  bool align_k_to_16;  // of float
  int64_t unit_flag;
};
void Mmad(const LocalView& c, const LocalView& a, const LocalView& b, Type type,
          const MmadShape& shape, Site site);

// L0C to GM.
struct FixpipeShape {
  int64_t n;
  int64_t m;
  int64_t src_stride;  // 64-byte rows between columns of fractals
  int64_t dst_stride;  // ND: elements of a row; NZ: 32-byte blocks between columns of fractals
  int64_t matrices;
  int64_t src_matrix_stride;  // fractals of 1024 bytes
  int64_t dst_matrix_stride;  // elements
  bool nz;
  bool relu;
  bool split_channels;
  QuantMode_t quant;
  int64_t unit_flag;
};
void Fixpipe(const GmView& dst, const LocalView& src, Type type, const FixpipeShape& shape,
             Site site);

// Scalar access.
GmView GmTensor(const void* base, uint64_t bytes, Site site);
void ReadLocal(const LocalView& view, void* out, int64_t bytes, Site site);
void WriteLocal(const LocalView& view, const void* in, int64_t bytes, Site site);
void ReadGm(const GmView& view, void* out, int64_t bytes, Site site);
void WriteGm(const GmView& view, const void* in, int64_t bytes, Site site);
void CleanAndInvalidate(const GmView& view, bool whole_cache, Site site);

// Buffers and queues of a TPipe.
void PipeInit(void* pipe, Site site);
void PipeReset(Site site);
void PipeDestroy(Site site);
void* CurrentPipe();
LocalView InitTBuf(AscendC::TPosition position, uint32_t bytes, Site site);
int InitQueue(AscendC::TPosition src, AscendC::TPosition dst, int32_t depth, int64_t num,
              uint32_t bytes, Site site);
LocalView QueueAlloc(int queue, Site site);
bool QueueEnque(int queue, const LocalView& tensor, Site site);
LocalView QueueDeque(int queue, Site site);
void QueueFree(int queue, const LocalView& tensor, Site site);
int32_t QueueCount(int queue, Site site);
bool QueueVacant(int queue, Site site);
bool QueueHasIdle(int queue, Site site);
void QueueFreeAllEvents(int queue, Site site);
LocalView PlaceTensor(AscendC::TPosition position, uint32_t addr, uint64_t bytes, Site site);

// Events and barriers.
int8_t FetchEvent(AscendC::HardEvent event, Site site);
int8_t AllocEvent(AscendC::HardEvent event, Site site);
void ReleaseEvent(AscendC::HardEvent event, int64_t id, Site site);
void SetFlag(AscendC::HardEvent event, int64_t id, Site site);
void WaitFlag(AscendC::HardEvent event, int64_t id, Site site);
void PipeBarrier(pipe_t pipe, Site site);
void SyncAll(bool aiv_only, Site site);
void SyncAllSoft(const GmView& workspace, const LocalView& local, int64_t used_cores, Site site);
void CrossCoreSet(int mode, pipe_t pipe, int64_t id, Site site);
void CrossCoreWait(int64_t id, Site site);

// The core that runs.
#ifndef ASCENDC_SIM_COUNT
bool IsCube();
#endif
int64_t BlockIndex();
int64_t BlockCount();
int64_t SubBlockIndex();
int64_t SubBlockCount();
int64_t TaskRatio();
int64_t SystemCycle();
void SetKernelType(AscendC::KernelMetaType type, Site site);

}  // namespace sim

#ifdef ASCENDC_SIM_COUNT
#include "counted.h"
#endif
