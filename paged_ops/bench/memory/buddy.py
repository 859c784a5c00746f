"""A buddy allocator: how a contiguous cache finds its place in the pool."""

from __future__ import annotations


class Buddies:
    """Hands out contiguous ranges of slots, each a power of two in size and in alignment.

    Parameters
    ----------
    num_slots : int
        Slots of the pool; what is no power of two is cut into ones.

    Examples
    --------
    >>> buddies = Buddies(12)
    >>> buddies.take(3), buddies.take(5), buddies.take(1)
    (8, 0, None)
    """

    def __init__(self, num_slots: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]
        self._orders: dict[int, int] = {}  # of the ranges handed out
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def take(self, slots: int) -> int | None:
        """Return the start of a range of at least so many slots, or None if there is none."""
        order = (slots - 1).bit_length()
        larger = next((i for i in range(order, len(self._free)) if self._free[i]), None)
        if larger is None:
            return None
        start = min(self._free[larger])
        self._free[larger].remove(start)
        for half in reversed(range(order, larger)):
            self._free[half].add(start + (1 << half))
        self._orders[start] = order
        return start

    def give_back(self, start: int) -> None:
        """Give back a range, and join it with its buddy as long as that is free."""
        order = self._orders.pop(start)
        while (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)

    def size(self, start: int) -> int:
        """Return the slots of a range that was handed out."""
        return 1 << self._orders[start]
