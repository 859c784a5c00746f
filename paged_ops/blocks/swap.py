"""Requests that step aside: their blocks are copied to a second pool, and back, at leisure.

A copy takes time, and meanwhile the books go on. So a `Transfer` holds every block that it reads
or writes until it is finished: whoever is freed in between, no block of a copy in flight is handed
out, and each comes back exactly once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from paged_ops.blocks.digest import extend_chain
from paged_ops.blocks.manager import NO_BLOCK, BlockManager, _Request
from paged_ops.blocks.stats import BlockStats


class Transfer:
    """Block copies on their way from one pool to the other; made by `SwapSpace`.

    Attributes
    ----------
    copies : list of (int, int)
        (source, destination) block ids, for `PagedKVCache.send_blocks`. No block comes twice on
        either side.
    """

    def __init__(
        self, source: BlockManager, destination: BlockManager, copies: list[tuple[int, int]]
    ) -> None:
        self.copies = copies
        self._source = source
        self._destination = destination
        self._arriving: dict[Hashable, _Request] = {}
        self._finished = False

    def finish(self) -> None:
        """Say that the copies are made: what they held is released, and the requests arrive.

        Call it even if the requests were freed meanwhile, and if there is nothing to copy.

        Raises
        ------
        ValueError
            The transfer was finished already.
        """
        with _both(self._source, self._destination):
            if self._finished:
                raise ValueError("the transfer is finished already; expected one finish() each")
            self._finished = True
            for manager in (self._source, self._destination):
                for held in manager._holds.pop(self, ()):
                    manager._release(held.blocks)
            arriving = self._destination._arriving
            for request, held in self._arriving.items():
                if arriving.get(request) is held:  # and was not freed, nor made anew since then
                    self._destination._requests[request] = arriving.pop(request)


class SwapSpace:
    """A second pool, of host memory, that requests can be moved to and brought back from.

    A request is in one place: while it is swapped out, the manager does not know it, and its name
    must not be given to another one. Requests that share blocks share them in both pools if they
    are moved by one call. Every call is atomic, among threads as well.

    Parameters
    ----------
    manager : BlockManager
        The books of the device's pool.
    num_blocks : int
        Blocks of the host's pool, of the same block size.

    Examples
    --------
    >>> manager = BlockManager(num_blocks=4, block_size=2)
    >>> space = SwapSpace(manager, num_blocks=4)
    >>> _ = manager.allocate("a", 5)
    >>> transfer = space.swap_out(["a"])
    >>> transfer.copies                 # for device_cache.send_blocks(host_cache, copies)
    [(0, 0), (1, 1), (2, 2)]
    >>> manager.num_free                # the blocks are still being read
    1
    >>> transfer.finish()
    >>> manager.num_free, space.num_free
    (4, 1)
    >>> transfer = space.swap_in(["a"])
    >>> transfer.finish()               # after host_cache.send_blocks(device_cache, ...)
    >>> manager.num_tokens("a"), space.num_free
    (5, 4)
    """

    def __init__(self, manager: BlockManager, num_blocks: int) -> None:
        self._device = manager
        self._host = BlockManager(num_blocks, manager.block_size, prefix_caching=False)

    def swap_out(self, requests: Sequence[Hashable]) -> Transfer:
        """Begin to move requests to the host. It counts as a preemption of each.

        Their device blocks become free when the transfer is finished; what of them is published
        stays cached then.

        Parameters
        ----------
        requests : sequence of Hashable
            Requests of the manager, each once.

        Returns
        -------
        Transfer
            The copies to make, from the device's pool to the host's.

        Raises
        ------
        OutOfBlocks
            The host's pool has too few free blocks.
        UnknownRequest, InFlight
            A request is not there, or not yet.
        ValueError
            A request comes twice.
        """
        with _both(self._device, self._host):
            transfer = self._move(self._device, self._host, requests)
            self._device._preemptions += len(requests)
            return transfer

    def swap_in(self, requests: Sequence[Hashable]) -> Transfer:
        """Begin to bring requests back. Each is `InFlight` until the transfer is finished.

        Blocks whose content is still cached on the device are shared rather than copied. The
        manager's watermark holds, as for new requests.

        Parameters
        ----------
        requests : sequence of Hashable
            Requests that are swapped out, each once.

        Returns
        -------
        Transfer
            The copies to make, from the host's pool to the device's.

        Raises
        ------
        OutOfBlocks
            The device's pool has too few free blocks.
        UnknownRequest, InFlight
            A request is not swapped out, or its way out is not finished.
        ValueError
            A request comes twice, or its name was given to another one.
        """
        with _both(self._device, self._host):
            return self._move(self._host, self._device, requests)

    def free(self, request: Hashable) -> None:
        """End a request that is swapped out, or on its way out.

        Raises
        ------
        UnknownRequest
            It is not.
        """
        self._host.free(request)

    def __contains__(self, request: Hashable) -> bool:
        """Say whether a request is swapped out, or on its way out."""
        with self._host._lock:
            return request in self._host._requests or request in self._host._arriving

    @property
    def num_free(self) -> int:
        """Free blocks of the host's pool."""
        return self._host.num_free

    def num_blocks_needed(self, requests: Sequence[Hashable]) -> int:
        """Return how many distinct host blocks requests hold: what `swap_in` may need."""
        with self._host._lock:
            held = [self._host._find(request) for request in requests]
            return len({block for one in held for block in one.blocks})

    def stats(self) -> BlockStats:
        """Count what the host's pool holds."""
        return self._host.stats()

    def check(self) -> None:
        """Prove that the host's books are in order; see `BlockManager.check`."""
        self._host.check()

    def _move(
        self, source: BlockManager, destination: BlockManager, requests: Sequence[Hashable]
    ) -> Transfer:
        """Take blocks at the destination, and let a transfer hold those of both sides."""
        leaving = [source._find(request) for request in requests]
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests is {list(requests)!r}, expected each request once")
        for request in requests:
            destination._refuse_existing("request", request)
        found = found_blocks(leaving, destination)
        distinct = dict.fromkeys(block for held in leaving for block in held.blocks)
        missing = [block for block in distinct if block not in found]
        idle = sum(not destination._ref_counts[block] for block in set(found.values()))
        destination._refuse_beyond_free(len(missing), idle, destination._reserved())
        # Owned by nobody else yet, the blocks are this call's own until each has its holders.
        destination._share(list(set(found.values())))
        places = found | dict(zip(missing, destination._take(len(missing)), strict=True))
        transfer = Transfer(source, destination, [(block, places[block]) for block in missing])
        source._holds[transfer] = leaving
        destination._holds[transfer] = []
        for request, held in zip(requests, leaving, strict=True):
            arriving = held.fork()
            arriving.table = [places.get(block, NO_BLOCK) for block in held.table]
            arriving.num_committed = 0  # its new blocks are to be published again
            transfer._arriving[request] = destination._arriving[request] = arriving
            destination._holds[transfer].append(arriving.fork())
            destination._share(arriving.blocks * 2)
            del source._requests[request]
        destination._release(list(set(places.values())))
        return transfer


def found_blocks(leaving: list[_Request], destination: BlockManager) -> dict[int, int]:
    """Return the blocks whose content is cached at the destination already, and where."""
    found: dict[int, int] = {}
    for held in leaving:
        if held.generation != destination._generation:
            continue
        full = len(held.tokens) // destination.block_size
        extend_chain(held.digests, held.tokens, destination.block_size, held.keys, full)
        for index in range(held.num_released, len(held.digests)):
            block = destination._prefix.find(held.digests[index])
            if block is not None:
                found[held.table[index]] = block
    return found


@contextmanager
def _both(one: BlockManager, other: BlockManager) -> Iterator[None]:
    """Hold both locks, in an order that does not depend on the direction of a transfer."""
    first, second = sorted((one, other), key=id)
    with first._lock, second._lock:
        yield
