"""Break the Ascend kernels on purpose, one line at a time, and see that it is noticed.

``python -m tests.sim.mutations`` copies op_kernel, changes one line, compiles the copy and runs it
on the simulated cores. A mutation is caught by the compiler, by a broken rule, or by a wrong
result; the table says by which. The exit code is the number of mutations that nothing noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_ops import reference
from tests.sim import kernel_calls
from tests.sim.cases import make_case
from tests.sim.harness import ROOT, CompileError


@dataclass(frozen=True)
class Mutation:
    """A change of one place in a kernel source: `old`, found once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    op: str = "attention on vector cores"


_VECTOR, _STATE, _COPY, _OUTPUT = (
    "attention_vector.h",
    "row_state.h",
    "row_copy.h",
    "row_output.h",
)
_CUBE, _SOFTMAX, _TO_CUBE = "attention_cube.h", "attention_softmax.h", "cube_copy.h"
_STREAM = "share_stream.h"
_MIXED = "attention on cube and vector cores"

MUTATIONS = (
    Mutation(
        "a barrier too few between the products of two rows",
        _VECTOR,
        "lanes, repeats, 1, 1, kBlockLanes);\n    Barrier();",
        "lanes, repeats, 1, 1, kBlockLanes);",
    ),
    Mutation(
        "a barrier too few between the chunks of a product",
        _VECTOR,
        "mask, repeats, params);\n      }\n      Barrier();",
        "mask, repeats, params);\n      }",
    ),
    Mutation(
        "a barrier too few between exp's argument and exp",
        _STATE,
        "AscendC::Sub(lanes, from, to, count);\n  Barrier();",
        "AscendC::Sub(lanes, from, to, count);",
    ),
    Mutation(
        "a barrier too few before weights meet values",
        _VECTOR,
        "static_cast<int32_t>(kSumRows * value_dim_));\n    Barrier();",
        "static_cast<int32_t>(kSumRows * value_dim_));",
    ),
    Mutation(
        "a barrier too few in the pairwise sum",
        _VECTOR,
        "static_cast<int32_t>(half * value_dim_));\n      Barrier();",
        "static_cast<int32_t>(half * value_dim_));",
    ),
    Mutation("keys never freed", _VECTOR, "key_in_.FreeTensor(keys);", ""),
    Mutation("values never freed", _VECTOR, "value_in_.FreeTensor(values);", ""),
    Mutation("an output row never freed", _OUTPUT, "rows_out_->FreeTensor(rows);", ""),
    Mutation("values never enqueued", _VECTOR, "value_in_.EnQue(values);", ""),
    Mutation(
        "output copied without waiting for the vector unit",
        _OUTPUT,
        "    rows_out_->EnQue(rows);\n    rows = rows_out_->template DeQue<T>();\n",
        "",
    ),
    Mutation(
        "keys freed before they are used",
        _VECTOR,
        "const int32_t all = static_cast<int32_t>(step.unit.num_rows * kRepeatLanes);",
        "key_in_.FreeTensor(keys);\n"
        "    const int32_t all = static_cast<int32_t>(step.unit.num_rows * kRepeatLanes);",
    ),
    Mutation("a copy shifted by one element", "block_walk.h", "cache[at]", "cache[at + 1]"),
    Mutation(
        "a copy of one row too many",
        "block_walk.h",
        "Smaller(block_size - offset, lanes.last - lane)",
        "Smaller(block_size - offset + 1, lanes.last - lane)",
    ),
    Mutation(
        "one block read too far",
        "block_walk.h",
        "tables.At(sequence, key / block_size)",
        "tables.At(sequence, key / block_size + 1)",
    ),
    Mutation("a block's offset forgotten", "block_walk.h", "offset * layout.token_stride +", "0 +"),
    Mutation("the KV head forgotten", "block_walk.h", "kv_head * layout.head_stride", "0"),
    Mutation(
        "block ids not clamped",
        "block_walk.h",
        "return Clamp(ids_.GetValue(at), 0, tiling_->num_blocks - 1);",
        "return ids_.GetValue(at);",
    ),
    Mutation(
        "lengths not clamped",
        "sequence.h",
        "Clamp(seq_lens_.GetValue(i), 0, capacity_)",
        "seq_lens_.GetValue(i)",
    ),
    Mutation(
        "query starts not clamped",
        "sequence.h",
        "Clamp(starts_.GetValue(i + 1), begin, num_tokens_)",
        "starts_.GetValue(i + 1)",
    ),
    Mutation(
        "more unified buffer than there is",
        _VECTOR,
        "InitBuffer(key_in_, 2, tile",
        "InitBuffer(key_in_, 2, 8 * tile",
    ),
    Mutation(
        "a buffer half as large as its contents",
        _VECTOR,
        "InitBuffer(output_out_, 1, rows * value_dim_ * sizeof(T))",
        "InitBuffer(output_out_, 1, rows * value_dim_ * sizeof(T) / 2)",
    ),
    Mutation(
        "accumulators too small",
        _VECTOR,
        "InitBuffer(acc_buffer_, 2 * rows",
        "InitBuffer(acc_buffer_, 1 * rows",
    ),
    Mutation("cores don't wait for each other", _VECTOR, "AscendC::SyncAll();", ""),
    Mutation("hidden keys not hidden", _VECTOR, "HideScores(step, r);", ""),
    Mutation(
        "a window of one key more",
        "visible.h",
        "position + 1 - tiling.sliding_window",
        "position - tiling.sliding_window",
    ),
    Mutation(
        "the causal mask off by one",
        "visible.h",
        "Clamp(position + 1, 0, seq_len)",
        "Clamp(position + 2, 0, seq_len)",
    ),
    Mutation(
        "the values' partial sums misplaced",
        _VECTOR,
        "products_[(first - begin) * value_dim_]",
        "products_[first * value_dim_]",
    ),
    Mutation(
        "one repeat too many",
        _VECTOR,
        "const uint8_t repeats = static_cast<uint8_t>(count);",
        "const uint8_t repeats = static_cast<uint8_t>(count + 1);",
    ),
    Mutation(
        "the running maximum not kept",
        _VECTOR,
        "AscendC::Adds(piece_.max, scratch_.new_max, 0.0f, lanes);",
        "",
    ),
    Mutation(
        "the accumulator not rescaled",
        _VECTOR,
        "MultiplyRows(piece_.acc, scratch_.factor, rows, value_dim_);",
        "",
    ),
    Mutation(
        "a piece begins with the last one's state",
        _VECTOR,
        "Clear(piece_, step.unit.num_rows, value_dim_);",
        "",
    ),
    Mutation(
        "states folded with their weights exchanged",
        _STATE,
        "AscendC::Sub(scratch.keep, into.max, scratch.new_max, lanes);\n"
        "    AscendC::Sub(scratch.add, max, scratch.new_max, lanes);",
        "AscendC::Sub(scratch.add, into.max, scratch.new_max, lanes);\n"
        "    AscendC::Sub(scratch.keep, max, scratch.new_max, lanes);",
    ),
    Mutation(
        "sinks forgotten",
        _OUTPUT,
        "Rescale(state, sink_lanes_",
        "if (false) Rescale(state, sink_lanes_",
    ),
    Mutation(
        "lse copied from the wrong block",
        _OUTPUT,
        "lse[i * kBlockLanes]",
        "lse[i]",
    ),
    Mutation("a unit in turn left out", "work_units.h", "skip_ = next_skip_;", "++skip_;"),
    Mutation(
        "scores announced by the matrix unit",
        _CUBE,
        "PIPE_FIX>(kScoresReady)",
        "PIPE_M>(kScoresReady)",
        op=_MIXED,
    ),
    Mutation(
        "products announced by the matrix unit",
        _CUBE,
        "PIPE_FIX>(kProductsReady)",
        "PIPE_M>(kProductsReady)",
        op=_MIXED,
    ),
    Mutation(
        "weights announced before they are in the workspace",
        _SOFTMAX,
        "PIPE_MTE3>(kWeightsReady)",
        "PIPE_V>(kWeightsReady)",
        op=_MIXED,
    ),
    Mutation(
        "scores not waited for",
        _STREAM,
        "AscendC::CrossCoreWaitFlag(kScoresReady);",
        "",
        op=_MIXED,
    ),
    Mutation(
        "weights not waited for",
        _CUBE,
        "AscendC::CrossCoreWaitFlag(kWeightsReady);",
        "",
        op=_MIXED,
    ),
    Mutation(
        "products not waited for",
        _STREAM,
        "AscendC::CrossCoreWaitFlag(kProductsReady);",
        "",
        op=_MIXED,
    ),
    Mutation(
        "a flag with the wrong id",
        _CUBE,
        "PIPE_FIX>(kProductsReady)",
        "PIPE_FIX>(kScoresReady)",
        op=_MIXED,
    ),
    Mutation(
        "one vector core doesn't announce its weights",
        _SOFTMAX,
        "    AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);",
        "    if (AscendC::GetSubBlockIdx() == 0) {\n"
        "      AscendC::CrossCoreSetFlag<kWithinGroup, PIPE_MTE3>(kWeightsReady);\n"
        "    }",
        op=_MIXED,
    ),
    Mutation(
        "a step too many in flight between the cores",
        "exchange.h",
        "kAhead = kSlots - 1;",
        "kAhead = kSlots;",
        op=_MIXED,
    ),
    Mutation(
        "all groups share one workspace",
        "exchange.h",
        "workspace + group * tiling.exchange_bytes",
        "workspace + 0 * group * tiling.exchange_bytes",
        op=_MIXED,
    ),
    Mutation(
        "a buffer announced before it is filled",
        "turns.h",
        "    return buffer;\n  }\n\n  // The first one that was begun is full.\n"
        "  __aicore__ inline void Filled() {\n    AscendC::SetFlag<filled>(first + filled_);\n",
        "    AscendC::SetFlag<filled>(first + buffer);\n"
        "    return buffer;\n  }\n\n  __aicore__ inline void Filled() {\n",
        op=_MIXED,
    ),
    Mutation(
        "a buffer overwritten before it was used",
        "turns.h",
        "    return use_;\n  }\n\n  __aicore__ inline void Used() {\n"
        "    AscendC::SetFlag<freed>(first + use_);\n",
        "    AscendC::SetFlag<freed>(first + use_);\n"
        "    return use_;\n  }\n\n  __aicore__ inline void Used() {\n",
        op=_MIXED,
    ),
    Mutation("flags left set at the end", _CUBE, "    scores_.Close();\n", "", op=_MIXED),
    Mutation(
        "results stored while the matrix unit works on them",
        "cube_sums.h",
        "void End() { turns_.Filled(); }",
        "void End() {}",
        op=_MIXED,
    ),
    Mutation(
        "both parts of a product in one buffer",
        "cube_sums.h",
        "return At(slots_[part]);",
        "return At(slots_[0 * part]);",
        op=_MIXED,
    ),
    Mutation(
        "small products thought to stay in order",
        "cube_sums.h",
        "kOrderedProducts = 10 *",
        "kOrderedProducts = 4 *",
        op=_MIXED,
    ),
    Mutation(
        "a barrier too few between products that add up",
        _CUBE,
        "AscendC::PipeBarrier<PIPE_M>();",
        "",
        op=_MIXED,
    ),
    Mutation(
        "every product begins at zero",
        _CUBE,
        "depth), 0, false, opens)",
        "depth), 0, false, true)",
        op=_MIXED,
    ),
    Mutation(
        "the first product begins with what was there",
        _CUBE,
        "depth), 0, false, opens)",
        "depth), 0, false, false)",
        op=_MIXED,
    ),
    Mutation(
        "values not transposed",
        _CUBE,
        "LoadRows<true>(Right(slot), values",
        "LoadRows<false>(Right(slot), values",
        op=_MIXED,
    ),
    Mutation(
        "fractals of the left factor in the wrong order",
        _TO_CUBE,
        "static_cast<uint16_t>(apart), 0, 0, transposed, 0);",
        "static_cast<uint16_t>(apart + 1), 0, 0, transposed, 0);",
        op=_MIXED,
    ),
    Mutation(
        "rows of zeros beyond the keys forgotten",
        _TO_CUBE,
        "  ZeroRowsInL1(to, lanes.last - span.first, span.last - span.first, layout.head_dim, "
        "pitch);\n",
        "",
        op=_MIXED,
    ),
    Mutation(
        "rows of zeros beyond the queries forgotten",
        _CUBE,
        "    ZeroRowsInL1(to, unit.num_rows, pitch, key_dim_, pitch);\n",
        "",
        op=_MIXED,
    ),
    Mutation(
        "results read with the wrong pitch",
        _CUBE,
        "static_cast<uint16_t>(pitch), static_cast<uint32_t>(width), false);",
        "static_cast<uint16_t>(pitch + kFractal), static_cast<uint32_t>(width), false);",
        op=_MIXED,
    ),
    Mutation(
        "scores written to another tile's place",
        _CUBE,
        "exchange_.Scores(step.slot)[(begin + span.first) * rows]",
        "exchange_.Scores(step.slot)[span.first * rows]",
        op=_MIXED,
    ),
    Mutation(
        "both vector cores take the same rows",
        _STREAM,
        "      share.first_row = first;\n",
        "      share.first_row = 0;\n",
        op=_MIXED,
    ),
    Mutation(
        "more L1 than there is",
        _CUBE,
        "InitBuffer(tile_buffer_, kTilesInL1",
        "InitBuffer(tile_buffer_, 16 * kTilesInL1",
        op=_MIXED,
    ),
    Mutation(
        "a buffer of scores too few",
        _STREAM,
        "InitBuffer(ring_, tiling.chunk_buffers",
        "InitBuffer(ring_, tiling.chunk_buffers - 1",
        op=_MIXED,
    ),
    Mutation(
        "one more chunk of scores kept than there is room for",
        _STREAM,
        "return tiling_->chunk_buffers - 2;",
        "return tiling_->chunk_buffers - 1;",
        op=_MIXED,
    ),
    Mutation(
        "scores that stay overwritten by others",
        _SOFTMAX,
        "stream_.ScoredChunk(round - 1) >= stream_.Kept()",
        "stream_.ScoredChunk(round - 1) >= 0",
        op=_MIXED,
    ),
    Mutation(
        "scores never freed",
        _SOFTMAX,
        "      stream_.Free(summed_.scores);\n",
        "",
        op=_MIXED,
    ),
    Mutation("products never freed", _SOFTMAX, "    stream_.Free(products.acc);\n", "", op=_MIXED),
    Mutation(
        "a barrier too few between the rounds",
        _SOFTMAX,
        "  __aicore__ inline void RunRound(int64_t round) {\n    Barrier();\n",
        "  __aicore__ inline void RunRound(int64_t round) {\n",
        op=_MIXED,
    ),
    Mutation(
        "a barrier too few inside a round",
        _SOFTMAX,
        "    Barrier();\n    scored_ = TakeScored(round);\n",
        "    scored_ = TakeScored(round);\n",
        op=_MIXED,
    ),
    Mutation(
        "a barrier too few before the last slabs of a pass",
        _SOFTMAX,
        "    Barrier();\n    AddLastSlabs(rounds);\n",
        "    AddLastSlabs(rounds);\n",
        op=_MIXED,
    ),
    Mutation(
        "a slab of each chunk left out of the sums",
        _SOFTMAX,
        "      sums_.AddSlab(summed_, CountSlabs(summed_) - 1);\n",
        "",
        op=_MIXED,
    ),
    Mutation(
        "the last rows of a unit not written",
        _SOFTMAX,
        "    while (written_rows_ < stream_.Summed().step.unit.num_rows) {\n",
        "    while (false) {\n",
        op=_MIXED,
    ),
    Mutation(
        "the total prepared for the products of another step",
        _SOFTMAX,
        "ClosePass(scored, weighed, stream_.NextSummed());",
        "ClosePass(scored, weighed, stream_.Summed());",
        op=_MIXED,
    ),
    Mutation(
        "a stage of the total's preparation left out",
        _SOFTMAX,
        "      OpenTotal(stage++, next_summed);\n",
        "      OpenTotal(stage += 2, next_summed);\n",
        op=_MIXED,
    ),
    Mutation(
        "the maxima of steps in flight in one place",
        _SOFTMAX,
        "AscendC::Muls(max_[share.step.slot], maxima_",
        "AscendC::Muls(max_[0], maxima_",
        op=_MIXED,
    ),
    Mutation(
        "the verdict read from an old line of the cache",
        "verdict.h",
        "    AscendC::DataCacheCleanAndInvalid<float, AscendC::CacheLine::SINGLE_CACHE_LINE,\n"
        "                                      AscendC::DcciDst::CACHELINE_OUT>(verdict);\n",
        "",
        op=_MIXED,
    ),
    Mutation(
        "the verdict read before both vector cores have told",
        _CUBE,
        "    AscendC::CrossCoreWaitFlag(kVerdictReady);\n",
        "",
        op=_MIXED,
    ),
    Mutation("a mover's rows never enqueued", _COPY, "queue_.EnQue(rows);", "", op="write_kv"),
    Mutation("a mover's rows never freed", _COPY, "queue_.FreeTensor(rows);", "", op="write_kv"),
    Mutation(
        "a gap in GM counted in elements",
        _COPY,
        "count > 1 ? static_cast<uint32_t>((stride - width) * sizeof(T)) : 0",
        "count > 1 ? static_cast<uint32_t>(stride - width + 1) : 0",
        op="write_kv",
    ),
    Mutation("negative slots written", "write_kv.cpp", "slot < 0 ||", "", op="write_kv"),
    Mutation(
        "slots beyond the pool written",
        "write_kv.cpp",
        "slot >= num_slots",
        "slot >= 2 * num_slots",
        op="write_kv",
    ),
    Mutation(
        "a slot given twice written by two cores",
        "write_kv.cpp",
        "slot / kNeighbours % num_cores",
        "(slot / kNeighbours + token) % num_cores",
        op="write_kv",
    ),
    Mutation(
        "blocks written while others are read",
        "copy_blocks.cpp",
        "AscendC::SyncAll();",
        "",
        op="copy_blocks",
    ),
    Mutation(
        "an id beyond the pool followed",
        "copy_blocks.cpp",
        "id >= 0 && id < tiling_->num_blocks",
        "true",
        op="copy_blocks",
    ),
    Mutation(
        "the output of a state without keys read",
        "merge_states.cpp",
        "if (value == kMinusInf) {",
        "if (false) {",
        op="merge_states",
    ),
)


def _mutated(mutation: Mutation, folder: Path) -> None:
    shutil.copytree(ROOT / "op_kernel", folder)
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.name}: {mutation.old!r} stands {text.count(mutation.old)} times"
        )
    path.write_text(text.replace(mutation.old, mutation.new))


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
        make_case(torch.float16, seq_lens=[30, 200, 64], query_lens=[30, 1, 2], block_size=24),
    )
    # The third one has more scores than stay in UB, and rows that see nothing of a piece; the next
    # one as many as stay. The last ones are on a single group of cores: with more steps than are in
    # flight at a time.
    for case, cores in zip(cases, (48, 48, 4, 2, 2), strict=True):
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


def _write_kv_verdict(folder: Path) -> str:
    key, value = torch.randn(40, 3, 72).half(), torch.randn(40, 3, 40).half()
    caches = [torch.zeros(9, 16, 3, 72).half(), torch.zeros(9, 16, 3, 40).half()]
    expected = [cache.clone() for cache in caches]
    slots = torch.arange(40)
    slots[3], slots[8], slots[9] = -1, 9 * 16, slots[30]
    sane = torch.where(slots == 9 * 16, -1, slots)
    reference.write_kv(key, value, *expected, sane)
    result = kernel_calls.write_kv(key, value, *caches, slots, folder=folder, seed=2)
    return _verdict(result.violations, caches, expected)


def _copy_blocks_verdict(folder: Path) -> str:
    caches = [torch.randn(9, 16, 3, 64).half(), torch.randn(9, 16, 3, 64).half()]
    mapping = torch.tensor([[0, 1], [1, 2], [5, 6], [6, 5], [2, 900], [900, 3]])
    expected = [cache.clone() for cache in caches]
    reference.copy_blocks(*expected, mapping[:4])
    result = kernel_calls.copy_blocks(*caches, mapping, folder=folder, seed=2)
    return _verdict(result.violations, caches, expected)


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
    "attention on vector cores": partial(_attention_verdict, wanted="vector"),
    _MIXED: partial(_attention_verdict, wanted="mixed"),
    "write_kv": _write_kv_verdict,
    "copy_blocks": _copy_blocks_verdict,
    "merge_states": _merge_states_verdict,
}


def judge(mutation: Mutation | None, op: str) -> str:
    """Say what noticed a mutation, or "" if nothing did; None stands for no mutation."""
    torch.manual_seed(0)
    if mutation is None:
        return _VERDICTS[op](ROOT / "op_kernel")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "op_kernel"
        _mutated(mutation, folder)
        try:
            return _VERDICTS[op](folder)
        except CompileError as error:
            return f"compiler: {str(error).splitlines()[0]}"


def _judge_in_a_process(index: int) -> str:
    """Judge one mutation in a process of its own, which may crash or hang."""
    command = [sys.executable, "-m", "tests.sim.mutations", "--judge", str(index)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end within 120 s"
    if done.returncode != 0:
        return f"crash: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
    return done.stdout.strip()


def main() -> None:
    """Judge every mutation and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description=__doc__)
    parser.add_argument("--judge", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.judge is not None:
        mutation = MUTATIONS[options.judge]
        print(judge(mutation, mutation.op))
        return
    for op in _VERDICTS:
        if verdict := judge(None, op):
            sys.exit(f"{op} as it is: {verdict}")
    missed = 0
    print("| mutation | noticed by |\n|---|---|")
    for index, mutation in enumerate(MUTATIONS):
        verdict = _judge_in_a_process(index).replace(tempfile.gettempdir() + os.sep, "")
        missed += not verdict
        print(f"| {mutation.name} | {verdict or 'NOTHING'} |", flush=True)
    print(f"\n{len(MUTATIONS) - missed} of {len(MUTATIONS)} noticed")
    sys.exit(missed)


if __name__ == "__main__":
    main()
