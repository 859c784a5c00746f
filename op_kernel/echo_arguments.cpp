// Writes back what arrives: the arguments of the launch, the number of each core, the tiling.
//
// It is the first kernel to run where none has run. So it trusts nothing: each pointer is a buffer
// that may be written, and were every argument to arrive one place later, the answer would be right
// and stand in the second buffer instead of the third.
#include "common/entry.h"
#include "common/scalar.h"
#include "echo_arguments_tiling_data.h"
#include "kernel_operator.h"

// The record of a core, for the scalar unit to write.
class EchoRecord {
 public:
  __aicore__ inline explicit EchoRecord(GM_ADDR buffer, int64_t core) {
    record_.SetGlobalBuffer((__gm__ int64_t*)buffer + core * kEchoWords, kEchoWords);
  }

  __aicore__ inline void Add(int64_t word) { record_.SetValue(count_++, word); }
  __aicore__ inline void Add(GM_ADDR address) { Add((int64_t)address); }

  // Words are in the core's cache until then.
  __aicore__ inline void Finish() {
    constexpr int64_t kLineWords = 8;
    for (int64_t word = 0; word < kEchoWords; word += kLineWords) {
      AscendC::DataCacheCleanAndInvalid<int64_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                        AscendC::DcciDst::CACHELINE_OUT>(record_[word]);
    }
  }

 private:
  AscendC::GlobalTensor<int64_t> record_;
  int64_t count_ = 0;
};

__aicore__ inline void Echo(GM_ADDR first, GM_ADDR second, GM_ADDR third, GM_ADDR fourth,
                            GM_ADDR tiling) {
  const auto data = TilingAt<EchoArgumentsTilingData>(tiling);
  EchoRecord record(third, Clamp(AscendC::GetBlockIdx(), 0, kEchoMostCores - 1));
  record.Add(kEchoMark);
  record.Add(AscendC::GetBlockIdx());
  record.Add(AscendC::GetBlockNum());
  record.Add(first);
  record.Add(second);
  record.Add(third);
  record.Add(fourth);
  record.Add(tiling);
  for (const int64_t word : data.words) {
    record.Add(word);
  }
  record.Finish();
}

PAGED_KERNEL(PAGED_VECTOR_CORES, paged_echo_arguments,
             (GM_ADDR first, GM_ADDR second, GM_ADDR third, GM_ADDR fourth, GM_ADDR tiling),
             Echo(first, second, third, fourth, tiling))
