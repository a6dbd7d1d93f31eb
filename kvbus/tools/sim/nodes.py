"""Radix nodes over a block cache, for SGLang's early events of variable size.

A node is a run of pages without a fork. A store below the middle of a node splits it: one batch removes the node and
stores it again as two. A node's name is the hash of its last page, so the lower half keeps the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvbus.tools.sim.cache import Block

Run = tuple["Block", ...]


class RadixNodes:
    """The run of blocks of each node. The cache must remove leaves first."""

    def __init__(self) -> None:
        self._node_of: dict[bytes, Run] = {}

    def clear(self) -> None:
        """Forget every node."""
        self._node_of.clear()

    def store(self, blocks: Run) -> Iterator[tuple[bool, Run]]:
        """Add a run below its parent; yield (stored or removed, node) in the order of the events."""
        parent = blocks[0].parent
        node = self._node_of.get(parent.digest) if parent is not None else None
        if node is not None and parent is not None and node[-1].digest != parent.digest:
            at = next(n for n, block in enumerate(node) if block.digest == parent.digest)
            yield from self._split(node, at + 1)
        self._hold(blocks)
        yield True, blocks

    def remove(self, blocks: Run) -> Iterator[tuple[bool, Run]]:
        """Remove blocks, leaves first; yield (stored or removed, node) in the order of the events."""
        gone = {block.digest for block in blocks}
        for block in blocks:
            node = self._node_of.get(block.digest)
            if node is None:
                continue  # removed with its node
            kept = sum(part.digest not in gone for part in node)
            if kept:
                yield from self._split(node, kept)
                node = self._node_of[block.digest]
            for part in node:
                del self._node_of[part.digest]
            yield False, node

    def _split(self, node: Run, at: int) -> Iterator[tuple[bool, Run]]:
        head, tail = node[:at], node[at:]
        self._hold(head)
        self._hold(tail)
        yield False, node
        yield True, head
        yield True, tail

    def _hold(self, run: Run) -> None:
        for block in run:
            self._node_of[block.digest] = run
