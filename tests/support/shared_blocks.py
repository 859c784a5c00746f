"""Sequences that have keys in common, placed so that they have blocks in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import paged_ops
from tests.support.quantisation import QUANTISATIONS
from tests.support.sequences import (
    DTYPES,
    PagedCase,
    Placement,
    Sequences,
    make_sequences,
    normal,
    one_thread,
    place,
)
from tests.support.strategies import attention_options
from tests.support.trees import tree_mask


@dataclass(frozen=True)
class Sharing:
    """Which sequences have which keys in common.

    Keys are cut at ``bounds``. Between two of them sequences of equal numbers in the row of
    ``kinds`` that belongs to it have the same keys.
    """

    bounds: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]

    def kind(self, key: int, sequence: int) -> int:
        """Return the number of a sequence where the key is."""
        return self.kinds[sum(bound <= key for bound in self.bounds)][sequence]


def piece_keys(dtype: torch.dtype) -> int:
    """Return how many keys the kernel of a cache of that dtype takes as one."""
    by_tiles = paged_ops.backend_info().cpu_isa == "amx" and dtype == torch.bfloat16
    return 2048 if by_tiles else 512


@one_thread()
def with_shared_keys(sequences: Sequences, sharing: Sharing, seed: int = 0) -> Sequences:
    """Return the same with keys and values in common."""
    longest = max(sequences.seq_lens)
    bounds = [0, *sharing.bounds, longest]
    made = []
    for tensors in (sequences.keys, sequences.values):
        shape, dtype = tensors[0].shape[1:], tensors[0].dtype
        kinds = range(1 + max(max(row) for row in sharing.kinds))
        stems = [normal((longest, *shape), dtype, seed + 7 * kind) for kind in kinds]
        seed += 1
        made.append(
            tuple(
                torch.cat(
                    [
                        stems[row[sequence]][begin:end]
                        for row, begin, end in zip(
                            sharing.kinds, bounds[:-1], bounds[1:], strict=True
                        )
                    ]
                )[: len(tensor)].clone()
                for sequence, tensor in enumerate(tensors)
            )
        )
    return replace(sequences, keys=made[0], values=made[1])


def share_blocks(case: PagedCase, sharing: Sharing) -> PagedCase:
    """Return the same call with one block for all whose keys there are the same.

    Of these the longest sequence has its keys in it. No other may have its own block read: that has
    NaN in it, or what else no result can hide.
    """
    tables, lens = case.block_tables.clone(), case.seq_lens.tolist()
    block_size = case.key_cache.shape[1]
    caches = (case.key_cache.clone(), case.value_cache.clone())
    bounds = [0, *sharing.bounds]
    for column in range(tables.shape[1]):
        begin, end = column * block_size, (column + 1) * block_size
        if any(begin < bound < end for bound in bounds):
            continue  # keys of two kinds
        first: dict[int, int] = {}
        for sequence in sorted(range(len(lens)), key=lambda s: -lens[s]):
            if begin >= lens[sequence]:
                continue
            owner = first.setdefault(sharing.kind(begin, sequence), sequence)
            if owner == sequence:
                continue
            own = int(tables[sequence, column])
            for cache in caches:
                cache[own] = 85 if cache.dtype == torch.int8 else torch.tensor(float("nan"))
            tables[sequence, column] = tables[owner, column]
    return replace(case, block_tables=tables, key_cache=caches[0], value_cache=caches[1])


@st.composite
def shared_calls(draw: st.DrawFn) -> tuple[Sequences, Sharing]:
    """Draw sequences of one to three pieces with keys in common, in any pattern."""
    quantisation = draw(st.sampled_from([None, None, None, None, *QUANTISATIONS]))
    dtype = draw(st.sampled_from(DTYPES))
    piece = piece_keys(dtype if quantisation is None else quantisation.dtype)
    batch = draw(st.integers(2, 5))
    num_kv_heads = draw(st.sampled_from([1, 1, 2]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 3, 4, 8]))
    lengths = st.builds(
        lambda pieces, more: pieces * piece + more,
        st.integers(0, 2),
        st.one_of(st.sampled_from([0, 1, 31, piece - 1]), st.integers(0, piece)),
    )
    seq_lens = draw(st.lists(lengths, min_size=batch, max_size=batch))
    query_lens = [draw(st.sampled_from([0, 1, 1, 1, 2, 5, 40])) for _ in range(batch)]
    sequences = make_sequences(
        seq_lens,
        query_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([4, 8, 33])),
        head_dim_v=draw(st.sampled_from([4, 8, 37])),
        dtype=dtype,
        seed=draw(st.integers(0, 2**16)),
        quantisation=quantisation,
    )
    options = draw(attention_options(num_heads))
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.integers(piece // 2, 3 * piece))
    if draw(st.sampled_from([False, False, True])):
        options |= {"sliding_window": None, "alibi_slopes": None}
        options["tree_mask"] = tree_mask(query_lens, draw(st.integers(0, 9)))
    bounds = sorted(
        draw(
            st.lists(
                st.one_of(
                    st.sampled_from([piece, 2 * piece, piece - 8]), st.integers(1, 3 * piece)
                ),
                max_size=3,
            )
        )
    )
    kinds = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=batch, max_size=batch)
    sharing = Sharing(tuple(bounds), tuple(tuple(draw(kinds)) for _ in range(len(bounds) + 1)))
    return with_shared_keys(sequences.with_options(**options), sharing), sharing


def run_shared(
    sequences: Sequences, sharing: Sharing, placement: Placement
) -> tuple[Tensor, Tensor]:
    """Call the op with one block for all whose keys are the same."""
    return share_blocks(place(sequences, placement), sharing).run()


def prefix(tokens: int, batch: int, groups: Sequence[int] | None = None) -> Sharing:
    """Return that sequences begin with as many keys of their group's, and go on with their own."""
    return Sharing((tokens,), (tuple(groups or (0,) * batch), tuple(range(batch))))
