// The arguments of a call, as torch hands them over, and the checks that every op shares.
//
// A function named check_<op>_shapes looks at everything but the values of lengths, tables, slots
// and mappings, so it serves tensors of any device; check_<op>_values reads those values and needs
// them on the host. Nothing is computed or written before every check of a call has passed.
//
// A refusal is a std::runtime_error (RuntimeError in Python) that names the op, the argument, its
// value and what was expected. The package's fake functions refuse the same shapes, dtypes and
// options in the same words.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments/memory.h"
#include "params.h"

namespace paged {

using torch::headeronly::DeviceType;
using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// torch's own name of a dtype.
inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::UInt16:
      return "torch.uint16";
    case ScalarType::UInt32:
      return "torch.uint32";
    case ScalarType::UInt64:
      return "torch.uint64";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    case ScalarType::Float8_e4m3fn:
      return "torch.float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "torch.float8_e5m2";
    default:
      return torch::headeronly::toString(dtype);
  }
}

// The dtype that the ops know by this name; none for one that they don't take.
inline std::optional<Dtype> known_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Char:
      return Dtype::kInt8;
    case ScalarType::Float8_e4m3fn:
      return Dtype::kFloat8E4M3;
    case ScalarType::Float8_e5m2:
      return Dtype::kFloat8E5M2;
    default:
      return std::nullopt;
  }
}

// A tensor argument and its metadata, read once.
class Argument {
 public:
  // Never throws: what can't be read is for Checks::readable to refuse.
  Argument(const char* argument_name, OptionalTensor tensor) noexcept
      : name(argument_name), tensor_(std::move(tensor)) {
    if (!is_given()) return;
    try {
      if (!tensor_->defined()) return;
      dtype = tensor_->scalar_type();
      device = tensor_->device();
      sizes = tensor_->sizes();
      strides = tensor_->strides();
      is_readable_ = true;
    } catch (const std::runtime_error&) {
    }
  }

  // None, where an argument may be left out, is not given.
  bool is_given() const { return tensor_.has_value(); }
  bool is_readable() const { return is_readable_; }
  const Tensor& tensor() const { return *tensor_; }

  int64_t size(int64_t dim) const { return sizes[dim]; }
  int64_t stride(int64_t dim) const { return strides[dim]; }
  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  // Of a tensor of few dimensions: one whose rank was checked.
  const Memory& memory() const {
    if (!memory_.has_value()) {
      const auto element = static_cast<int64_t>(tensor_->element_size());
      memory_.emplace(data(), element, sizes, strides, element);
    }
    return *memory_;
  }
  // For reading; never materialises a lazy copy.
  void* data() const {
    if (data_ == nullptr) data_ = const_cast<void*>(tensor_->const_data_ptr());
    return data_;
  }
  // This does, and moves the data then.
  void* mutable_data() const {
    memory_.reset();
    return data_ = tensor_->mutable_data_ptr();
  }

  const char* name;
  ScalarType dtype = ScalarType::Undefined;
  torch::stable::Device device = DeviceType::CPU;
  IntHeaderOnlyArrayRef sizes;
  IntHeaderOnlyArrayRef strides;

 private:
  OptionalTensor tensor_;
  bool is_readable_ = false;
  // Kept, because asking torch is half of what the checks of a small call cost.
  mutable void* data_ = nullptr;
  mutable std::optional<Memory> memory_;
};

// What torch hands a kernel: the arguments in the order of the schema. Each is taken once, and all
// of them before anything may be refused: what nobody takes is never freed.
class Stack {
 public:
  Stack(StableIValue* values, uint64_t count) : next_(values), end_(values + count) {}

  // That the schema has no more arguments than were taken.
  void check_end() const {
    STD_TORCH_CHECK(next_ == end_, "an op takes another number of arguments than its schema has");
  }

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Argument tensor(const char* name) { return {name, take<Tensor>()}; }
  Argument optional_tensor(const char* name) { return {name, take<OptionalTensor>()}; }

 private:
  StableIValue* next_;
  const StableIValue* end_;
};

// The checks of one call.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  // None reaches an op as an undefined tensor; and torch has dtypes that its stable interface can't
  // name.
  void readable(const Argument& arg) const {
    if (arg.is_readable()) return;
    if (!arg.tensor().defined()) refuse(arg.name, " is None, expected a tensor");
    refuse(arg.name, " has a dtype that no op takes");
  }

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    std::ostringstream message;
    message << "paged::" << op_ << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }

  void rank(const Argument& arg, int64_t expected, const char* shape) const {
    if (arg.rank() != expected) {
      refuse(arg.name, " has ", arg.rank(), " dimensions, expected ", expected, ": ", shape);
    }
  }

  void size(const Argument& arg, int64_t dim, int64_t expected, const char* why) const {
    if (arg.size(dim) != expected) {
      refuse(arg.name, ".shape[", dim, "] is ", arg.size(dim), ", expected ", expected, ": ", why);
    }
  }

  void at_least_one(const Argument& arg, int64_t dim, const char* what) const {
    if (arg.size(dim) < 1)
      refuse(arg.name, ".shape[", dim, "] (", what, ") is 0, expected 1 or more");
  }

  void dtype(const Argument& arg, ScalarType expected, const char* why = "") const {
    if (arg.dtype != expected) {
      refuse(arg.name, " is ", dtype_name(arg.dtype), ", expected ", dtype_name(expected), why);
    }
  }

  // The element type of query, output or new rows.
  Dtype element(const Argument& arg) const {
    const std::optional<Dtype> dtype = known_dtype(arg.dtype);
    if (!dtype.has_value() || is_quantised(*dtype)) {
      refuse(arg.name, " is ", dtype_name(arg.dtype),
             ", expected torch.float32, torch.float16 or torch.bfloat16");
    }
    return *dtype;
  }

  // The element type of a cache that `like`, a float tensor or the cache itself, is used with.
  Dtype cache_element(const Argument& cache, const Argument& like) const {
    const std::optional<Dtype> dtype = known_dtype(cache.dtype);
    if (!dtype.has_value()) {
      refuse(cache.name, " is ", dtype_name(cache.dtype),
             ", expected torch.float32, torch.float16, torch.bfloat16, torch.int8, "
             "torch.float8_e4m3fn or torch.float8_e5m2");
    }
    if (!is_quantised(*dtype) && cache.dtype != like.dtype) {
      refuse(cache.name, " is ", dtype_name(cache.dtype), ", expected ", dtype_name(like.dtype),
             " like ", like.name, ", or a quantised dtype");
    }
    return *dtype;
  }

  void same_device(const Argument& arg, const Argument& like) const {
    if (arg.device != like.device) {
      refuse(arg.name, " is on ", device_name(arg), ", expected ", device_name(like), " like ",
             like.name);
    }
  }

  void dense_last(const Argument& arg) const {
    const int64_t last = arg.rank() - 1;
    if (arg.stride(last) != 1 && arg.size(last) > 1) {
      refuse(arg.name, ".stride(", last, ") is ", arg.stride(last),
             ", expected 1: the last dimension must be dense");
    }
  }

  // Two elements of a tensor that is written must not share memory.
  void no_overlap(const Argument& arg) const {
    if (!arg.memory().shares_with_itself()) return;
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < arg.rank(); ++dim) {
      if (arg.size(dim) > 1) dims.push_back(dim);
    }
    std::sort(dims.begin(), dims.end(),
              [&](int64_t a, int64_t b) { return arg.stride(a) < arg.stride(b); });
    int64_t span = 1;
    for (const int64_t dim : dims) {
      if (arg.stride(dim) < span) {
        refuse(arg.name, ".stride(", dim, ") is ", arg.stride(dim), ", expected ", span,
               " or more: elements that are written must not share memory");
      }
      span += (arg.size(dim) - 1) * arg.stride(dim);
    }
  }

  // Neither does what is written share memory with anything else that the call reads or writes.
  void no_shared_memory(const Argument& written, const Argument& other) const {
    if (!other.is_given() || !written.memory().shares_with(other.memory())) return;
    refuse(other.name, " shares memory with ", written.name,
           ", which is written; expected separate tensors");
  }

 private:
  static std::string device_name(const Argument& arg) {
    std::ostringstream name;
    switch (arg.device.type()) {
      case DeviceType::CPU:
        return "cpu";
      case DeviceType::PrivateUse1:
        name << "npu";
        break;
      default:
        name << "device type " << static_cast<int>(arg.device.type());
    }
    if (arg.device.index() >= 0) name << ':' << static_cast<int>(arg.device.index());
    return name.str();
  }

  const char* op_;
};

// [num_tokens, num_heads, head_dim]
inline Rows rows_of(const Argument& arg) { return {arg.data(), arg.stride(0), arg.stride(1)}; }

// A one-dimensional tensor as a vector of its own, whatever its strides: what was checked is then
// what is used, even if the caller changes the tensor meanwhile.
template <class T, class Element = T>
std::vector<T> copy_of(const Argument& arg) {
  std::vector<T> values(arg.size(0));
  const Element* data = static_cast<const Element*>(arg.data());
  for (int64_t i = 0; i < arg.size(0); ++i) values[i] = static_cast<T>(data[i * arg.stride(0)]);
  return values;
}

// alibi_slopes or sinks as floats: every value of the narrower dtypes is one.
inline std::vector<float> per_head_values(const Argument& arg) {
  if (!arg.is_given()) return {};
  if (arg.dtype == ScalarType::Half) return copy_of<float, torch::headeronly::Half>(arg);
  if (arg.dtype == ScalarType::BFloat16) return copy_of<float, torch::headeronly::BFloat16>(arg);
  return copy_of<float>(arg);
}

}  // namespace paged
