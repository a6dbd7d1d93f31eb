"""A copy-on-write overlay: a large dictionary is frozen for a reader while it goes on changing, without being copied.

Copying a million entries stops the stream for some 20 ms. So whoever needs them as they are now gets the dictionary
itself, and changes go to a layer on top. When nobody needs it any more, the layers are merged into it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Final, Generic, TypeVar
from weakref import ref

K = TypeVar("K")
V = TypeVar("V")

SMALL: Final = 150_000
"""Fewer entries are copied all the same: it takes a millisecond or two, and a layer costs its traffic more."""

MAX_LAYERS: Final = 4
"""Layers on top of each other; where one more would be needed, the entries are copied."""


class Layer(MutableMapping[K, V]):
    """The changes made since ``below`` was frozen."""

    __slots__ = ("_below", "_gone", "_length", "_new")

    def __init__(self, below: MutableMapping[K, V]) -> None:
        self._below = below
        self._new: dict[K, V] = {}
        self._gone: set[K] = set()
        """Keys of ``below`` that are hidden: removed, or in ``_new`` with another value."""
        self._length = len(below)

    def __getitem__(self, key: K) -> V:
        if key in self._new:
            return self._new[key]
        if key in self._gone:
            raise KeyError(key)
        return self._below[key]

    def __contains__(self, key: object) -> bool:
        return key in self._new or (key not in self._gone and key in self._below)

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._length += 1
        if key in self._below:
            self._gone.add(key)
        self._new[key] = value

    def __delitem__(self, key: K) -> None:
        if key in self._new:
            del self._new[key]
        elif key in self._gone or key not in self._below:
            raise KeyError(key)
        else:
            self._gone.add(key)
        self._length -= 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[K]:
        gone = self._gone
        for key in self._below:  # one at a time when it is compiled, too: a generator expression becomes a list
            if key not in gone:
                yield key
        yield from self._new

    def put_into(self, base: dict[K, V]) -> None:
        """Make the changes in ``base``, which holds what is below."""
        for key in self._gone:
            base.pop(key, None)
        base.update(self._new)


class Overlay(Generic[K, V]):
    """What is frozen, for whom, and the layers on top.

    Args:
        base: the dictionary.
        copied_below: fewer entries than this are copied.
    """

    __slots__ = ("_base", "_copied_below", "_holders", "_layers")

    def __init__(self, base: dict[K, V], copied_below: int = SMALL) -> None:
        self._base = base
        self._copied_below = copied_below
        self._layers: list[Layer[K, V]] = []
        self._holders: list[ref[object]] = []

    def freeze(self, top: MutableMapping[K, V], holder: object) -> tuple[MutableMapping[K, V], MutableMapping[K, V]]:
        """What ``holder`` may read as long as it exists, and the mapping to change from now on."""
        if len(top) < self._copied_below or len(self._layers) == MAX_LAYERS:
            return dict(top), top
        layer = Layer(top)
        self._layers.append(layer)
        self._holders.append(ref(holder))
        return top, layer

    def merge(self, top: MutableMapping[K, V]) -> MutableMapping[K, V]:
        """The mapping to change from now on: the dictionary itself, once no holder exists any more."""
        if not self._layers or any(holder() is not None for holder in self._holders):
            return top
        for layer in self._layers:
            layer.put_into(self._base)
        self._layers.clear()
        self._holders.clear()
        return self._base
