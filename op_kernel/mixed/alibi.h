// The bias of score_options.h for a chunk of scores: keys one after the other, the rows in the
// lanes.
#pragma once

#include "attention/score_options.h"
#include "attention/work_units.h"
#include "attention_tiling_data.h"
#include "common/lanes.h"
#include "kernel_operator.h"
#include "mixed/score_chunk.h"

class Alibi {
 public:
  __aicore__ inline void Init(const AttentionTilingData& tiling, GM_ADDR slopes,
                              AscendC::TPipe* pipe) {
    tiling_ = &tiling;
    if (tiling.has_alibi_slopes == 0) {
      return;
    }
    slopes_.SetGlobalBuffer((__gm__ float*)slopes);
    slope_lanes_ = NewBuffer<float>(pipe, (2 + 2 * kRepeats) * kRepeatLanes);
    distances_ = slope_lanes_[kRepeatLanes];
    work_ = slope_lanes_[(1 + kRepeats) * kRepeatLanes];
    AscendC::Duplicate(slope_lanes_, 0.0f, static_cast<int32_t>((2 + 2 * kRepeats) * kRepeatLanes));
    Barrier();
  }

  // Takes the slopes and positions of a unit's rows, `rows` lanes, for the piece that begins with
  // key `begin`.
  __aicore__ inline void Open(const Unit& unit, int64_t rows, int64_t begin) {
    for (int64_t r = 0; r < unit.num_rows; ++r) {
      const Row row = RowAt(*tiling_, unit, r);
      SetLane(slope_lanes_, r, slopes_.GetValue(row.head));
      SetLane(distances_, r, static_cast<float>(begin - row.position));
    }
    RepeatLanes(slope_lanes_, rows);
    // Lanes of the next keys of a repeat, then of the next repeats.
    for (int64_t filled = rows; filled < kRepeats * kRepeatLanes; filled *= 2) {
      AscendC::Adds(distances_[filled], distances_, static_cast<float>(filled / rows),
                    static_cast<int32_t>(filled));
      Barrier();
    }
  }

  // Adds to the scores of a chunk that begins with key `first` of the piece.
  __aicore__ inline void Add(const ScoreChunk& chunk, int64_t first) {
    const int64_t keys = kRepeats * kRepeatLanes / chunk.rows;
    for (int64_t k = 0; k < chunk.keys; k += keys) {
      AddBias(chunk.scores[k * chunk.rows], distances_, static_cast<float>(first + k), slope_lanes_,
              false, work_, kRepeats);
    }
  }

 private:
  static constexpr int64_t kRepeats = 4;  // repeats at a time

  const AttentionTilingData* tiling_;
  AscendC::GlobalTensor<float> slopes_;
  Float slope_lanes_;
  Float distances_;  // of kRepeats repeats: key of the piece - query position
  Float work_;
};
