"""What one worker holds of a tree of prefixes, by its own names for blocks.

Most names are those of the nodes, and then a bit at the node says all. A worker has names of its own for a block whose
node was named by another worker that hashes otherwise, for one of two with equal tokens behind equal parents, and for
one that has no node: they are kept here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvbus.core.blocks.names import Names
from kvbus.core.blocks.prefix_labels import Label
from kvbus.core.blocks.prefix_tree import PrefixTree
from kvbus.core.types import Hash


class Waiting(NamedTuple):
    """A block whose parent has no place yet."""

    parent: Hash | None


NOWHERE: Final = Waiting(None)
"""A block whose tokens are not known."""

Place = int | Waiting
"""The node of a block, or why it has none."""


class OwnNames:
    """A worker's own names for blocks on one medium."""

    __slots__ = ("names", "nodes")

    def __init__(self) -> None:
        self.names: Names[Place] = Names()
        self.nodes: dict[int, int] = {}
        """How many of the names lead to a node."""

    def free(self, most: int) -> int:
        """Forget up to so many names, after which none is looked up any more; how many more it could have been."""
        while self.names.size and most > 0:
            self.names.pop_any()
            if self.nodes:
                self.nodes.popitem()
            most -= 1
        return most


class Holder:
    """A worker's blocks since it was last cleared.

    A node is held on a medium either by its name alone, or by names that are all among the worker's own.

    Args:
        tree: what its bit is in.
        bit: says in each node whether the worker holds it.
    """

    __slots__ = ("_tree", "bit", "own", "size", "waiting")

    def __init__(self, tree: PrefixTree, bit: int) -> None:
        self._tree = tree
        self.bit = bit
        self.size = 0
        """Blocks, on all media."""
        self.own: dict[str, OwnNames] = {}
        """By medium; of none that there is no name for."""
        self.waiting: dict[Hash, dict[tuple[str, Hash], Label]] = {}
        """Blocks that wait, by their parent: medium and name."""

    def at(self, block: Hash, medium: str, named: int) -> Place | None:
        """Where a block is that is on a medium; None if it is not.

        Args:
            block: its name.
            medium: the medium.
            named: the node of this name, 0 if there is none.
        """
        if self.own:
            own = self.own.get(medium)
            if own is not None:
                place = own.names.get(block)
                if place is not None:
                    return place
        return named if named and self._by_name(named, medium) else None

    def _by_name(self, node: int, medium: str) -> bool:
        """Whether it holds a node on a medium by the node's name."""
        if not self._tree.holds(node, medium, self.bit):
            return False
        own = self.own.get(medium) if self.own else None
        return own is None or node not in own.nodes

    def media(self, block: Hash) -> list[str]:
        """Where a block is."""
        found = [medium for medium, own in self.own.items() if own.names.get(block) is not None]
        node = self._tree.named(block)
        if node:
            found += [each for each in self._tree.media(node, self.bit) if self._by_name(node, each)]
        return found

    def node(self, block: Hash, named: int) -> int:
        """The node of a block on any medium, 0 if it has none."""
        if self.own:
            for own in self.own.values():
                place = own.names.get(block)
                if isinstance(place, int):
                    return place
        if named and any(self._by_name(named, each) for each in self._tree.media(named, self.bit)):
            return named
        return 0

    def put(self, block: Hash, medium: str, node: int) -> None:
        """A block that was not on a medium is there, at a node."""
        self.size += 1
        name = self._tree.name_of(node)
        own = self.own.get(medium) if self.own else None
        count = 0 if own is None else own.nodes.get(node, 0)
        if not count:
            if self._tree.hold(node, medium, self.bit):
                if name == block:
                    return
            elif name is not None:  # it is there by the node's name, which is one of its own from now on
                self._own(medium).names.put(name, node)
                count = 1
        own = self._own(medium)
        own.names.put(block, node)
        own.nodes[node] = count + 1

    def put_nowhere(self, block: Hash, medium: str) -> None:
        """A block that was not on a medium is there, and its tokens are not known."""
        self.size += 1
        self._own(medium).names.put(block, NOWHERE)

    def wait(self, block: Hash, medium: str, parent: Hash, label: Label) -> None:
        """A block that was not on a medium is there, and has no node until its parent has one."""
        self.size += 1
        self._own(medium).names.put(block, Waiting(parent))
        self.waiting.setdefault(parent, {})[medium, block] = label

    def _own(self, medium: str) -> OwnNames:
        own = self.own.get(medium)
        if own is None:
            own = self.own[medium] = OwnNames()
        return own

    def remove(self, block: Hash, medium: str) -> bool:
        """A block is not on a medium any more; False if it was not."""
        own = self.own.get(medium) if self.own else None
        place = None if own is None else self._pop(own, block, medium)
        if own is None or place is None:
            node = self._tree.named(block)
            if not node or not self._by_name(node, medium):
                return False
            self._tree.let_go(node, medium, self.bit)
        elif isinstance(place, int):
            left = own.nodes.pop(place) - 1
            if left:
                own.nodes[place] = left
            else:
                self._tree.let_go(place, medium, self.bit)
        elif place.parent is not None:
            waiting = self.waiting[place.parent]
            del waiting[medium, block]
            if not waiting:
                del self.waiting[place.parent]
        self.size -= 1
        return True

    def clear_medium(self, medium: str) -> None:
        """Remove every block on one medium."""
        own = self.own.get(medium)
        for block in [] if own is None else list(own.names):
            self.remove(block, medium)
        for node in self._tree.nodes_on(medium, self.bit):  # these are held by the node's name alone
            name = self._tree.name_of(node)
            if name is not None:
                self.remove(name, medium)

    def forget(self, block: Hash, medium: str) -> None:
        """A block that has no node gets one now, or waits for it."""
        self._pop(self.own[medium], block, medium)
        self.size -= 1

    def _pop(self, own: OwnNames, block: Hash, medium: str) -> Place | None:
        place = own.names.pop(block)
        if not own.names.size:
            del self.own[medium]
        return place
