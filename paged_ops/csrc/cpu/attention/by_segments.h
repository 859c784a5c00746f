// Paged attention of bfloat16 by the matrix unit, segment by segment.
//
// Few rows read keys and values where they lie (RowGroup); more rows share panels of packed ones
// (RowBlock). A row has the same bits either way, up to what follows.
//
// Weights that are far above their reference, infinities and NaN leave a row's sums infinite or
// NaN. So do infinities and NaN in keys and values that the row doesn't see, among others that do.
// Such rows are attended to that segment again: with their largest scores for references; what that
// doesn't help alone, with just what the row sees; and what that doesn't help by vectors. Which of
// these it is depends on nothing but what the row sees.
#pragma once

#include "cpu/attention/by_pieces.h"
#include "cpu/attention/by_vectors.h"
#include "cpu/attention/row_block.h"
#include "cpu/attention/row_group.h"

namespace paged::cpu {
namespace {

// Rows that read keys and values where they lie.
constexpr int64_t kMostGroupRows = kTileRows;

// How many pieces of a segment are packed at a time: all where their panels fit into a second cache
// of 2 MB beside the rest. Where they don't, the sums of all blocks wait for the next part.
PAGED_INLINE int64_t packed_pieces(const TileCounts& counts) {
  constexpr int64_t kMostUnits = 5 * 256 * 1024 / kUnitBytes;
  const int64_t units =
      kChunksPerPiece * counts.units_per_key_chunk() + counts.units_per_value_piece();
  int64_t pieces = kPiecesPerSegment;
  while (pieces > 1 && pieces * units > kMostUnits) pieces /= 2;
  return pieces;
}

class BySegments {
 public:
  // Sums that wait must be few, if they have to stay in a cache.
  static SpanLimits span_limits(const AttentionParams& params) {
    const bool is_packed_whole = packed_pieces(TileCounts(params)) == kPiecesPerSegment;
    return {is_packed_whole ? 2048 : 256, kSegment};
  }

  static int64_t scratch_bytes(const AttentionParams& params, int64_t num_rows) {
    const BySegments attention(params, num_rows, nullptr);
    return static_cast<int64_t>(num_rows > kMostGroupRows ? attention.end_ : attention.group_end_);
  }

  static void attend(const AttentionParams& params, const RowSpan& span, void* scratch) {
    const TileSession session;
    BySegments(params, span.num_rows, scratch).attend_all(span);
  }

  static void extend(const AttentionParams& params, const RowSpan& span, PieceRange segments,
                     float* state, void* scratch) {
    const TileSession session;
    BySegments attention(params, span.num_rows, scratch);
    const SegmentState own = segment_state_at(state, span.num_rows, columns_of(params));
    for (int64_t segment = segments.begin; segment < segments.end; ++segment) {
      attention.attend_segment(span, segment, own);
    }
  }

  static void fold(const AttentionParams& params, const RowSpan& span, int64_t num_states,
                   float* states) {
    const int64_t columns = columns_of(params);
    const SegmentState total = segment_state_at(states, span.num_rows, columns);
    for (int64_t i = 1; i < num_states; ++i) {
      states += floats_per_state(params, span.num_rows);
      const SegmentState more = segment_state_at(states, span.num_rows, columns);
      for (int64_t r = 0; r < span.num_rows; ++r) {
        const SegmentSoftmax softmax = {more.rounded.max[r], more.rounded.sum[r], more.total[r]};
        const float* values = more.rounded.acc + r * columns;
        fold_segment(total, r, softmax, [&](int64_t d) { return load(values + d); });
      }
    }
  }

  static void finish(const AttentionParams& params, const RowSpan& span, float* state) {
    finish_rows(params, span, segment_state_at(state, span.num_rows, columns_of(params)));
    _mm_sfence();
  }

 private:
  using ExactEngine = ByVectors<BFloat16>;

  // What a row's weights are relative to.
  enum Reference { kOfFirstKeys, kLargest };

  BySegments(const AttentionParams& params, int64_t num_rows, void* scratch)
      : BySegments(params, num_rows, Arena(scratch)) {}

  // What a group needs comes first, what only blocks need after it.
  BySegments(const AttentionParams& params, int64_t num_rows, Arena arena)
      : params_(params),
        counts_(params),
        packed_pieces_(packed_pieces(counts_)),
        columns_(columns_of(params)),
        writes_lines_(writes_lines(params)),
        zeros_(arena.take<BFloat16>(round_up(longest_row(params), kStep))),
        state_memory_(arena.take<float>(floats_per_state(params, num_rows))),
        row_state_(state_at(arena.take<float>(floats_per_state(params, 1)), 1, columns_)),
        stream_(params, arena),
        group_(params, wants_total(params), arena),
        exact_arena_(arena),
        group_end_(ExactEngine(params, arena).end()),
        block_(params, wants_total(params), skip_to(group_end_, arena)),
        keys_(
            arena.take<int32_t>(packed_pieces_ * kChunksPerPiece * counts_.units_per_key_chunk())),
        values_(arena.take<int32_t>(packed_pieces_ * counts_.units_per_value_piece())),
        sums_(arena.take<char>(num_waiting_blocks(num_rows) * BlockSums::bytes(counts_.passes))),
        end_(arena.address()) {}

  static Arena& skip_to(uintptr_t address, Arena& arena) {
    arena = Arena(reinterpret_cast<void*>(address));
    return arena;
  }

  // The sum of the weights before rounding is what the log and a sink go by.
  static bool wants_total(const AttentionParams& params) {
    return params.lse != nullptr || params.sinks != nullptr;
  }

  // Whether each row of the output is whole cache lines.
  static bool writes_lines(const AttentionParams& params) {
    const int64_t strides = params.output.token_stride | params.output.head_stride;
    return reinterpret_cast<uintptr_t>(params.output.data) % kCacheLine == 0 &&
           (strides | params.pool.value.head_dim) % kPass == 0;
  }

  // Blocks whose sums are kept at a time.
  int64_t num_waiting_blocks(int64_t num_rows) const {
    if (packed_pieces_ == kPiecesPerSegment) return 1;
    return (num_rows + kBlockRows - 1) / kBlockRows;
  }
  BlockSums& sums_of(int64_t row) const {
    const int64_t block = packed_pieces_ == kPiecesPerSegment ? 0 : row / kBlockRows;
    return *reinterpret_cast<BlockSums*>(sums_ + block * BlockSums::bytes(counts_.passes));
  }

  static Visible in_range(Visible keys, int64_t begin, int64_t end) {
    if (keys.first < begin) keys.first = begin;
    if (keys.last > end) keys.last = end;
    return keys;
  }
  static bool is_empty(Visible keys) { return keys.first >= keys.last; }

  RowSpan block_of(const RowSpan& span, int64_t row) const {
    const int64_t rest = span.num_rows - row;
    return rows_of(span, row, rest < kBlockRows ? rest : kBlockRows);
  }

  void attend_all(const RowSpan& span) {
    const PieceRange segments = pieces_of(span_visible(params_, span), kSegment);
    const SegmentState state = segment_state_at(state_memory_, span.num_rows, columns_);
    if (span.num_rows > kMostGroupRows && segments.end - segments.begin == 1) {
      attend_only_segment(span, segments.begin, state);
    } else {
      clear(state, span.num_rows);
      for (int64_t segment = segments.begin; segment < segments.end; ++segment) {
        attend_segment(span, segment, state);
      }
      finish_rows(params_, span, state);
    }
    // Output that was stored past the caches has to be seen by whoever waits for this thread.
    _mm_sfence();
  }

  // Where there is but one segment, each block is finished while the first cache has its state.
  void attend_only_segment(const RowSpan& span, int64_t segment, const SegmentState& state) {
    clear(state, kBlockRows);
    for (int64_t r = 0; r < span.num_rows; r += kBlockRows) {
      const RowSpan rows = block_of(span, r);
      if (is_empty(span_visible(params_, rows))) finish_rows(params_, rows, state);
    }
    attend_blocks(span, segment, [&](const RowSpan& rows, int64_t, const BlockSums& sums) {
      if (finish_whole_rows(rows, sums)) return;
      clear(state, kBlockRows);
      fold_rows(rows, segment, state, sums);
      finish_rows(params_, rows, state);
    });
  }

  // What folding into an empty state, and finishing that, would write, if nothing but the output is
  // asked for and all rows see keys and are whole.
  bool finish_whole_rows(const RowSpan& rows, const BlockSums& sums) const {
    const int64_t head_dim = params_.pool.value.head_dim;
    if (wants_total(params_) || !writes_lines_ || !are_whole(sums, rows.num_rows)) return false;
    BFloat16* output = static_cast<BFloat16*>(params_.output.data);
    RowCursor cursor(params_, rows);
    for (int64_t r = 0; r < rows.num_rows; ++r, cursor.next()) {
      const QueryRow& row = cursor.row();
      BFloat16* out =
          output + row.token * params_.output.token_stride + row.head * params_.output.head_stride;
      const Vec sum = sums.weight(r);
      const Vec scale = broadcast(-1.0f) - exponents(sum);  // the sum becomes 1/2 to 1
      const Vec factor = 1.0f / times_power_of_two(sum, scale);
      for (int64_t d = 0; d < head_dim; d += kPass) {
        const Vec first = times_power_of_two(sums.values(r, d), scale) * factor;
        const Vec second = times_power_of_two(sums.values(r, d + kLanes), scale) * factor;
        const auto line = (__m512i)narrow_pair(first, second);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + d), line);
      }
    }
    return true;
  }

  // Whether each of the block's rows sees a key and has finite sums that nothing was cut from.
  bool are_whole(const BlockSums& sums, int64_t num_rows) const {
    uint32_t sees_none = sums.has_no_reference;
    if (num_rows < kBlockRows) sees_none &= (1u << num_rows) - 1;
    if (sees_none != 0) return false;
    Vec largest = broadcast(0.0f), rest = broadcast(0.0f);
    for (int64_t r = 0; r < num_rows; ++r) {
      const Vec sum = sums.weight(r);
      largest = larger(sum, largest);
      rest = fma(sum, broadcast(0.0f), rest);
    }
    const float* acc = sums.acc();
    Vec more[4] = {rest, broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
    for (int64_t i = 0; i < BlockSums::acc_floats(counts_.passes); i += 4 * kLanes) {
      for (int64_t j = 0; j < 4; ++j) {
        more[j] = fma(load(acc + i + j * kLanes), broadcast(0.0f), more[j]);
      }
    }
    rest = (more[0] + more[1]) + (more[2] + more[3]);
    return max(largest) < kLargestSum && sum(rest) == 0.0f;
  }

  // Attends the span to one segment and folds the result into its state.
  void attend_segment(const RowSpan& span, int64_t segment, const SegmentState& state) {
    if (span.num_rows <= kMostGroupRows) {
      attend_group(span, segment, state);
    } else {
      attend_blocks(span, segment, [&](const RowSpan& rows, int64_t r, const BlockSums& sums) {
        fold_rows(rows, segment, state.from(r), sums);
      });
    }
  }

  void attend_group(const RowSpan& span, int64_t segment, const SegmentState& state) {
    sum_group(span, segment, kOfFirstKeys);
    fold_rows(span, segment, state, group_);
  }

  void sum_group(const RowSpan& rows, int64_t segment, Reference reference) {
    std::memset(zeros_, 0, static_cast<size_t>(longest_row(params_)) * sizeof(BFloat16));
    group_.start(params_, rows);
    if (reference == kLargest) {
      for_each_piece(rows, segment, [&](int64_t begin) {
        group_.look_for_largest(params_, stream_, begin, zeros_);
      });
      group_.use_largest();
    }
    for_each_piece(rows, segment,
                   [&](int64_t begin) { group_.attend(params_, stream_, begin, zeros_); });
  }

  // Calls f(begin) for each piece of the segment of which the rows see a key, looked up.
  template <class F>
  void for_each_piece(const RowSpan& rows, int64_t segment, F f) {
    for (int64_t i = 0; i < kPiecesPerSegment; ++i) {
      const int64_t piece = segment * kPiecesPerSegment + i;
      if (look_up(params_, rows, piece, stream_, RowGroup::kRowsAhead)) f(piece * kPiece);
    }
  }

  // Calls done(rows, index of the first, sums) for each block that sees a key of the segment.
  template <class F>
  void attend_blocks(const RowSpan& span, int64_t segment, F done) {
    std::memset(zeros_, 0, static_cast<size_t>(longest_row(params_)) * sizeof(BFloat16));
    configure_tiles(kFullTiles);
    const int64_t begin = segment * kSegment;
    const int64_t part_keys = packed_pieces_ * kPiece;
    for (int64_t part = begin; part < begin + kSegment; part += part_keys) {
      const Visible all = in_range(span_visible(params_, span), part, part + part_keys);
      if (is_empty(all)) continue;
      packed_end_ = all.first / kChunk * kChunk;
      looked_up_ = -1;
      asked_end_ = 0;
      for (int64_t r = 0; r < span.num_rows; r += kBlockRows) {
        const RowSpan rows = block_of(span, r);
        const Visible seen = in_range(span_visible(params_, rows), begin, begin + kSegment);
        const Visible keys = in_range(seen, part, part + part_keys);
        if (is_empty(keys)) continue;
        BlockSums& sums = sums_of(r);
        if (keys.first == seen.first) sums.clear(wants_total(params_));
        block_.start(params_, rows);
        block_.ask_for_queries(params_, block_of(span, r + kBlockRows));
        pack_to(span, part, keys.last);
        attend_block(part, keys, sums);
        if (keys.last == seen.last) done(rows, r, sums);
      }
    }
  }

  // Of the looked up piece's rows that are still to be packed, as many as are asked for beside so
  // many chunks: spread over these, they don't fill the buffers between caches and memory.
  RowsAhead rows_to_ask_for(int64_t num_chunks) {
    if (looked_up_ < 0) return {};
    const int64_t packed = packed_end_ - looked_up_ * kPiece - stream_.keys.first;
    if (asked_end_ < packed) asked_end_ = packed;
    const int64_t rest = stream_.num_keys - asked_end_;
    if (rest <= 0) return {};
    const RowsAhead ahead = {stream_.rows + asked_end_,
                             stream_.rows + stream_.value_begin + asked_end_,
                             rest < num_chunks ? rest : num_chunks};
    asked_end_ += ahead.count;
    return ahead;
  }

  // Packs keys and values up to key `end` of the part that begins at key `part`.
  void pack_to(const RowSpan& span, int64_t part, int64_t end) {
    for (; packed_end_ < end; packed_end_ += kChunk) {
      const int64_t piece = packed_end_ / kPiece;
      if (piece != looked_up_) {
        look_up(params_, span, piece, stream_);
        looked_up_ = piece;
        asked_end_ = 0;
      }
      const int64_t key = packed_end_ - piece * kPiece;
      // What is packed one chunk after the other, in one go, has been asked for by nobody else.
      const int64_t next = key + kChunk;
      const bool asks = packed_end_ + kChunk < end && next >= stream_.keys.first &&
                        next + kChunk <= stream_.keys.last;
      const bool asks_values = asks && stream_.value_begin > 0;
      const ChunkRows keys(stream_.key_rows(), stream_.keys, key, zeros_);
      pack_keys(keys, params_.pool.key.head_dim, counts_.steps,
                asks ? stream_.key_rows() + next : nullptr, keys_at(part, packed_end_));
      const ChunkRows values(stream_.value_rows(), stream_.keys, key, zeros_);
      pack_values(values, params_.pool.value.head_dim, counts_.passes,
                  asks_values ? stream_.value_rows() + next : nullptr,
                  values_at(part, packed_end_));
    }
  }

  int32_t* keys_at(int64_t part, int64_t key) const {
    return keys_ + (key - part) / kChunk * counts_.units_per_key_chunk();
  }
  int32_t* values_at(int64_t part, int64_t key) const {
    const int64_t piece = (key - part) / kPiece, chunk = (key - part) % kPiece / kChunk;
    return values_ + piece * counts_.units_per_value_piece() + chunk * 2 * kUnitsPerTile;
  }

  void attend_block(int64_t part, Visible keys, BlockSums& sums) {
    for (int64_t begin = keys.first / kPiece * kPiece; begin < keys.last; begin += kPiece) {
      const Visible mine = in_range(keys, begin, begin + kPiece);
      const int64_t first = (mine.first - begin) / kChunk;
      const int64_t last = round_up(mine.last - begin, kChunk) / kChunk;
      const int64_t first_key = begin + first * kChunk;
      block_.attend(params_, begin, first, last, keys_at(part, first_key),
                    values_at(part, first_key), rows_to_ask_for(last - first), sums);
    }
  }

  // Folds the sums of some rows over a segment into their states; rows whose sums aren't finite are
  // attended again.
  template <class Sums>
  void fold_rows(const RowSpan& rows, int64_t segment, const SegmentState& state,
                 const Sums& sums) {
    const uint32_t left = fold_whole_rows(~uint32_t{0}, rows, state, sums);
    if (left == 0) return;
    for (int64_t r = 0; r < rows.num_rows; r += kMostGroupRows) {
      if ((left >> r & ((1u << kMostGroupRows) - 1)) == 0) continue;
      const int64_t rest = rows.num_rows - r;
      const RowSpan some = rows_of(rows, r, rest < kMostGroupRows ? rest : kMostGroupRows);
      attend_again<std::is_same_v<Sums, RowGroup>>(left >> r, some, segment, state.from(r));
    }
    looked_up_ = -1;
    configure_tiles(kFullTiles);
  }

  // Those whose bit is set in `wanted`; returns the bits of those whose sums aren't finite.
  template <class Sums>
  uint32_t fold_whole_rows(uint32_t wanted, const RowSpan& rows, const SegmentState& state,
                           const Sums& sums) const {
    uint32_t left = 0;
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      if ((wanted >> r & 1) == 0) continue;
      const SegmentSoftmax softmax = sums.softmax(r);
      if (softmax.sum == 0.0f) continue;  // sees no key: one that it sees weighs something, or NaN
      const auto values = [&](int64_t d) { return sums.values(r, d); };
      if (is_whole(softmax, values)) {
        fold_segment(state, r, softmax, values);
      } else {
        left |= 1u << r;
      }
    }
    return left;
  }

  template <class F>
  bool is_whole(const SegmentSoftmax& softmax, F values) const {
    if (!(softmax.sum < kLargestSum)) return false;
    Vec rest = broadcast(0.0f);
    for (int64_t d = 0; d < columns_; d += kLanes) rest = fma(values(d), broadcast(0.0f), rest);
    return sum(rest) == 0.0f;
  }

  // Attends again to those of up to 16 rows whose bit is set in `left`; kIsSecond: not for the
  // first time as this group. A row that is whole only with its largest score for reference has had
  // weights cut, since infinities and NaN of others in the group spoil it with either: so alone it
  // would have the same reference, on which the last bits of a log depend.
  template <bool kIsSecond>
  void attend_again(uint32_t left, const RowSpan& rows, int64_t segment,
                    const SegmentState& state) {
    if constexpr (!kIsSecond) {
      sum_group(rows, segment, kOfFirstKeys);
      left = fold_whole_rows(left, rows, state, group_);
    }
    if (left != 0) {
      sum_group(rows, segment, kLargest);
      left = fold_whole_rows(left, rows, state, group_);
    }
    for (int64_t r = 0; r < rows.num_rows; ++r) {
      if ((left >> r & 1) == 0) continue;
      attend_alone(rows_of(rows, r, 1), segment, state.from(r));
    }
  }

  void attend_alone(const RowSpan& row, int64_t segment, const SegmentState& state) {
    for (const Reference reference : {kOfFirstKeys, kLargest}) {
      sum_group(row, segment, reference);
      if (fold_whole_rows(1, row, state, group_) == 0) return;
    }
    clear(row_state_, 1);
    for (int64_t i = 0; i < kPiecesPerSegment; ++i) {
      attend_row<ExactEngine>(params_, row, segment * kPiecesPerSegment + i, exact_arena_,
                              row_state_);
    }
    fold_state(state, 0, row_state_);
  }

  // Lets the sinks join the denominator, then writes output and lse.
  static void finish_rows(const AttentionParams& params, const RowSpan& span,
                          const SegmentState& state) {
    BFloat16* output = static_cast<BFloat16*>(params.output.data);
    RowCursor cursor(params, span);
    for (int64_t r = 0; r < span.num_rows; ++r, cursor.next()) {
      const QueryRow& row = cursor.row();
      float max = state.rounded.max[r] * kLn2;
      float sum = state.total[r];
      float factor = 1.0f / state.rounded.sum[r];
      if (params.sinks != nullptr) {
        const Joined joined = join_sink(max, sum, params.sinks[row.head]);
        factor *= sum * joined.keep / joined.sum;
        max = joined.max;
        sum = joined.sum;
      }
      BFloat16* out =
          output + row.token * params.output.token_stride + row.head * params.output.head_stride;
      const float* acc = state.rounded.acc + r * state.rounded.acc_stride;
      if (state.rounded.max[r] == kMinusInf) {
        std::memset(out, 0, static_cast<size_t>(params.pool.value.head_dim) * sizeof(BFloat16));
      } else {
        write_past_caches(out, acc, params.pool.value.head_dim,
                          state.rounded.sum[r] == 0.0f ? 0.0f : factor);
      }
      if (params.lse != nullptr)
        params.lse[row.token * params.num_heads + row.head] = max + logf(sum);
    }
  }

  // What is written here won't be read soon, and must not take the caches from keys and values.
  static void write_past_caches(BFloat16* out, const float* acc, int64_t head_dim, float factor) {
    if (reinterpret_cast<uintptr_t>(out) % kCacheLine != 0 || head_dim % kPass != 0) {
      return write_row(out, acc, head_dim, factor);
    }
    for (int64_t d = 0; d < head_dim; d += kPass) {
      const IntVec line = narrow_pair(load(acc + d) * factor, load(acc + d + kLanes) * factor);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + d), (__m512i)line);
    }
  }

  const AttentionParams& params_;
  TileCounts counts_;
  int64_t packed_pieces_;
  int64_t columns_;
  bool writes_lines_;
  BFloat16* zeros_;  // a row of K or V that nobody sees
  float* state_memory_;
  State row_state_;
  RowStream<BFloat16> stream_;
  RowGroup group_;
  Arena exact_arena_;
  uintptr_t group_end_;
  RowBlock block_;
  int32_t* keys_;  // packed, of a part of a segment
  int32_t* values_;
  char* sums_;  // of each block that waits
  uintptr_t end_;
  int64_t packed_end_ = 0;
  int64_t looked_up_ = -1;  // the piece whose rows the stream has
  int64_t asked_end_ = 0;   // how many of its keys have been asked for
};

}  // namespace
}  // namespace paged::cpu
