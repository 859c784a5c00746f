"""The audit says what is wrong with books that were spoiled on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paged_ops.blocks.manager import BlockManager
from tests.blocks.test_block_manager import half_full


def free_twice(manager: BlockManager) -> None:
    manager.ledger.stock.free.append(manager.ledger.stock.free[-1])


def free_an_owned_block(manager: BlockManager) -> None:
    manager.ledger.stock.free.append(manager.block_table("a")[0])


def lose_a_free_block(manager: BlockManager) -> None:
    manager.ledger.stock.free.pop()


def lose_an_owner(manager: BlockManager) -> None:
    manager.ledger.stock.counts[manager.block_table("a")[0]] -= 1


def leak_a_block(manager: BlockManager) -> None:
    manager.ledger.stock.counts[manager.ledger.stock.free.pop()] = 1


def shorten_a_table(manager: BlockManager) -> None:
    manager.ledger.requests["c"].table.pop()


def forget_a_request(manager: BlockManager) -> None:
    del manager.ledger.requests["c"]


def invent_a_block(manager: BlockManager) -> None:
    manager.ledger.stock.free.append(99)


def hand_out_too_many(manager: BlockManager) -> None:
    manager.ledger.stock.counts += [0, 0]


def list_a_block_twice(manager: BlockManager) -> None:
    table = manager.ledger.requests["c"].table
    table[1] = table[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (free_twice, "0 owners and is 2 times in the free list"),
        (free_an_owned_block, "2 owners and is 1 times in the free list"),
        (lose_a_free_block, "0 owners and is 0 times in the free list"),
        (lose_an_owner, "counts 1 owners, but 2 tables hold it"),
        (leak_a_block, "counts 1 owners, but 0 tables hold it"),
        (shorten_a_table, "request 'c' has 2 blocks, but its 12 tokens need 3"),
        (forget_a_request, "counts 1 owners, but 0 tables hold it"),
        (invent_a_block, r"blocks that were never handed out: \[99\]"),
        (hand_out_too_many, "8 blocks were handed out, of 6"),
        (list_a_block_twice, "request 'c' lists a block twice"),
    ],
)
def test_check_says_what_is_wrong(spoil: Callable[[BlockManager], None], message: str) -> None:
    manager = half_full()
    manager.check()
    spoil(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check()


A = list(range(100, 120))  # two prompts that share nothing
B = list(range(200, 220))


def forget_a_digest(manager: BlockManager) -> None:
    manager.ledger.stock.prefix._digests.pop(0)


def exchange_digests(manager: BlockManager) -> None:
    prefix = manager.ledger.stock.prefix
    one, two = prefix.digest(0), prefix.digest(1)
    prefix.unpublish(0)
    prefix.unpublish(1)
    assert one
    assert two
    prefix.publish([(two, 0), (one, 1)])


def make_an_owned_block_idle(manager: BlockManager) -> None:
    manager.ledger.stock.prefix.retire([0])


def free_a_published_block(manager: BlockManager) -> None:
    manager.ledger.stock.prefix.revive(4)
    manager.ledger.stock.free.append(4)


def keep_old_tokens(manager: BlockManager) -> None:
    manager.ledger.requests["a"].tokens[0] += 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (forget_a_digest, "the digests of the blocks and the blocks of the digests differ"),
        (exchange_digests, "block 0 is found by other tokens than request 'a' has in it"),
        (make_an_owned_block_idle, "1 owners and is 0 times in the free list, 1 times among"),
        (free_a_published_block, "block 4 can be found, but is plain free"),
        (keep_old_tokens, "request 'a' has digests of other tokens than its own"),
    ],
)
def test_check_says_what_is_wrong_with_the_cache(
    spoil: Callable[[BlockManager], None], message: str
) -> None:
    manager = BlockManager(8, 4)
    manager.allocate("a", A[:9])
    manager.commit("a")
    manager.allocate("b", B[:9])
    manager.commit("b")
    manager.free("b")
    manager.check()
    spoil(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check()
