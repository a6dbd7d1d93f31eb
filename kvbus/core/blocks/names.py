"""Blocks by name, in several small dictionaries: one of a million takes 50 ms to grow, and batches would wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from kvbus.core.types import Hash

V = TypeVar("V")

_SLOTS: Final = 32
"""Of one worker's blocks."""

_MOST: Final = 16_384
"""Names of a part that is divided when it has more: that takes 2 ms, and so does growth of one of 32 of a million."""


class Names(Generic[V]):
    """What is known of each block.

    Args:
        slots: how many parts there are at most, a power of two.
        apart: there are so many from the beginning, which is right where there will be many names: to divide a part
            costs as much as to fill it.
    """

    __slots__ = ("_mask", "_parts", "size")

    def __init__(self, slots: int = _SLOTS, *, apart: bool = False) -> None:
        self._mask = slots - 1
        self._parts: list[dict[Hash, V]] = [{} for _ in range(slots)] if apart else [{}] * slots
        """By the last bits of a name's hash; a part has several slots until it is divided, since few parts are closer
        together in memory than many."""
        self.size = 0
        """Blocks."""

    def __iter__(self) -> Iterator[Hash]:
        """Yield every block's name."""
        for part in {id(each): each for each in self._parts}.values():
            yield from part

    def get(self, block: Hash) -> V | None:
        """What is known of a block; None if nothing is."""
        return self._parts[hash(block) & self._mask].get(block)

    def put(self, block: Hash, known: V) -> None:
        """Know something of a block, and nothing else any more."""
        part = self._parts[hash(block) & self._mask]
        before = len(part)
        part[block] = known
        self.size += len(part) - before
        if before == _MOST:
            self._divide(part)

    def _divide(self, part: dict[Hash, V]) -> None:
        """Give half of a part's slots to a new one, if it has several."""
        slots = [slot for slot, each in enumerate(self._parts) if each is part]
        bit = len(self._parts) // len(slots)  # what is below it, all of them have in common
        if bit == len(self._parts):
            return
        halves: tuple[dict[Hash, V], dict[Hash, V]] = {}, {}
        for block, known in part.items():
            halves[hash(block) & bit != 0][block] = known
        for slot in slots:
            self._parts[slot] = halves[slot & bit != 0]
        for half in halves:
            if len(half) >= _MOST:  # nearly all names are alike in this bit
                self._divide(half)

    def pop(self, block: Hash) -> V | None:
        """What was known of a block, of which nothing is known now."""
        known = self._parts[hash(block) & self._mask].pop(block, None)
        if known is not None:
            self.size -= 1
        return known

    def pop_any(self) -> V:
        """What was known of some block; there is one. Afterwards the others can be taken in this way alone."""
        while not self._parts[-1]:
            self._parts.pop()
        self.size -= 1
        return self._parts[-1].popitem()[1]
