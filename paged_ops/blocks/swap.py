"""Requests that step aside: their blocks are copied to a second pool, and back, at leisure.

A copy takes time, and meanwhile the books go on. So a `Transfer` holds every block that it reads
or writes until it is finished: whoever is freed in between, no block of a copy in flight is handed
out, and each comes back exactly once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paged_ops.blocks.arrival import arrive, hold, settle
from paged_ops.blocks.ledger import Ledger
from paged_ops.blocks.manager import BlockManager
from paged_ops.blocks.stats import BlockStats


class Transfer:
    """Block copies on their way from one pool to the other; made by `SwapSpace`.

    Attributes
    ----------
    copies : list of (int, int)
        (source, destination) block ids, for `PagedKVCache.send_blocks`. No block comes twice on
        either side.
    """

    def __init__(self, source: Ledger, destination: Ledger) -> None:
        self.copies: list[tuple[int, int]] = []
        self._source = source
        self._destination = destination

    def finish(self) -> None:
        """Say that the copies are made: what they held is released, and the requests arrive.

        Call it even if the requests were freed meanwhile, and if there is nothing to copy.

        Raises
        ------
        ValueError
            The transfer was finished already.
        """
        with self._source.lock, self._source:
            if self not in self._source.flights:
                raise ValueError("the transfer is finished already; expected one finish() each")
            for ledger in (self._source, self._destination):
                settle(ledger, self)


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
        self._device = manager.ledger
        self._host = BlockManager(
            num_blocks, manager.block_size, prefix_caching=False, journal=self._device.journal
        )

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
        return self._move(self._device, self._host.ledger, requests)

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
        return self._move(self._host.ledger, self._device, requests)

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
        with self._host.lock, self._host.ledger as host:
            return request in host.requests or request in host.arriving

    @property
    def num_free(self) -> int:
        """Free blocks of the host's pool."""
        return self._host.num_free

    def num_blocks_needed(self, requests: Sequence[Hashable]) -> int:
        """Return how many distinct host blocks requests hold: what `swap_in` may need."""
        with self._host.lock, self._host.ledger as host:
            return len({block for held in map(host.find, requests) for block in held.blocks})

    @property
    def transfers(self) -> list[Transfer]:
        """Those that are not finished: where to look if the call that made one was broken off."""
        with self._host.lock, self._host.ledger as host:
            return [each for each in host.flights if isinstance(each, Transfer)]

    def stats(self) -> BlockStats:
        """Count what the host's pool holds."""
        return self._host.stats()

    def check(self) -> None:
        """Prove that the host's books are in order; see `BlockManager.check`."""
        self._host.check()

    def _move(self, source: Ledger, destination: Ledger, requests: Sequence[Hashable]) -> Transfer:
        """Take blocks at the destination, and let a transfer hold those of both sides."""
        with source.lock, source:
            leaving = source.find_all(requests)
            transfer = Transfer(source, destination)
            copies = arrive(
                destination,
                transfer,
                {name: held.fork() for name, held in zip(requests, leaving, strict=True)},
                sharing=True,
                watermark=True,
            )
            transfer.copies += copies.items()
            hold(source, transfer, leaving)
            for request in requests:
                source.end(request, preempted=source is self._device)
            return transfer
