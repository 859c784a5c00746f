"""Attention beside torch_npu's own: ``python -m paged_ops.ascend.versus FILE`` writes the times.

torch_npu's is the fused attention over a paged cache (`npu_fused_infer_attention_score`), called
with packed queries as serving engines call it. Nobody has run this on an NPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_ops import functional
from paged_ops.ascend.runtime import load, npu

BLOCK_SIZE, HEAD_DIM = 128, 128  # what both take
MASK = 2048  # the rows and columns of the causal mask that torch_npu's takes


class Case(NamedTuple):
    """A batch of equal sequences."""

    name: str
    batch: int
    length: int
    queries: int
    num_heads: int = 32
    num_kv_heads: int = 8


CASES = (
    Case("decode, 16 x 2048", 16, 2048, 1),
    Case("decode, 64 x 4096", 64, 4096, 1),
    Case("prefill, 2048", 1, 2048, 2048),
    Case("prefill, 8192", 1, 8192, 8192),
)


class Inputs:
    """What both are called with, on the device."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float16) -> None:
        self.case = case
        width = -(-case.length // BLOCK_SIZE)
        shape = (2, case.batch * width, BLOCK_SIZE, case.num_kv_heads, HEAD_DIM)
        self.caches = self._normal(dtype, *shape)
        self.query = self._normal(dtype, case.batch * case.queries, case.num_heads, HEAD_DIM)
        tables = torch.randperm(case.batch * width, device="cpu").view(case.batch, width)
        self.tables = tables.int().to("npu")
        self.lengths = torch.full((case.batch,), case.length, dtype=torch.int32).to("npu")
        starts = torch.arange(case.batch + 1, device="cpu") * case.queries
        self.starts = starts.int().to("npu")
        self.mask = torch.ones(MASK, MASK, dtype=torch.int8, device="cpu").triu(1).to("npu")

    def _normal(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, device="cpu").to(dtype).to("npu")

    def ours(self) -> Tensor:
        """Call this project's attention."""
        key_cache, value_cache = self.caches[0], self.caches[1]
        return functional.attention(
            self.query, key_cache, value_cache, self.tables, self.lengths, self.starts
        )

    def theirs(self) -> Tensor:
        """Call torch_npu's."""
        case = self.case
        packed = self.caches.flatten(-2)
        result: Any = import_module("torch_npu").npu_fused_infer_attention_score(
            self.query,
            packed[0],
            packed[1],
            atten_mask=self.mask,
            block_table=self.tables,
            input_layout="TND",
            block_size=BLOCK_SIZE,
            actual_seq_lengths=[(i + 1) * case.queries for i in range(case.batch)],
            actual_seq_lengths_kv=[case.length] * case.batch,
            num_heads=case.num_heads,
            num_key_value_heads=case.num_kv_heads,
            scale=HEAD_DIM**-0.5,
            sparse_mode=3,
        )
        output: Tensor = result[0]
        return output


def milliseconds(call: Callable[[], Tensor], repeats: int) -> float:
    """Return the median time of a call on the device, after three to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (npu().Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        npu().synchronize()
        times.append(begin.elapsed_time(end))
    return float(median(times))


def compared(cases: Sequence[Case], repeats: int) -> Iterator[str]:
    """Time the two on each case; yield a line for each."""
    for case in cases:
        inputs = Inputs(case)
        ours = milliseconds(inputs.ours, repeats)
        line = f"{case.name}: paged_ops {ours:.3f} ms"
        try:
            difference = (inputs.ours().cpu() - inputs.theirs().cpu()).abs().max()
            theirs = milliseconds(inputs.theirs, repeats)
        except (RuntimeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            yield f"{line}; torch_npu's own can't be had: {type(error).__name__}: {reason}"
        else:
            yield f"{line}, torch_npu {theirs:.3f} ms; they differ by at most {difference:.1e}"


def main(file: str) -> None:
    """Compare all cases and write the lines into a file."""
    load()
    torch.manual_seed(0)
    Path(file).write_text("\n".join(compared(CASES, repeats=20)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
