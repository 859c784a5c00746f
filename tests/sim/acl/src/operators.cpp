// The few operators of CANN's library that moving tensors needs: copy a strided tensor, set one to
// zero. An operator is called in two steps: the first keeps the arguments in an executor, the
// second runs it in a stream. Any other operator is missing, and torch_npu says so by name.
#include <cstring>

#include "runtime.h"

struct aclTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements
  std::byte* data;               // of the first element
  size_t element_bytes;
  aclDataType dtype;
};

struct aclOpExecutor {
  sim::Task task;
};

namespace sim {
namespace {

// 0 for types that aren't implemented.
size_t element_bytes(aclDataType dtype) {
  switch (dtype) {
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
      return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
      return 2;
    case ACL_FLOAT:
    case ACL_INT32:
      return 4;
    case ACL_DOUBLE:
    case ACL_INT64:
      return 8;
    default:
      return 0;
  }
}

// `source` as it looks when broadcast to `sizes`: strides of 0 where it repeats.
std::vector<int64_t> broadcast_strides(const aclTensor& source, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 0);
  const size_t missing = sizes.size() - source.sizes.size();
  for (size_t dim = 0; dim < source.sizes.size(); ++dim) {
    if (source.sizes[dim] == sizes[missing + dim]) strides[missing + dim] = source.strides[dim];
  }
  return strides;
}

bool can_broadcast(const aclTensor& source, const std::vector<int64_t>& sizes) {
  if (source.sizes.size() > sizes.size()) return false;
  const size_t missing = sizes.size() - source.sizes.size();
  for (size_t dim = 0; dim < source.sizes.size(); ++dim) {
    if (source.sizes[dim] != sizes[missing + dim] && source.sizes[dim] != 1) return false;
  }
  return true;
}

// Calls visit(offset_a, offset_b), in elements, for every element of two tensors of the same sizes.
template <class Visit>
void for_each_element(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides_a,
                      const std::vector<int64_t>& strides_b, const Visit& visit, size_t dim = 0,
                      int64_t offset_a = 0, int64_t offset_b = 0) {
  if (dim == sizes.size()) return visit(offset_a, offset_b);
  for (int64_t i = 0; i < sizes[dim]; ++i) {
    for_each_element(sizes, strides_a, strides_b, visit, dim + 1, offset_a + i * strides_a[dim],
                     offset_b + i * strides_b[dim]);
  }
}

// That every byte of the tensor lies inside one allocation.
aclError check_bounds(const aclTensor& tensor) {
  int64_t last = 0;
  for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    if (tensor.sizes[dim] == 0) return ACL_SUCCESS;
    last += (tensor.sizes[dim] - 1) * tensor.strides[dim];
  }
  const size_t bytes = (static_cast<size_t>(last) + 1) * tensor.element_bytes;
  if (find_extent(tensor.data, bytes) != nullptr) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_PARAM_INVALID, "a tensor at ", static_cast<void*>(tensor.data),
              " isn't inside one allocation of a device");
}

aclError copy_tensor(const aclTensor& destination, const aclTensor& source) {
  if (const aclError error = check_bounds(destination)) return error;
  if (const aclError error = check_bounds(source)) return error;
  const DeviceAccess access;
  const size_t bytes = destination.element_bytes;
  for_each_element(destination.sizes, destination.strides,
                   broadcast_strides(source, destination.sizes), [&](int64_t to, int64_t from) {
                     std::memcpy(destination.data + to * bytes, source.data + from * bytes, bytes);
                   });
  note_host_write(destination.data, 1);
  return ACL_SUCCESS;
}

aclError zero_tensor(const aclTensor& tensor) {
  if (const aclError error = check_bounds(tensor)) return error;
  const DeviceAccess access;
  for_each_element(tensor.sizes, tensor.strides, tensor.strides, [&](int64_t at, int64_t) {
    std::memset(tensor.data + at * tensor.element_bytes, 0, tensor.element_bytes);
  });
  note_host_write(tensor.data, 1);
  return ACL_SUCCESS;
}

aclError prepare(Task task, uint64_t* workspace_bytes, aclOpExecutor** executor) {
  *workspace_bytes = 0;
  *executor = new aclOpExecutor{std::move(task)};
  return ACL_SUCCESS;
}

aclError execute(aclOpExecutor* executor, aclrtStream stream) {
  const Lock lock;
  const Task task = std::move(executor->task);
  delete executor;
  return submit(stream, task);
}

}  // namespace
}  // namespace sim

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

SIM_EXPORT aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t rank, aclDataType dtype,
                                      const int64_t* strides, int64_t offset, aclFormat,
                                      const int64_t*, uint64_t, void* data) {
  const size_t bytes = sim::element_bytes(dtype);
  return new aclTensor{{sizes, sizes + rank},
                       {strides, strides + rank},
                       static_cast<std::byte*>(data) + offset * static_cast<int64_t>(bytes),
                       bytes,
                       dtype};
}

SIM_EXPORT int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ACL_SUCCESS;
}

SIM_EXPORT int aclnnInplaceCopyGetWorkspaceSize(aclTensor* destination, const aclTensor* source,
                                                uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  if (destination->element_bytes == 0 || destination->dtype != source->dtype) {
    return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "copying tensors of type ",
                     static_cast<int>(source->dtype), " to type ",
                     static_cast<int>(destination->dtype), " isn't implemented");
  }
  if (!sim::can_broadcast(*source, destination->sizes)) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "a copy between tensors of other sizes");
  }
  return sim::prepare([to = *destination, from = *source] { return sim::copy_tensor(to, from); },
                      workspace_bytes, executor);
}

SIM_EXPORT int aclnnInplaceCopy(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return sim::execute(executor, stream);
}

SIM_EXPORT int aclnnInplaceZeroGetWorkspaceSize(aclTensor* tensor, uint64_t* workspace_bytes,
                                                aclOpExecutor** executor) {
  if (tensor->element_bytes == 0) {
    return sim::fail(ACL_ERROR_API_NOT_SUPPORT, "zeroing tensors of type ",
                     static_cast<int>(tensor->dtype), " isn't implemented");
  }
  return sim::prepare([at = *tensor] { return sim::zero_tensor(at); }, workspace_bytes, executor);
}

SIM_EXPORT int aclnnInplaceZero(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  return sim::execute(executor, stream);
}
