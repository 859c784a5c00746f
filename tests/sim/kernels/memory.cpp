// Bounds, alignment, rights and garbage of both memories, and the limits of copies.
#include "bench.h"

namespace {

using AscendC::DataCopy;
using AscendC::DataCopyExtParams;
using AscendC::DataCopyPad;
using AscendC::DataCopyPadExtParams;
using AscendC::DataCopyParams;
using AscendC::HardEvent;

template <bool kept>
__aicore__ inline void gm_is_read_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in[kSize - kTile + (kept ? 0 : 8)], kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void gm_is_written_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  Order<HardEvent::MTE2_MTE3>();
  DataCopy(bench.out[kSize - kTile + (kept ? 0 : 1)], bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void gm_is_read_by_scalar_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  (void)bench.in.GetValue(kSize - (kept ? 1 : 0));  // breaks here
}

template <bool kept>
__aicore__ inline void gm_tensor_has_its_size(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(in), kept ? kTile : kTile - 1);
  DataCopy(bench.a, bench.in, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void gm_belongs_to_a_tensor(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  float elsewhere[kTile] = {};
  if constexpr (!kept) bench.in.SetGlobalBuffer(elsewhere);
  DataCopy(bench.a, bench.in, kTile);  // breaks here
  (void)elsewhere;
}

template <bool kept>
__aicore__ inline void gm_tensor_has_an_address(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::GlobalTensor<float> tensor;
  if constexpr (kept) tensor = bench.in;
  DataCopy(bench.a, tensor, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void inputs_are_only_read(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  Order<HardEvent::MTE2_MTE3>();
  DataCopy(kept ? bench.out : bench.in, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void outputs_are_garbage(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if constexpr (kept) {
    bench.Load();
    Order<HardEvent::MTE2_MTE3>();
    DataCopy(bench.out, bench.a, kTile);
    Order<HardEvent::MTE3_MTE2>();
  }
  DataCopy(bench.a, bench.out, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void ub_is_used_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, kTile + (kept ? 0 : 8));  // breaks here
}

template <bool kept>
__aicore__ inline void ub_parts_are_used_inside(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a[kept ? 128 : 136], bench.in, 128);  // breaks here
}

template <bool kept>
__aicore__ inline void buffers_are_rounded_to_blocks(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::TBuf<> buffer;
  bench.pipe.InitBuffer(buffer, 40);                        // room for 16 floats
  DataCopy(buffer.Get<float>(), bench.in, kept ? 16 : 24);  // breaks here
}

template <bool kept>
__aicore__ inline void ub_is_aligned(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a[kept ? 8 : 4], 64);  // breaks here
}

template <bool kept>
__aicore__ inline void copies_are_aligned_in_ub(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a[kept ? 8 : 1], bench.in, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void copies_are_aligned_to_the_type(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.in.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(in + (kept ? 4 : 2)));
  DataCopy(bench.a, bench.in, 64);  // breaks here
}

template <bool kept>
__aicore__ inline void ub_is_written_before_it_is_read(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if constexpr (kept) AscendC::Duplicate(bench.a, 1.0f, kTile);
  AscendC::PipeBarrier<PIPE_V>();
  AscendC::Abs(bench.c, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void fresh_tensors_are_garbage(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::TQue<AscendC::TPosition::VECIN, 1> queue;
  bench.pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  for (int pass = 0; pass < 2; ++pass) {
    AscendC::LocalTensor<float> x = queue.AllocTensor<float>();
    if (kept || pass == 0) DataCopy(x, bench.in, kTile);
    queue.EnQue(x);
    x = queue.DeQue<float>();
    AscendC::Abs(bench.c, x, kTile);  // breaks here
    AscendC::PipeBarrier<PIPE_V>();
    queue.FreeTensor(x);
  }
}

// 5 floats: the last 12 bytes of the block hold the value only where a padding asks for it.
template <bool kept>
__aicore__ inline void unpadded_tails_are_garbage(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopyPad(bench.a, bench.in, DataCopyExtParams{1, 20, 0, 0, 0},
              DataCopyPadExtParams<float>{kept, 0, 3, 0.0f});
  Order<HardEvent::MTE2_V>();
  AscendC::Abs(bench.c, bench.a, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void copies_are_whole_blocks(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kept ? 8 : 12);  // breaks here
}

template <bool kept>
__aicore__ inline void copies_have_a_length(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kept ? 8 : 0);  // breaks here
}

template <bool kept>
__aicore__ inline void padded_copies_are_whole_elements(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const DataCopyExtParams params{1, kept ? 20u : 18u, 0, 0, 0};
  DataCopyPad(bench.a, bench.in, params, {false, 0, 0, 0.0f});  // breaks here
}

template <bool kept>
__aicore__ inline void copies_have_4095_pieces(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const DataCopyExtParams params{static_cast<uint16_t>(kept ? 8 : 4096), 4, 0, 0, 0};
  DataCopyPad(bench.a, bench.in, params, {false, 0, 0, 0.0f});  // breaks here
}

template <bool kept>
__aicore__ inline void gaps_have_16_bits(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopyParams params;
  params.blockCount = 2;
  params.blockLen = 1;
  params.dstStride = Hidden(kept ? 1 : 65536);
  DataCopy(bench.a, bench.in, params);  // breaks here
}

template <bool kept>
__aicore__ inline void paddings_have_32_bytes(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  const DataCopyPadExtParams<float> pad{true, static_cast<uint8_t>(kept ? 8 : 9), 0, 0.0f};
  DataCopyPad(bench.a, bench.in, {1, 32, 0, 0, 0}, pad);  // breaks here
}

}  // namespace

RULE(gm_is_read_inside)
RULE(gm_is_written_inside)
RULE(gm_is_read_by_scalar_inside)
RULE(gm_tensor_has_its_size)
RULE(gm_belongs_to_a_tensor)
RULE(gm_tensor_has_an_address)
RULE(inputs_are_only_read)
RULE(outputs_are_garbage)
RULE(ub_is_used_inside)
RULE(ub_parts_are_used_inside)
RULE(buffers_are_rounded_to_blocks)
RULE(ub_is_aligned)
RULE(copies_are_aligned_in_ub)
RULE(copies_are_aligned_to_the_type)
RULE(ub_is_written_before_it_is_read)
RULE(fresh_tensors_are_garbage)
RULE(unpadded_tails_are_garbage)
RULE(copies_are_whole_blocks)
RULE(copies_have_a_length)
RULE(padded_copies_are_whole_elements)
RULE(copies_have_4095_pieces)
RULE(gaps_have_16_bits)
RULE(paddings_have_32_bytes)
