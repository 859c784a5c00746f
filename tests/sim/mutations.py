"""Break the Ascend kernels on purpose, in one place at a time, and see that it is noticed.

``python -m tests.sim.mutations`` makes each mutant in a copy of op_kernel, compiles it and runs it
on the simulated cores. A mutant is caught by the compiler, by a broken rule, or by a wrong result;
the table says by which. With words it takes the mutants whose fault, file or unit has one of them:
``python -m tests.sim.mutations dense score_chunk.h``. The exit code is the number of
mutants that nothing noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_ops import reference
from tests.sim import kernel_calls
from tests.sim.cases import Case, make_case, quantised
from tests.sim.harness import CompileError
from tests.sim.kernel_calls import OP_KERNEL
from tests.support.mutants import WORDS, Mutant, apply, chosen
from tests.support.trees import tree_mask

_VECTOR, _STATE, _COPY, _OUTPUT = (
    "vector/attention_vector.h",
    "attention/row_state.h",
    "common/row_copy.h",
    "attention/row_output.h",
)
_CUBE, _SOFTMAX, _TO_CUBE = (
    "mixed/attention_cube.h",
    "mixed/attention_softmax.h",
    "mixed/cube_copy.h",
)
_STREAM, _STEPS, _STAYING = (
    "mixed/share_stream.h",
    "mixed/piece_steps.h",
    "mixed/staying_tiles.h",
)
_SCALES, _TREE = "vector/tile_scales.h", "vector/tree_mask.h"
_TABLES, _OPTIONS, _HIDE = (
    "attention/block_tables.h",
    "attention/score_options.h",
    "mixed/hide_scores.h",
)

# By what runs them: a source of op_kernel, and what is asked of it.
MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "attention": (
        Mutant(
            "a barrier too few between the products of two rows",
            _VECTOR,
            "lanes, repeats, 1, 1, kGranule);\n    Barrier();",
            "lanes, repeats, 1, 1, kGranule);",
        ),
        Mutant(
            "a barrier too few between the columns of a product",
            _VECTOR,
            "mask, repeats, params);\n      }\n      Barrier();",
            "mask, repeats, params);\n      }",
        ),
        Mutant(
            "a barrier too few between exp's argument and exp",
            _STATE,
            "AscendC::Sub(lanes, from, to, count);\n  Barrier();",
            "AscendC::Sub(lanes, from, to, count);",
        ),
        Mutant(
            "a barrier too few before weights meet values",
            _VECTOR,
            "static_cast<int32_t>(kSumRows * width));\n    Barrier();",
            "static_cast<int32_t>(kSumRows * width));",
        ),
        Mutant(
            "a barrier too few in the pairwise sum",
            _VECTOR,
            "static_cast<int32_t>(half * width));\n      Barrier();",
            "static_cast<int32_t>(half * width));",
        ),
        Mutant("keys never freed", _VECTOR, "key_in_.FreeTensor(keys);", ""),
        Mutant("values never freed", _VECTOR, "value_in_.FreeTensor(values);", ""),
        Mutant(
            "an output row never freed",
            _OUTPUT,
            "      i += CopyTokensOut(unit, i, end, rows[(i - begin) * width_]);\n    }\n"
            "    rows_out_->FreeTensor(rows);",
            "      i += CopyTokensOut(unit, i, end, rows[(i - begin) * width_]);\n    }\n",
        ),
        Mutant("values never enqueued", _VECTOR, "value_in_.EnQue(values);", ""),
        Mutant(
            "output copied without waiting for the vector unit",
            _OUTPUT,
            "    }\n    rows_out_->EnQue(rows);\n    rows = rows_out_->template DeQue<T>();\n",
            "    }\n",
        ),
        Mutant(
            "keys freed before they are used",
            _VECTOR,
            "const int32_t all = static_cast<int32_t>(step.unit.num_rows * kRepeatLanes);",
            "key_in_.FreeTensor(keys);\n"
            "    const int32_t all = static_cast<int32_t>(step.unit.num_rows * kRepeatLanes);",
        ),
        Mutant(
            "a copy shifted by one element",
            _VECTOR,
            "CopyRowsIn(to[k * UbPitch<C>(layout.head_dim)], cache[at]",
            "CopyRowsIn(to[k * UbPitch<C>(layout.head_dim)], cache[at + 1]",
        ),
        Mutant(
            "a copy of one row too many",
            _TABLES,
            "return tiling_->block_size - (key -",
            "return tiling_->block_size + 1 - (key -",
        ),
        Mutant(
            "one block read too far",
            _TABLES,
            "BlockAt(RowOf(sequence), column) *",
            "BlockAt(RowOf(sequence), column + 1) *",
        ),
        Mutant(
            "a block's offset forgotten",
            _TABLES,
            "slot * layout.token_stride +",
            "0 +",
        ),
        Mutant("the KV head forgotten", _TABLES, "kv_head * layout.head_stride", "0"),
        Mutant(
            "block ids not clamped",
            _TABLES,
            "return Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);",
            "return ids_.GetValue(at);",
        ),
        Mutant(
            "lengths not clamped",
            "attention/sequence.h",
            "Clamp(seq_lens_.GetValue(i), 0, capacity_)",
            "seq_lens_.GetValue(i)",
        ),
        Mutant(
            "query starts not clamped",
            "attention/sequence.h",
            "Clamp(starts_.GetValue(i + 1), begin, num_tokens_)",
            "starts_.GetValue(i + 1)",
        ),
        Mutant(
            "more unified buffer than there is",
            _VECTOR,
            "InitBuffer(key_in_, 2, tree_at_",
            "InitBuffer(key_in_, 2, 8 * tree_at_",
        ),
        Mutant(
            "a buffer half as large as its contents",
            _VECTOR,
            "InitBuffer(output_out_, 1, rows * value_dim_ * sizeof(T))",
            "InitBuffer(output_out_, 1, rows * value_dim_ * sizeof(T) / 2)",
        ),
        Mutant(
            "accumulators too small",
            _VECTOR,
            "acc = NewBuffer<float>(pipe, (rows + totals)",
            "acc = NewBuffer<float>(pipe, rows",
        ),
        Mutant("cores don't wait for each other", _VECTOR, "AscendC::SyncAll();", ""),
        Mutant("hidden keys not hidden", _VECTOR, "HideScores(step, r);", ""),
        Mutant(
            "distances without the position",
            _OPTIONS,
            "AscendC::Adds(work, distances, shift,",
            "AscendC::Adds(work, distances, 0.0f,",
        ),
        Mutant(
            "a window of one key more",
            "attention/visible.h",
            "position + 1 - tiling.sliding_window",
            "position - tiling.sliding_window",
        ),
        Mutant(
            "the causal mask off by one",
            "attention/visible.h",
            "Clamp(position + 1, 0, seq_len)",
            "Clamp(position + 2, 0, seq_len)",
        ),
        Mutant(
            "the values' partial sums misplaced",
            _VECTOR,
            "products_[(first - begin) * width]",
            "products_[first * width]",
        ),
        Mutant(
            "one repeat too many",
            _VECTOR,
            "const uint8_t repeats = static_cast<uint8_t>(count);",
            "const uint8_t repeats = static_cast<uint8_t>(count + 1);",
        ),
        Mutant(
            "the running maximum not kept",
            _VECTOR,
            "AscendC::Adds(piece_.max, scratch_.new_max, 0.0f, lanes);",
            "",
        ),
        Mutant(
            "the accumulator not rescaled",
            _VECTOR,
            "MultiplyRows(piece_.acc, scratch_.factor, rows, value_dim_);",
            "",
        ),
        Mutant(
            "a piece begins with the last one's state",
            _VECTOR,
            "Clear(piece_, step.unit.num_rows, value_dim_);",
            "",
        ),
        Mutant(
            "states folded with their weights exchanged",
            _STATE,
            "AscendC::Sub(scratch.keep, into.max, scratch.new_max, lanes);\n"
            "    AscendC::Sub(scratch.add, max, scratch.new_max, lanes);",
            "AscendC::Sub(scratch.add, into.max, scratch.new_max, lanes);\n"
            "    AscendC::Sub(scratch.keep, max, scratch.new_max, lanes);",
        ),
        Mutant(
            "sinks forgotten",
            _OUTPUT,
            "Rescale(state, sink_lanes_",
            "if (false) Rescale(state, sink_lanes_",
        ),
        Mutant(
            "lse copied from the wrong granule",
            _OUTPUT,
            "lse[i * kGranule]",
            "lse[i]",
        ),
        Mutant(
            "a unit in turn left out", "attention/work_units.h", "skip_ = next_skip_;", "++skip_;"
        ),
    ),
    "attention, int8": (
        Mutant("scales of keys forgotten", _VECTOR, "ScaleScores(step, key_scales_.Lanes());", ""),
        Mutant(
            "scales of values forgotten", _VECTOR, "ScaleScores(step, value_scales_.Lanes());", ""
        ),
        Mutant(
            "one KV head's scale for all",
            _SCALES,
            "scales_.GetValue(unit.kv_head * layout_->head_stride)",
            "scales_.GetValue(0)",
        ),
        Mutant(
            "scales shifted where a tile begins within a granule",
            _SCALES,
            "unit.kv_head, begin + k - before)",
            "unit.kv_head, begin + k)",
        ),
        Mutant(
            "garbage before the first scale",
            _SCALES,
            "        AscendC::Duplicate(in[first * kGranule], 0.0f,",
            "        if (false) AscendC::Duplicate(in[first * kGranule], 0.0f,",
        ),
        Mutant(
            "rows of int8 without the rest of their granule",
            _VECTOR,
            "const int64_t pitch = UbPitch<int8_t>(width);",
            "const int64_t pitch = width;",
        ),
        Mutant(
            "more halves at a time than there is room for",
            _VECTOR,
            "num_products_ * sizeof(float) / (width * sizeof(half))",
            "2 * num_products_ * sizeof(float) / (width * sizeof(half))",
        ),
        Mutant(
            "a barrier too few between halves and floats",
            _VECTOR,
            "pitch, count, width);\n    Barrier();",
            "pitch, count, width);",
        ),
    ),
    "attention, tree": (
        Mutant(
            "the mask of another sequence",
            _TREE,
            "return unit.sequence.first_token + unit.row_begin /",
            "return unit.row_begin /",
        ),
        Mutant(
            "context of a tile hidden",
            _TREE,
            "AscendC::Duplicate(halves, static_cast<half>(1.0f), all);",
            "AscendC::Duplicate(halves, static_cast<half>(0.0f), all);",
        ),
        Mutant(
            "context of a granule hidden",
            _TREE,
            "static_cast<uint8_t>(before), 0, 1);",
            "static_cast<uint8_t>(before), 0, 0);",
        ),
        Mutant(
            "bits read before they are computed",
            _TREE,
            "    AscendC::WaitFlag<AscendC::HardEvent::V_S>(computed_);\n",
            "",
        ),
        Mutant(
            "bits computed before the last ones are read",
            _TREE,
            "    AscendC::SetFlag<AscendC::HardEvent::S_V>(read_);\n"
            "    AscendC::WaitFlag<AscendC::HardEvent::S_V>(read_);\n",
            "",
        ),
        Mutant(
            "columns read beyond the last one",
            _TREE,
            "Smaller(seen.last, end)",
            "Smaller(seen.last, end + kRepeatLanes)",
        ),
        Mutant(
            "the bits of a unit's first token for all its rows",
            _TREE,
            "bits_[(unit.row_begin + r) / heads - unit.row_begin / heads]",
            "bits_[0 * r * heads]",
        ),
        Mutant(
            "values multiplied though hidden",
            _VECTOR,
            "if ((MaskOf({first, last}) & ~mask) != 0) {",
            "if (false) {",
        ),
    ),
    "attention, latent": (
        Mutant(
            "keys freed while they serve as values",
            _VECTOR,
            "      AddValues(step, wide_keys, key_dim_);\n      FreeKeys(keys);\n",
            "      FreeKeys(keys);\n      AddValues(step, wide_keys, key_dim_);\n",
        ),
        Mutant(
            "values thought to be dense among keys",
            _VECTOR,
            "AddValues(step, wide_keys, key_dim_);",
            "AddValues(step, wide_keys, value_dim_);",
        ),
        Mutant(
            "only the first columns of long values summed",
            _VECTOR,
            "c < value_dim_; c += kSumColumns",
            "c < Smaller(value_dim_, kSumColumns); c += kSumColumns",
        ),
    ),
    "gather_kv": (
        Mutant(
            "block ids of a gathered table not clamped",
            "gather_kv.cpp",
            "Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1)",
            "ids_.GetValue(at)",
        ),
        Mutant(
            "lengths longer than the result followed",
            "gather_kv.cpp",
            "Clamp(seq_lens_.GetValue(i), 0, room)",
            "Clamp(seq_lens_.GetValue(i), 0, room + capacity)",
        ),
        Mutant(
            "heads gathered to one place",
            "gather_kv.cpp",
            "(first_token + position + offset) * tiling_->num_kv_heads + head",
            "(first_token + position + offset) * tiling_->num_kv_heads",
        ),
        Mutant("a core's turn forgotten between sequences", "gather_kv.cpp", "skip -= units;", ""),
        Mutant("scales never freed", "common/dequantise.h", "scales_in_.FreeTensor(granules);", ""),
        Mutant(
            "a barrier too few between elements and scales",
            "common/dequantise.h",
            "    WidenHalves(wide, count, width);\n    Barrier();\n",
            "    WidenHalves(wide, count, width);\n",
        ),
        Mutant(
            "scales read with the rows' stride",
            "common/dequantise.h",
            "CopyRowsIn(granules, scales, count, 1, scale_stride);",
            "CopyRowsIn(granules, scales, count, 1, from_stride);",
        ),
    ),
    "attention_mixed": (
        Mutant(
            "scores announced by the matrix unit",
            _CUBE,
            "PIPE_FIX>(kScoresReady)",
            "PIPE_M>(kScoresReady)",
        ),
        Mutant(
            "products announced by the matrix unit",
            _CUBE,
            "PIPE_FIX>(kProductsReady)",
            "PIPE_M>(kProductsReady)",
        ),
        Mutant(
            "weights announced before they are in the workspace",
            _SOFTMAX,
            "PIPE_MTE3>(kWeightsReady)",
            "PIPE_V>(kWeightsReady)",
        ),
        Mutant(
            "scores not waited for",
            _STREAM,
            "AscendC::CrossCoreWaitFlag(kScoresReady);",
            "",
        ),
        Mutant(
            "weights not waited for",
            _CUBE,
            "AscendC::CrossCoreWaitFlag(kWeightsReady);",
            "",
        ),
        Mutant(
            "products not waited for",
            _STREAM,
            "AscendC::CrossCoreWaitFlag(kProductsReady);",
            "",
        ),
        Mutant(
            "a flag with the wrong id",
            _CUBE,
            "PIPE_FIX>(kProductsReady)",
            "PIPE_FIX>(kScoresReady)",
        ),
        Mutant(
            "one vector core doesn't announce its weights",
            _SOFTMAX,
            "    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);",
            "    if (AscendC::GetSubBlockIdx() == 0) {\n"
            "      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);\n"
            "    }",
        ),
        Mutant(
            "a step too many in flight between the cores",
            "mixed/exchange.h",
            "kAhead = kExchangeBuffers - 1;",
            "kAhead = kExchangeBuffers;",
        ),
        Mutant(
            "all groups share one workspace",
            "mixed/exchange.h",
            "workspace + group * tiling.exchange_bytes",
            "workspace + 0 * group * tiling.exchange_bytes",
        ),
        Mutant(
            "keys used before they have come in",
            _CUBE,
            "    tile_ring_.Use(turn);\n    const AscendC::LocalTensor<T> keys = tiles_[at];",
            "    const AscendC::LocalTensor<T> keys = tiles_[at];",
        ),
        Mutant(
            "a buffer overwritten before it was used",
            "mixed/ring.h",
            "    AscendC::WaitFlag<freed>(first + static_cast<int32_t>(buffer));\n"
            "    return buffer;",
            "    return buffer;",
        ),
        Mutant("flags left set at the end", _CUBE, "    scores_.Close();\n", ""),
        Mutant(
            "results stored while the matrix unit works on them",
            "mixed/cube_sums.h",
            "    AscendC::SetFlag<AscendC::HardEvent::M_FIX>(EventOf(buffer));\n",
            "",
        ),
        Mutant(
            "both halves of a product in one buffer",
            _CUBE,
            "MultiplyHalf(sums, sum ^ 1, buffer,",
            "MultiplyHalf(sums, sum, buffer,",
        ),
        Mutant(
            "small products thought to stay in order",
            "mixed/cube_sums.h",
            "kOrderedProducts = 10 *",
            "kOrderedProducts = 4 *",
        ),
        Mutant(
            "a barrier too few between products that add up",
            _CUBE,
            "AscendC::PipeBarrier<PIPE_M>();",
            "",
        ),
        Mutant(
            "every product begins at zero",
            _CUBE,
            "depth), 0, false, opens)",
            "depth), 0, false, true)",
        ),
        Mutant(
            "the first product begins with what was there",
            _CUBE,
            "depth), 0, false, opens)",
            "depth), 0, false, false)",
        ),
        Mutant(
            "values not transposed",
            _CUBE,
            "LoadTile<true>(Right(buffer), values",
            "LoadTile<false>(Right(buffer), values",
        ),
        Mutant(
            "fractals of a factor in the wrong order",
            _TO_CUBE,
            "static_cast<uint8_t>(count), 1, 0, 0, transposed, 0);",
            "static_cast<uint8_t>(count), 2, 0, 0, transposed, 0);",
        ),
        Mutant(
            "rows of zeros beyond the keys forgotten",
            _TO_CUBE,
            "  ZeroRowsOfFractal(to, seen.last - span.first, span.last - span.first, width);\n",
            "",
        ),
        Mutant(
            "rows of zeros beyond the queries forgotten",
            _CUBE,
            "    ZeroRowsInL1(to, unit.num_rows, step.pitch, KeyDim(), step.pitch);\n",
            "",
        ),
        Mutant(
            "results read with the wrong pitch",
            _CUBE,
            "static_cast<uint16_t>(rows), width, false);",
            "static_cast<uint16_t>(rows + kFractal), width, false);",
        ),
        Mutant(
            "scores written to another tile's place",
            _CUBE,
            "cube.pairs_at + (begin + first) * rows]",
            "cube.pairs_at + first * rows]",
        ),
        Mutant("half a cap", _OPTIONS, "scores, 2.0f / softcap,", "scores, 1.0f / softcap,"),
        Mutant(
            "a key beyond the causal mask not hidden",
            _HIDE,
            "uint64_t mask[2] = {((1ULL << early) - 1) & lanes, 0};",
            "uint64_t mask[2] = {((1ULL << early) - 1) & lanes & ~1ULL, 0};",
        ),
        Mutant(
            "a key before the window not hidden",
            _HIDE,
            "int64_t late = row + tiling.sliding_window * heads;",
            "int64_t late = row + (tiling.sliding_window + 1) * heads;",
        ),
        Mutant(
            "both vector cores take the same rows",
            _STREAM,
            "share.first_row = is_second_ ? first : 0;",
            "share.first_row = 0;",
        ),
        Mutant(
            "more L1 than there is",
            _CUBE,
            "(pipe, kTilesInL1",
            "(pipe, 16 * kTilesInL1",
        ),
        Mutant(
            "a buffer of scores too few",
            _STREAM,
            "ring_.Init(pipe, tiling.chunk_buffers);",
            "ring_.Init(pipe, tiling.chunk_buffers - 1);",
        ),
        Mutant(
            "one more chunk of scores kept than there is room for",
            _STREAM,
            "kept_ = tiling.chunk_buffers - 2;",
            "kept_ = tiling.chunk_buffers - 1;",
        ),
        Mutant(
            "scores that stay overwritten by others",
            _SOFTMAX,
            "scored_stays = chunk < stream_.Kept();",
            "scored_stays = false;",
        ),
        Mutant(
            "scores never freed",
            _SOFTMAX,
            "      stream_.Free(summed);\n",
            "",
        ),
        Mutant("products never freed", _SOFTMAX, "    stream_.Free(buffer);\n", ""),
        Mutant(
            "a barrier too few between the rounds",
            _SOFTMAX,
            "      Barrier();\n      if (weighed != kNothing) {\n        ExpScores",
            "      if (weighed != kNothing) {\n        ExpScores",
        ),
        Mutant(
            "a barrier too few inside a round",
            _SOFTMAX,
            "      Barrier();\n      const int64_t chunk = pass.last_chunk - round;\n",
            "      const int64_t chunk = pass.last_chunk - round;\n",
        ),
        Mutant(
            "a barrier too few before the last slabs of a pass",
            _SOFTMAX,
            "    Barrier();\n    AddLastSlabs(scored, scored_stays, summed);\n",
            "    AddLastSlabs(scored, scored_stays, summed);\n",
        ),
        Mutant(
            "a slab of each chunk left out of the sums",
            _SOFTMAX,
            "      sums_.AddLast(stream_.In(summed));\n",
            "",
        ),
        Mutant(
            "the last rows of a unit not written",
            _SOFTMAX,
            "    while (written_rows_ < summed.num_rows) {\n",
            "    while (false) {\n",
        ),
        Mutant(
            "the total prepared for the products of another step",
            _SOFTMAX,
            "ClosePass(scored, weighed, stream_.NextSummed());",
            "ClosePass(scored, weighed, summed);",
        ),
        Mutant(
            "a stage of the total's preparation left out",
            _SOFTMAX,
            "        OpenTotal(stage++, next_summed);\n",
            "        OpenTotal(stage += 2, next_summed);\n",
        ),
        Mutant(
            "the maxima of steps in flight in one place",
            _SOFTMAX,
            "AscendC::Muls(max_[share.step.buffer], maxima_",
            "AscendC::Muls(max_[0], maxima_",
        ),
        Mutant(
            "the verdict read from an old line of the cache",
            "mixed/verdict.h",
            "    AscendC::DataCacheCleanAndInvalid<float, AscendC::CacheLine::SINGLE_CACHE_LINE,\n"
            "                                      AscendC::DcciDst::CACHELINE_OUT>(verdict);\n",
            "",
        ),
        Mutant(
            "the verdict read before both vector cores have told",
            _CUBE,
            "    AscendC::CrossCoreWaitFlag(kVerdictReady);\n",
            "",
        ),
        Mutant(
            "tiles of a piece taken for those of the piece before",
            _STAYING,
            "    if (opens_piece) {\n",
            "    if (false) {\n",
        ),
        Mutant(
            "one total for both bands of a unit",
            _SOFTMAX,
            "return totals_[share.step.band];",
            "return totals_[0];",
        ),
        Mutant(
            "one band's queries for both",
            _CUBE,
            "step.query = query_index_[step.step.band];",
            "step.query = query_index_[0];",
        ),
        Mutant(
            "the band's keys taken for the unit's",
            _CUBE,
            "static_cast<uint32_t>(span.first - fractals.first), seen, fractals};",
            "0, seen, fractals};",
        ),
        Mutant(
            "only the keys of the first band brought in",
            _STEPS,
            "step.unit_seen = unit_seen_;",
            "step.unit_seen = seen;",
        ),
        Mutant("every step of a band begins it", _STEPS, "    band.is_opened = true;\n", ""),
        Mutant(
            "a band that doesn't end",
            _STEPS,
            "band.keys.last <= begin_ + kPiece;",
            "band.keys.last <= begin_;",
        ),
        Mutant("queries never freed", _CUBE, "        query_ring_.Used(cube.query);\n", ""),
        Mutant(
            "weights with a gap in UB written as if without",
            _SOFTMAX,
            "static_cast<uint16_t>(pitch - keys), static_cast<uint16_t>(tiling_->exchange_keys",
            "0, static_cast<uint16_t>(tiling_->exchange_keys",
        ),
        Mutant(
            "columns of weights read one after the other",
            _CUBE,
            "static_cast<uint16_t>(tiling_->exchange_keys - keys),",
            "0,",
        ),
        Mutant(
            "weights overwritten on their way out",
            "mixed/part_ring.h",
            "    AscendC::WaitFlag<AscendC::HardEvent::MTE3_V>(freed_[part_]);\n    return Part();",
            "    return Part();",
        ),
        Mutant(
            "a chunk read before it is there",
            "mixed/chunk_ring.h",
            "    AscendC::WaitFlag<AscendC::HardEvent::MTE2_V>(filled_[buffer]);\n",
            "",
        ),
        Mutant(
            "a chunk overwritten while it is used",
            "mixed/chunk_ring.h",
            "    AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_[buffer]);\n"
            "    return buffer;",
            "    return buffer;",
        ),
        Mutant(
            "every chunk thought to be seen by all rows",
            _STREAM,
            "if (chunk - share.plain_first >= share.num_plain) {",
            "if (false) {",
        ),
        Mutant(
            "a cut chunk read from the beginning",
            _STREAM,
            "from[held.span_first * share.step.pitch]",
            "from[0 * share.step.pitch]",
        ),
        Mutant(
            "slabs of maxima larger than a short chunk",
            _STREAM,
            "all_whole ? kMaximaLanes : kSlabKeys * share.rows;",
            "kMaximaLanes;",
        ),
        Mutant(
            "rows of fractals one row apart in GM",
            _TO_CUBE,
            "matrices > 1 ? kFractal * stride : 0",
            "matrices > 1 ? stride : 0",
        ),
        Mutant(
            "rows written to the beginning of their fractals",
            _TO_CUBE,
            "(at - in_fractal) * width + in_fractal * kFractal], from[done",
            "(at - in_fractal) * width], from[done",
        ),
        Mutant(
            "quotients half as large",
            "attention/visible.h",
            "(n * by.multiplier) >> by.shift",
            "(n * by.multiplier) >> (by.shift + 1)",
        ),
        Mutant(
            "units dealt one too early",
            "attention/work_units.h",
            "at_ += skip_ + 1;",
            "at_ += skip_;",
        ),
        Mutant(
            "every unit of a row begins with its first piece",
            "attention/work_units.h",
            "unit_.piece = first_piece_ + piece;",
            "unit_.piece = first_piece_;",
        ),
        Mutant(
            "states stored one after the other",
            "attention/piece_states.h",
            "states[(r - begin) * Pitch()], copied, Pitch(), tiling_->max_pieces * Pitch()",
            "states[(r - begin) * Pitch()], copied, Pitch(), Pitch()",
        ),
        Mutant(
            "a state overwritten while it is folded",
            "attention/piece_states.h",
            "      AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(freed_);\n      CopyRowsIn",
            "      CopyRowsIn",
        ),
        Mutant(
            "the maximum of a row's pieces taken for their sum",
            "attention/piece_states.h",
            "BlockReduceMax(total.sum, sum_,",
            "BlockReduceMax(total.sum, max_,",
        ),
    ),
    "attention_mixed, usual": (
        Mutant(
            "a whole tile read from the first block",
            _CUBE,
            "place.block * layout.block_stride + place.slot",
            "0 * layout.block_stride + place.slot",
        ),
        Mutant(
            "a whole tile read from its block's begin",
            _CUBE,
            "place.slot * layout.token_stride + head;",
            "0 * layout.token_stride + head;",
        ),
        Mutant(
            "the last tile thought to be whole",
            "mixed/cube_step.h",
            "Smaller(step.span.last, step.unit_seen.last) & -size;",
            "step.span.last;",
        ),
        Mutant(
            "dense rows loaded as if they were fractals",
            _CUBE,
            "    if (IsDense()) {\n      LoadDenseRows",
            "    if (false) {\n      LoadDenseRows",
        ),
        Mutant(
            "dense rows that nobody describes",
            _CUBE,
            "      DescribeDenseRows(TileKeys(), Larger(KeyDim(), ValueDim()));\n",
            "",
        ),
        Mutant(
            "garbage behind the last dense row",
            _TO_CUBE,
            "  ZeroDenseRows(to, seen.last - span.first, span.last - span.first, width);\n",
            "",
        ),
        Mutant(
            "every second small band left out",
            _STREAM,
            "share.rows = is_second_ ? step.pitch - first : first;",
            "share.rows = is_second_ ? (step.pitch - first) % step.pitch : first;",
        ),
        Mutant(
            "a core without rows tells of its weights before it has read",
            _SOFTMAX,
            "PIPE_V>(kWeightsReady)",
            "PIPE_MTE3>(kWeightsReady)",
        ),
        Mutant(
            "weights of a whole chunk written to the piece's begin",
            _SOFTMAX,
            "StoreColumns(share, chunk.first, stream_.In(buffer),",
            "StoreColumns(share, 0 * chunk.first, stream_.In(buffer),",
        ),
        Mutant(
            "both halves of a band's scores read as one",
            _STREAM,
            "kHalfRows / kGranule, kHalfRows / kGranule, 0)",
            "kHalfRows / kGranule, 0, 0)",
        ),
        Mutant(
            "sums that begin with 1",
            "mixed/score_chunk.h",
            "static constexpr float kNothing = 0.0f;",
            "static constexpr float kNothing = 1.0f;",
        ),
        Mutant(
            "a token's state folded by nobody",
            "attention/piece_states.h",
            "        at -= end;\n",
            "        at -= end - 1;\n",
        ),
    ),
    "write_kv": (
        Mutant("a mover's rows never enqueued", _COPY, "queue_.EnQue(rows);", ""),
        Mutant("a mover's rows never freed", _COPY, "queue_.FreeTensor(rows);", ""),
        Mutant(
            "a gap in GM counted in elements",
            _COPY,
            "count > 1 ? static_cast<uint32_t>((stride - width) * sizeof(T)) : 0",
            "count > 1 ? static_cast<uint32_t>(stride - width + 1) : 0",
        ),
        Mutant("negative slots written", "write_kv.cpp", "slot < 0 ||", ""),
        Mutant(
            "slots beyond the pool written",
            "write_kv.cpp",
            "slot >= num_slots",
            "slot >= 2 * num_slots",
        ),
        Mutant(
            "a slot given twice written by two cores",
            "write_kv.cpp",
            "slot / kNeighbours % num_cores",
            "(slot / kNeighbours + token) % num_cores",
        ),
        Mutant(
            "rounded to half first",
            "common/quantise.h",
            "    AscendC::Cast(wide_, wide_, AscendC::RoundMode::CAST_RINT, "
            "static_cast<uint32_t>(all_));\n    Barrier();\n",
            "",
        ),
        Mutant(
            "a row that isn't finite given a scale",
            "common/quantise.h",
            "    AscendC::Add(scales_, scales_, poison_, kRepeatLanes);\n    Barrier();\n",
            "",
        ),
        Mutant(
            "divided by a scale of 0",
            "common/quantise.h",
            "BroadcastLanes(factors_, divisors_, count);",
            "BroadcastLanes(factors_, scales_, count);",
        ),
        Mutant(
            "scales left where they are computed",
            "common/quantise.h",
            "      StoreScales(scales, scale_stride, count);\n",
            "",
        ),
        Mutant(
            "zeros up to the pitch forgotten",
            "common/quantise.h",
            "    AscendC::Duplicate(wide_, 0.0f, all_);\n",
            "",
        ),
        Mutant(
            "a latent row written twice",
            "write_kv.cpp",
            "if (tiling_->values_are_keys == 0) {",
            "if (true) {",
        ),
    ),
    "copy_blocks": (
        Mutant(
            "blocks written while others are read",
            "copy_blocks.cpp",
            "AscendC::SyncAll();",
            "",
        ),
        Mutant(
            "an id beyond the pool followed",
            "copy_blocks.cpp",
            "id >= 0 && id < tiling_->num_blocks",
            "true",
        ),
        Mutant(
            "scales left behind",
            "copy_blocks.cpp",
            "MoveHead(scale_mover_, key_scale_,",
            "if (false) MoveHead(scale_mover_, key_scale_,",
        ),
        Mutant(
            "scales of K and of V in one place of the workspace",
            "copy_blocks.cpp",
            "                 num_rows, staging);",
            "                 0 * num_rows, staging);",
        ),
        Mutant(
            "rows thought to lie side by side",
            "copy_blocks.cpp",
            "const bool are_one = layout.token_stride == layout.head_dim;",
            "const bool are_one = true;",
        ),
    ),
    "merge_states": (
        Mutant(
            "the output of a state without keys read",
            "merge_states.cpp",
            "if (lse == kMinusInf || (other == kInf && lse < other)) {",
            "if (other == kInf && lse < other) {",
        ),
    ),
}

# What a cube core's TPipe holds for itself.
MUTANTS["attention_mixed"] += (
    Mutant(
        "the ring of factors takes ids that the TPipe has set",
        _CUBE,
        "M_MTE1, 3, 2> factor_ring_;",
        "M_MTE1, 0, 2> factor_ring_;",
    ),
    Mutant(
        "the ring of factors takes one id that the TPipe has set",
        _CUBE,
        "M_MTE1, 3, 2> factor_ring_;",
        "M_MTE1, 2, 2> factor_ring_;",
    ),
)


def _attention_verdict(folder: Path, wanted: str) -> str:
    """Run calls that reach every option, and one whose table, lengths and starts are nonsense."""
    options: Any = {"sinks": True, "alibi_slopes": True, "sliding_window": 700}
    cases = (
        make_case(
            torch.float16, seq_lens=[1100, 20, 130], query_lens=[2, 20, 3], head_dim=80, **options
        ),
        make_case(torch.float16, seq_lens=[60], query_lens=[4], sliding_window=7, softcap=5.0),
        make_case(torch.float16, seq_lens=[1060], query_lens=[70], num_kv_heads=1, head_dim=32),
        make_case(torch.float16, seq_lens=[384], query_lens=[384], num_kv_heads=1, causal=False),
        make_case(torch.float16, seq_lens=[700], query_lens=[600], sliding_window=350),
        make_case(torch.float16, seq_lens=[30, 200, 64], query_lens=[30, 1, 2], block_size=24),
    )
    # The third one has more scores than stay in UB, and rows that see nothing of a piece; the next
    # one as many as stay. The last ones are on a single group of cores: with more steps than are in
    # flight at a time; with units of two bands.
    for case, cores in zip(cases, (48, 48, 4, 2, 2, 2), strict=True):
        run = kernel_calls.attention(
            *case.tensors, **case.options, folder=folder, seed=1, cores=cores, wanted=wanted
        )
        if run.result.violations:
            return run.result.violations[0]
        wide = [tensor.double() for tensor in case.tensors[:3]]
        output, lse = reference.attention_with_lse(*wide, *case.tensors[3:], **case.options)
        error = (run.output.double() - output).abs().max() / output.abs().max()
        lse_error = (run.lse.double() - lse).abs().max()
        if not (error < 2e-3 and lse_error < 1e-4):
            return f"wrong result: error {error:.1e}, lse {lse_error:.1e}"
    case.block_tables.fill_(5000)
    case.seq_lens.fill_(5000)
    case.query_start_loc[1:] = 500
    run = kernel_calls.attention(*case.tensors, **case.options, folder=folder, wanted=wanted)
    return run.result.violations[0] if run.result.violations else ""


def _usual_verdict(folder: Path) -> str:
    """Run calls of the widths that the kernel is compiled for: dense tiles in decode, on one group
    and on several; long prefills on whole tiles, with two tiles in a block and one.
    """
    usual: dict[str, Any] = {"layout": "HND", "head_dim": 128, "group": 4, "num_kv_heads": 1}
    cases = (
        make_case(torch.float16, seq_lens=[1600, 45, 700], block_size=128, **usual),
        make_case(torch.float16, seq_lens=[2100, 600], block_size=256, **usual),
        make_case(torch.float16, seq_lens=[700], query_lens=[300], block_size=256, **usual),
    )
    for case, cores in zip(cases, (2, 48, 2), strict=True):
        if noticed := _mixed_error(case, folder, cores):
            return noticed
    return ""


def _mixed_error(case: Case, folder: Path, cores: int) -> str:
    run = kernel_calls.attention(
        *case.tensors, **case.options, folder=folder, seed=1, cores=cores, wanted="mixed"
    )
    if run.result.violations:
        return run.result.violations[0]
    wide = [tensor.double() for tensor in case.tensors[:3]]
    output, lse = reference.attention_with_lse(*wide, *case.tensors[3:], **case.options)
    error = (run.output.double() - output).abs().max() / output.abs().max()
    lse_error = (run.lse.double() - lse).abs().max()
    same = error < 2e-3 and lse_error < 1e-4
    return "" if same else f"wrong result: error {error:.1e}, lse {lse_error:.1e}"


def _attention_error(case: Case, folder: Path, cores: int = 48) -> str:
    """Run a call on the vector kernel and compare it with the reference."""
    run = kernel_calls.attention(
        *case.tensors, **case.options, folder=folder, seed=1, cores=cores, wanted="vector"
    )
    if run.result.violations:
        return run.result.violations[0]
    query, *rest = case.tensors
    if case.key_cache.dtype != torch.int8:
        rest[:2] = [cache.double() for cache in rest[:2]]
    output, lse = reference.attention_with_lse(query.double(), *rest, **case.options)
    same = torch.allclose(run.output.double(), output, rtol=2e-3, atol=2e-3, equal_nan=True)
    same &= torch.allclose(run.lse.double(), lse.double(), rtol=1e-4, atol=1e-4, equal_nan=True)
    return "" if same else "wrong result"


def _int8_verdict(folder: Path) -> str:
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("token", {"seq_lens": [90, 530], "query_lens": [3, 2], "head_dim": 80}),
        ("token, heads dense", {"seq_lens": [90], "query_lens": [9], "sliding_window": 21}),
        ("token", {"seq_lens": [90], "query_lens": [9], "sliding_window": 21}),
        ("head", {"seq_lens": [70], "head_dim": 256, "head_dim_v": 16}),
    )
    for granularity, kind in kinds:
        case = quantised(make_case(torch.float16, **kind), granularity)
        if granularity == "head":
            case.options["key_scale"][1] *= 3
        if verdict := _attention_error(case, folder):
            return verdict
    return ""


def _tree_verdict(folder: Path) -> str:
    case = make_case(torch.float16, seq_lens=[75, 600], query_lens=[9, 40], causal=False)
    mask = tree_mask([9, 40])
    case = replace(case, options=case.options | {"tree_mask": mask})
    if verdict := _attention_error(case, folder):
        return verdict
    hidden = (case.block_tables[1, 570 // 16], 570 % 16)  # new token 10: to be seen by few
    mask[9:, 10] = False
    case.value_cache[hidden] = torch.nan
    if verdict := _attention_error(case, folder):
        return verdict
    narrow = replace(case, options={"tree_mask": mask[:, :7].contiguous()})
    run = kernel_calls.attention(*narrow.tensors, **narrow.options, folder=folder)
    return run.result.violations[0] if run.result.violations else ""


def _latent_verdict(folder: Path) -> str:
    for head_dim, head_dim_v in ((80, 64), (320, 304)):
        kind: dict[str, Any] = {"seq_lens": [600], "query_lens": [3], "num_kv_heads": 1}
        case = make_case(torch.float32, head_dim=head_dim, **kind)
        latent = replace(case, value_cache=case.key_cache[..., :head_dim_v])
        if verdict := _attention_error(latent, folder):
            return verdict
    return ""


def _gather_kv_verdict(folder: Path) -> str:
    case = quantised(make_case(torch.float32, seq_lens=[60, 0, 37]), "token")
    scales = {name: case.options[name] for name in ("key_scale", "value_scale")}
    tensors = (case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    want = reference.gather_kv(*tensors, **scales)
    *got, result = kernel_calls.gather_kv(*tensors, num_tokens=97, **scales, cores=5, folder=folder)
    if verdict := _verdict(result.violations, got, list(want)):
        return verdict
    case.block_tables.fill_(5000)
    case.seq_lens.fill_(5000)
    result = kernel_calls.gather_kv(*tensors, num_tokens=97, **scales, folder=folder)[2]
    return result.violations[0] if result.violations else ""


def _write_kv_verdict(folder: Path) -> str:
    key, value = torch.randn(40, 3, 72).half(), torch.randn(40, 3, 40).half()
    caches = [torch.zeros(9, 16, 3, 72).half(), torch.zeros(9, 16, 3, 40).half()]
    expected = [cache.clone() for cache in caches]
    slots = torch.arange(40)
    slots[3], slots[8], slots[9] = -1, 9 * 16, slots[30]
    sane = torch.where(slots == 9 * 16, -1, slots)
    reference.write_kv(key, value, *expected, sane)
    result = kernel_calls.write_kv(key, value, *caches, slots, folder=folder, seed=2)
    return _verdict(result.violations, caches, expected) or _write_int8_verdict(folder)


def _write_int8_verdict(folder: Path) -> str:
    # Ratios close to a half, rows that aren't finite, a scale of 0, and a latent cache.
    ratios = torch.arange(-120, 120)[:, None] + 0.5 + torch.tensor([-1e-4, 0.0, 1e-4, 7.0])
    key = ratios.reshape(15, 2, 32).float()
    latent = torch.randn(15, 2, 40)
    latent[3, 1, 7], latent[4, 0, 0] = torch.inf, torch.nan
    for rows, width, scale in (
        (key, 32, torch.tensor([1.0, 0.0])),
        (latent, 24, torch.zeros(2, 16, 2)),
    ):
        is_latent = scale.dim() == 3
        pools = []
        for _ in range(2):
            cache = torch.zeros(2, 16, 2, rows.shape[2], dtype=torch.int8)
            values = cache[..., :width] if is_latent else cache.clone()
            pools.append([cache, values, scale.clone()])
        tensors = (rows, rows[..., :width])
        slots = torch.arange(15)
        cache, values, scales = pools[0]
        names = {"key_scale": scales, "value_scale": scales}
        reference.write_kv(*tensors, cache, values, slots, **names)
        cache, values, scales = pools[1]
        names = {"key_scale": scales, "value_scale": scales}
        result = kernel_calls.write_kv(*tensors, cache, values, slots, **names, folder=folder)
        marked = [[cache, scales.nan_to_num(-1.0)] for cache, _, scales in pools]
        if verdict := _verdict(result.violations, marked[1], marked[0]):
            return verdict
    return ""


def _copy_blocks_verdict(folder: Path) -> str:
    mapping = torch.tensor([[0, 1], [1, 2], [5, 6], [6, 5], [2, 900], [900, 3]])
    caches = [torch.randn(9, 16, 3, 64).half(), torch.randn(9, 16, 3, 64).half()]
    expected = [cache.clone() for cache in caches]
    reference.copy_blocks(*expected, mapping[:4])
    result = kernel_calls.copy_blocks(*caches, mapping, folder=folder, seed=2)
    if verdict := _verdict(result.violations, caches, expected):
        return verdict
    tensors = [torch.randint(-9, 9, (9, 16, 3, 40), dtype=torch.int8) for _ in range(2)]
    tensors += [torch.randn(9, 16, 3) for _ in range(2)]
    expected = [tensor.clone() for tensor in tensors]
    names = ("key_scale", "value_scale")
    reference.copy_blocks(*expected[:2], mapping[:4], **dict(zip(names, expected[2:], strict=True)))
    scales = dict(zip(names, tensors[2:], strict=True))
    result = kernel_calls.copy_blocks(*tensors[:2], mapping, **scales, folder=folder, seed=2)
    return _verdict(result.violations, tensors, expected)


def _merge_states_verdict(folder: Path) -> str:
    outs, lses = torch.randn(2, 3, 19, 64).half(), torch.randn(2, 3, 19)
    lses[0, 0, :5] = -torch.inf
    outs[0, 0, :5] = torch.nan
    out, lse, result = kernel_calls.merge_states(outs[0], lses[0], outs[1], lses[1], folder=folder)
    wide = outs.double()
    expected, expected_lse = reference.merge_states(wide[0], lses[0], wide[1], lses[1])
    close = torch.allclose(out.double(), expected, rtol=1e-3, atol=2e-3)
    same = close and torch.allclose(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)
    return result.violations[0] if result.violations else "" if same else "wrong result"


def _verdict(
    violations: tuple[str, ...], got: list[torch.Tensor], expected: list[torch.Tensor]
) -> str:
    if violations:
        return violations[0]
    same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return "" if same else "wrong result"


_VERDICTS = {
    "attention": partial(_attention_verdict, wanted="vector"),
    "attention, int8": _int8_verdict,
    "attention, tree": _tree_verdict,
    "attention, latent": _latent_verdict,
    "gather_kv": _gather_kv_verdict,
    "attention_mixed": partial(_attention_verdict, wanted="mixed"),
    "attention_mixed, usual": _usual_verdict,
    "write_kv": _write_kv_verdict,
    "copy_blocks": _copy_blocks_verdict,
    "merge_states": _merge_states_verdict,
}


def judge(op: str, mutant: Mutant | None = None) -> str:
    """Say what noticed a mutant, or "" if nothing did; without one, what is wrong as it is."""
    torch.manual_seed(0)
    if mutant is None:
        return _VERDICTS[op](OP_KERNEL)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "op_kernel"
        shutil.copytree(OP_KERNEL, folder)
        apply(mutant, folder)
        try:
            return _VERDICTS[op](folder)
        except CompileError as error:
            return f"compiler: {str(error).splitlines()[0]}"


def _judge_in_a_process(op: str, index: int) -> str:
    """Judge one mutant in a process of its own, which may crash or hang."""
    command = [sys.executable, "-m", "tests.sim.mutations", "--judge", op, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return "no end within 600 s"
    if done.returncode != 0:
        return f"crash: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
    return done.stdout.strip()


def main() -> None:
    """Judge every mutant, or those that are named, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help=WORDS)
    parser.add_argument("--judge", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge is not None:
        op, index = options.judge
        print(judge(op, MUTANTS[op][int(index)]))
        return
    missed = 0
    wanted = chosen(MUTANTS, options.words)
    for op, mutants in wanted.items():
        if verdict := judge(op):
            sys.exit(f"{op} as it is: {verdict}")
        print(f"\n| mutant of {op} | noticed by |\n|---|---|")
        for mutant in mutants:
            verdict = _judge_in_a_process(op, MUTANTS[op].index(mutant)).replace(
                tempfile.gettempdir() + os.sep, ""
            )
            missed += not verdict
            print(f"| {mutant.fault} | {verdict or 'NOTHING'} |", flush=True)
    total = sum(map(len, wanted.values()))
    print(f"\n{total - missed} of {total} noticed")
    sys.exit(missed)


if __name__ == "__main__":
    main()
