// TPipe, the queues TQueBind and TQue, and TBuf.
#pragma once

#include "params.h"
#include "tensor.h"

namespace AscendC {

// A queue between two stages. `src` fills a tensor, `dst` consumes it: VECIN stands for GM -> UB by
// MTE2, VECOUT for UB -> GM by MTE3, and both compute on V on their other side. A1 and B1 stand for
// GM -> L1, A2 and B2 for L1 -> L0, CO1 for the product on its way to GM.
template <TPosition src, TPosition dst, int32_t depth, int32_t mask = 0>
class TQueBind {
  static_assert(depth > 0,
                "TQue: depth 0 is the in-place form, which this simulator does not have");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor(SIM_SITE) {
    return {sim::QueueAlloc(id_, SIM_HERE), src};
  }

  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor, SIM_SITE) {
    return sim::QueueEnque(id_, tensor.sim_view(), SIM_HERE);
  }

  template <typename T>
  LocalTensor<T> DeQue(SIM_SITE) {
    return {sim::QueueDeque(id_, SIM_HERE), dst};
  }

  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor, SIM_SITE) {
    sim::QueueFree(id_, tensor.sim_view(), SIM_HERE);
  }

  void FreeAllEvent(SIM_SITE) { sim::QueueFreeAllEvents(id_, SIM_HERE); }
  int32_t GetTensorCountInQue(SIM_SITE) { return sim::QueueCount(id_, SIM_HERE); }
  bool HasTensorInQue(SIM_SITE) { return sim::QueueCount(id_, SIM_HERE) > 0; }
  bool VacantInQue(SIM_SITE) { return sim::QueueVacant(id_, SIM_HERE); }
  bool HasIdleBuffer(SIM_SITE) { return sim::QueueHasIdle(id_, SIM_HERE); }

 private:
  friend class TPipe;
  static constexpr TPosition kSource = src;
  static constexpr TPosition kDestination = dst;
  static constexpr int32_t kDepth = depth;

  int id_ = -1;
};

template <TPosition position, int32_t depth, int32_t mask = 0>
class TQue : public TQueBind<position, position, depth, mask> {
  static_assert(position == TPosition::VECIN || position == TPosition::VECOUT ||
                    position == TPosition::A1 || position == TPosition::B1 ||
                    position == TPosition::A2 || position == TPosition::B2 ||
                    position == TPosition::CO1,
                "TQue: a vector core has queues at VECIN and VECOUT, a cube core at A1, B1, A2, B2 "
                "and CO1");
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
  static_assert(position == TPosition::VECCALC || position == TPosition::VECIN ||
                    position == TPosition::VECOUT || sim::SpaceOf(position) != sim::Space::kUb,
                "TBuf: a vector core has buffers at VECCALC, VECIN and VECOUT, a cube core at A1, "
                "B1, C1, A2, B2 and CO1");

 public:
  template <typename T>
  LocalTensor<T> Get() {
    return {view_, position};
  }

  template <typename T>
  LocalTensor<T> Get(uint32_t len) {
    return GetWithOffset<T>(len, 0);
  }

  // `size` in elements, `offset` in bytes.
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t offset) {
    sim::LocalView part = view_;
    part.addr += offset;
    part.begin = part.addr;
    const uint64_t end = part.addr + uint64_t{size} * sizeof(T);
    part.end = static_cast<uint32_t>(end < view_.end ? end : view_.end);
    LocalTensor<T> tensor(part, position);
    tensor.SetSize(size);
    return tensor;
  }

 private:
  friend class TPipe;
  sim::LocalView view_;
};

class TPipe {
 public:
  TPipe(SIM_SITE) : site_{site_file, site_line} { sim::PipeInit(this, site_); }  // NOLINT
  ~TPipe() {
    if (alive_) sim::PipeDestroy(site_);
  }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  void Init(SIM_SITE) {
    sim::PipeInit(this, SIM_HERE);
    alive_ = true;
  }

  template <typename Queue>
  bool InitBuffer(Queue& queue, sim::Field<uint8_t> num, uint32_t len, SIM_SITE) {
    queue.id_ =
        sim::InitQueue(Queue::kSource, Queue::kDestination, Queue::kDepth, num, len, SIM_HERE);
    return true;
  }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t len, SIM_SITE) {
    buffer.view_ = sim::InitTBuf(position, len, SIM_HERE);
    return true;
  }

  void Reset(SIM_SITE) { sim::PipeReset(SIM_HERE); }
  void Destroy(SIM_SITE) {
    sim::PipeDestroy(SIM_HERE);
    alive_ = false;
  }

  template <HardEvent event>
  TEventID AllocEventID(SIM_SITE) {
    return sim::AllocEvent(event, SIM_HERE);
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, SIM_SITE) {
    sim::ReleaseEvent(event, id, SIM_HERE);
  }
  template <HardEvent event>
  TEventID FetchEventID(SIM_SITE) {
    return sim::FetchEvent(event, SIM_HERE);
  }
  TEventID FetchEventID(HardEvent event, SIM_SITE) { return sim::FetchEvent(event, SIM_HERE); }

 private:
  sim::Site site_;
  bool alive_ = true;
};

inline TPipe* GetTPipePtr() { return static_cast<TPipe*>(sim::CurrentPipe()); }

}  // namespace AscendC
