"""The order in which live blocks are announced: device first, one medium at a time, parents before children.

A walk over the index finds this order, so nothing has to be kept for it. The index has blocks in the order in which
they were stored. A parent that was stored again comes after its children there.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, TableKey, chunks_of
from kvbus.core.types import DEVICE_MEDIUM, Hash

Run = tuple[TableKey, Chunk, int, int]
"""A table's key, and blocks ``[first, end)`` of one of its chunks."""

_Part = tuple[Chunk, int, int]


def in_order(index: Index) -> Iterator[Run]:
    """Yield every live run of blocks."""
    for key in sorted(index.tables, key=_table_order):
        for part in _Walk(index.tables[key]).parts():
            yield key, *part


def _table_order(key: TableKey) -> tuple[bool, str, int]:
    return (key[1] != DEVICE_MEDIUM, key[1], -1 if key[0] is None else key[0])


class _Walk:
    """A walk over the runs of one table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._done: set[Hash] = set()
        """The blocks of all runs that were taken."""
        self._block_of: dict[Hash, Hash] = {}
        """The live block that each sub-block is part of, by derived hash."""
        for chunk in chunks_of(table) if table.sub_blocks or table.refs else ():
            derived, per_block = chunk.reblocked()
            for first, end in live_runs(table, chunk) if derived else ():
                parts = range(first * per_block, end * per_block)
                self._block_of.update((derived[at], chunk.hashes[at // per_block]) for at in parts)

    def parts(self) -> Iterator[_Part]:
        """Yield every run once, after the run with its parent."""
        for chunk in chunks_of(self._table):
            for first, end in live_runs(self._table, chunk):
                if chunk.hashes[first] not in self._done:
                    yield from self._with_ancestors((chunk, first, end))

    def _with_ancestors(self, part: _Part) -> list[_Part]:
        """Take a run that was not taken yet; return it after its ancestors that were not taken yet either.

        A cycle of parents ends, too.
        """
        path: list[_Part] = []
        step: _Part | None = part
        while step is not None:
            chunk, first, end = step
            self._done.update(chunk.hashes[first:end])
            path.append(step)
            step = self._parent_of(chunk, first)
        return path[::-1]

    def _parent_of(self, chunk: Chunk, first: int) -> _Part | None:
        """Return the run that holds the parent of block ``first``; None if there is none, or it was taken."""
        parent: Hash | None
        if chunk.derived is not None and first == 0 and chunk.out_parent is not None:
            parent = self._block_of.get(chunk.out_parent)
        else:
            parent = chunk.parent_of(first)
        holder = None if parent is None or parent in self._done else self._table.blocks.get(parent)
        if parent is None or holder is None:
            return None
        at = holder.hashes.index(parent)
        return next((holder, a, b) for a, b in live_runs(self._table, holder) if a <= at < b)


def live_runs(table: Table, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the maximal ranges of a chunk's blocks that are still live through this chunk."""
    first = None
    for i, block in enumerate(chunk.hashes):
        alive = table.blocks.get(block) is chunk
        if alive and first is None:
            first = i
        elif not alive and first is not None:
            yield first, i
            first = None
    if first is not None:
        yield first, len(chunk.hashes)
