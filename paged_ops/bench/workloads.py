"""The workloads: shapes that serving meets, named as in docs/performance.md."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_ops import PagedKVCache, gather_kv

HEAD_DIM = 128


@dataclass(frozen=True)
class Workload:
    """One attention call: who asks, over how much, in which dtype.

    The first `num_shared` tokens are in blocks that all sequences share.
    """

    name: str
    description: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    num_shared: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the call must read once."""
        num_tokens = sum(self.seq_lens) - (len(self.seq_lens) - 1) * self.num_shared
        return 2 * num_tokens * self.num_kv_heads * HEAD_DIM * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products under the causal mask."""
        pairs = 0
        for length, new in zip(self.seq_lens, self.query_lens, strict=True):
            pairs += new * length - new * (new - 1) // 2
        return 4 * pairs * self.num_heads * HEAD_DIM

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query token, so that reading memory is the limit."""
        return max(self.query_lens) == 1


def _ragged_lengths(batch: int) -> tuple[int, ...]:
    """Lognormal lengths with a mean of about 700, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(batch, generator=generator).mul(0.8).add(6.2).exp()
    return tuple(lengths.clamp(16, 4096).int().tolist())


_BF16 = torch.bfloat16


def _decode(
    name: str, what: str, lens: tuple[int, ...], num_kv_heads: int = 8, dtype: torch.dtype = _BF16
) -> Workload:
    what = f"decode, {what}, 32/{num_kv_heads} heads"
    return Workload(name, what, lens, (1,) * len(lens), 32, num_kv_heads, dtype)


_LENS, _ONES = (2048,) * 16, (1,) * 8
WORKLOADS = (
    _decode("D0", "1 x 256", (256,)),
    _decode("D1-bf16", "batch 16 x 2048", _LENS, 32),
    _decode("D1-fp16", "batch 16 x 2048", _LENS, 32, torch.float16),
    _decode("D1-fp32", "batch 16 x 2048", _LENS, 32, torch.float32),
    _decode("D2", "batch 16 x 2048", _LENS),
    _decode("D3", "1 x 32768", (32768,)),
    _decode("D4", "batch 64, ragged", _ragged_lengths(64)),
    replace(
        _decode("S1", "32 sequences, 4096 tokens shared and 128 of their own", (4224,) * 32),
        num_shared=4096,
    ),
    Workload("P1-bf16", "prefill, 1 x 2048, 32/32 heads", (2048,), (2048,), 32, 32),
    Workload("P1-fp32", "prefill, 1 x 2048, 32/32 heads", (2048,), (2048,), 32, 32, torch.float32),
    Workload("P2", "chunk of 512 on 4096, 32/8 heads", (4608,), (512,)),
    Workload("M1", "8 decodes x 2048 and a chunk of 256, 32/8 heads", (2048,) * 9, (*_ONES, 256)),
)

WRITES = (
    Workload("W1-32", "write 2048 tokens, 32 KV heads", (2048,), (1,), 32, 32),
    Workload("W1-8", "write 2048 tokens, 8 KV heads", (2048,), (1,)),
)
"""What `write_kv` is timed with; the query is there to look at what was written."""

CURVES = {
    "length": [_decode(f"length {n}", "batch 1", (n,)) for n in (512, 2048, 8192, 32768)],
    "batch": [_decode(f"batch {n}", "2048 tokens", (2048,) * n) for n in (1, 4, 16, 64)],
}
"""Decode workloads of which only one thing changes."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call."""

    workload: Workload
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Return K and V of all sequences, one after another, as ``[tokens, heads, head_dim]``."""
        return gather_kv(self.key_cache, self.value_cache, self.block_tables, self.seq_lens)

    def new_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the K and V of the query tokens, as ``[tokens, heads, head_dim]``."""
        work, (key, value) = self.workload, self.gathered()
        ends = itertools.accumulate(work.seq_lens)
        rows = torch.cat(
            [torch.arange(e - n, e) for e, n in zip(ends, work.query_lens, strict=True)]
        )
        return key[rows], value[rows]

    def slots(self) -> Tensor:
        """Return the slot of every token, sequence after sequence."""
        block_size, slots = self.key_cache.shape[1], []
        for table, length in zip(self.block_tables.long(), self.workload.seq_lens, strict=True):
            places = torch.arange(length)
            slots.append(table[places // block_size] * block_size + places % block_size)
        return torch.cat(slots)


def scattered_tables(seq_lens: tuple[int, ...], block_size: int, num_shared: int = 0) -> Tensor:
    """Return block tables that use every block of a pool, in random order; -1 is no block.

    Each block has one place in them, but for those of the first `num_shared` tokens, which all
    sequences begin with.
    """
    assert num_shared % block_size == 0, (num_shared, block_size)
    prefix = num_shared // block_size
    own = [-(-length // block_size) - prefix for length in seq_lens]
    shared, *each = torch.randperm(prefix + sum(own)).to(torch.int32).split([prefix, *own])
    tables = torch.full((len(own), prefix + max(own)), -1, dtype=torch.int32)
    for row, ids in zip(tables, each, strict=True):
        row[: prefix + len(ids)] = torch.cat([shared, ids])
    return tables


def make_inputs(workload: Workload, block_size: int) -> Inputs:
    """Return random tensors, the blocks of each sequence scattered over a pool as users have it."""
    tables = scattered_tables(workload.seq_lens, block_size, workload.num_shared)
    num_blocks = int(tables.max()) + 1
    pool = PagedKVCache(
        1, num_blocks, block_size, workload.num_kv_heads, HEAD_DIM, dtype=workload.dtype
    )
    pool.kv_blocks(0).normal_()
    starts = torch.tensor([0, *workload.query_lens], dtype=torch.int32).cumsum(0)
    query = torch.randn(sum(workload.query_lens), workload.num_heads, HEAD_DIM)
    return Inputs(
        workload,
        query.to(workload.dtype),
        *pool.layer(0),
        tables,
        torch.tensor(workload.seq_lens, dtype=torch.int32),
        starts.to(torch.int32),
    )
