// One piece of a sequence: its rows of K and V, and the softmax of some rows of queries over it.
#pragma once

#include "cpu/attention/row_span.h"
#include "cpu/attention/score.h"
#include "cpu/attention/softmax.h"

namespace paged::cpu {
namespace {

constexpr int64_t kCacheLine = 64;

// Rows of scores and weights are a cache line longer than a piece: at a power of two apart they
// would all fall into the same few sets of the cache.
constexpr int64_t kScoreStride = kPiece + 16;

// Keys that a softmax, and a weighted sum, takes at a time; a multiple of what any engine takes.
constexpr int64_t kChunk = 32;

// Keys that are scored at a time.
constexpr int64_t kTile = 64;

// Hands out parts of a thread's scratch memory, each on a cache line. From address 0 it measures
// how much there must be.
class Arena {
 public:
  explicit Arena(void* begin) : address_(reinterpret_cast<uintptr_t>(begin)) {}

  template <class E>
  PAGED_INLINE E* take(int64_t count) {
    E* part = reinterpret_cast<E*>(address_);
    address_ += static_cast<uintptr_t>(round_up(count * int64_t{sizeof(E)}, kCacheLine));
    return part;
  }
  PAGED_INLINE uintptr_t address() const { return address_; }

 private:
  uintptr_t address_;
};

// Those of `keys` that lie in the piece, counted from its begin.
PAGED_INLINE Visible in_piece(Visible keys, int64_t piece) {
  const int64_t begin = piece * kPiece;
  keys.first = keys.first > begin ? keys.first - begin : 0;
  keys.last = keys.last < begin + kPiece ? keys.last - begin : kPiece;
  if (keys.last < keys.first) keys.last = keys.first;
  return keys;
}

// The scales of a piece's keys and values, by key, counted from the piece's begin: finite for the
// keys of its chunks that the piece doesn't hold. Null where the cache isn't quantised.
struct PieceScales {
  float* key;  // [kPiece]
  float* value;
};

// The elements of a row of K or V, whichever has more.
PAGED_INLINE int64_t longest_row(const AttentionParams& params) {
  const int64_t key = params.pool.key.head_dim, value = params.pool.value.head_dim;
  return key > value ? key : value;
}

// The rows of K, then those of V, of the keys of one piece, in the order they are read, and the
// first of the next piece. Where values are keys, the rows of K serve both.
template <class T>
struct RowStream {
  // Rows ahead of the one being read that are on their way from memory into the first cache, and
  // into the second.
  static constexpr int64_t kAhead = 16;
  static constexpr int64_t kFarAhead = 64;
  static constexpr int64_t kFarthestAhead = 320;  // as many as can be looked up

  const T* rows[2 * kPiece + kFarthestAhead];
  Visible keys;  // counted from the piece's begin
  int64_t num_keys;
  int64_t value_begin;  // the index of the first row of V
  int64_t num_rows;     // all of them
  PieceScales scales;
  T* zeros;  // a row of V or K, to be read in the place of one that must not be

  PAGED_INLINE RowStream(const AttentionParams& params, Arena& arena) : scales{} {
    if (params.tree_mask.data != nullptr) zeros = arena.take<T>(longest_row(params));
    if constexpr (kIsQuantised<T>) {
      scales = {arena.take<float>(kPiece), arena.take<float>(kPiece)};
    }
  }

  // The rows of K and of V by key, counted from the piece's begin.
  PAGED_INLINE const T* const* key_rows() const { return rows - keys.first; }
  PAGED_INLINE const T* const* value_rows() const { return rows + value_begin - keys.first; }
  PAGED_INLINE bool holds(int64_t key) const { return key >= keys.first && key < keys.last; }
};

// Appends the rows of keys [first, last) of the sequence to `rows`.
template <class T>
PAGED_INLINE int64_t append_rows(const AttentionParams& params, const RowSpan& span,
                                 const Cache& cache, Visible keys, const T** rows) {
  const int64_t block_size = params.pool.block_size;
  const T* head = static_cast<const T*>(cache.data) + span.kv_head * cache.head_stride;
  const BlockTables& tables = params.block_tables;
  if (block_size == 1 && tables.column_stride == 1) {  // a loop that compilers make vectors of
    const int32_t* blocks = tables.data + span.sequence * tables.row_stride + keys.first;
    const int64_t num_rows = keys.last - keys.first, stride = cache.block_stride;
    for (int64_t i = 0; i < num_rows; ++i) rows[i] = head + blocks[i] * stride;
    return num_rows;
  }
  int64_t column = keys.first / block_size;
  int64_t offset = keys.first % block_size;
  int64_t count = 0;
  for (int64_t key = keys.first; key < keys.last; ++column, offset = 0) {
    const T* first =
        head + tables.at(span.sequence, column) * cache.block_stride + offset * cache.token_stride;
    const int64_t rest = block_size - offset;
    const int64_t num_rows = keys.last - key < rest ? keys.last - key : rest;
    for (int64_t i = 0; i < num_rows; ++i) rows[count + i] = first + i * cache.token_stride;
    count += num_rows;
    key += num_rows;
  }
  return count;
}

// Writes the scales of keys [first, last) of the sequence.
PAGED_INLINE void copy_scales(const AttentionParams& params, const RowSpan& span,
                              const Scales& scales, Visible keys, float* to) {
  if (!scales.are_per_token) {
    const float scale = *scales.at(0, 0, span.kv_head);
    for (int64_t i = 0; i < keys.last - keys.first; ++i) to[i] = scale;
    return;
  }
  const int64_t block_size = params.pool.block_size;
  for (int64_t key = keys.first; key < keys.last;) {
    const int64_t offset = key % block_size;
    const int64_t rest = block_size - offset;
    const int64_t count = keys.last - key < rest ? keys.last - key : rest;
    const float* from =
        scales.at(params.block_tables.at(span.sequence, key / block_size), offset, span.kv_head);
    if (scales.token_stride == 1) {
      std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = from[i * scales.token_stride];
    }
    to += count;
    key += count;
  }
}

// Asks for the scales of keys [first, last) of the sequence: they lie apart from everything else.
PAGED_INLINE void prefetch_scales(const AttentionParams& params, const RowSpan& span,
                                  const Scales& scales, Visible keys) {
  if (!scales.are_per_token) return;
  constexpr int64_t kFloatsPerLine = kCacheLine / int64_t{sizeof(float)};
  const int64_t block_size = params.pool.block_size;
  const int64_t step = scales.token_stride == 1 ? kFloatsPerLine : 1;
  for (int64_t key = keys.first / block_size * block_size; key < keys.last; key += block_size) {
    const int32_t block = params.block_tables.at(span.sequence, key / block_size);
    for (int64_t offset = 0; offset < block_size; offset += step) {
      __builtin_prefetch(scales.at(block, offset, span.kv_head));
    }
  }
}

// Looks up the scales of `stream.keys`, those of a piece that begins at key `begin`, and asks for
// those of the next piece, up to key `last`.
template <class T>
PAGED_INLINE void look_up_scales(const AttentionParams& params, const RowSpan& span, int64_t begin,
                                 int64_t last, RowStream<T>& stream) {
  const Visible keys = stream.keys;
  const int64_t first_chunk = keys.first / kChunk * kChunk;
  const int64_t end = round_up(keys.last, kChunk);
  const Cache* caches[] = {&params.pool.key, &params.pool.value};
  float* all[] = {stream.scales.key, stream.scales.value};
  for (int i = 0; i < 2; ++i) {
    for (int64_t key = first_chunk; key < keys.first; ++key) all[i][key] = 0.0f;
    for (int64_t key = keys.last; key < end; ++key) all[i][key] = 0.0f;
    copy_scales(params, span, caches[i]->scales, {begin + keys.first, begin + keys.last},
                all[i] + keys.first);
    const int64_t next = begin + kPiece;
    prefetch_scales(params, span, caches[i]->scales,
                    {next, last < next + kPiece ? last : next + kPiece});
  }
}

// Zeros stand for what the tree mask hides from the one row of the span: a weight of 0 wouldn't
// hide an infinity or NaN.
template <class T>
PAGED_INLINE void hide_rows(const AttentionParams& params, const RowSpan& span, int64_t piece,
                            RowStream<T>& stream) {
  const RowMask mask = row_mask(params, span, query_row(params, span, 0), piece);
  std::memset(stream.zeros, 0, static_cast<size_t>(longest_row(params)) * sizeof(T));
  for (int64_t key = mask.first(stream.keys.first); key < stream.keys.last; ++key) {
    if (!mask.hides(key)) continue;
    stream.rows[key - stream.keys.first] = stream.zeros;
    stream.rows[stream.value_begin + key - stream.keys.first] = stream.zeros;
    if (stream.scales.value != nullptr) stream.scales.value[key] = 0.0f;
  }
}

// Looks up the keys of the piece that the span sees, and `far` of those that come after; false if
// it sees none.
template <class T>
bool look_up(const AttentionParams& params, const RowSpan& span, int64_t piece,
             RowStream<T>& stream, int64_t far = RowStream<T>::kFarAhead) {
  const Visible all = span_visible(params, span);
  stream.keys = in_piece(all, piece);
  if (stream.keys.first >= stream.keys.last) return false;
  const int64_t begin = piece * kPiece + stream.keys.first;
  const int64_t end = piece * kPiece + stream.keys.last;
  const int64_t ahead = all.last - end < far ? all.last - end : far;
  int64_t count = append_rows(params, span, params.pool.key, {begin, end}, stream.rows);
  stream.num_keys = count;
  stream.value_begin = 0;
  if (!values_are_keys(params.pool)) {
    stream.value_begin = count;
    count += append_rows(params, span, params.pool.value, {begin, end}, stream.rows + count);
  }
  count += append_rows(params, span, params.pool.key, {end, end + ahead}, stream.rows + count);
  stream.num_rows = count;
  if constexpr (kIsQuantised<T>) look_up_scales(params, span, piece * kPiece, all.last, stream);
  if (params.tree_mask.data != nullptr && span.num_rows == 1) {
    hide_rows(params, span, piece, stream);
  }
  return true;
}

// Asks for a row as reading it with that locality does: 3 for the first cache, 2 for the second.
template <int kLocality>
PAGED_INLINE void prefetch_row(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, kLocality);
}

template <class T>
PAGED_INLINE void prefetch_ahead(const RowStream<T>& stream, int64_t i, int64_t bytes) {
  const int64_t next = i + stream.kAhead;
  if (next < stream.num_rows) prefetch_row<3>(stream.rows[next], bytes);
}

// The same for what is read later than that: rows [begin, end) of the stream, counted as far ahead.
template <class T>
PAGED_INLINE void prefetch_far(const RowStream<T>& stream, int64_t begin, int64_t end,
                               int64_t bytes) {
  for (int64_t i = begin + stream.kFarAhead; i < end + stream.kFarAhead; ++i) {
    if (i < stream.num_rows) prefetch_row<2>(stream.rows[i], bytes);
  }
}

template <class T>
PAGED_INLINE const T* query_at(const AttentionParams& params, const QueryRow& row) {
  return static_cast<const T*>(params.query.data) + row.token * params.query.token_stride +
         row.head * params.query.head_stride;
}

// Turns the dot products with the chunks that hold `keys` into weights, 0 for keys that a row
// doesn't see, which go to store_weights(row, key, kLanes weights, kLanes weights). The scales of
// a quantised cache join both.
template <class F>
PAGED_INLINE void weigh_rows(const AttentionParams& params, const RowSpan& rows, int64_t piece,
                             Visible keys, const PieceScales& scales, float* dots,
                             RowSoftmax* softmax, F store_weights) {
  const int64_t begin = keys.first / kChunk * kChunk;
  const int64_t end = round_up(keys.last, kChunk);
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    const QueryRow row = query_row(params, rows, r);
    const Visible seen = in_piece(row_visible(params, rows, row), piece);
    const RowScores scores = {dots + r * kScoreStride, begin, end, seen.first, seen.last};
    const Scored scored = score(params, rows, row, piece, scales.key, scores);
    const auto store = [&](int64_t key, Vec first, Vec second) {
      if (scales.value != nullptr) {
        first = first * load(scales.value + key);
        second = second * load(scales.value + key + kLanes);
      }
      store_weights(r, key, first, second);
    };
    softmax[r] = {scored.top * scored.unit, weigh_row(scores, scored.unit, scored.top, store)};
  }
}

}  // namespace
}  // namespace paged::cpu
