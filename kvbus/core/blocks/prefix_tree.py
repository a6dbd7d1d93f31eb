"""The places of a prefix tree, what engines call the blocks there, and who holds them.

A node is a number, and what belongs to it is in lists: so a million of them are no objects that a garbage collector has
to look at. Below the top there is a node for each adapter, below that one for each size of blocks, and then the blocks.

A node has the name that came first for it, unless another node has that name already. Engines that hash alike say the
same names, so that one look-up is for all of them; for other names see :mod:`~kvbus.core.blocks.prefix_index`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvbus.core.blocks.names import Names
from kvbus.core.blocks.prefix_labels import Adapter, Label, Shape
from kvbus.core.types import DEVICE_MEDIUM, Hash

_TOP: Final = 1
"""The node above every tree. Node 0 is none: nobody holds a block there."""

_MANY: Final = -1
"""Of a node with several children."""

_LOOKED_AT: Final = 8
"""Nodes that are looked at in the time in which one is freed."""

_SLOTS: Final = 512
"""Of the dictionaries of names, which are those of all workers."""


class PrefixTree:
    """Nodes, and on each the holders' bits."""

    def __init__(self) -> None:
        self._emptied: list[list[Any]] = []
        """What nodes were kept in before the last one went; freed in steps."""
        self._plant()

    def _plant(self) -> None:
        """Begin with no node but the top."""
        self._labels: list[Any] = [b"", b""]
        self._parents: list[int] = [0, 0]
        self._below: list[int] = [0, 0]
        """The one child, 0 for none, or :data:`_MANY`."""
        self._on_device: list[int] = [0, 0]
        """Bits of the workers that hold it on their device."""
        self._names: list[Hash | None] = [None, None]
        self._by_name: Names[int] = Names(_SLOTS, apart=True)
        self._many: dict[int, dict[Any, int]] = {}
        self._elsewhere: dict[str, dict[int, int]] = {}
        """By medium and node: the bits of other tiers."""
        self._free_nodes: list[int] = []

    @property
    def nodes(self) -> int:
        """Places there are."""
        return len(self._labels) - 2 - len(self._free_nodes)

    @property
    def shrinking(self) -> bool:
        """Whether there is something to free for :meth:`shrink`."""
        return bool(self._emptied)

    def shrink(self, most: int) -> bool:
        """Free about so many nodes of a tree that is empty now; whether there are more."""
        if self._free_nodes and not self.nodes:
            self._emptied += [
                self._labels,
                self._parents,
                self._below,
                self._on_device,
                self._names,
                self._free_nodes,
            ]
            self._plant()
        while self._emptied and most > 0:
            last = self._emptied[-1]
            freed = min(most, len(last))
            del last[len(last) - freed :]
            most -= freed
            if not last:
                self._emptied.pop()
        return bool(self._emptied)

    def roots(self, lora: Adapter) -> list[tuple[int, Shape]]:
        """The roots of an adapter's blocks, one for each size."""
        return [(root, self._labels[root]) for root in self._children(self._only(_TOP, lora))]

    def root(self, lora: Adapter, shape: Shape) -> int:
        """The root of an adapter's blocks of one size, made if need be. If nothing comes below, :meth:`prune` it."""
        return self.child(self.child(_TOP, lora), shape)

    def named(self, name: Hash) -> int:
        """The node of this name, 0 if there is none."""
        return self._by_name.get(name) or 0

    def name_of(self, node: int) -> Hash | None:
        """A node's name; None if another node had it."""
        return self._names[node]

    def place(self, parent: int, label: Label, name: Hash, known: int) -> int:
        """The child with this label, made if there is none; it gets the name if neither has another.

        Args:
            parent: the node above.
            label: the block's.
            name: what somebody calls it.
            known: the node of this name, 0 if there is none.
        """
        if known and self._parents[known] == parent and self._labels[known] == label:
            return known
        node = self.child(parent, label)
        if not known and self._names[node] is None:
            self._names[node] = name
            self._by_name.put(name, node)
        return node

    def holds(self, node: int, medium: str, bit: int) -> bool:
        """Whether somebody holds a block on a medium."""
        if medium == DEVICE_MEDIUM:
            return self._on_device[node] & bit != 0
        bits = self._elsewhere.get(medium)
        return bits is not None and bits.get(node, 0) & bit != 0

    def media(self, node: int, bit: int) -> list[str]:
        """Where somebody holds a block."""
        found = [DEVICE_MEDIUM] if self._on_device[node] & bit else []
        found += [medium for medium, bits in self._elsewhere.items() if bits.get(node, 0) & bit]
        return found

    def nodes_on(self, medium: str, bit: int) -> list[int]:
        """The nodes that somebody holds on a medium."""
        if medium == DEVICE_MEDIUM:
            return [node for node, bits in enumerate(self._on_device) if bits & bit]
        return [node for node, bits in self._elsewhere.get(medium, {}).items() if bits & bit]

    def hold(self, node: int, medium: str, bit: int) -> bool:
        """Somebody holds a block on a medium; False if it held one there already."""
        if medium == DEVICE_MEDIUM:
            have = self._on_device[node]
            self._on_device[node] = have | bit if have else bit
        else:
            bits = self._elsewhere.setdefault(medium, {})
            have = bits.get(node, 0)
            bits[node] = have | bit
        return not have & bit

    def let_go(self, node: int, medium: str, bit: int) -> None:
        """Somebody does not hold its block on a medium any more."""
        if medium == DEVICE_MEDIUM:
            self._on_device[node] ^= bit
        else:
            bits = self._elsewhere[medium]
            bits[node] ^= bit
            if not bits[node]:
                del bits[node]
                if not bits:
                    del self._elsewhere[medium]
        self.prune(node)

    def let_all_go(self, bits: int, node: int, most: int) -> tuple[int, int]:
        """Those of these bits hold nothing any more; nodes that come from now on are not theirs.

        Args:
            bits: whose.
            node: where to go on; 0: to begin.
            most: about how many nodes are freed.

        Returns:
            Where to go on, 0: nowhere; and what is left of ``most``.
        """
        end, left = len(self._on_device), most * _LOOKED_AT
        at = node or _TOP + 1
        while at < end:
            if left <= 0:
                return at, 0
            left -= 1
            had = self._on_device[at] & bits
            if had:
                self.let_go(at, DEVICE_MEDIUM, had)
                left -= _LOOKED_AT
            if self._elsewhere:
                for medium in list(self._elsewhere):
                    had = self._elsewhere[medium].get(at, 0) & bits
                    if had:
                        self.let_go(at, medium, had)
                        left -= _LOOKED_AT
            at += 1
        return 0, max(0, left // _LOOKED_AT)

    def tiers(self, path: Sequence[int], ends: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
        """By medium, how many of a path's blocks each holder has, for :func:`count`."""
        found = {DEVICE_MEDIUM: _counts([self._on_device[each] for each in path], ends)}
        for medium, held in self._elsewhere.items():
            found[medium] = _counts([held.get(each, 0) for each in path], ends)
        return found

    @property
    def tiered(self) -> bool:
        """Whether any block is on another medium than the device."""
        return bool(self._elsewhere)

    def path(self, node: int, labels: Iterable[Label]) -> list[int]:
        """The nodes below one, as far as there are any."""
        labels_of, below, many = self._labels, self._below, self._many
        path: list[int] = []
        if node >= len(below):  # it was of a tree that has been emptied since
            return path
        for label in labels:
            child = below[node]
            if child < 0:
                child = many[node].get(label, 0)
                if not child:
                    break
            elif labels_of[child] != label:
                break
            path.append(child)
            node = child
        return path

    def path_named(self, node: int, names: Sequence[Hash]) -> list[int]:
        """The same by their names; each is most likely to be below the one before, the first below this node."""
        names_of, below = self._names, self._below
        path: list[int] = []
        if node >= len(below):  # it was of a tree that has been emptied since
            return path
        for name in names:
            child = below[node]
            if child <= 0 or names_of[child] != name:  # most often it is the only one below the last
                child = self.named(name)
                if not child:
                    break
            path.append(child)
            node = child
        return path

    def labels(self, nodes: Sequence[int]) -> list[Label]:
        """What tells each of these from others behind the one before it."""
        return [self._labels[node] for node in nodes]

    def still(self, node: int, nodes: list[int], labels: list[Label]) -> bool:
        """Whether the first of these is below a node, each other one below the one before, with these very labels.

        Labels with the same tokens are not enough: what has come and gone is found by a walk.
        """
        parents, labels_of = self._parents, self._labels
        there = len(parents)
        for at, each in enumerate(nodes):
            if each >= there or labels_of[each] is not labels[at] or parents[each] != node:
                return False
            node = each
        return True

    def names(self, nodes: Sequence[int]) -> list[Hash | None]:
        """What each of these is called."""
        return [self._names[node] for node in nodes]

    def still_named(self, nodes: list[int], names: list[Hash | None]) -> bool:
        """Whether each of these nodes has its name, this very object. No other node has one that is equal."""
        names_of = self._names
        there = len(names_of)
        return all(node < there and names_of[node] is names[at] for at, node in enumerate(nodes))

    def ends(self, path: Sequence[int], alive: int) -> list[tuple[int, int]]:
        """Which of these holders hold how many blocks of a path without a hole, the most first."""
        held = self._on_device
        others = list(self._elsewhere.values())
        ends: list[tuple[int, int]] = []
        last = -1
        blocks = 0
        for node in path:
            have = held[node]
            if others:
                for bits in others:
                    have |= bits.get(node, 0)
            if have is not last:  # most often it is the same object
                last = have
                have &= alive
                if have != alive:
                    if blocks:
                        ends.append((alive ^ have, blocks))
                    alive = have
                    if not have:
                        break
            blocks += 1
        if blocks and alive:
            ends.append((alive, blocks))
        ends.reverse()
        return ends

    def _children(self, node: int) -> list[int]:
        only = self._below[node]
        return list(self._many[node].values()) if only == _MANY else [only] if only else []

    def _only(self, node: int, label: Any) -> int:
        """The child with this label, 0 if there is none."""
        child = self._below[node]
        if child < 0:
            return self._many[node].get(label, 0)
        return child if child and self._labels[child] == label else 0

    def child(self, node: int, label: Any) -> int:
        """The child with this label, made if there is none."""
        found = self._only(node, label)
        if found:
            return found
        if self._free_nodes:
            new = self._free_nodes.pop()
            self._labels[new], self._parents[new] = label, node
        else:
            new = len(self._labels)
            self._labels.append(label)
            self._parents.append(node)
            self._below.append(0)
            self._on_device.append(0)
            self._names.append(None)
        only = self._below[node]
        if not only:
            self._below[node] = new
        elif only > 0:
            self._many[node] = {self._labels[only]: only, label: new}
            self._below[node] = _MANY
        else:
            self._many[node][label] = new
        return new

    def prune(self, node: int) -> None:
        """Free a node that nobody holds and nothing is below, and so upwards."""
        elsewhere = self._elsewhere.values()
        while node != _TOP and not (
            self._on_device[node] or self._below[node] or any(node in bits for bits in elsewhere)
        ):
            parent = self._parents[node]
            if self._below[parent] == _MANY:
                siblings = self._many[parent]
                del siblings[self._labels[node]]
                if len(siblings) == 1:
                    (self._below[parent],) = siblings.values()
                    del self._many[parent]
            else:
                self._below[parent] = 0
            self._labels[node] = b""
            name = self._names[node]
            if name is not None:
                self._by_name.pop(name)
                self._names[node] = None
            self._free_nodes.append(node)
            node = parent

    def size_at(self, node: int) -> int:
        """Tokens of the blocks of the tree that a node is in; 0 of no node."""
        if not node:
            return 0
        while self._parents[self._parents[node]] != _TOP:
            node = self._parents[node]
        shape: Shape = self._labels[node]
        return shape[0]


def _counts(held: Sequence[int], ends: Sequence[tuple[int, int]]) -> list[int]:
    """How many blocks each worker holds, up to its own end: bit n of all counts in the n-th integer.

    So it costs the same for one worker and for hundreds.
    """
    planes: list[int] = []
    leaving = {blocks: bits for bits, blocks in ends}
    counting = sum(bits for bits, _ in ends)
    last = run = 0
    for at, each in enumerate(held):
        counting ^= leaving.get(at, 0)
        bits = each & counting
        if bits != last:
            _add(planes, last, run)
            last, run = bits, 0
        run += 1
    _add(planes, last, run)
    return planes


def _add(planes: list[int], bits: int, number: int) -> None:
    """Add a number to the counts of these workers."""
    for at in range(number.bit_length()):
        carry = bits if number >> at & 1 else 0
        while carry:
            planes += [0] * (at + 1 - len(planes))
            planes[at], carry = planes[at] ^ carry, planes[at] & carry
            at += 1  # noqa: PLW2901 - the carry goes to the next one


def count(planes: Sequence[int], bit: int) -> int:
    """The count of one holder."""
    return sum(1 << at for at, plane in enumerate(planes) if plane & bit)


def each_bit(bits: int) -> list[int]:
    """The bits of an integer, each alone."""
    found = []
    while bits:
        found.append(bits & -bits)
        bits &= bits - 1
    return found
