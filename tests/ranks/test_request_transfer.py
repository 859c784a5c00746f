"""Requests from rank 0 to rank 1: they go on there as they would have here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paged_ops
from paged_ops import BlockManager, OutOfBlocks, PagedKVCache, UnknownRequest, build_batch
from paged_ops.blocks.errors import InFlight
from paged_ops.distributed import TransferRefused, receive_request, send_request
from tests.support.checks import same_bits

TOKENS = list(range(100, 130))
KEYS = [("adapter", "german")]


class Pool:
    """Books and a pool of two layers; keys and values follow from the position and the layer."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, **options: Any) -> None:
        self.window = options.pop("sliding_window", None)
        self.manager = BlockManager(num_blocks, block_size, sliding_window=self.window)
        self.cache = PagedKVCache(2, num_blocks, block_size, 2, 8, **options)

    def compute(self, request: str, num_tokens: int) -> torch.Tensor:
        """Write the keys and values of the last tokens of a request, and attend from them."""
        batch = build_batch(self.manager, [request], [num_tokens])
        length = self.manager.num_tokens(request)
        rows = torch.randn(
            length, 2, 2, self.cache.head_dim, generator=torch.Generator().manual_seed(0)
        )
        key, value = rows[length - num_tokens :].to(self.cache.dtype).unbind(1)
        output = key
        for layer in range(2):
            caches = self.cache.layer(layer)
            scales = self.cache.scales(layer)
            paged_ops.write_kv(key + layer, value, *caches, batch.slot_mapping, **scales)
            output = paged_ops.attention(
                key + layer,
                *caches,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
                sliding_window=self.window,
                **scales,
            )
        self.manager.commit(request)
        return output


def is_sender() -> bool:
    return dist.get_rank() == 0


pytestmark = pytest.mark.skipif(
    int(os.environ.get("RANK", 0)) > 1, reason="two ranks suffice for calls from one to the other"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "NHD", "dtype": torch.bfloat16},
        {"sliding_window": 6},
        {"cache_dtype": torch.int8},
        {"cache_dtype": torch.float8_e4m3fn, "layout": "NHD"},
        {"cache_dtype": torch.float8_e5m2, "scale_granularity": "head"},
    ],
    ids=["HND float32", "NHD bfloat16", "window", "int8", "NHD float8", "float8 by heads"],
)
def test_a_request_goes_on_at_the_receiver_bit_for_bit(options: dict[str, Any]) -> None:
    here = Pool(**options)  # the sender's; the receiver makes the same one to compare with
    here.manager.allocate("other", 9)
    here.manager.allocate("a", TOKENS, KEYS)
    here.compute("a", len(TOKENS))
    if is_sender():
        held = len([block for block in here.manager.block_table("a") if block >= 0])
        assert send_request(here.manager, here.cache, "a", 1) == held
        here.manager.check()
        assert here.manager.block_table("a")  # and it is still here
        return
    there = Pool(num_blocks=24, **options)
    there.manager.flush()  # the ranks need not have had the same number of weights before these
    there.manager.allocate("mine", 7)
    assert receive_request(there.manager, there.cache, 0) == "a"
    there.manager.check()
    assert there.manager.num_tokens("a") == len(TOKENS)
    if here.window is None:
        assert there.manager.lookup(TOKENS, KEYS) == here.manager.lookup(TOKENS, KEYS) == 28
        assert there.manager.lookup(TOKENS) == 0
    for pool in (here, there):
        pool.cache.copy_blocks(pool.manager.append("a", [7, 8, 9]))
    assert same_bits(there.compute("a", 3), here.compute("a", 3))
    there.manager.free("a")
    there.manager.check()
    assert there.manager.num_used == 2


def test_blocks_that_the_receiver_has_cached_are_not_sent() -> None:
    pool = Pool()
    if is_sender():
        pool.manager.allocate("a", TOKENS)
        pool.compute("a", len(TOKENS))
        assert send_request(pool.manager, pool.cache, "a", 1) == 3  # of 8: 20 tokens are there
        return
    pool.manager.allocate("earlier", TOKENS[:22])
    pool.compute("earlier", 22)
    pool.manager.free("earlier")
    cached = pool.manager.num_cached
    assert cached == 5
    receive_request(pool.manager, pool.cache, 0)
    pool.manager.check()
    assert pool.manager.num_cached == 0
    assert pool.manager.num_used == 8


@pytest.mark.parametrize("reason", ["blocks", "name", "block_size", "layout", "dtype", "unknown"])
def test_a_refusal_is_raised_on_both_ranks_and_changes_nothing(reason: str) -> None:
    if is_sender():
        pool = Pool()
        if reason != "unknown":
            pool.manager.allocate("a", TOKENS)
        error = UnknownRequest if reason == "unknown" else TransferRefused
        with pytest.raises(error) as refusal:
            send_request(pool.manager, pool.cache, "a", 1)
        assert reason == "unknown" or "rank 1: " in str(refusal.value)
        pool.manager.check()
        assert pool.manager.num_used == (0 if reason == "unknown" else 8)
        return
    options: dict[str, Any] = {
        "blocks": {"num_blocks": 7},
        "block_size": {"block_size": 8},
        "layout": {"layout": "NHD"},
        "dtype": {"cache_dtype": torch.int8},
    }
    pool = Pool(**options.get(reason, {}))
    if reason == "name":
        pool.manager.allocate("a", 3)
    errors = {"blocks": OutOfBlocks, "unknown": TransferRefused}
    patterns = {
        "blocks": "8 blocks asked for, 7 free",
        "name": "'a', which exists already",
        "block_size": "block_size 4, expected 8",
        "layout": "layout 'HND', expected 'NHD'",
        "dtype": "cache_dtype 'torch.float32', expected 'torch.int8'",
        "unknown": "rank 0: UnknownRequest.*'a' is unknown",
    }
    with pytest.raises(errors.get(reason, ValueError), match=patterns[reason]):
        receive_request(pool.manager, pool.cache, 0)
    pool.manager.check()
    assert pool.manager.num_used == (1 if reason == "name" else 0)


def on_last_layer(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do something when the blocks of the last layer have arrived, and are not yet written."""
    real, layers = dist.recv, []

    def recv(tensor: torch.Tensor, **arguments: Any) -> int:
        source = real(tensor, **arguments)
        if tensor.is_floating_point():  # not a message
            layers.append(tensor)
            if len(layers) == 2:
                action()
        return source

    monkeypatch.setattr(dist, "recv", recv)


def test_a_connection_that_breaks_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    if is_sender():
        pool.manager.allocate("a", TOKENS)
        send_request(pool.manager, pool.cache, "a", 1)
        pool.manager.check()
        assert pool.manager.num_used == 8
        return

    def fail() -> None:
        assert pool.manager.num_used == 8
        raise ConnectionError

    on_last_layer(monkeypatch, fail)
    with pytest.raises(ConnectionError):
        receive_request(pool.manager, pool.cache, 0)
    pool.manager.check()
    assert pool.manager.num_used == 0
    with pytest.raises(UnknownRequest):
        pool.manager.num_tokens("a")


def test_a_request_that_is_freed_on_its_way_gives_its_blocks_back_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool()
    if is_sender():
        pool.manager.allocate("a", TOKENS)
        send_request(pool.manager, pool.cache, "a", 1)
        return

    def free() -> None:
        with pytest.raises(InFlight):
            pool.manager.append("a", 1)
        pool.manager.free("a")
        pool.manager.check()
        assert pool.manager.num_used == 8  # still being written

    on_last_layer(monkeypatch, free)
    receive_request(pool.manager, pool.cache, 0)
    pool.manager.check()
    assert pool.manager.num_used == 0
