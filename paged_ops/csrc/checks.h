// Validates the arguments of each op and fills its params struct. Nothing is computed or written
// before every check of a call has passed.
//
// A function named check_<op>_shapes looks at everything but the values of lengths, tables, slots
// and mappings, so it serves tensors of any device; check_<op>_values reads those values and needs
// them on the host. check_<op> is both, for the CPU.
//
// A refusal is a std::runtime_error (RuntimeError in Python) that names the op, the argument, its
// value and what was expected. paged_ops/ops/registration.py refuses the same shapes, dtypes and options in the
// same words for fake tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace paged {

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
struct Argument {
  Argument(const char* argument_name, const Tensor& argument)
      : name(argument_name),
        tensor(argument),
        dtype(argument.scalar_type()),
        sizes(argument.sizes()),
        strides(argument.strides()) {}

  int64_t size(int64_t dim) const { return sizes[dim]; }
  int64_t stride(int64_t dim) const { return strides[dim]; }
  int64_t rank() const { return static_cast<int64_t>(sizes.size()); }
  // For reading; never materialises a lazy copy.
  void* data() const { return const_cast<void*>(tensor.const_data_ptr()); }

  const char* name;
  const Tensor& tensor;
  ScalarType dtype;
  IntHeaderOnlyArrayRef sizes;
  IntHeaderOnlyArrayRef strides;
};

// The checks of one call.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  // Reads a tensor's metadata. None reaches an op as an undefined tensor; and torch has dtypes that
  // its stable interface can't name.
  Argument argument(const char* name, const Tensor& tensor) const {
    if (!tensor.defined()) refuse(name, " is None, expected a tensor");
    try {
      return Argument(name, tensor);
    } catch (const std::runtime_error&) {
      refuse(name, " has a dtype that no op takes");
    }
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
    if (arg.tensor.device() != like.tensor.device()) {
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

  // Two elements of a tensor that is written must not share memory: each dimension must step over
  // all that the dimensions of smaller stride span.
  void no_overlap(const Argument& arg) const {
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < arg.rank(); ++dim) {
      if (arg.size(dim) == 0) return;
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

  void no_shared_memory(const Argument& written, const Argument& read) const {
    const auto [written_begin, written_end] = extent(written);
    const auto [read_begin, read_end] = extent(read);
    if (written_begin < read_end && read_begin < written_end) {
      refuse(read.name, " shares memory with ", written.name,
             ", which is written; expected separate tensors");
    }
  }

 private:
  struct Extent {
    uintptr_t begin;
    uintptr_t end;
  };

  static Extent extent(const Argument& arg) {
    int64_t elements = 1;
    for (int64_t dim = 0; dim < arg.rank(); ++dim) {
      if (arg.size(dim) == 0) return {0, 0};
      elements += (arg.size(dim) - 1) * arg.stride(dim);
    }
    const auto begin = reinterpret_cast<uintptr_t>(arg.data());
    return {begin, begin + static_cast<uintptr_t>(elements) * arg.tensor.element_size()};
  }

  static std::string device_name(const Argument& arg) {
    const auto device = arg.tensor.device();
    std::ostringstream name;
    switch (device.type()) {
      case torch::headeronly::DeviceType::CPU:
        return "cpu";
      case torch::headeronly::DeviceType::PrivateUse1:
        name << "npu";
        break;
      default:
        name << "device type " << static_cast<int>(device.type());
    }
    if (device.index() >= 0) name << ':' << static_cast<int>(device.index());
    return name.str();
  }

  const char* op_;
};

// One half of the pool, without its scales.
inline Cache cache_of(const Argument& arg) {
  return {arg.data(), arg.size(3), arg.stride(0), arg.stride(1), arg.stride(2), {}};
}

// [num_tokens, num_heads, head_dim]
inline Rows rows_of(const Argument& arg) { return {arg.data(), arg.stride(0), arg.stride(1)}; }

inline Rows written_rows_of(const Argument& arg) {
  return {arg.tensor.mutable_data_ptr(), arg.stride(0), arg.stride(1)};
}

// The scale of a float8 cache that is given none.
inline constexpr float kUnitScale = 1.0f;

// key_scale or value_scale, the scales of `cache`: one, one per head, or one per token and head.
inline Scales check_scale(const Checks& checks, const char* name, const OptionalTensor& tensor,
                          const Argument& cache, bool is_cache_quantised) {
  if (!is_cache_quantised) {
    if (!tensor.has_value()) return {};
    checks.refuse(name, " is a tensor, expected None: ", cache.name, " is ",
                  dtype_name(cache.dtype), ", which has no scales");
  }
  if (!tensor.has_value()) {
    if (cache.dtype == ScalarType::Char) {
      checks.refuse(name, " is None, expected a tensor: ", cache.name,
                    " is torch.int8, which means nothing without its scales");
    }
    return {const_cast<float*>(&kUnitScale), 0, 0, 0, false};
  }
  const Argument scale = checks.argument(name, *tensor);
  checks.dtype(scale, ScalarType::Float);
  checks.same_device(scale, cache);
  float* data = static_cast<float*>(scale.data());
  if (scale.rank() == 0) return {data, 0, 0, 0, false};
  if (scale.rank() == 1) {
    checks.size(scale, 0, cache.size(2), "num_kv_heads of the cache");
    return {data, 0, 0, scale.stride(0), false};
  }
  if (scale.rank() != 3) {
    checks.refuse(name, " has ", scale.rank(),
                  " dimensions, expected 0, 1 or 3: [], [num_kv_heads] or [num_blocks, block_size, "
                  "num_kv_heads]");
  }
  checks.size(scale, 0, cache.size(0), "num_blocks of the cache");
  checks.size(scale, 1, cache.size(1), "block_size of the cache");
  checks.size(scale, 2, cache.size(2), "num_kv_heads of the cache");
  return {data, scale.stride(0), scale.stride(1), scale.stride(2), true};
}

// key_scale and value_scale as the caller gives them.
struct ScaleArguments {
  const OptionalTensor& key_scale;
  const OptionalTensor& value_scale;
};

// key_cache and value_cache: shapes, dtype, device, scales. `like` is what they are used with:
// floats of the caches' dtype, or any floats where the caches are quantised.
inline Pool check_pool(const Checks& checks, const Argument& key_cache, const Argument& value_cache,
                       const Argument& like, const ScaleArguments& scales) {
  for (const Argument* cache : {&key_cache, &value_cache}) {
    checks.rank(*cache, 4, "[num_blocks, block_size, num_kv_heads, head_dim]");
    checks.cache_element(*cache, like);
    checks.same_device(*cache, like);
    checks.dense_last(*cache);
    checks.at_least_one(*cache, 1, "block_size");
    checks.at_least_one(*cache, 2, "num_kv_heads");
    checks.at_least_one(*cache, 3, "head_dim");
  }
  checks.dtype(value_cache, key_cache.dtype, " like key_cache");
  checks.size(value_cache, 0, key_cache.size(0), "num_blocks of key_cache");
  checks.size(value_cache, 1, key_cache.size(1), "block_size of key_cache");
  checks.size(value_cache, 2, key_cache.size(2), "num_kv_heads of key_cache");
  Pool pool = {checks.cache_element(key_cache, like),
               key_cache.size(0),
               key_cache.size(1),
               key_cache.size(2),
               cache_of(key_cache),
               cache_of(value_cache)};
  const bool is_quantised_pool = is_quantised(pool.dtype);
  pool.key.scales =
      check_scale(checks, "key_scale", scales.key_scale, key_cache, is_quantised_pool);
  pool.value.scales =
      check_scale(checks, "value_scale", scales.value_scale, value_cache, is_quantised_pool);
  if (scales.key_scale.has_value() != scales.value_scale.has_value()) {
    checks.refuse(scales.key_scale.has_value() ? "value_scale" : "key_scale",
                  " is None, expected a tensor: the other scale is given");
  }
  return pool;
}

// Makes `pool` one that is written: its caches, and the scales that come with each token. None of
// them may share memory with anything else that the call reads or writes; but V may be a view of K.
inline void check_written_pool(const Checks& checks, const Argument& key_cache,
                               const Argument& value_cache, const ScaleArguments& scales,
                               Pool& pool) {
  checks.no_overlap(key_cache);
  checks.no_overlap(value_cache);
  pool.key.data = key_cache.tensor.mutable_data_ptr();
  pool.value.data = value_cache.tensor.mutable_data_ptr();
  const auto check_written_scale = [&](const char* name, const OptionalTensor& tensor,
                                       Cache& cache) {
    if (!tensor.has_value()) return;
    const Argument scale(name, *tensor);
    checks.no_shared_memory(key_cache, scale);
    checks.no_shared_memory(value_cache, scale);
    if (!cache.scales.are_per_token) return;
    checks.no_overlap(scale);
    cache.scales.data = static_cast<float*>(scale.tensor.mutable_data_ptr());
  };
  check_written_scale("key_scale", scales.key_scale, pool.key);
  check_written_scale("value_scale", scales.value_scale, pool.value);
}

// A one-dimensional tensor as a vector of its own, whatever its strides: what was checked is then
// what is used, even if the caller changes the tensor meanwhile.
template <class T, class Element = T>
std::vector<T> copy_of(const Argument& arg) {
  std::vector<T> values(arg.size(0));
  const Element* data = static_cast<const Element*>(arg.data());
  for (int64_t i = 0; i < arg.size(0); ++i) values[i] = static_cast<T>(data[i * arg.stride(0)]);
  return values;
}

inline void check_length_shapes(const Checks& checks, const Argument& block_tables,
                                const Argument& seq_lens, const Argument& like) {
  checks.rank(block_tables, 2, "[batch, max_blocks_per_seq]");
  checks.rank(seq_lens, 1, "[batch]");
  checks.dtype(block_tables, ScalarType::Int);
  checks.dtype(seq_lens, ScalarType::Int);
  checks.same_device(block_tables, like);
  checks.same_device(seq_lens, like);
  checks.size(block_tables, 0, seq_lens.size(0), "batch, the length of seq_lens");
}

// Lengths that fit the table.
inline std::vector<int32_t> check_length_values(const Checks& checks, const Pool& pool,
                                                const Argument& block_tables,
                                                const Argument& seq_lens) {
  std::vector<int32_t> lengths = copy_of<int32_t>(seq_lens);
  const int64_t columns = block_tables.size(1);
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t length = lengths[i];
    if (length < 0) checks.refuse("seq_lens[", i, "] is ", length, ", expected 0 or more");
    if (length > 0 && (length - 1) / pool.block_size >= columns) {
      checks.refuse("seq_lens[", i, "] is ", length, ", expected at most ",
                    columns * pool.block_size, ": block_tables has ", columns, " blocks of ",
                    pool.block_size, " tokens in a row");
    }
  }
  return lengths;
}

inline BlockTables tables_of(const Argument& arg) {
  return {static_cast<const int32_t*>(arg.data()), arg.stride(0), arg.stride(1)};
}

// The ids of the blocks that hold keys [first, last) of a sequence.
inline void check_block_ids(const Checks& checks, const Pool& pool, const BlockTables& tables,
                            int64_t sequence, const Visible& keys) {
  if (keys.first >= keys.last) return;
  const int64_t end = (keys.last - 1) / pool.block_size + 1;
  for (int64_t column = keys.first / pool.block_size; column < end; ++column) {
    const int64_t id = tables.at(sequence, column);
    if (id < 0 || id >= pool.num_blocks) {
      checks.refuse("block_tables[", sequence, ", ", column, "] is ", id, ", expected 0 to ",
                    pool.num_blocks - 1, ": key_cache has ", pool.num_blocks, " blocks");
    }
  }
}

inline void check_query_start_loc_shape(const Checks& checks, const OptionalTensor& tensor,
                                        const Argument& query, int64_t batch) {
  if (!tensor.has_value()) {
    if (query.size(0) != batch) {
      checks.refuse("query.shape[0] is ", query.size(0), ", expected ", batch,
                    ": without query_start_loc every sequence has one query token");
    }
    return;
  }
  const Argument arg = checks.argument("query_start_loc", *tensor);
  checks.rank(arg, 1, "[batch + 1]");
  checks.dtype(arg, ScalarType::Int);
  checks.same_device(arg, query);
  checks.size(arg, 0, batch + 1, "batch + 1");
}

// query_start_loc, or one query token per sequence where it is None.
inline std::vector<int32_t> check_query_start_loc_values(const Checks& checks,
                                                         const OptionalTensor& tensor,
                                                         int64_t num_tokens, int64_t batch) {
  if (!tensor.has_value()) {
    std::vector<int32_t> starts(batch + 1);
    for (int64_t i = 0; i <= batch; ++i) starts[i] = static_cast<int32_t>(i);
    return starts;
  }
  std::vector<int32_t> starts = copy_of<int32_t>(Argument("query_start_loc", *tensor));
  if (starts[0] != 0) checks.refuse("query_start_loc[0] is ", starts[0], ", expected 0");
  for (int64_t i = 0; i < batch; ++i) {
    if (starts[i + 1] < starts[i]) {
      checks.refuse("query_start_loc[", i + 1, "] is ", starts[i + 1], ", expected ", starts[i],
                    " or more: it must not decrease");
    }
  }
  if (starts[batch] != num_tokens) {
    checks.refuse("query_start_loc[", batch, "] is ", starts[batch], ", expected ", num_tokens,
                  ": the number of query tokens");
  }
  return starts;
}

// alibi_slopes or sinks.
inline void check_per_head_shape(const Checks& checks, const char* name,
                                 const OptionalTensor& tensor, const Argument& query) {
  if (!tensor.has_value()) return;
  const Argument arg = checks.argument(name, *tensor);
  checks.rank(arg, 1, "[num_heads]");
  checks.dtype(arg, ScalarType::Float);
  checks.same_device(arg, query);
  checks.size(arg, 0, query.size(1), "num_heads of query");
}

inline std::vector<float> per_head_values(const char* name, const OptionalTensor& tensor) {
  return tensor.has_value() ? copy_of<float>(Argument(name, *tensor)) : std::vector<float>();
}

// The options of attention as the caller gives them.
struct AttentionOptions {
  std::optional<double> scale;
  bool causal;
  std::optional<int64_t> sliding_window;
  double softcap;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& sinks;
  const OptionalTensor& key_scale;
  const OptionalTensor& value_scale;
  const OptionalTensor& tree_mask;
};

inline void check_scalars(const Checks& checks, const AttentionOptions& options, int64_t head_dim,
                          AttentionParams& params) {
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  params.scale = static_cast<float>(scale);
  if (!std::isfinite(params.scale))
    checks.refuse("scale is ", scale, ", expected a finite float32");
  params.softcap = static_cast<float>(options.softcap);
  if (!(options.softcap >= 0.0) || !std::isfinite(params.softcap)) {
    checks.refuse("softcap is ", options.softcap, ", expected a finite float32, 0 (off) or more");
  }
  // A cap too small for float32 is still a cap, which makes all scores equal, and not 0, which is
  // off.
  constexpr float kSmallest = std::numeric_limits<float>::min();
  if (options.softcap > 0.0 && params.softcap < kSmallest) params.softcap = kSmallest;
  params.causal = options.causal;
  params.sliding_window = 0;
  if (options.sliding_window.has_value()) {
    if (*options.sliding_window < 1) {
      checks.refuse("sliding_window is ", *options.sliding_window, ", expected 1 or more, or None");
    }
    // Lengths have 31 bits: a larger window hides nothing, and sums with it must not overflow.
    constexpr int64_t kLargest = int64_t{1} << 40;
    params.sliding_window = *options.sliding_window < kLargest ? *options.sliding_window : kLargest;
  }
}

// The checked arguments of one attention call; params points into the vectors.
struct AttentionCall {
  AttentionParams params;
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> query_start_loc;
  std::vector<float> alibi_slopes;
  std::vector<float> sinks;
};

// Which new tokens a query token sees. Distances count positions, and in a tree a token's position
// is not its place among the new tokens: what goes by distance is refused.
inline TreeMask check_tree_mask_shape(const Checks& checks, const AttentionOptions& options,
                                      const Argument& query) {
  if (!options.tree_mask.has_value()) return {};
  const Argument mask = checks.argument("tree_mask", *options.tree_mask);
  checks.rank(mask, 2, "[num_query_tokens, max_query_len]");
  checks.dtype(mask, ScalarType::Bool);
  checks.same_device(mask, query);
  checks.size(mask, 0, query.size(0), "num_tokens of query");
  if (options.sliding_window.has_value()) {
    checks.refuse("sliding_window is ", *options.sliding_window,
                  ", expected None: a window goes by position, which tree_mask leaves open");
  }
  if (options.alibi_slopes.has_value()) {
    checks.refuse(
        "alibi_slopes is a tensor, expected None: ALiBi goes by position, which tree_mask leaves "
        "open");
  }
  return {static_cast<const uint8_t*>(mask.data()), mask.stride(0), mask.stride(1)};
}

inline void check_tree_mask_columns(const Checks& checks, const OptionalTensor& tree_mask,
                                    const AttentionParams& params) {
  if (!tree_mask.has_value()) return;
  const int64_t columns = tree_mask->size(1);
  for (int64_t i = 0; i < params.batch; ++i) {
    const int64_t new_tokens = params.query_start_loc[i + 1] - params.query_start_loc[i];
    if (new_tokens > columns) {
      checks.refuse("tree_mask.shape[1] is ", columns, ", expected ", new_tokens,
                    " or more: sequence ", i, " has ", new_tokens, " query tokens");
    }
  }
}

inline void check_query(const Checks& checks, const Argument& query, const Pool& pool) {
  if (query.size(2) != pool.key.head_dim) {
    checks.refuse("query.shape[2] is ", query.size(2), ", expected ", pool.key.head_dim,
                  ": head_dim of key_cache");
  }
  if (query.size(1) < 1 || query.size(1) % pool.num_kv_heads != 0) {
    checks.refuse("query.shape[1] (num_heads) is ", query.size(1), ", expected a multiple of ",
                  pool.num_kv_heads, ": num_kv_heads of key_cache");
  }
}

// Everything but values and where the output goes. The pointers to what has values to be checked
// (lengths, slopes, sinks) stay null.
inline AttentionParams check_attention_shapes(const Checks& checks, const Tensor& query_tensor,
                                              const Tensor& key_cache_tensor,
                                              const Tensor& value_cache_tensor,
                                              const Tensor& block_tables_tensor,
                                              const Tensor& seq_lens_tensor,
                                              const OptionalTensor& query_start_loc,
                                              const AttentionOptions& options) {
  const Argument query = checks.argument("query", query_tensor);
  const Argument key_cache = checks.argument("key_cache", key_cache_tensor);
  const Argument value_cache = checks.argument("value_cache", value_cache_tensor);
  const Argument block_tables = checks.argument("block_tables", block_tables_tensor);
  const Argument seq_lens = checks.argument("seq_lens", seq_lens_tensor);
  checks.rank(query, 3, "[num_tokens, num_heads, head_dim]");
  checks.dense_last(query);
  AttentionParams params = {};
  params.dtype = checks.element(query);
  params.pool =
      check_pool(checks, key_cache, value_cache, query, {options.key_scale, options.value_scale});
  check_query(checks, query, params.pool);
  check_scalars(checks, options, query.size(2), params);
  check_per_head_shape(checks, "alibi_slopes", options.alibi_slopes, query);
  check_per_head_shape(checks, "sinks", options.sinks, query);
  check_length_shapes(checks, block_tables, seq_lens, query);
  params.batch = seq_lens.size(0);
  check_query_start_loc_shape(checks, query_start_loc, query, params.batch);
  params.tree_mask = check_tree_mask_shape(checks, options, query);
  params.block_tables = tables_of(block_tables);
  params.num_heads = query.size(1);
  params.query = rows_of(query);
  return params;
}

// Lengths, starts and the block ids of what some row sees: only that is ever read, so only that is
// required to be valid. `call.params` comes from check_attention_shapes.
inline void check_attention_values(const Checks& checks, const Tensor& block_tables_tensor,
                                   const Tensor& seq_lens, const OptionalTensor& query_start_loc,
                                   int64_t num_tokens, AttentionCall& call) {
  AttentionParams& params = call.params;
  const Argument block_tables = checks.argument("block_tables", block_tables_tensor);
  call.seq_lens =
      check_length_values(checks, params.pool, block_tables, Argument("seq_lens", seq_lens));
  call.query_start_loc =
      check_query_start_loc_values(checks, query_start_loc, num_tokens, params.batch);
  params.block_tables = tables_of(block_tables);
  params.seq_lens = call.seq_lens.data();
  params.query_start_loc = call.query_start_loc.data();
  for (int64_t i = 0; i < params.batch; ++i) {
    const int64_t new_tokens = params.query_start_loc[i + 1] - params.query_start_loc[i];
    if (new_tokens == 0) continue;
    const int64_t length = params.seq_lens[i];
    const Visible keys = {visible(params, length, length - new_tokens).first,
                          visible(params, length, length - 1).last};
    check_block_ids(checks, params.pool, params.block_tables, i, keys);
  }
}

// Everything but where the output goes.
inline AttentionCall check_attention(const Checks& checks, const Tensor& query,
                                     const Tensor& key_cache, const Tensor& value_cache,
                                     const Tensor& block_tables, const Tensor& seq_lens,
                                     const OptionalTensor& query_start_loc,
                                     const AttentionOptions& options) {
  AttentionCall call;
  call.params = check_attention_shapes(checks, query, key_cache, value_cache, block_tables,
                                       seq_lens, query_start_loc, options);
  check_attention_values(checks, block_tables, seq_lens, query_start_loc, query.size(0), call);
  check_tree_mask_columns(checks, options.tree_mask, call.params);
  call.alibi_slopes = per_head_values("alibi_slopes", options.alibi_slopes);
  call.sinks = per_head_values("sinks", options.sinks);
  call.params.alibi_slopes = options.alibi_slopes.has_value() ? call.alibi_slopes.data() : nullptr;
  call.params.sinks = options.sinks.has_value() ? call.sinks.data() : nullptr;
  return call;
}

// The out argument of attention.out. It shares memory with none of the inputs: some are read while
// it is written, and which ones is nothing that a caller should have to know.
inline Rows check_out(const Checks& checks, const Tensor& out_tensor, const Tensor& query_tensor,
                      const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& block_tables, const Tensor& seq_lens,
                      const OptionalTensor& query_start_loc, const AttentionOptions& options,
                      const AttentionParams& params) {
  const Argument out = checks.argument("out", out_tensor);
  const Argument query = checks.argument("query", query_tensor);
  checks.rank(out, 3, "[num_tokens, num_heads, head_dim_v]");
  checks.dtype(out, query.dtype, " like query");
  checks.same_device(out, query);
  checks.size(out, 0, query.size(0), "num_tokens of query");
  checks.size(out, 1, query.size(1), "num_heads of query");
  checks.size(out, 2, params.pool.value.head_dim, "head_dim of value_cache");
  checks.dense_last(out);
  checks.no_overlap(out);
  checks.no_shared_memory(out, query);
  checks.no_shared_memory(out, Argument("key_cache", key_cache));
  checks.no_shared_memory(out, Argument("value_cache", value_cache));
  checks.no_shared_memory(out, Argument("block_tables", block_tables));
  checks.no_shared_memory(out, Argument("seq_lens", seq_lens));
  const auto unless_none = [&](const char* name, const OptionalTensor& tensor) {
    if (tensor.has_value()) checks.no_shared_memory(out, Argument(name, *tensor));
  };
  unless_none("query_start_loc", query_start_loc);
  unless_none("alibi_slopes", options.alibi_slopes);
  unless_none("sinks", options.sinks);
  unless_none("key_scale", options.key_scale);
  unless_none("value_scale", options.value_scale);
  unless_none("tree_mask", options.tree_mask);
  return written_rows_of(out);
}

// int64 or int32 values of slot_mapping or block_mapping, which the caller has checked otherwise.
inline void check_index_dtype(const Checks& checks, const Argument& arg) {
  if (arg.dtype != ScalarType::Long && arg.dtype != ScalarType::Int) {
    checks.refuse(arg.name, " is ", dtype_name(arg.dtype), ", expected torch.int64 or torch.int32");
  }
}

struct WriteKvCall {
  WriteKvParams params;
  std::vector<int64_t> slot_mapping;
};

inline void check_new_rows(const Checks& checks, const Argument& rows, const Argument& cache) {
  checks.rank(rows, 3, "[num_tokens, num_kv_heads, head_dim]");
  checks.dense_last(rows);
  if (rows.size(1) != cache.size(2)) {
    checks.refuse(rows.name, ".shape[1] is ", rows.size(1), ", expected ", cache.size(2),
                  ": num_kv_heads of ", cache.name);
  }
  if (rows.size(2) != cache.size(3)) {
    checks.refuse(rows.name, ".shape[2] is ", rows.size(2), ", expected ", cache.size(3),
                  ": head_dim of ", cache.name);
  }
}

// Where V is a view of K, a quantised row has one scale and is written once: value must be the same
// view of key, and value_scale be key_scale.
inline void check_written_once(const Checks& checks, const WriteKvParams& params) {
  const Pool& pool = params.pool;
  if (!is_quantised(pool.dtype) || !shares_rows(pool)) return;
  if (!values_are_keys(pool)) {
    checks.refuse(
        "value_cache starts within the rows of key_cache, expected the same start: a quantised row "
        "is written once");
  }
  if (params.value.data != params.key.data ||
      params.value.token_stride != params.key.token_stride ||
      params.value.head_stride != params.key.head_stride) {
    checks.refuse(
        "value is no view of key, expected key[..., :head_dim_v] itself: value_cache is a view of "
        "key_cache, whose quantised rows are written once");
  }
  if (pool.value.scales.data != pool.key.scales.data) {
    checks.refuse(
        "value_scale is another tensor than key_scale, expected the same: value_cache is a view of "
        "key_cache");
  }
}

// Everything but the values of slot_mapping, whose pointer stays null.
inline WriteKvParams check_write_kv_shapes(const Checks& checks, const Tensor& key_tensor,
                                           const Tensor& value_tensor,
                                           const Tensor& key_cache_tensor,
                                           const Tensor& value_cache_tensor,
                                           const Tensor& slot_mapping_tensor,
                                           const ScaleArguments& scales) {
  const Argument key = checks.argument("key", key_tensor);
  const Argument value = checks.argument("value", value_tensor);
  const Argument key_cache = checks.argument("key_cache", key_cache_tensor);
  const Argument value_cache = checks.argument("value_cache", value_cache_tensor);
  const Argument slot_mapping = checks.argument("slot_mapping", slot_mapping_tensor);
  checks.rank(key, 3, "[num_tokens, num_kv_heads, head_dim]");
  const Dtype dtype = checks.element(key);
  Pool pool = check_pool(checks, key_cache, value_cache, key, scales);
  checks.dtype(value, key.dtype, " like key");
  checks.same_device(value, key);
  check_new_rows(checks, key, key_cache);
  check_new_rows(checks, value, value_cache);
  checks.size(value, 0, key.size(0), "num_tokens of key");
  checks.rank(slot_mapping, 1, "[num_tokens]");
  check_index_dtype(checks, slot_mapping);
  checks.same_device(slot_mapping, key);
  checks.size(slot_mapping, 0, key.size(0), "num_tokens of key");
  for (const Argument* cache : {&key_cache, &value_cache}) {
    checks.no_shared_memory(*cache, key);
    checks.no_shared_memory(*cache, value);
  }
  check_written_pool(checks, key_cache, value_cache, scales, pool);
  const WriteKvParams params = {dtype, pool, rows_of(key), rows_of(value), nullptr, key.size(0)};
  check_written_once(checks, params);
  return params;
}

inline std::vector<int64_t> check_write_kv_values(const Checks& checks, const Pool& pool,
                                                  const Tensor& slot_mapping_tensor) {
  const Argument slot_mapping = checks.argument("slot_mapping", slot_mapping_tensor);
  std::vector<int64_t> slots = slot_mapping.dtype == ScalarType::Int
                                   ? copy_of<int64_t, int32_t>(slot_mapping)
                                   : copy_of<int64_t>(slot_mapping);
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    if (slot < -1 || (slot >= 0 && slot / pool.block_size >= pool.num_blocks)) {
      checks.refuse("slot_mapping[", i, "] is ", slot, ", expected -1 (write nothing) or 0 to ",
                    pool.num_blocks * pool.block_size - 1, ": the pool has ", pool.num_blocks,
                    " blocks of ", pool.block_size, " tokens");
    }
  }
  return slots;
}

inline WriteKvCall check_write_kv(const Checks& checks, const Tensor& key, const Tensor& value,
                                  const Tensor& key_cache, const Tensor& value_cache,
                                  const Tensor& slot_mapping, const ScaleArguments& scales) {
  WriteKvCall call;
  call.params =
      check_write_kv_shapes(checks, key, value, key_cache, value_cache, slot_mapping, scales);
  call.slot_mapping = check_write_kv_values(checks, call.params.pool, slot_mapping);
  call.params.slot_mapping = call.slot_mapping.data();
  return call;
}

struct CopyBlocksCall {
  CopyBlocksParams params;
  std::vector<int64_t> block_mapping;
};

// The pairs of block_mapping as int64, row after row.
inline std::vector<int64_t> pairs_of(const Argument& block_mapping) {
  std::vector<int64_t> pairs;
  pairs.reserve(2 * block_mapping.size(0));
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t at = i * block_mapping.stride(0) + j * block_mapping.stride(1);
      pairs.push_back(block_mapping.dtype == ScalarType::Int
                          ? static_cast<const int32_t*>(block_mapping.data())[at]
                          : static_cast<const int64_t*>(block_mapping.data())[at]);
    }
  }
  return pairs;
}

// Everything but the values of block_mapping, whose pointer stays null.
inline CopyBlocksParams check_copy_blocks_shapes(const Checks& checks,
                                                 const Tensor& key_cache_tensor,
                                                 const Tensor& value_cache_tensor,
                                                 const Tensor& block_mapping_tensor,
                                                 const ScaleArguments& scales) {
  const Argument key_cache = checks.argument("key_cache", key_cache_tensor);
  const Argument value_cache = checks.argument("value_cache", value_cache_tensor);
  const Argument block_mapping = checks.argument("block_mapping", block_mapping_tensor);
  Pool pool = check_pool(checks, key_cache, value_cache, key_cache, scales);
  checks.rank(block_mapping, 2, "[num_copies, 2]");
  checks.size(block_mapping, 1, 2, "(source, destination)");
  check_index_dtype(checks, block_mapping);
  checks.same_device(block_mapping, key_cache);
  check_written_pool(checks, key_cache, value_cache, scales, pool);
  return {pool, nullptr, block_mapping.size(0)};
}

inline std::vector<int64_t> check_copy_blocks_values(const Checks& checks, const Pool& pool,
                                                     const Tensor& block_mapping) {
  std::vector<int64_t> pairs = pairs_of(Argument("block_mapping", block_mapping));
  std::vector<int64_t> destinations;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] < 0 || pairs[i] >= pool.num_blocks) {
      checks.refuse("block_mapping[", i / 2, ", ", i % 2, "] is ", pairs[i], ", expected 0 to ",
                    pool.num_blocks - 1, ": key_cache has ", pool.num_blocks, " blocks");
    }
    if (i % 2 == 1) destinations.push_back(pairs[i]);
  }
  std::sort(destinations.begin(), destinations.end());
  const auto twice = std::adjacent_find(destinations.begin(), destinations.end());
  if (twice != destinations.end()) {
    checks.refuse("block_mapping has destination ", *twice,
                  " more than once, expected distinct destinations");
  }
  return pairs;
}

inline CopyBlocksCall check_copy_blocks(const Checks& checks, const Tensor& key_cache,
                                        const Tensor& value_cache, const Tensor& block_mapping,
                                        const ScaleArguments& scales) {
  CopyBlocksCall call;
  call.params = check_copy_blocks_shapes(checks, key_cache, value_cache, block_mapping, scales);
  call.block_mapping = check_copy_blocks_values(checks, call.params.pool, block_mapping);
  call.params.block_mapping = call.block_mapping.data();
  return call;
}

struct GatherKvCall {
  GatherKvParams params;
  std::vector<int32_t> seq_lens;
  int64_t num_tokens;
};

inline GatherKvCall check_gather_kv(const Checks& checks, const Tensor& key_cache_tensor,
                                    const Tensor& value_cache_tensor,
                                    const Tensor& block_tables_tensor,
                                    const Tensor& seq_lens_tensor,
                                    std::optional<int64_t> num_tokens,
                                    const ScaleArguments& scales) {
  const Argument key_cache = checks.argument("key_cache", key_cache_tensor);
  const Argument value_cache = checks.argument("value_cache", value_cache_tensor);
  const Argument block_tables = checks.argument("block_tables", block_tables_tensor);
  const Argument seq_lens = checks.argument("seq_lens", seq_lens_tensor);
  GatherKvCall call;
  GatherKvParams& params = call.params;
  params.pool = check_pool(checks, key_cache, value_cache, key_cache, scales);
  params.dtype = is_quantised(params.pool.dtype) ? Dtype::kFloat32 : params.pool.dtype;
  check_length_shapes(checks, block_tables, seq_lens, key_cache);
  call.seq_lens = check_length_values(checks, params.pool, block_tables, seq_lens);
  params.block_tables = tables_of(block_tables);
  params.seq_lens = call.seq_lens.data();
  params.batch = seq_lens.size(0);
  call.num_tokens = 0;
  for (int64_t i = 0; i < params.batch; ++i) {
    call.num_tokens += params.seq_lens[i];
    check_block_ids(checks, params.pool, params.block_tables, i, {0, params.seq_lens[i]});
  }
  if (num_tokens.has_value() && *num_tokens != call.num_tokens) {
    checks.refuse("num_tokens is ", *num_tokens, ", expected ", call.num_tokens,
                  ": the sum of seq_lens");
  }
  return call;
}

inline MergeStatesParams check_merge_states(const Checks& checks, const Tensor& out_a_tensor,
                                            const Tensor& lse_a_tensor, const Tensor& out_b_tensor,
                                            const Tensor& lse_b_tensor) {
  const Argument out_a = checks.argument("out_a", out_a_tensor);
  const Argument out_b = checks.argument("out_b", out_b_tensor);
  const Argument lse_a = checks.argument("lse_a", lse_a_tensor);
  const Argument lse_b = checks.argument("lse_b", lse_b_tensor);
  checks.element(out_a);
  checks.dtype(out_b, out_a.dtype, " like out_a");
  for (const Argument* out : {&out_a, &out_b}) {
    checks.rank(*out, 3, "[num_tokens, num_heads, head_dim_v]");
    checks.same_device(*out, out_a);
    checks.dense_last(*out);
    for (int64_t dim = 0; dim < 3; ++dim)
      checks.size(*out, dim, out_a.size(dim), "the shape of out_a");
  }
  for (const Argument* lse : {&lse_a, &lse_b}) {
    checks.rank(*lse, 2, "[num_tokens, num_heads]");
    checks.dtype(*lse, ScalarType::Float);
    checks.same_device(*lse, out_a);
    checks.size(*lse, 0, out_a.size(0), "num_tokens of out_a");
    checks.size(*lse, 1, out_a.size(1), "num_heads of out_a");
  }
  MergeStatesParams params = {};
  params.dtype = checks.element(out_a);
  params.num_tokens = out_a.size(0);
  params.num_heads = out_a.size(1);
  params.head_dim = out_a.size(2);
  params.out_a = rows_of(out_a);
  params.out_b = rows_of(out_b);
  params.lse_a = rows_of(lse_a);
  params.lse_b = rows_of(lse_b);
  return params;
}

}  // namespace paged
