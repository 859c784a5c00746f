// Order between pipes: events and barriers.
#include "bench.h"

namespace {

using AscendC::DataCopy;
using AscendC::HardEvent;
using AscendC::PipeBarrier;
using AscendC::SetFlag;
using AscendC::WaitFlag;

template <bool kept>
__aicore__ inline void v_waits_for_mte2(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kTile);
  if constexpr (kept) Order<HardEvent::MTE2_V>();
  AscendC::Abs(bench.c, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_waits_for_v(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, kTile);
  if constexpr (kept) Order<HardEvent::V_MTE2>();
  DataCopy(bench.a, bench.in, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void mte3_waits_for_v(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  if constexpr (kept) Order<HardEvent::V_MTE3>();
  DataCopy(bench.out, bench.c, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void v_waits_for_mte3(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  bench.Store(bench.c);
  if constexpr (kept) Order<HardEvent::MTE3_V>();
  AscendC::Duplicate(bench.c, 2.0f, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void mte3_waits_for_mte2(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kTile);
  if constexpr (kept) Order<HardEvent::MTE2_MTE3>();
  DataCopy(bench.out, bench.a, kTile);  // breaks here
}

// An order through a third pipe is an order.
template <bool kept>
__aicore__ inline void order_is_transitive(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  if constexpr (kept) Order<HardEvent::V_MTE3>();
  DataCopy(bench.out, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void v_reads_what_v_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.a, 1.0f, kTile);
  if constexpr (kept) PipeBarrier<PIPE_V>();
  AscendC::Abs(bench.c, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void v_writes_what_v_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.a, 1.0f, kTile);
  if constexpr (kept) PipeBarrier<PIPE_V>();
  AscendC::Duplicate(bench.a, 2.0f, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void v_writes_what_v_read(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::Abs(bench.c, bench.a, kTile);
  if constexpr (kept) PipeBarrier<PIPE_V>();
  AscendC::Duplicate(bench.a, 2.0f, kTile);  // breaks here
}

// Results of one repeat in neighbouring elements of a block don't meet.
template <bool kept>
__aicore__ inline void v_writes_neighbours(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  bench.Load();
  AscendC::WholeReduceSum(bench.c, bench.a, 64, 1, 1, 1, 8);
  AscendC::WholeReduceSum(bench.c[kept ? 1 : 0], bench.b, 64, 1, 1, 1, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_writes_what_mte2_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kTile);
  if constexpr (kept) PipeBarrier<PIPE_MTE2>();
  DataCopy(bench.a, bench.in[kTile], kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void mte3_writes_what_mte3_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  bench.Store(bench.c);
  if constexpr (kept) PipeBarrier<PIPE_MTE3>();
  DataCopy(bench.out[8], bench.c, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void mte2_reads_what_mte3_wrote(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  bench.Store(bench.c);
  if constexpr (kept) Order<HardEvent::MTE3_MTE2>();
  DataCopy(bench.a, bench.out, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void scalar_waits_for_v(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::Duplicate(bench.c, 1.0f, kTile);
  if constexpr (kept) Order<HardEvent::V_S>();
  (void)bench.c.GetValue(3);  // breaks here
}

template <bool kept>
__aicore__ inline void scalar_waits_for_mte2(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kTile);
  if constexpr (kept) Order<HardEvent::MTE2_S>();
  (void)bench.a.GetValue(3);  // breaks here
}

template <bool kept>
__aicore__ inline void v_waits_for_scalar(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  for (uint32_t i = 0; i < 8; ++i) bench.a.SetValue(i, 1.0f);
  if constexpr (kept) Order<HardEvent::S_V>();
  AscendC::Abs(bench.c, bench.a, 8);  // breaks here
}

template <bool kept>
__aicore__ inline void barrier_all_orders_everything(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  DataCopy(bench.a, bench.in, kTile);
  if constexpr (kept) PipeBarrier<PIPE_ALL>();
  if constexpr (!kept) PipeBarrier<PIPE_MTE2>();
  AscendC::Abs(bench.c, bench.a, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void wait_follows_set(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if constexpr (kept) SetFlag<HardEvent::MTE2_V>(EVENT_ID1);
  WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);  // breaks here
}

template <bool kept>
__aicore__ inline void set_is_waited_for(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  SetFlag<HardEvent::MTE2_V>(EVENT_ID1);  // breaks here
  if constexpr (kept) WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);
}

template <bool kept>
__aicore__ inline void set_once_before_wait(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  SetFlag<HardEvent::MTE2_V>(EVENT_ID1);
  if constexpr (kept) WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);
  SetFlag<HardEvent::MTE2_V>(EVENT_ID1);  // breaks here
  WaitFlag<HardEvent::MTE2_V>(EVENT_ID1);
}

template <bool kept>
__aicore__ inline void events_have_eight_ids(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  if constexpr (kept) SetFlag<HardEvent::MTE2_V>(5);
  if constexpr (!kept) SetFlag<HardEvent::MTE2_V>(8);  // breaks here
  if constexpr (kept) WaitFlag<HardEvent::MTE2_V>(5);
}

template <bool kept>
__aicore__ inline void two_event_ids_are_reserved(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  SetFlag<HardEvent::MTE2_V>(kept ? 5 : 6);  // breaks here
  if constexpr (kept) WaitFlag<HardEvent::MTE2_V>(5);
}

template <bool kept>
__aicore__ inline void queues_hold_event_ids(GM_ADDR in, GM_ADDR out) {
  Bench bench(in, out);
  AscendC::TQue<AscendC::TPosition::VECIN, 1> queue;
  bench.pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  AscendC::LocalTensor<float> x = queue.AllocTensor<float>();
  DataCopy(x, bench.in, kTile);
  queue.EnQue(x);
  const int32_t id = kept ? bench.pipe.FetchEventID<HardEvent::MTE2_V>() : 0;
  SetFlag<HardEvent::MTE2_V>(id);  // breaks here
  if constexpr (kept) WaitFlag<HardEvent::MTE2_V>(id);
  x = queue.DeQue<float>();
  queue.FreeTensor(x);
}

}  // namespace

RULE(v_waits_for_mte2)
RULE(mte2_waits_for_v)
RULE(mte3_waits_for_v)
RULE(v_waits_for_mte3)
RULE(mte3_waits_for_mte2)
RULE(order_is_transitive)
RULE(v_reads_what_v_wrote)
RULE(v_writes_what_v_wrote)
RULE(v_writes_what_v_read)
RULE(v_writes_neighbours)
RULE(mte2_writes_what_mte2_wrote)
RULE(mte3_writes_what_mte3_wrote)
RULE(mte2_reads_what_mte3_wrote)
RULE(scalar_waits_for_v)
RULE(scalar_waits_for_mte2)
RULE(v_waits_for_scalar)
RULE(barrier_all_orders_everything)
RULE(wait_follows_set)
RULE(set_is_waited_for)
RULE(set_once_before_wait)
RULE(events_have_eight_ids)
RULE(two_event_ids_are_reserved)
RULE(queues_hold_event_ids)
