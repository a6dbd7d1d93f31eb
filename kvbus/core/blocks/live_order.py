"""The order in which live blocks are announced: device first, one medium at a time, parents before children.

It is found by walking the index as it is, so that nothing has to be kept for it. The index has blocks in the order in
which they were stored, which is not this one: a parent that was stored again lies behind its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.chunk_set import ChunkSet
from kvbus.core.blocks.index import Index, Table, TableKey, set_of_chunks
from kvbus.core.types import DEVICE_MEDIUM, Hash

_MAX_RUNS: Final = 4096
"""Chunks whose runs are remembered: many blocks may have their parent in one of the last ones."""


_Run = tuple[Chunk, int, int]


def in_order(index: Index) -> Iterator[tuple[TableKey, Chunk, int, int]]:
    """Every live run ``(table, chunk, first, last + 1)``."""
    for key in sorted(index.tables, key=_table_order):
        yield from _table_runs(key, index.tables[key])


def _table_order(key: TableKey) -> tuple[bool, str, int]:
    return (key[1] != DEVICE_MEDIUM, key[1], -1 if key[0] is None else key[0])


def _table_runs(key: TableKey, table: Table) -> Iterator[tuple[TableKey, Chunk, int, int]]:
    sub_blocks: dict[Hash, tuple[Chunk, int]] = {}
    """By derived hash: the reblocked chunk, and its block that the sub-block is part of."""
    for chunk in set_of_chunks(table) if table.sub_blocks or table.refs else ():
        if chunk.derived is not None:
            derived, per_block = chunk.reblocked()
            sub_blocks.update((name, (chunk, at // per_block)) for at, name in enumerate(derived))
    runs: dict[int, tuple[tuple[int, int], ...]] = {}

    def runs_of(chunk: Chunk) -> tuple[tuple[int, int], ...]:
        found = runs.get(id(chunk))
        if found is None:
            if len(runs) == _MAX_RUNS:  # a million of them would be a hundred megabytes
                runs.clear()
            found = runs[id(chunk)] = tuple(live_runs(table, chunk))
        return found

    def run_before(chunk: Chunk, first: int) -> _Run | None:
        """The live run that holds the parent of this run."""
        if chunk.derived is not None and first == 0 and chunk.out_parent is not None:
            holder, at = sub_blocks.get(chunk.out_parent, (None, 0))
        else:
            parent = chunk.parent_of(first)
            holder = table.blocks.get(parent) if parent is not None else None
            at = holder.hashes.index(parent) if holder is not None and parent is not None else 0
        if holder is None:
            return None
        return next(((holder, a, b) for a, b in runs_of(holder) if a <= at < b), None)

    done = ChunkSet()
    """Chunks whose runs were taken, where there is one run."""
    done_runs: set[Hash] = set()
    """The first block of each run that was taken of other chunks."""

    def take(chunk: Chunk, first: int) -> bool:
        if len(runs_of(chunk)) == 1:
            return done.add(chunk)
        before = len(done_runs)
        done_runs.add(chunk.hashes[first])
        return len(done_runs) > before

    def with_ancestors(run: _Run) -> Iterator[tuple[TableKey, Chunk, int, int]]:
        path: list[_Run] = [run]
        walk = run_before(run[0], run[1])
        # up to the first ancestor that was taken already; noted on the way, so that a cycle of parents ends too
        while walk is not None and take(walk[0], walk[1]):
            path.append(walk)
            walk = run_before(walk[0], walk[1])
        return ((key, *run) for run in reversed(path))

    last: Chunk | None = None
    blocks = table.blocks
    for chunk in blocks.values():
        if chunk is last:
            continue
        last = chunk
        if is_single(chunk):  # the same as below, at a quarter of the cost
            if done.add(chunk):
                holder = None if chunk.parent is None else blocks.get(chunk.parent)
                if holder is None or (is_single(holder) and holder in done):
                    yield key, chunk, 0, 1
                else:
                    yield from with_ancestors((chunk, 0, 1))
            continue
        for a, b in runs_of(chunk):
            if take(chunk, a):
                yield from with_ancestors((chunk, a, b))


def is_single(chunk: Chunk) -> bool:
    """Whether a chunk is one block that leaves as it came."""
    return len(chunk.hashes) == 1 and chunk.rest is None


def live_runs(table: Table, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """The maximal ranges of a chunk's blocks that are still live through this chunk."""
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
