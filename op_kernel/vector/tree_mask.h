// Which of a tile's keys each query token of a unit sees by the tree mask.
//
// The mask has a column for each new token of a sequence, and none for its context. A tile's part
// of it comes in with the keys, in the same buffer, and becomes 64 bits for each token of the unit.
#pragma once

#include "attention/visible.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "common/scalar.h"
#include "kernel_operator.h"

class TreeMaskBits {
 public:
  // Bytes that a tile's part takes where it comes in.
  static constexpr int64_t kBytesIn = kMaxRows * kRepeatLanes;

  // op_host counts this buffer in attention_ub_bytes.
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR tree_mask,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    if (tiling.tree_columns == 0) {
      return;
    }
    mask_.SetGlobalBuffer((__gm__ uint8_t*)tree_mask);
    compared_ = NewBuffer<uint8_t>(pipe, kMaxRows * kBitBytes);
    computed_ = pipe->AllocEventID<AscendC::HardEvent::V_S>();
    read_ = pipe->AllocEventID<AscendC::HardEvent::S_V>();
  }

  // Brings what belongs to the keys `seen` of the tile from `begin` on to `in`, if new tokens are
  // among them.
  __aicore__ inline void Load(const AscendC::LocalTensor<uint8_t>& in, const Unit& unit,
                              int64_t begin, const Range& seen) const {
    const Range lanes = NewTokens(unit, begin, seen);
    if (lanes.first >= lanes.last) {
      return;
    }
    // A token's lanes begin in the granule of the first one, with ones before it.
    const int64_t before = lanes.first % kGranuleBytes;
    const int64_t count = lanes.last - lanes.first;
    const int64_t granules = (before + count + kGranuleBytes - 1) / kGranuleBytes;
    const int64_t from = FirstToken(unit) * tiling_->tree_token_stride + begin + lanes.first -
                         FirstNew(unit.sequence);
    const int64_t tokens = CountTokens(unit);
    const int64_t gap = tokens > 1 ? tiling_->tree_token_stride - count : 0;
    const AscendC::DataCopyExtParams rows(static_cast<uint16_t>(tokens),
                                          static_cast<uint32_t>(count), static_cast<uint32_t>(gap),
                                          static_cast<uint32_t>(kGranulesPerToken - granules), 0);
    const AscendC::DataCopyPadExtParams<uint8_t> ones(true, static_cast<uint8_t>(before), 0, 1);
    AscendC::DataCopyPad(in[lanes.first - before], mask_[from], rows, ones);
  }

  // Takes the bits of the tile whose part is in `in`. `work` has room for 64 floats of each row.
  __aicore__ inline void Take(const AscendC::LocalTensor<uint8_t>& in, const Unit& unit,
                              int64_t begin, const Range& seen, const Float& work) {
    const Range lanes = NewTokens(unit, begin, seen);
    hides_ = lanes.first < lanes.last;
    if (!hides_) {
      return;
    }
    const int64_t tokens = CountTokens(unit);
    const int64_t first = lanes.first / kGranuleBytes * kGranuleBytes;
    const AscendC::LocalTensor<half> halves = work.ReinterpretCast<half>();
    const int32_t all = static_cast<int32_t>(tokens * kCompared);
    AscendC::Duplicate(halves, static_cast<half>(1.0f), all);
    Barrier();
    AscendC::Cast(halves[first], in[first], AscendC::RoundMode::CAST_NONE,
                  static_cast<uint64_t>(lanes.last - first), static_cast<uint8_t>(tokens),
                  AscendC::UnaryRepeatParams(1, 1, kCompared * sizeof(half) / kGranuleBytes,
                                             kGranulesPerToken));
    Barrier();
    AscendC::CompareScalar(compared_, halves, static_cast<half>(0.0f), AscendC::CMPMODE::NE,
                           static_cast<uint32_t>(all));
    AscendC::SetFlag<AscendC::HardEvent::V_S>(computed_);
    AscendC::WaitFlag<AscendC::HardEvent::V_S>(computed_);
    const AscendC::LocalTensor<uint64_t> bits = compared_.ReinterpretCast<uint64_t>();
    for (int64_t t = 0; t < tokens; ++t) {
      bits_[t] = bits.GetValue(static_cast<uint32_t>(t * kBitBytes / sizeof(uint64_t)));
    }
    AscendC::SetFlag<AscendC::HardEvent::S_V>(read_);
    AscendC::WaitFlag<AscendC::HardEvent::S_V>(read_);
  }

  // The lanes of the tile that row r of the unit sees, as far as the mask goes.
  __aicore__ inline uint64_t OfRow(const Unit& unit, int64_t r) const {
    if (tiling_->tree_columns == 0 || !hides_) {
      return ~0ULL;
    }
    const int64_t heads = HeadsPerKvHead(*tiling_);
    return bits_[(unit.row_begin + r) / heads - unit.row_begin / heads];
  }

 private:
  // Halves that are compared of a token, a whole repeat, and the bytes of their bits.
  static constexpr int64_t kCompared = 128;
  static constexpr int64_t kBitBytes = kCompared / 8;
  static constexpr int64_t kGranulesPerToken = kRepeatLanes / kGranuleBytes;

  __aicore__ inline int64_t FirstNew(const Sequence& sequence) const {
    return sequence.length - sequence.new_tokens;
  }

  // Of the call.
  __aicore__ inline int64_t FirstToken(const Unit& unit) const {
    return unit.sequence.first_token + unit.row_begin / HeadsPerKvHead(*tiling_);
  }

  __aicore__ inline int64_t CountTokens(const Unit& unit) const {
    const int64_t heads = HeadsPerKvHead(*tiling_);
    return (unit.row_begin + unit.num_rows - 1) / heads - unit.row_begin / heads + 1;
  }

  // Lanes of the tile that have a column. Beyond the last column, which the host refuses on
  // request, all is visible.
  __aicore__ inline Range NewTokens(const Unit& unit, int64_t begin, const Range& seen) const {
    if (tiling_->tree_columns == 0) {
      return {0, 0};
    }
    const int64_t first = Larger(0, FirstNew(unit.sequence) - begin);
    const int64_t end = FirstNew(unit.sequence) + tiling_->tree_columns - begin;
    return {first, Smaller(seen.last, end)};
  }

  const AttentionTilingData* tiling_;
  AscendC::GlobalTensor<uint8_t> mask_;
  AscendC::LocalTensor<uint8_t> compared_;
  AscendC::TEventID computed_;  // both are this object's for as long as the kernel runs
  AscendC::TEventID read_;
  bool hides_;
  uint64_t bits_[kMaxRows];
};
