// LocalTensor (in a memory of the core) and GlobalTensor (global memory).
#pragma once

#include "runtime.h"

namespace AscendC {

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;

  // Places a tensor of `size` elements at a byte address of its position's memory, without a TPipe.
  LocalTensor(TPosition position, uint32_t addr, uint32_t size, SIM_SITE)
      : view_(sim::PlaceTensor(position, addr, uint64_t{size} * sizeof(T), SIM_HERE)),
        size_(size),
        position_(position) {}

  // For this library: a tensor over a view that the runtime handed out.
  LocalTensor(const sim::LocalView& view, TPosition position)
      : view_(view), size_((view.end - view.addr) / sizeof(T)), position_(position) {}

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.view_.addr += static_cast<uint32_t>(offset * sizeof(T));
    return part;
  }

  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other(view_, position_);
    other.SetSize(static_cast<uint32_t>(size_ * sizeof(T) / sizeof(U)));
    return other;
  }

  T GetValue(uint32_t index, SIM_SITE) const {
    T value{};
    sim::ReadLocal((*this)[index].view_, &value, sizeof(T), SIM_HERE);
    return value;
  }

  template <typename V>
  void SetValue(uint32_t index, V value, SIM_SITE) const {
    const T converted = static_cast<T>(value);
    sim::WriteLocal((*this)[index].view_, &converted, sizeof(T), SIM_HERE);
  }

  void SetSize(uint32_t size) { size_ = size; }
  uint32_t GetSize() const { return size_; }
  int32_t GetPosition() const { return static_cast<int32_t>(position_); }
  uint64_t GetPhyAddr() const { return view_.addr; }
  uint64_t GetPhyAddr(uint32_t offset) const { return view_.addr + uint64_t{offset} * sizeof(T); }

  const sim::LocalView& sim_view() const { return view_; }
  sim::Operand sim_operand(int64_t block = 1, int64_t repeat = 8) const {
    return {view_, sim::TypeOf<T>(), {block, repeat}};
  }

 private:
  sim::LocalView view_;
  uint32_t size_ = 0;
  TPosition position_ = TPosition::VECCALC;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  GlobalTensor() = default;

  void SetGlobalBuffer(__gm__ T* buffer, uint64_t size, SIM_SITE) {
    view_ = sim::GmTensor((const void*)buffer, size * sizeof(T), SIM_HERE);
    size_ = size;
  }

  void SetGlobalBuffer(__gm__ T* buffer, SIM_SITE) {
    view_ = sim::GmTensor((const void*)buffer, UINT64_MAX, SIM_HERE);
    size_ = 0;
  }

  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part = *this;
    part.view_.addr += offset * sizeof(T);
    return part;
  }

  T GetValue(uint64_t offset, SIM_SITE) const {
    T value{};
    sim::ReadGm((*this)[offset].view_, &value, sizeof(T), SIM_HERE);
    return value;
  }

  void SetValue(uint64_t offset, T value, SIM_SITE) {
    sim::WriteGm((*this)[offset].view_, &value, sizeof(T), SIM_HERE);
  }

  const __gm__ T* GetPhyAddr() const { return reinterpret_cast<const __gm__ T*>(view_.addr); }
  __gm__ T* GetPhyAddr(uint64_t offset) const {
    return reinterpret_cast<__gm__ T*>(view_.addr + offset * sizeof(T));
  }
  uint64_t GetSize() const { return size_; }

  const sim::GmView& sim_view() const { return view_; }

 private:
  sim::GmView view_;
  uint64_t size_ = 0;
};

}  // namespace AscendC
