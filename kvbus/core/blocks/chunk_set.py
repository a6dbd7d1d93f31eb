"""A set of chunks, by identity: a bit each instead of the 80 bytes of a set of numbers.

A walk over a large index has to know which chunks it has seen. With a million chunks a ``set`` of them costs more than
everything else that a state snapshot needs.
"""

from __future__ import annotations

from typing import Final

_ALIGNED: Final = 3
"""Objects begin at multiples of eight bytes."""

_WINDOW: Final = 13
"""Bits of one bitmap: it stands for 64 KiB of addresses, some pools of Python's allocator."""

_MASK: Final = (1 << _WINDOW) - 1


class ChunkSet:
    """Objects that live at least as long as the set: another one may take the address of one that is gone."""

    __slots__ = ("_windows",)

    def __init__(self) -> None:
        self._windows: dict[int, bytearray] = {}

    def add(self, chunk: object) -> bool:
        """Put an object in; whether it was not in already."""
        place = id(chunk) >> _ALIGNED
        window = self._windows.get(place >> _WINDOW)
        if window is None:
            window = self._windows[place >> _WINDOW] = bytearray((_MASK + 1) // 8)
        at, bit = (place & _MASK) >> 3, 1 << (place & 7)
        if window[at] & bit:
            return False
        window[at] |= bit
        return True

    def __contains__(self, chunk: object) -> bool:
        place = id(chunk) >> _ALIGNED
        window = self._windows.get(place >> _WINDOW)
        return window is not None and bool(window[(place & _MASK) >> 3] & 1 << (place & 7))
