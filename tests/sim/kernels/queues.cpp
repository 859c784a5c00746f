// Queues and buffers.
#include "bench.h"

namespace {

using AscendC::LocalTensor;
using AscendC::TPosition;
using In = AscendC::TQue<TPosition::VECIN, 1>;

__aicore__ inline AscendC::GlobalTensor<float> Tensor(GM_ADDR address) {
  AscendC::GlobalTensor<float> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(address), kSize);
  return tensor;
}

template <bool kept>
__aicore__ inline void tensor_is_freed(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.EnQue(x);
  x = queue.DeQue<float>();  // breaks here
  if constexpr (kept) queue.FreeTensor(x);
}

template <bool kept>
__aicore__ inline void tensor_is_dequeued(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.EnQue(x);  // breaks here
  if constexpr (kept) {
    x = queue.DeQue<float>();
    queue.FreeTensor(x);
  }
}

template <bool kept>
__aicore__ inline void no_use_after_free(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.EnQue(x);
  x = queue.DeQue<float>();
  if constexpr (kept) AscendC::Abs(x, x, kTile);
  queue.FreeTensor(x);
  if constexpr (!kept) AscendC::Abs(x, x, kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void no_use_before_deque(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.EnQue(x);
  if constexpr (!kept) AscendC::Abs(x, x, kTile);  // breaks here
  x = queue.DeQue<float>();
  if constexpr (kept) AscendC::Abs(x, x, kTile);
  queue.FreeTensor(x);
}

template <bool kept>
__aicore__ inline void queue_depth(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TQue<TPosition::VECIN, kept ? 2 : 1> queue;
  pipe.InitBuffer(queue, 2, kTile * sizeof(float));
  LocalTensor<float> x = queue.template AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.EnQue(x);
  LocalTensor<float> y = queue.template AllocTensor<float>();
  AscendC::DataCopy(y, Tensor(in), kTile);
  queue.EnQue(y);  // breaks here
  x = queue.template DeQue<float>();
  queue.FreeTensor(x);
  if constexpr (kept) y = queue.template DeQue<float>();
  queue.FreeTensor(y);
}

template <bool kept>
__aicore__ inline void buffers_suffice(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TQue<TPosition::VECIN, 2> queue;
  pipe.InitBuffer(queue, kept ? 2 : 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  LocalTensor<float> y = queue.AllocTensor<float>();  // breaks here
  queue.FreeTensor(x);
  queue.FreeTensor(y);
}

template <bool kept>
__aicore__ inline void deque_follows_enque(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  if constexpr (kept) queue.EnQue(x);
  x = queue.DeQue<float>();  // breaks here
  queue.FreeTensor(x);
}

template <bool kept>
__aicore__ inline void tensor_returns_to_its_queue(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  In other;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  pipe.InitBuffer(other, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  if constexpr (!kept) other.EnQue(x);  // breaks here
  queue.FreeTensor(x);
}

template <bool kept>
__aicore__ inline void tensor_is_freed_once(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.FreeTensor(x);
  if constexpr (!kept) queue.FreeTensor(x);  // breaks here
}

template <bool kept>
__aicore__ inline void queue_has_buffers(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  if constexpr (kept) pipe.InitBuffer(queue, 1, kTile * sizeof(float));
  LocalTensor<float> x = queue.AllocTensor<float>();  // breaks here
  AscendC::DataCopy(x, Tensor(in), kTile);
  queue.FreeTensor(x);
}

template <bool kept>
__aicore__ inline void eight_buffers_a_position(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  In queue;
  In other;
  pipe.InitBuffer(queue, 4, 32);
  pipe.InitBuffer(other, kept ? 4 : 5, 32);  // breaks here
}

template <bool kept>
__aicore__ inline void sixty_four_buffers(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TBuf<> buffers[65];
  for (int i = 0; i < (kept ? 64 : 65); ++i) {
    pipe.InitBuffer(buffers[i], 32);  // breaks here
  }
}

template <bool kept>
__aicore__ inline void ub_capacity(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TBuf<> most;
  AscendC::TBuf<> rest;
  pipe.InitBuffer(most, 180 * 1024);
  pipe.InitBuffer(rest, 192 * 1024 - 256 - 8192 - 180 * 1024 + !kept);  // breaks here
}

template <bool kept>
__aicore__ inline void one_pipe_at_a_time(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  if constexpr (kept) pipe.Destroy();
  AscendC::TPipe other;  // breaks here
}

template <bool kept>
__aicore__ inline void reset_ends_buffers(GM_ADDR in, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TBuf<> buffer;
  pipe.InitBuffer(buffer, kTile * sizeof(float));
  LocalTensor<float> x = buffer.Get<float>();
  pipe.Reset();
  if constexpr (kept) {
    pipe.InitBuffer(buffer, kTile * sizeof(float));
    x = buffer.Get<float>();
  }
  AscendC::DataCopy(x, Tensor(in), kTile);  // breaks here
}

template <bool kept>
__aicore__ inline void event_ids_suffice(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TEventID ids[9];
  for (int i = 0; i < (kept ? 8 : 9); ++i) {
    ids[i] = pipe.AllocEventID<AscendC::HardEvent::V_S>();  // breaks here
  }
  for (int i = 0; i < 8; ++i) pipe.ReleaseEventID<AscendC::HardEvent::V_S>(ids[i]);
}

template <bool kept>
__aicore__ inline void released_ids_were_allocated(GM_ADDR, GM_ADDR) {
  AscendC::TPipe pipe;
  AscendC::TEventID id = pipe.FetchEventID<AscendC::HardEvent::V_S>();
  if constexpr (kept) id = pipe.AllocEventID<AscendC::HardEvent::V_S>();
  pipe.ReleaseEventID<AscendC::HardEvent::V_S>(id);  // breaks here
}

}  // namespace

RULE(tensor_is_freed)
RULE(tensor_is_dequeued)
RULE(no_use_after_free)
RULE(no_use_before_deque)
RULE(queue_depth)
RULE(buffers_suffice)
RULE(deque_follows_enque)
RULE(tensor_returns_to_its_queue)
RULE(tensor_is_freed_once)
RULE(queue_has_buffers)
RULE(eight_buffers_a_position)
RULE(sixty_four_buffers)
RULE(ub_capacity)
RULE(one_pipe_at_a_time)
RULE(reset_ends_buffers)
RULE(event_ids_suffice)
RULE(released_ids_were_allocated)
