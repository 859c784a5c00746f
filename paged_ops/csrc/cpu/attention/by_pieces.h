// Paged attention of one row span, piece by piece: score, weigh, sum the values and fold.
//
// The Engine says how: ByVectors or ByTiles.
#pragma once

#include <math.h>

#include "cpu/attention/piece.h"
#include "cpu/attention/row_span.h"
#include "cpu/attention/softmax.h"
#if defined(PAGED_HAS_TILES)
#include "cpu/attention/amx.h"
#endif

namespace paged::cpu {
namespace {

#if !defined(PAGED_HAS_TILES)
// What a thread does before it attends and undoes after it.
struct TileSession {
  PAGED_INLINE TileSession() {}
};
#endif

PAGED_INLINE bool all_finite(const float* values, int64_t count) {
  Vec sum = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) sum = fma(load(values + i), broadcast(0.0f), sum);
  bool finite = true;
  for (int i = 0; i < kLanes; ++i) finite &= sum[i] == 0.0f;
  return finite;
}

// Attends one row to one piece, whatever infinities and NaN there are among what it sees: where an
// engine can't, another.
template <class Engine>
void attend_row(const AttentionParams& params, const RowSpan& row, int64_t piece, Arena arena,
                const State& state) {
  Engine engine(params, arena);
  if (!engine.look_up(params, row, piece)) return;
  RowSoftmax softmax;
  engine.attend(params, row, piece, in_piece(span_visible(params, row), piece), &softmax);
  if constexpr (requires { typename Engine::Exact; }) {
    if (!all_finite(engine.values(), columns_of(params))) {
      return attend_row<typename Engine::Exact>(params, row, piece, arena, state);
    }
  }
  fold_row(state, 0, softmax, engine.values());
}

// Attends the span to one piece and folds the result into its state.
//
// Rows that don't see a key have the weight 0 for it, and 0 times infinity or NaN is NaN. So where
// any result is not finite, rows are attended one by one to just the keys that they see. A row's
// result depends on nothing else in either case.
template <class Engine>
void attend_piece(const AttentionParams& params, const RowSpan& span, int64_t piece, Arena arena,
                  const State& state) {
  Engine engine(params, arena);
  if (!engine.look_up(params, span, piece)) return;
  const int64_t columns = columns_of(params);
  bool is_ready = true;
  for (int64_t r = 0; r < span.num_rows; r += kBlockRows) {
    const int64_t num_rows = span.num_rows - r < kBlockRows ? span.num_rows - r : kBlockRows;
    const RowSpan rows = rows_of(span, r, num_rows);
    const Visible keys = in_piece(span_visible(params, rows), piece);
    if (keys.first >= keys.last) continue;
    if (!is_ready) engine.look_up(params, span, piece);
    RowSoftmax softmax[kBlockRows];
    engine.attend(params, rows, piece, keys, softmax);
    is_ready = all_finite(engine.values(), num_rows * columns);
    for (int64_t i = 0; i < num_rows; ++i) {
      if (is_ready) {
        fold_row(state, r + i, softmax[i], engine.values() + i * columns);
      } else {
        attend_row<Engine>(params, rows_of(rows, i, 1), piece, arena, state.from(r + i));
      }
    }
  }
}

template <class T>
void write_row(T* out, const float* acc, int64_t width, float factor) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(out + d, load(acc + d) * factor);
  if (d < width) store_partial(out + d, load(acc + d) * factor, width - d);
}

// A denominator with a sink in it: relative to a new maximum, beside which what the sums had before
// weighs `keep`.
struct Joined {
  float max;
  float keep;
  float sum;
};

PAGED_INLINE Joined join_sink(float max, float sum, float sink) {
  const float new_max = sink > max || sink != sink ? sink : max;
  const float keep = weight_of(max, new_max);
  return {new_max, keep, sum * keep + weight_of(sink, new_max)};
}

// Lets the sinks join the denominator, then writes output and lse. A row that saw no key writes 0,
// whatever its sink is.
template <class T>
void finish_as(const AttentionParams& params, const RowSpan& span, const State& state) {
  T* output = static_cast<T*>(params.output.data);
  for (int64_t r = 0; r < span.num_rows; ++r) {
    const QueryRow row = query_row(params, span, r);
    float max = state.max[r];
    float sum = state.sum[r];
    float keep = 1.0f;
    if (params.sinks != nullptr) {
      const Joined joined = join_sink(max, sum, params.sinks[row.head]);
      keep = joined.keep;
      sum = joined.sum;
      max = joined.max;
    }
    T* out = output + row.token * params.output.token_stride + row.head * params.output.head_stride;
    write_row(out, state.acc + r * state.acc_stride, params.pool.value.head_dim,
              state.sum[r] == 0.0f ? 0.0f : keep / sum);
    if (params.lse != nullptr)
      params.lse[row.token * params.num_heads + row.head] = max + logf(sum);
  }
}

inline void finish(const AttentionParams& params, const RowSpan& span, const State& state) {
  by_dtype(params.dtype, [&](auto element) { finish_as<decltype(element)>(params, span, state); });
}

// The state of a span comes first in its scratch memory, what the engines work in after it.
PAGED_INLINE State take_state(const AttentionParams& params, int64_t num_rows, Arena& arena) {
  float* state = arena.take<float>(floats_per_state(params, num_rows));
  return state_at(state, num_rows, columns_of(params));
}

// Attention by an engine, as the table of kernels has it.
template <class Engine>
struct ByPieces {
  static SpanLimits span_limits(const AttentionParams&) { return kSpansOfPieces; }

  static int64_t scratch_bytes(const AttentionParams& params, int64_t num_rows) {
    const Engine engine(params, Arena(nullptr));
    return floats_per_state(params, num_rows) * static_cast<int64_t>(sizeof(float)) +
           static_cast<int64_t>(engine.end());
  }

  static void attend(const AttentionParams& params, const RowSpan& span, void* scratch) {
    [[maybe_unused]] const TileSession session;
    Arena arena(scratch);
    const State state = take_state(params, span.num_rows, arena);
    const PieceRange pieces = pieces_of(span_visible(params, span), kPiece);
    clear(state, span.num_rows);
    for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
      attend_piece<Engine>(params, span, piece, arena, state);
    }
    cpu::finish(params, span, state);
  }

  static void extend(const AttentionParams& params, const RowSpan& span, PieceRange pieces,
                     float* state, void* scratch) {
    [[maybe_unused]] const TileSession session;
    const State own = state_at(state, span.num_rows, columns_of(params));
    for (int64_t piece = pieces.begin; piece < pieces.end; ++piece) {
      attend_piece<Engine>(params, span, piece, Arena(scratch), own);
    }
  }

  static void fold(const AttentionParams& params, const RowSpan& span, int64_t num_states,
                   float* states) {
    const int64_t columns = columns_of(params);
    const State total = state_at(states, span.num_rows, columns);
    for (int64_t i = 1; i < num_states; ++i) {
      states += state_floats(span.num_rows, columns);
      const State more = state_at(states, span.num_rows, columns);
      for (int64_t r = 0; r < span.num_rows; ++r) {
        fold_row(total, r, {more.max[r], more.sum[r]}, more.acc + r * columns);
      }
    }
  }

  static void finish(const AttentionParams& params, const RowSpan& span, float* state) {
    cpu::finish(params, span, state_at(state, span.num_rows, columns_of(params)));
  }
};

}  // namespace
}  // namespace paged::cpu
