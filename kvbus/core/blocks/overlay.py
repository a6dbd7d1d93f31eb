"""A layer of changes over a dictionary that nobody may change any more.

To copy a million entries stops the event loop for some 20 ms. So a reader that needs a large dictionary as it is now
gets the dictionary itself, and further changes go to a :class:`Layer` on top of it (:meth:`Table.freeze
<kvbus.core.blocks.index.Table.freeze>`). After the last reader has gone, :func:`merged` puts the changes into the
dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Layer(MutableMapping[K, V]):
    """The entries of ``below``, with the changes made since. ``below`` does not change while the layer exists."""

    __slots__ = ("_gone", "_length", "_new", "below")

    def __init__(self, below: MutableMapping[K, V]) -> None:
        self.below = below
        self._new: dict[K, V] = {}
        self._gone: set[K] = set()
        """Keys of ``below`` that are hidden: removed, or in ``_new`` with another value."""
        self._length = len(below)

    def __getitem__(self, key: K) -> V:
        if key in self._new:
            return self._new[key]
        if key in self._gone:
            raise KeyError(key)
        return self.below[key]

    def __contains__(self, key: object) -> bool:
        return key in self._new or (key not in self._gone and key in self.below)

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._length += 1
        if key in self.below:
            self._gone.add(key)
        self._new[key] = value

    def __delitem__(self, key: K) -> None:
        if key in self._new:
            del self._new[key]
        elif key in self._gone or key not in self.below:
            raise KeyError(key)
        else:
            self._gone.add(key)
        self._length -= 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[K]:
        yield from (key for key in self.below if key not in self._gone)
        yield from self._new

    def put_into(self, base: MutableMapping[K, V]) -> None:
        """Make the changes in ``base``, which holds the entries of ``below``."""
        for key in self._gone:
            base.pop(key, None)
        base.update(self._new)


def merged(top: MutableMapping[K, V]) -> MutableMapping[K, V]:
    """Put the changes of all layers into the dictionary under them; return the dictionary."""
    if not isinstance(top, Layer):
        return top
    base: MutableMapping[K, V] = merged(top.below)
    top.put_into(base)
    return base
