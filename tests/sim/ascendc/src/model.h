// The machine, and what the cycle model assumes of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

// Sizes and limits of a 910B's cores, from its public specification (NPU architecture 2201).
constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kL1Bytes = 512 * 1024;
constexpr uint32_t kL0Bytes = 64 * 1024;  // L0A and L0B each
constexpr uint32_t kL0cBytes = 128 * 1024;
constexpr uint32_t kL1AlwaysReserved = 256;
constexpr uint32_t kUbAlwaysReserved = 256;  // kept by the framework at the end of UB
constexpr uint32_t kBlock = 32;              // bytes: the unit of access to UB and L1
constexpr uint32_t kFractal = 512;  // bytes of 16 rows of 32 bytes: the unit of L0A and L0B
constexpr int64_t kSide = 16;       // rows of a fractal
constexpr uint32_t kUbBlocks = kUbBytes / kBlock;
constexpr uint32_t kRepeatBytes = 256;  // bytes that a vector instruction handles in one repeat
constexpr int64_t kMaxRepeat = 255;
constexpr int64_t kMaxRepeatStride = 255;
constexpr int64_t kMaxBuffers = 64;         // of one TPipe
constexpr int64_t kMaxBuffersPerPlace = 8;  // queue buffers at one TPosition: one event id each
constexpr int64_t kEventIds = 8;
constexpr int64_t kFirstReservedEvent = 6;  // 6 and 7 belong to the toolchain
constexpr int64_t kPipeEvents = 3;          // ids 0 to 2 of M_MTE1 are the TPipe's on a cube core
constexpr int64_t kMaxPieces = 4095;        // blockCount
constexpr int64_t kMaxPadPiece = 2097151;   // blockLen of DataCopyPad in bytes
constexpr int64_t kMaxPiece = 65535;        // blockLen of DataCopy in blocks
constexpr int64_t kMaxGap = 65535;          // its gaps in blocks
constexpr int64_t kMaxPadGap = 0xffffffff;  // gaps of DataCopyPad
constexpr int64_t kMaxField = 65535;        // of a 16-bit field
constexpr int64_t kMaxNzRows = 16384;       // rows and strides of a copy to NZ
constexpr int64_t kMaxFill = 32767;         // repeats, blocks and gap of InitConstValue
constexpr int64_t kMaxImageSide = 32767;    // of an image
constexpr int64_t kMaxChannels = 63;
constexpr int64_t kMaxFilter = 255;  // its sides, and their dilations
constexpr int64_t kMaxFilterStride = 63;
constexpr int64_t kMaxMmad = 4095;        // m, n and k
constexpr int64_t kMaxNdRows = 8192;      // mSize of Fixpipe to ROW_MAJOR
constexpr int64_t kMaxNdGap = 512;        // its srcNdStride
constexpr int64_t kOrderedProducts = 10;  // (m / 16) * (n / 16) from which on Mmads stay in order
constexpr int64_t kCacheLine = 64;        // of the scalar unit's data cache
constexpr int64_t kCrossCoreFlags = 16;
constexpr int64_t kCrossCoreLimit = 15;    // a flag's counter
constexpr int64_t kFirstSyncAllFlag = 11;  // SyncAll uses 11 to 14
constexpr int64_t kLastSyncAllFlag = 14;

// Cycles of kUsualMhz. Throughputs are published (docs/simulated-device.md says where); most
// latencies and start-up costs are not, so those are round numbers of the right size. What GM gives
// is for each core while all of its kind use GM at once. At another clock GM keeps its time.
constexpr int64_t kUsualMhz = 1800;
constexpr int64_t kLaunchMicroseconds = 5;  // of 5 to 20: from the host's call to the first core
constexpr int64_t kIssueCycles = 2;         // the scalar unit, for each instruction that it issues
constexpr int64_t kScalarCycles = 1;        // instead, where they are counted: for each of its own
constexpr size_t kQueueDepth = 32;          // instructions that wait for MTE1, and for M
constexpr int64_t kVectorStart = 4;         // the vector unit before an instruction's first repeat
constexpr int64_t kVectorLatency = 24;      // from the last repeat's start to its result in UB
constexpr int64_t kBankGroups = 16;         // of UB: block i lies in group i modulo 16
constexpr int64_t kBankConflict = 2;  // times as long takes a repeat whose sources share a group

// GM: bytes a cycle for a cube core; a vector core, of which there are two, has half of it from L2.
constexpr double kHbmReadOfCube = 35.5;
constexpr double kHbmReadOfVector = 17.3;
constexpr double kL2ReadOfCube = 110;
constexpr double kL2WriteOfCube = 86;
constexpr double kRowOfCube = 1.7;  // cycles, for each row or piece that is read
constexpr double kRowOfVector = 0.7;
constexpr int64_t kGmLine = 512;    // bytes: a piece costs as many times as it has lines too many
constexpr int64_t kL2Line = 64;     // bytes: what counts as read once
constexpr int64_t kCopyStart = 24;  // the DMA engine, for each copy
constexpr int64_t kPieceStart = 4;  // the DMA engine, for each piece that is written
constexpr int64_t kGmBurst = 128;   // bytes: the smallest transfer
constexpr int64_t kReadLatency = 500;      // from the last piece's start until it is there
constexpr int64_t kL2ReadLatency = 250;    // likewise, where L2 holds all of it
constexpr int64_t kWriteLatency = 300;     // from the last piece's start until GM has it
constexpr int64_t kUbBytesPerCycle = 256;  // UB to UB
constexpr int64_t kL0aBytesPerCycle = 256;
constexpr int64_t kL0bBytesPerCycle = 128;
constexpr int64_t kLoadStart = 4;
constexpr int64_t kLoadLatency = 28;
constexpr int64_t kMmadStart = 8;
constexpr int64_t kMmadLatency = 48;
constexpr int64_t kFixpipeElements = 64;  // for each cycle
constexpr int64_t kFlagCycles = 8;        // from SetFlag to the waiting pipe
constexpr int64_t kScalarUbCycles = 6;    // GetValue, SetValue on UB
constexpr int64_t kCacheHitCycles = 6;    // scalar access to GM
constexpr int64_t kCacheMissCycles = 400;
constexpr int64_t kCacheCleanCycles = 100;
constexpr int64_t kSyncAllCycles = 600;
constexpr int64_t kGroupFlagCycles = 200;  // a flag between the cores of a group

// Cycles for each repeat.
constexpr int64_t kPlainCycles = 1;
constexpr int64_t kSlowFloatCycles = 2;  // Exp, Ln, Sqrt, Div: 32 lanes a cycle
constexpr int64_t kSlowHalfCycles = 4;
constexpr int64_t kWholeReduceCycles = 5;
constexpr int64_t kBlockReduceHalfCycles = 5;
constexpr int64_t kGatherCycles = 4;
constexpr int64_t kTransposeCycles = 2;

}  // namespace sim
