// What copies between GM and a core take.
#pragma once

#include "core.h"

namespace sim {

// A copy's way to GM or from it, while its pieces are moved. A read pays for each row and for its
// bytes; in a write the pieces' starts are hidden behind the bytes, unless the pieces are short. A
// piece that begins off a line of GM, so that it lies in more lines than it fills, takes so many
// times as long.
class Transfer {
 public:
  Transfer(const Instruction& instruction, bool write);

  // A piece of GM that was moved since the one before it: a row, or so many that lie side by side.
  void Add(uint64_t address, int64_t bytes, int64_t rows = 1);

  int64_t Cycles() const;
  // From the last piece's start until it is there.
  int64_t Latency() const;

 private:
  const Core& core_;
  const bool write_;
  const uint64_t hbm_before_;
  uint64_t hbm_;
  double starts_ = 0;
  double bytes_ = 0;  // cycles that the bytes take
};

// Books a copy of pieces by the DMA engine.
void SpendCopy(const Instruction& instruction, const Transfer& transfer);

// A time of GM, given in cycles of the usual clock, in those of the clock that is set.
double GmCycles(double cycles);

}  // namespace sim
