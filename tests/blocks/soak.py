"""Long random histories of the books, some calls of which are broken off: nothing may be lost.

Run ``python -m tests.blocks.soak --operations 1000000`` in the project's root. ``--seed`` chooses
other histories, ``--broken-off`` the share of calls in which KeyboardInterrupt is raised, at a line
or, in the core of the books, at a bytecode instruction. After each of these, and after every
hundredth of the others, everything is compared with a twin of plain lists, see `SwappingLists`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from typing import Any

from tests.blocks.test_block_manager_states import random_call
from tests.support.broken_off import CORE_FILES, break_off
from tests.support.paged_lists import REFUSALS, Call
from tests.support.swapping_lists import SPACE_CALLS, SwappingLists

CALLS_PER_POOL = 1000
VERIFY_EVERY = 100
MOST_POINTS = 1000  # that a call has; most have a quarter of it


def soak(operations: int, seed: int = 0, broken_off: float = 0.1) -> Counter[str]:
    """Make so many calls, on a new pool every thousand; count what became of them."""
    choose, outcomes = random.Random(seed), Counter[str]()
    paged = new_pool(choose)
    for number in range(operations):
        if number % CALLS_PER_POOL == 0:
            paged = new_pool(choose)
        call = random_call(choose, paged)
        if call[0] not in SPACE_CALLS and choose.random() < broken_off:
            point = int(MOST_POINTS ** choose.random()) + choose.randrange(200)
            outcomes[break_off_call(paged, call, point)] += 1
            paged.verify()
        else:
            outcomes["done" if paged.call(call) else "refused"] += 1
            if number % VERIFY_EVERY == 0:
                paged.verify()
    return outcomes


def new_pool(choose: random.Random) -> SwappingLists:
    return SwappingLists(
        choose.randint(2, 12),
        choose.randint(1, 4),
        choose.randint(2, 12),
        watermark=choose.choice([0.0, 0.0, 0.2]),
        sliding_window=choose.choice([None, None, 1, 2, 5]),
    )


def break_off_call(paged: SwappingLists, call: Call, point: int) -> str:
    """Break a call off at a point, and let the lists follow whatever has happened."""
    name, *arguments = call
    expected, before, result = paged.expected_error(call), holdings(paged), list[Any]()
    refusal: type[Exception] | None = None
    paged._before = paged.tables()
    lost: Any = None
    if name == "allocate":
        lost = paged.expected_hit(*arguments[1:]) * paged.manager.block_size
    try:
        broken = break_off(
            lambda: result.append(getattr(paged.manager, name)(*arguments)), point, CORE_FILES
        )
    except REFUSALS as error:
        refusal = type(error)
    if refusal is not None:
        assert refusal is expected, (call, refusal)
        assert holdings(paged) == before
        return "refused"
    happened = bool(result) or holdings(paged) != before
    if happened:
        assert expected is None, call
        if name == "append" and not result:
            lost = copies_of(paged, arguments[0])
        elif name == "flush" and not result:
            lost = paged.manager.num_used
        getattr(paged, "after_" + name)(*arguments, result[0] if result else lost)
    if broken:  # some of what could be found may be forgotten, and some may be there already
        paged.read_what_is_listed()
        with paged.manager.lock, paged.manager.ledger as ledger:
            for request, listed in paged.requests.items():
                listed.committed = ledger.find(request).num_committed * ledger.block_size
    return f"broken off, {'done' if happened else 'not done'}" if broken else "done"


def holdings(paged: SwappingLists) -> Any:
    """Return all that tells whether a call has happened, but that it has published something."""
    with paged.manager.lock, paged.manager.ledger as ledger:
        here, arriving = (
            {name: (list(held.table), held.num_tokens) for name, held in requests.items()}
            for requests in (ledger.requests, ledger.arriving)
        )
        return here, arriving, ledger.generation


def copies_of(paged: SwappingLists, request: str) -> list[tuple[int, int]]:
    """Return the copies that an append would have returned."""
    before, now = paged._before[request], paged.manager.block_table(request)
    return [pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]]


def main() -> None:
    """Run as the arguments say, and print what became of the calls."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken-off", type=float, default=0.1)
    options = parser.parse_args()
    start = time.perf_counter()
    outcomes = soak(options.operations, options.seed, options.broken_off)
    for outcome, number in outcomes.most_common():
        print(f"{number:10,} {outcome}")
    print(
        f"{options.operations:10,} operations in {time.perf_counter() - start:.0f} s, nothing lost"
    )


if __name__ == "__main__":
    main()
