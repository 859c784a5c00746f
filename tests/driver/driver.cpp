// Runs calls of the CPU ops that standard input describes and writes their results to standard
// output; tests/driver/calls.py is the other end. First it writes the name of the ISA variant, in
// 16 bytes.
//
// A call is an int64 (which op), the op's numbers (int64 or double) and its tensors. A tensor is
// its shape[4], its strides[4] in elements, its offset into its storage and the storage's size,
// both in bytes, then the storage. A size of 0 stands for an argument that is not given.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/ops.h"

#if __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#else  // nothing to tell
#define VALGRIND_MAKE_MEM_UNDEFINED(begin, bytes)
#define VALGRIND_MAKE_MEM_DEFINED(begin, bytes)
#define VALGRIND_CHECK_MEM_IS_DEFINED(begin, bytes)
#endif

namespace paged {
namespace {

void read_bytes(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) == bytes) return;
  std::fprintf(stderr, "driver: the input ends within a call\n");
  std::exit(2);
}

template <class T>
T read() {
  T value;
  read_bytes(&value, sizeof(value));
  return value;
}

// Exactly as many bytes as asked for, so that valgrind sees an access past the end.
struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(int64_t bytes) { return Memory(static_cast<char*>(std::malloc(bytes))); }

class Tensor {
 public:
  Tensor() {
    read_bytes(shape_, sizeof(shape_));
    read_bytes(strides_, sizeof(strides_));
    offset_ = read<int64_t>();
    bytes_ = read<int64_t>();
    if (bytes_ == 0) return;
    storage_ = allocate(bytes_);
    read_bytes(storage_.get(), bytes_);
  }

  int64_t shape(int i) const { return shape_[i]; }
  int64_t stride(int i) const { return strides_[i]; }
  template <class T>
  T* data() const {
    return storage_ == nullptr ? nullptr : reinterpret_cast<T*>(storage_.get() + offset_);
  }
  Rows rows() const { return {data<char>(), strides_[0], strides_[1]}; }
  Cache cache(const Tensor& scale, bool are_per_token) const {
    const Scales scales = {scale.data<float>(), scale.stride(0), scale.stride(1), scale.stride(2),
                           are_per_token};
    return {data<char>(), shape_[3], strides_[0], strides_[1], strides_[2], scales};
  }
  BlockTables table() const { return {data<int32_t>(), strides_[0], strides_[1]}; }
  // The whole storage.
  void write() const { std::fwrite(storage_.get(), 1, bytes_, stdout); }
  void make_undefined() const { VALGRIND_MAKE_MEM_UNDEFINED(storage_.get(), bytes_); }

 private:
  int64_t shape_[4];
  int64_t strides_[4];
  int64_t offset_;
  int64_t bytes_;
  Memory storage_;
};

// A result, contiguous, uninitialised until an op writes it.
struct Result {
  Memory memory;
  int64_t bytes;

  explicit Result(int64_t size) : memory(allocate(size)), bytes(size) {}
  void write() const {
    VALGRIND_CHECK_MEM_IS_DEFINED(memory.get(), bytes);
    std::fwrite(memory.get(), 1, bytes, stdout);
  }
};

cpu::ThreadPool threads(int64_t count) {
  return {count, [](int64_t parts, void (*body)(int64_t, int64_t, void*), void* context) {
            std::vector<std::thread> workers;
            for (int64_t i = 0; i < parts; ++i) workers.emplace_back(body, i, i + 1, context);
            for (std::thread& worker : workers) worker.join();
          }};
}

// The tensors of a pool, as every op takes them: caches, then their scales.
struct PoolTensors {
  Tensor key_cache, value_cache, key_scale, value_scale;

  Pool pool(Dtype dtype, bool are_per_token) const {
    return {dtype,
            key_cache.shape(0),
            key_cache.shape(1),
            key_cache.shape(2),
            key_cache.cache(key_scale, are_per_token),
            value_cache.cache(value_scale, are_per_token)};
  }
};

// To valgrind, all of a tensor of the pool is uninitialised but what belongs to tokens that the
// sequences hold: `bytes` for each head at `at(block, offset, head)`. Params are those of an op
// that reads sequences.
template <class Params, class At>
void define_only_what_is_held(const Params& params, const Tensor& tensor,
                              [[maybe_unused]] int64_t bytes, At at) {
  tensor.make_undefined();
  for (int64_t i = 0; i < params.batch; ++i) {
    for (int64_t token = 0; token < params.seq_lens[i]; ++token) {
      const int64_t block = params.block_tables.at(i, token / params.pool.block_size);
      for (int64_t head = 0; head < params.pool.num_kv_heads; ++head) {
        [[maybe_unused]] const void* held = at(block, token % params.pool.block_size, head);
        VALGRIND_MAKE_MEM_DEFINED(held, bytes);
      }
    }
  }
}

template <class Params>
void define_only_what_is_held(const Params& params, const Cache& cache, const Tensor& elements,
                              const Tensor& scales) {
  const int64_t element = element_size(params.pool.dtype);
  define_only_what_is_held(params, elements, cache.head_dim * element,
                           [&](int64_t block, int64_t offset, int64_t head) {
                             return static_cast<char*>(cache.data) +
                                    (block * cache.block_stride + offset * cache.token_stride +
                                     head * cache.head_stride) *
                                        element;
                           });
  if (!is_quantised(params.pool.dtype)) return;
  define_only_what_is_held(params, scales, sizeof(float),
                           [&](int64_t block, int64_t offset, int64_t head) {
                             return cache.scales.at(block, offset, head);
                           });
}

// The same for the pool, and for the entries of block tables.
template <class Params>
void define_only_what_is_needed(const Params& params, const PoolTensors& tensors,
                                const Tensor& block_tables) {
  define_only_what_is_held(params, params.pool.key, tensors.key_cache, tensors.key_scale);
  define_only_what_is_held(params, params.pool.value, tensors.value_cache, tensors.value_scale);
  block_tables.make_undefined();
  for (int64_t i = 0; i < params.batch; ++i) {
    const int64_t needed =
        (params.seq_lens[i] + params.pool.block_size - 1) / params.pool.block_size;
    for (int64_t column = 0; column < needed; ++column) {
      VALGRIND_MAKE_MEM_DEFINED(params.block_tables.data + i * params.block_tables.row_stride +
                                    column * params.block_tables.column_stride,
                                sizeof(int32_t));
    }
  }
}

void attention() {
  AttentionParams params = {};
  params.dtype = static_cast<Dtype>(read<int64_t>());
  const auto cache_dtype = static_cast<Dtype>(read<int64_t>());
  const auto num_threads = read<int64_t>();
  params.causal = read<int64_t>() != 0;
  params.sliding_window = read<int64_t>();
  params.scale = static_cast<float>(read<double>());
  params.softcap = static_cast<float>(read<double>());
  const PoolTensors tensors;
  const Tensor query, block_tables, seq_lens, query_start_loc, alibi_slopes, sinks, tree_mask;
  const int64_t head_dim_v = tensors.value_cache.shape(3);
  const int64_t num_rows = query.shape(0) * query.shape(1);
  const Result output(num_rows * head_dim_v * element_size(params.dtype));
  const Result lse(num_rows * static_cast<int64_t>(sizeof(float)));
  params.pool = tensors.pool(cache_dtype, true);
  params.block_tables = block_tables.table();
  params.seq_lens = seq_lens.data<int32_t>();
  params.query_start_loc = query_start_loc.data<int32_t>();
  params.batch = seq_lens.shape(0);
  params.num_heads = query.shape(1);
  params.query = query.rows();
  params.output = {output.memory.get(), query.shape(1) * head_dim_v, head_dim_v};
  params.lse = reinterpret_cast<float*>(lse.memory.get());
  params.alibi_slopes = alibi_slopes.data<float>();
  params.sinks = sinks.data<float>();
  params.tree_mask = {tree_mask.data<uint8_t>(), tree_mask.stride(0), tree_mask.stride(1),
                      tree_mask.shape(1)};
  define_only_what_is_needed(params, tensors, block_tables);
  cpu::attention(params, threads(num_threads));
  output.write();
  lse.write();
}

void write_kv() {
  WriteKvParams params = {};
  params.dtype = static_cast<Dtype>(read<int64_t>());
  const auto cache_dtype = static_cast<Dtype>(read<int64_t>());
  const auto num_threads = read<int64_t>();
  const bool are_per_token = read<int64_t>() != 0;
  const PoolTensors tensors;
  const Tensor key, value, slot_mapping;
  params.pool = tensors.pool(cache_dtype, are_per_token);
  params.key = key.rows();
  params.value = value.rows();
  params.slot_mapping = slot_mapping.data<int64_t>();
  params.num_tokens = slot_mapping.shape(0);
  cpu::write_kv(params, threads(num_threads));
  tensors.key_cache.write();
  tensors.value_cache.write();
  tensors.key_scale.write();
  tensors.value_scale.write();
}

void gather_kv() {
  GatherKvParams params = {};
  params.dtype = static_cast<Dtype>(read<int64_t>());
  const auto cache_dtype = static_cast<Dtype>(read<int64_t>());
  const auto num_threads = read<int64_t>();
  const auto num_tokens = read<int64_t>();
  const PoolTensors tensors;
  const Tensor block_tables, seq_lens;
  params.pool = tensors.pool(cache_dtype, true);
  params.block_tables = block_tables.table();
  params.seq_lens = seq_lens.data<int32_t>();
  params.batch = seq_lens.shape(0);
  const int64_t num_rows = num_tokens * params.pool.num_kv_heads;
  const int64_t head_dim = params.pool.key.head_dim, head_dim_v = params.pool.value.head_dim;
  const Result key(num_rows * head_dim * element_size(params.dtype));
  const Result value(num_rows * head_dim_v * element_size(params.dtype));
  params.key = {key.memory.get(), params.pool.num_kv_heads * head_dim, head_dim};
  params.value = {value.memory.get(), params.pool.num_kv_heads * head_dim_v, head_dim_v};
  define_only_what_is_needed(params, tensors, block_tables);
  cpu::gather_kv(params, threads(num_threads));
  key.write();
  value.write();
}

void merge_states() {
  const auto dtype = static_cast<Dtype>(read<int64_t>());
  const auto num_threads = read<int64_t>();
  const Tensor out_a, lse_a, out_b, lse_b;
  const int64_t num_tokens = out_a.shape(0), num_heads = out_a.shape(1);
  const int64_t head_dim = out_a.shape(2);
  const Result out(num_tokens * num_heads * head_dim * element_size(dtype));
  const Result lse(num_tokens * num_heads * static_cast<int64_t>(sizeof(float)));
  const MergeStatesParams params = {
      dtype,
      num_tokens,
      num_heads,
      head_dim,
      out_a.rows(),
      out_b.rows(),
      {out.memory.get(), num_heads * head_dim, head_dim},
      lse_a.rows(),
      lse_b.rows(),
      reinterpret_cast<float*>(lse.memory.get()),
  };
  cpu::merge_states(params, threads(num_threads));
  out.write();
  lse.write();
}

}  // namespace
}  // namespace paged

int main() {
  void (*const ops[])() = {paged::attention, paged::write_kv, paged::gather_kv,
                           paged::merge_states};  // in the order of calls.py
  char isa[16] = {};
  std::strncpy(isa, paged::cpu::selected_isa().name, sizeof(isa) - 1);
  std::fwrite(isa, 1, sizeof(isa), stdout);
  int64_t op;
  while (std::fread(&op, sizeof(op), 1, stdin) == 1) ops[op]();
  return std::fflush(stdout);
}
