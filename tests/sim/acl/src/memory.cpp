// Device memory and the copies in and out of it.
//
// Each device owns a range of addresses of its own. The pages are out of reach (PROT_NONE) except
// while an entry point needs them, so host code that follows a device pointer dies at once, as it
// would with a real NPU. New memory holds garbage that can't be mistaken for anything: 0x7fff in
// every 16 bits is NaN in float32, float16 and bfloat16, and a huge number in int32 and int64. Only
// allocations of more than a GiB are left as they are, zero, to be as large as a test needs and
// still cost no more than what is touched.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "runtime.h"

namespace sim {
namespace {

constexpr size_t kDeviceBytes = size_t{64} << 30;  // as a 910B has; the host lends what is touched
constexpr size_t kMostGarbageBytes = size_t{1} << 30;
constexpr size_t kPageBytes = 4096;
constexpr size_t kQuarantineBytes = 64 << 20;
constexpr uint16_t kGarbage = 0x7fff;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

void fill_with_garbage(std::byte* begin, size_t bytes) {
  std::fill_n(reinterpret_cast<uint16_t*>(begin), bytes / 2, kGarbage);
  if (bytes % 2 == 1) begin[bytes - 1] = std::byte{0x7f};
}

std::byte* reserve_addresses() {
  void* range =
      mmap(nullptr, kDeviceBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    std::perror("simulated device memory");
    std::abort();
  }
  // Changing what may be done with a page costs time for each, so they should be few.
  madvise(range, kDeviceBytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(range);
}

// The memory of one device. Allocations start on pages of their own.
class Memory {
 public:
  explicit Memory(int device)
      : device_(device), base_(reserve_addresses()), high_water_(base_), next_(base_) {}

  // Only what was ever allocated, so that it costs little.
  void set_access(int protection) {
    if (high_water_ > base_) mprotect(base_, high_water_ - base_, protection);
  }

  std::byte* allocate(size_t bytes) {
    const size_t pages = round_up(std::max<size_t>(bytes, 1), kPageBytes);
    std::byte* begin = find_room(pages);
    if (begin == nullptr) return nullptr;
    const bool garbage = bytes <= kMostGarbageBytes;
    extents_[begin] = {begin, bytes, device_, !garbage};
    high_water_ = std::max(high_water_, begin + pages);
    next_ = begin + pages;
    used_ += pages;
    const DeviceAccess access;
    if (garbage) fill_with_garbage(begin, bytes);
    core_learns(extents_[begin]);
    return begin;
  }

  bool free(void* p) {
    const auto found = extents_.find(static_cast<std::byte*>(p));
    if (found == extents_.end()) return false;
    const size_t pages = round_up(std::max<size_t>(found->second.bytes, 1), kPageBytes);
    core_forgets(found->second);
    madvise(found->second.begin, pages, MADV_DONTNEED);
    used_ -= pages;
    extents_.erase(found);
    return true;
  }

  bool contains(const void* p) const {
    const auto* address = static_cast<const std::byte*>(p);
    return address >= base_ && address < base_ + kDeviceBytes;
  }

  Extent* find(const void* p, size_t bytes) {
    const auto* address = static_cast<const std::byte*>(p);
    auto after = extents_.upper_bound(const_cast<std::byte*>(address));
    if (after == extents_.begin()) return nullptr;
    Extent& extent = std::prev(after)->second;
    return address + bytes <= extent.begin + extent.bytes ? &extent : nullptr;
  }

  const std::map<std::byte*, Extent>& extents() const { return extents_; }
  size_t used() const { return used_; }

 private:
  // The first gap after the last allocation, or from the beginning again: an address that was freed
  // stays unused for some time, so that using it is noticed.
  std::byte* find_room(size_t pages) const {
    const bool far = next_ > base_ + 2 * used_ + kQuarantineBytes;
    for (std::byte* start : {far ? base_ : next_, base_}) {
      std::byte* candidate = start;
      for (auto it = extents_.lower_bound(start); it != extents_.end(); ++it) {
        if (candidate + pages <= it->first) return candidate;
        candidate = it->first + round_up(std::max<size_t>(it->second.bytes, 1), kPageBytes);
      }
      if (candidate + pages <= base_ + kDeviceBytes) return candidate;
    }
    return nullptr;
  }

  int device_;
  std::byte* base_;
  std::byte* high_water_;  // the end of all that was ever allocated
  std::byte* next_;        // the end of the last allocation
  size_t used_ = 0;
  std::map<std::byte*, Extent> extents_;
};

Memory& memory(int device) {
  static Memory devices[kNumDevices] = {Memory(0), Memory(1)};
  return devices[device];
}

int device_of(const void* p) {
  for (int device = 0; device < kNumDevices; ++device) {
    if (memory(device).contains(p)) return device;
  }
  return -1;
}

void set_access(int protection) {
  for (int device = 0; device < kNumDevices; ++device) memory(device).set_access(protection);
}

std::map<void*, size_t>& pinned() {
  static std::map<void*, size_t> allocations;
  return allocations;
}

const char* kind_name(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return "host to host";
    case ACL_MEMCPY_HOST_TO_DEVICE:
      return "host to device";
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return "device to host";
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
      return "device to device";
    case ACL_MEMCPY_DEFAULT:
      return "default";
    default:
      return "other";
  }
}

// One end of a copy: it must be where the kind says, and inside one allocation if on a device.
aclError check_end(const char* end, const void* p, size_t bytes, bool on_device,
                   aclrtMemcpyKind kind) {
  const int device = device_of(p);
  if ((device >= 0) != on_device && kind != ACL_MEMCPY_DEFAULT) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy of kind ", kind_name(kind), " has its ", end,
                " ", p, " on the ", device >= 0 ? "device" : "host");
  }
  if (device >= 0 && find_extent(p, bytes) == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy's ", end, ", ", bytes, " bytes at ", p,
                ", isn't inside one allocation of device ", device);
  }
  return ACL_SUCCESS;
}

aclError copy(void* destination, size_t room, const void* source, size_t bytes,
              aclrtMemcpyKind kind) {
  if (bytes > room) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy of ", bytes, " bytes into room for ", room);
  }
  if (kind > ACL_MEMCPY_DEFAULT) {
    return fail(ACL_ERROR_API_NOT_SUPPORT, "copies of kind ", static_cast<int>(kind),
                " aren't implemented");
  }
  const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (const aclError error = check_end("destination", destination, bytes, to_device, kind)) {
    return error;
  }
  if (const aclError error = check_end("source", source, bytes, from_device, kind)) return error;
  const DeviceAccess access;
  std::memmove(destination, source, bytes);
  note_host_write(destination, bytes);
  return ACL_SUCCESS;
}

aclError set_bytes(void* p, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, "setting ", bytes, " bytes in room for ", room);
  }
  if (find_extent(p, bytes) == nullptr) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, bytes, " bytes at ", p,
                " aren't inside one allocation of a device");
  }
  const DeviceAccess access;
  std::memset(p, value, bytes);
  note_host_write(p, bytes);
  return ACL_SUCCESS;
}

}  // namespace

DeviceAccess::DeviceAccess() {
  ++depth_;
  set_access(PROT_READ | PROT_WRITE);  // again in a nested one: there may be more memory since
}

DeviceAccess::~DeviceAccess() {
  if (--depth_ == 0) set_access(PROT_NONE);
}

Extent* find_extent(const void* p, size_t bytes) {
  const int device = device_of(p);
  return device < 0 ? nullptr : memory(device).find(p, bytes);
}

void for_each_extent(const std::function<void(const Extent&)>& visit) {
  for (int device = 0; device < kNumDevices; ++device) {
    for (const auto& [begin, extent] : memory(device).extents()) visit(extent);
  }
}

void note_host_write(void* p, size_t bytes) {
  Extent* extent = find_extent(p, bytes);
  if (extent == nullptr || extent->written) return;
  extent->written = true;
  core_forgets(*extent);
  core_learns(*extent);
}

std::byte* allocate_device(int device, size_t bytes) { return memory(device).allocate(bytes); }

void free_device(void* p) { memory(device_of(p)).free(p); }

size_t device_bytes_total() { return kDeviceBytes; }

size_t device_bytes_used(int device) { return memory(device).used(); }

}  // namespace sim

using sim::Lock;

aclError aclrtMalloc(void** p, size_t bytes, aclrtMemMallocPolicy) {
  const Lock lock;
  if (sim::current_device() < 0) {
    return sim::fail(ACL_ERROR_RT_CONTEXT_NULL,
                     "memory needs a device: aclrtSetDevice comes first");
  }
  if (bytes == 0) return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "an allocation of 0 bytes");
  *p = sim::allocate_device(sim::current_device(), bytes);
  if (*p != nullptr) return ACL_SUCCESS;
  return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device ", sim::current_device(),
                   " has no room for ", bytes, " bytes");
}

aclError aclrtMallocAlign32(void** p, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(p, bytes, policy);
}

aclError aclrtFree(void* p) {
  const Lock lock;
  sim::Extent* extent = sim::find_extent(p, 0);
  if (extent == nullptr || extent->begin != p) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, p, " is no allocation of a device");
  }
  sim::free_device(p);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** p, size_t bytes) {
  const Lock lock;
  if (posix_memalign(p, sim::kPageBytes, std::max<size_t>(bytes, 1)) != 0) {
    return sim::fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no room for ", bytes, " bytes");
  }
  sim::fill_with_garbage(static_cast<std::byte*>(*p), bytes);
  sim::pinned()[*p] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* p) {
  const Lock lock;
  if (sim::pinned().erase(p) == 0) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, p, " is no pinned allocation");
  }
  std::free(p);
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* destination, size_t room, const void* source, size_t bytes,
                     aclrtMemcpyKind kind) {
  const Lock lock;
  if (const aclError error = sim::check_not_capturing("aclrtMemcpy")) return error;
  return sim::copy(destination, room, source, bytes, kind);
}

aclError aclrtMemcpyAsync(void* destination, size_t room, const void* source, size_t bytes,
                          aclrtMemcpyKind kind, aclrtStream stream) {
  const Lock lock;
  return sim::submit(stream, [=] { return sim::copy(destination, room, source, bytes, kind); });
}

aclError aclrtMemset(void* p, size_t room, int32_t value, size_t bytes) {
  const Lock lock;
  if (const aclError error = sim::check_not_capturing("aclrtMemset")) return error;
  return sim::set_bytes(p, room, value, bytes);
}

aclError aclrtMemsetAsync(void* p, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  const Lock lock;
  return sim::submit(stream, [=] { return sim::set_bytes(p, room, value, bytes); });
}
