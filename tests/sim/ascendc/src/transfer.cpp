#include "transfer.h"

#include <algorithm>
#include <cmath>

namespace sim {
namespace {

int64_t Ceil(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// Lines that a piece lies in, over those that its bytes fill.
double LineFactor(uint64_t address, int64_t bytes) {
  const auto into = static_cast<int64_t>(address % kGmLine);
  return static_cast<double>(Ceil(into + bytes, kGmLine)) /
         static_cast<double>(Ceil(bytes, kGmLine));
}

}  // namespace

double GmCycles(double cycles) {
  return cycles * static_cast<double>(Setting("clock_mhz")) / static_cast<double>(kUsualMhz);
}

Transfer::Transfer(const Instruction& instruction, bool write)
    : core_(instruction.core),
      write_(write),
      hbm_before_(core_.counters.hbm_bytes),
      hbm_(hbm_before_) {}

void Transfer::Add(uint64_t address, int64_t bytes, int64_t rows) {
  const bool cube = core_.place.kind == Kind::kCube;
  const double share = cube ? 1 : 0.5;
  const auto from_hbm = static_cast<double>(core_.counters.hbm_bytes - hbm_);
  hbm_ = core_.counters.hbm_bytes;
  const double l2 = share * (write_ ? kL2WriteOfCube : kL2ReadOfCube);
  const double hbm = cube ? kHbmReadOfCube : kHbmReadOfVector;
  const auto moved = static_cast<double>(Ceil(bytes, kGmBurst) * kGmBurst);
  const double cycles = from_hbm / hbm + std::max(moved - from_hbm, 0.0) / l2;
  bytes_ += cycles * LineFactor(address, bytes);
  const double start = write_ ? static_cast<double>(kPieceStart) : cube ? kRowOfCube : kRowOfVector;
  starts_ += start * static_cast<double>(rows);
}

int64_t Transfer::Cycles() const {
  const double cycles = write_ ? std::max(starts_, bytes_) : starts_ + bytes_;
  return static_cast<int64_t>(std::ceil(GmCycles(cycles)));
}

int64_t Transfer::Latency() const {
  const int64_t read = hbm_ > hbm_before_ ? kReadLatency : kL2ReadLatency;
  return std::llround(GmCycles(static_cast<double>(write_ ? kWriteLatency : read)));
}

void SpendCopy(const Instruction& now, const Transfer& transfer) {
  Spend(now, kCopyStart + transfer.Cycles(), transfer.Latency());
  ++now.core.counters.copy_calls;
}

}  // namespace sim
