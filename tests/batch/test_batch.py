"""build_batch and Batch.pad_to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paged_ops
from paged_ops.arguments import INT32_MAX
from paged_ops.batch.batch import Batch, build_batch
from paged_ops.blocks.errors import UnknownRequest
from paged_ops.blocks.manager import BlockManager


def as_lists(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name).tolist() for name in Batch.__dataclass_fields__}


def batch_by_loops(
    manager: BlockManager,
    requests: Sequence[str],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> dict[str, Any]:
    """Build the batch token by token."""
    size = manager.block_size
    tables, starts, slots = [], [0], []
    for request, new, length in zip(requests, query_lens, seq_lens, strict=True):
        table = manager.block_table(request)[: -(-length // size)]
        tables.append(table)
        starts.append(starts[-1] + new)
        for position in range(length - new, length):
            slots.append(table[position // size] * size + position % size)
    width = max(map(len, tables), default=0)
    return {
        "block_tables": [table + [-1] * (width - len(table)) for table in tables],
        "seq_lens": list(seq_lens),
        "query_start_loc": starts,
        "slot_mapping": slots,
    }


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), max_size=5),
)
def test_a_batch_is_what_loops_over_its_tokens_would_build(
    block_size: int, lengths: list[tuple[int, int, int]]
) -> None:
    manager = BlockManager(64, block_size)
    requests = [f"r{i}" for i in range(len(lengths))]
    held = [max(triple) for triple in lengths]
    seq_lens = [sorted(triple)[1] for triple in lengths]
    query_lens = [min(triple) for triple in lengths]
    for request, length in zip(requests, held, strict=True):
        manager.allocate(request, length // 2)
    for request, length in zip(requests, held, strict=True):  # now the blocks are interleaved
        manager.append(request, length - length // 2)
    whole = build_batch(manager, requests, query_lens)
    assert as_lists(whole) == batch_by_loops(manager, requests, query_lens, held)
    cut = build_batch(manager, requests, query_lens, seq_lens=seq_lens)
    assert as_lists(cut) == batch_by_loops(manager, requests, query_lens, seq_lens)


def test_without_query_lens_each_request_has_one_new_token() -> None:
    manager = BlockManager(8, 4)
    for request, tokens in [("a", 5), ("b", 1), ("c", 4)]:
        manager.allocate(request, tokens)
    batch = build_batch(manager, ["c", "a", "b"])
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [15, 4, 8]


def test_the_tensors_have_the_dtypes_that_the_ops_take() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    batch = build_batch(manager, ["a"])
    assert batch.block_tables.dtype == torch.int32
    assert batch.seq_lens.dtype == torch.int32
    assert batch.query_start_loc.dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64


def test_a_batch_of_no_requests_has_empty_tensors() -> None:
    batch = build_batch(BlockManager(8, 4), [])
    assert as_lists(batch) == {
        "block_tables": [],
        "seq_lens": [],
        "query_start_loc": [0],
        "slot_mapping": [],
    }
    assert batch.block_tables.shape == (0, 0)


def test_empty_sequences_and_sequences_without_new_tokens_have_their_rows() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("empty", 0)
    manager.allocate("idle", 3)
    batch = build_batch(manager, ["empty", "idle"], [0, 0])
    assert batch.block_tables.tolist() == [[-1], [0]]
    assert batch.query_start_loc.tolist() == [0, 0, 0]
    assert batch.slot_mapping.shape == (0,)
    only_empty = build_batch(manager, ["empty"], [0])
    assert only_empty.block_tables.shape == (1, 0)


def test_a_prompt_allocated_at_once_can_be_computed_in_chunks() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 10)
    slots = []
    for end in (4, 7, 10):
        chunk = min(4, end - len(slots))
        batch = build_batch(manager, ["a"], [chunk], seq_lens=[end])
        assert batch.seq_lens.tolist() == [end]
        slots += batch.slot_mapping.tolist()
    assert slots == build_batch(manager, ["a"], [10]).slot_mapping.tolist()


def test_slots_beyond_the_range_of_int32_are_right() -> None:
    manager = BlockManager(4, 2**30)
    manager.allocate("a", 2**30 * 3)
    manager.allocate("b", 2)
    assert build_batch(manager, ["b"], [2]).slot_mapping.tolist() == [3 * 2**30, 3 * 2**30 + 1]


def test_the_tensors_go_to_the_device_asked_for_and_by_default_to_the_default_one() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    assert build_batch(manager, ["a"]).slot_mapping.device.type == "cpu"
    assert build_batch(manager, ["a"], device="meta").slot_mapping.device.type == "meta"
    with torch.device("meta"):
        assert build_batch(manager, ["a"]).slot_mapping.device.type == "meta"
        assert build_batch(manager, ["a"], device="cpu").slot_mapping.tolist() == [4]


def three_requests() -> BlockManager:
    manager = BlockManager(8, 4)
    manager.allocate("a", 5)
    manager.allocate("b", 3)
    return manager


@pytest.mark.parametrize(
    ("requests", "options", "error", "message"),
    [
        (["a", "x"], {}, UnknownRequest, "request 'x' is unknown"),
        (["a", "b", "a"], {}, ValueError, "requests has 'a' twice, expected each request once"),
        (["a"], {"query_lens": [6]}, ValueError, r"query_lens\[0\] is 6, expected 0 to 5"),
        (["a"], {"query_lens": [-1]}, ValueError, r"query_lens\[0\] is -1, expected 0 or more"),
        (["a"], {"query_lens": [True]}, TypeError, r"query_lens\[0\] is True"),
        (["a"], {"query_lens": [1.0]}, TypeError, r"query_lens\[0\] is 1.0"),
        (["a"], {"query_lens": []}, ValueError, "query_lens has 0 entries, expected 1"),
        (["a"], {"query_lens": [1, 1]}, ValueError, "query_lens has 2 entries, expected 1"),
        (["b", "a"], {"seq_lens": [3, 6]}, ValueError, r"seq_lens\[1\] is 6, expected 0 to 5"),
        (["a"], {"seq_lens": [-1]}, ValueError, r"seq_lens\[0\] is -1, expected 0 to 5"),
        (["a"], {"seq_lens": [None]}, TypeError, r"seq_lens\[0\] is None"),
        (["a"], {"seq_lens": [1, 2]}, ValueError, "seq_lens has 2 entries, expected 1"),
        (["a"], {"seq_lens": [0]}, ValueError, r"query_lens\[0\] is 1, expected 0 to 0"),
    ],
)
def test_bad_arguments_are_refused_by_name_value_and_limit(
    requests: list[str], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_batch(three_requests(), requests, **options)


def test_a_sequence_longer_than_int32_is_refused() -> None:
    manager = BlockManager(4, INT32_MAX)
    manager.allocate("a", INT32_MAX + 1)
    with pytest.raises(ValueError, match=rf"seq_lens\[0\] is {2**31}, expected 0 to {INT32_MAX}"):
        build_batch(manager, ["a"])


# ------------------------------------------------------------------ padding


def test_padding_adds_empty_sequences_and_tokens_that_are_written_nowhere() -> None:
    batch = build_batch(three_requests(), ["a", "b"], [2, 1])
    padded = batch.pad_to(batch=5, num_tokens=8, max_blocks_per_seq=3)
    assert as_lists(padded) == {
        "block_tables": [[0, 1, -1], [2, -1, -1], [-1] * 3, [-1] * 3, [-1] * 3],
        "seq_lens": [5, 3, 0, 0, 0],
        "query_start_loc": [0, 2, 3, 4, 5, 8],
        "slot_mapping": [3, 4, 10, -1, -1, -1, -1, -1],
    }
    for name in Batch.__dataclass_fields__:
        assert getattr(padded, name).dtype == getattr(batch, name).dtype


def test_padding_of_a_decode_batch_keeps_one_token_per_sequence() -> None:
    padded = build_batch(three_requests(), ["a", "b"]).pad_to(batch=4, num_tokens=4)
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]


def test_there_may_be_more_padding_sequences_than_padding_tokens() -> None:
    padded = build_batch(three_requests(), ["a", "b"]).pad_to(batch=5, num_tokens=3)
    assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
    padded = build_batch(three_requests(), ["a", "b"]).pad_to(batch=4)
    assert padded.query_start_loc.tolist() == [0, 1, 2, 2, 2]


def test_padding_to_the_present_size_changes_nothing() -> None:
    batch = build_batch(three_requests(), ["a", "b"], [2, 1])
    assert as_lists(batch.pad_to()) == as_lists(batch)
    assert as_lists(batch.pad_to(batch=2, num_tokens=3, max_blocks_per_seq=2)) == as_lists(batch)


def test_a_batch_of_no_requests_can_be_padded() -> None:
    padded = build_batch(BlockManager(8, 4), []).pad_to(batch=2, num_tokens=2, max_blocks_per_seq=1)
    assert padded.block_tables.tolist() == [[-1], [-1]]
    assert padded.query_start_loc.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"batch": 1}, ValueError, "batch is 1, expected 2 or more"),
        ({"num_tokens": 2}, ValueError, "num_tokens is 2, expected 3 or more"),
        ({"max_blocks_per_seq": 1}, ValueError, "max_blocks_per_seq is 1, expected 2 or more"),
        ({"num_tokens": 4}, ValueError, "batch is 2, expected at least 3: 1 padding tokens need"),
        ({"batch": 2.5}, TypeError, "batch is 2.5"),
    ],
)
def test_padding_to_an_impossible_size_is_refused(
    sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    batch = build_batch(three_requests(), ["a", "b"], [2, 1])
    with pytest.raises(error, match=message):
        batch.pad_to(**sizes)


def test_a_padded_batch_leaves_blocks_of_others_alone_and_changes_no_real_row() -> None:
    manager = BlockManager(4, 4)
    manager.allocate("other", 4)  # holds block 0
    manager.allocate("a", 6)
    batch = build_batch(manager, ["a"], [3])
    padded = batch.pad_to(batch=3, num_tokens=8, max_blocks_per_seq=4)
    query, key, value = torch.randn(8, 2, 8), torch.randn(8, 1, 8), torch.randn(8, 1, 8)
    outputs = []
    for tokens, inputs in [(3, batch), (8, padded)]:
        caches = torch.full((4, 2, 4, 1, 8), 7.0).unbind(1)
        paged_ops.write_kv(key[:tokens], value[:tokens], *caches, inputs.slot_mapping)
        assert all((cache[0] == 7.0).all() for cache in caches)
        outputs.append(
            paged_ops.attention(
                query[:tokens],
                *caches,
                inputs.block_tables,
                inputs.seq_lens,
                inputs.query_start_loc,
            )
        )
    assert torch.equal(outputs[0], outputs[1][:3])
    assert not outputs[1][3:].any()


def test_marking_refuses_what_has_not_one_row_per_token() -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", 3)
    batch = build_batch(manager, ["a"], [3])
    with pytest.raises(ValueError, match=r"per_token\[1\] has shape \[2\], expected 3 rows"):
        batch.mark_batch_dynamic(torch.arange(3), torch.arange(2))
    with pytest.raises(ValueError, match=r"per_token\[0\] has shape \[\], expected 3 rows"):
        batch.mark_batch_dynamic(torch.tensor(3))
