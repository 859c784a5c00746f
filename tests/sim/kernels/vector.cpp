// Limits of the vector instructions.
#include "bench.h"

namespace {

using AscendC::BinaryRepeatParams;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::PipeBarrier;
using AscendC::RoundMode;
using AscendC::UnaryRepeatParams;

template <bool kept>
__aicore__ inline void repeats_end_at_255(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Copy(bench.c, bench.a, 8, Hidden(kept ? 255 : 256), {1, 1, 0, 0});  // breaks here
}

template <bool kept>
__aicore__ inline void repeat_strides_end_at_255(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  UnaryRepeatParams params;
  params.srcRepStride = Hidden(kept ? 8 : 256);
  AscendC::Abs(bench.c, bench.a, 64, 1, params);  // breaks here
}

template <bool kept>
__aicore__ inline void masks_end_with_the_repeat(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, kept ? 64 : 65, 1, {1, 1, 8, 8});  // breaks here
}

template <bool kept>
__aicore__ inline void mask_bits_end_with_the_repeat(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  uint64_t mask[2] = {UINT64_MAX, kept ? 0u : 1u};
  AscendC::Abs(bench.c, bench.a, mask, 1, {1, 1, 8, 8});  // breaks here
}

template <bool kept>
__aicore__ inline void set_masks_end_with_the_repeat(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::SetVectorMask<float>(kept ? 64 : 65);  // breaks here
  AscendC::Abs<float, false>(bench.c, bench.a, AscendC::MASK_PLACEHOLDER, 1, {1, 1, 8, 8});
  AscendC::ResetMask();
}

template <bool kept>
__aicore__ inline void counter_mode_ends(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::SetMaskCount();
  AscendC::Abs(bench.c, bench.a, uint64_t{100}, 1, {1, 1, 8, 8});
  if constexpr (kept) AscendC::SetMaskNorm();
  PipeBarrier<PIPE_V>();
  AscendC::Abs(bench.c, bench.a, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void destination_blocks_differ(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, 64, 1, {kept ? 1 : 0, 1, 8, 8});  // breaks here
}

template <bool kept>
__aicore__ inline void overlap_is_whole(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.a, bench.a[kept ? 0 : 8], 64);  // breaks here
}

template <bool kept>
__aicore__ inline void widening_is_not_in_place(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<half> narrow = (kept ? bench.b : bench.a).ReinterpretCast<half>();
  AscendC::Cast(bench.a, narrow, RoundMode::CAST_NONE, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void results_do_not_feed_later_repeats(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.a[kept ? 0 : 64], bench.a[kept ? 64 : 0], 128);  // breaks here
}

// A sum over repeats that stands still in dst and src1 is documented to work; in src0 it isn't.
template <bool kept>
__aicore__ inline void accumulation_goes_through_src1(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Duplicate(bench.c, 0.0f, 64);
  PipeBarrier<PIPE_V>();
  const BinaryRepeatParams params =
      kept ? BinaryRepeatParams{1, 1, 1, 0, 8, 0} : BinaryRepeatParams{1, 1, 1, 0, 0, 8};
  const LocalTensor<float>& src0 = kept ? bench.a : bench.c;
  const LocalTensor<float>& src1 = kept ? bench.c : bench.a;
  AscendC::Add(bench.c, src0, src1, 64, 4, params);  // breaks here
}

template <bool kept>
__aicore__ inline void cast_has_the_mode(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const RoundMode mode = kept ? RoundMode::CAST_RINT : RoundMode::CAST_NONE;
  AscendC::Cast(bench.c.ReinterpretCast<bfloat16_t>(), bench.a, mode, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void comparisons_are_whole_repeats(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<uint8_t> bits = bench.c.ReinterpretCast<uint8_t>();
  AscendC::CompareScalar(bits, bench.a, 0.0f, AscendC::CMPMODE::GT, kept ? 64 : 60);  // breaks here
}

template <bool kept>
__aicore__ inline void integers_compare_for_equality(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<uint8_t> bits = bench.c.ReinterpretCast<uint8_t>();
  const auto mode = kept ? AscendC::CMPMODE::EQ : AscendC::CMPMODE::LT;
  AscendC::CompareScalar(bits, bench.a.ReinterpretCast<int32_t>(), 0, mode, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void select_mode_fits_its_source(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<uint8_t> bits = bench.c.ReinterpretCast<uint8_t>();
  AscendC::CompareScalar(bits, bench.a, 0.0f, AscendC::CMPMODE::GT, 64);
  PipeBarrier<PIPE_V>();
  const auto mode =
      kept ? AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE : AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE;
  AscendC::Select(bench.b, bits, bench.a, 0.0f, mode, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void reductions_have_room_to_work(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::TBuf<> work;
  bench.pipe.InitBuffer(work, 64);
  const LocalTensor<float> results = work.GetWithOffset<float>(kept ? 8 : 7, 0);
  AscendC::ReduceSum(bench.c, bench.a, results, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void reduced_pairs_are_aligned(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::WholeReduceMax(bench.c[kept ? 2 : 1], bench.a, 64, 1, 1, 1, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void block_results_are_aligned(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::BlockReduceSum(bench.c[kept ? 8 : 4], bench.a, 1, 64, 1, 1, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void broadcasts_leave_their_source(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Brcb(kept ? bench.c : bench.a, bench.a, 1, {1, 8});  // breaks here
}

template <bool kept>
__aicore__ inline void gathers_stay_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<uint32_t> offsets = bench.b.ReinterpretCast<uint32_t>();
  AscendC::PipeBarrier<PIPE_V>();
  AscendC::Duplicate(offsets, (kept ? 255u : 256u) * 4u, 64);
  PipeBarrier<PIPE_V>();
  AscendC::Gather(bench.c, bench.a, offsets, 0, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void gathered_elements_are_aligned(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<uint32_t> offsets = bench.b.ReinterpretCast<uint32_t>();
  AscendC::Duplicate(offsets, kept ? 4u : 6u, 64);
  PipeBarrier<PIPE_V>();
  AscendC::Gather(bench.c, bench.a, offsets, 0, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void shifts_fit_the_type(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  const LocalTensor<int32_t> x = bench.a.ReinterpretCast<int32_t>();
  AscendC::ShiftLeft(x, x, kept ? 3 : 33, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void counts_are_not_negative(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, kept ? 64 : -1);  // breaks here
}

}  // namespace

RULE(repeats_end_at_255)
RULE(repeat_strides_end_at_255)
RULE(masks_end_with_the_repeat)
RULE(mask_bits_end_with_the_repeat)
RULE(set_masks_end_with_the_repeat)
RULE(counter_mode_ends)
RULE(destination_blocks_differ)
RULE(overlap_is_whole)
RULE(widening_is_not_in_place)
RULE(results_do_not_feed_later_repeats)
RULE(accumulation_goes_through_src1)
RULE(cast_has_the_mode)
RULE(comparisons_are_whole_repeats)
RULE(integers_compare_for_equality)
RULE(select_mode_fits_its_source)
RULE(reductions_have_room_to_work)
RULE(reduced_pairs_are_aligned)
RULE(block_results_are_aligned)
RULE(broadcasts_leave_their_source)
RULE(gathers_stay_inside)
RULE(gathered_elements_are_aligned)
RULE(shifts_fit_the_type)
RULE(counts_are_not_negative)
