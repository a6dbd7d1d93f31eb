"""Apply the removals of one source: drop blocks from the index at once, and send removals leaf first.

A *run* is all removals up to the next store that is sent. A run is sent unchanged if each of its events removes the
last copy of live blocks, in their stored spelling, children before parents. Otherwise kvbus sends the removed blocks in
new events, children before parents: a router that keeps a tree (Dynamo) loses the descendants of a removed inner block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from msgspec import UNSET

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import MAX_RUN, TableKey
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.copies import counts_left
from kvbus.core.normalizing.reblocking import Reblocking, SubBlocks
from kvbus.core.types import UNKNOWN_MEDIUM, Filtered, Hash, medium_key
from kvbus.core.wire.schema import BlockRemoved, HashOnlyRemoved

Gone = tuple[Hash, Hash | None]
"""A removed block, and its parent."""


class Removals:
    """A source's handler of removals: removes blocks from the cache, and queues removals for routers."""

    def __init__(self, cache: EngineCache, reblocking: Reblocking) -> None:
        self._cache = cache
        self._reblocking = reblocking

        # The current run.
        self._gone: dict[TableKey, dict[Hash, Chunk]] = {}
        """Blocks removed from the index, in removal order, by table. The tables are in the order of the events."""
        self._events: list[BlockRemoved] = []
        self._as_they_came = True
        """Whether the run's events may be sent unchanged, provided that the order of their blocks is right."""

        # The current batch.
        self._removed: dict[tuple[int | None, Hash], Chunk] = {}
        """The chunk of each removed block, by group and hash."""
        self._unknown: dict[int | None, int] = {}
        """Number of removed blocks that were not known, by group."""

    def remove(self, event: BlockRemoved) -> None:
        """Apply one event."""
        key = (None if event.group_idx is UNSET else event.group_idx, medium_key(event.medium) or UNKNOWN_MEDIUM)
        counts = counts_left(event)
        said: Any = event  # fields of raw msgpack may be UNSET
        unchanged = said.locality is said.ownership is said.remaining_copy_counts is UNSET
        if key in self._cache.index.tables:
            self._gone.setdefault(key, {})
        for at, block in enumerate(event.block_hashes):
            if counts and self._cache.copies.leave(self._cache.index.tables.get(key), block, counts[at]):
                continue
            chunk = self._take(key, block)
            unchanged = unchanged and chunk is not None and _named_alike(event, chunk)
        if unchanged:
            self._events.append(event)
        else:
            self._as_they_came = False

    def remove_one(self, key: TableKey, block: Hash) -> None:
        """Remove one copy of a block without an event of the engine."""
        self._as_they_came = False
        self._take(key, block)

    def _take(self, key: TableKey, block: Hash) -> Chunk | None:
        """Remove one copy of a block. Return its chunk if routers know the block by its own hash and it is gone."""
        cache, group = self._cache, key[0]
        meant = self._meant(key, block)
        if meant is None:
            self._unknown[group] = self._unknown.get(group, 0) + 1
            return None
        if cache.left_out.remove_coarse(meant, block):
            return None
        table = cache.index.tables.get(meant)
        if table is None or block not in table.blocks:
            if not cache.left_out.remove_tail(meant, block):
                self._unknown[group] = self._unknown.get(group, 0) + 1
            return None
        if cache.copies.take(table, block):
            cache.stats.filtered[Filtered.COPY] += 1
            return None
        chunk = cache.index.take(table, block)
        self._removed[meant[0], block] = chunk
        if chunk.derived is not None:
            self._reblocking.remove(meant, chunk, block)
            return None
        self._gone.setdefault(meant, {})[block] = chunk
        return chunk

    def _meant(self, key: TableKey, block: Hash) -> TableKey | None:
        """Return the table that a removal refers to; None if it names no group and several groups have the block."""
        group, medium = key
        if group is not None:
            return key
        table = self._cache.index.tables.get(key)
        if table is not None and block in table.blocks:
            return key
        holders = {each for each, _ in self._cache.index.tables_with(medium, block)}
        holders |= self._cache.left_out.coarse_with(medium, block)
        if key in holders or not holders:
            return key
        return holders.pop() if len(holders) == 1 else None

    def just_removed(self, group: int | None, block: Hash) -> Chunk | None:
        """Return the chunk of a block that this batch has removed."""
        return self._removed.get((group, block))

    # -- sending removals ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send the removals of the run, except those of sub-blocks."""
        if self._gone or not self._as_they_came:
            self._end_run({})

    def flush_all(self) -> None:
        """Send all removals, including those of sub-blocks that were not stored again."""
        if self._reblocking.removed:
            self._end_run(self._reblocking.removed)
            self._reblocking.removed = {}
        else:
            self.flush()

    def drop(self) -> None:
        """Forget the unsent removals. Call it when a clear covers them."""
        self._gone, self._events, self._as_they_came = {}, [], True
        self._reblocking.removed = {}

    def finish(self) -> None:
        """End the batch: send the removals, and count unknown blocks. Only now are the left-out groups certain."""
        self.flush_all()
        for group, count in self._unknown.items():
            left_out = group in self._cache.stream.no_prefix
            self._cache.stats.filtered[Filtered.GROUP if left_out else Filtered.UNKNOWN_BLOCK] += count
        self._unknown.clear()
        self._removed.clear()

    def put_back(self) -> None:
        """Put blocks with an unsent removal back into the index. The caller then discards the index."""
        for key, gone in self._gone.items():
            self._cache.index.table(*key).blocks.update(gone)
        for key, names in self._reblocking.removed.items():
            table = self._cache.index.table(*key)
            for name, (_, chunk) in names.items():
                derived, per_block = chunk.reblocked()
                table.blocks.setdefault(chunk.hashes[derived.index(name) // per_block], chunk)
                table.sub_blocks += 1

    def _end_run(self, sub_blocks: dict[TableKey, SubBlocks]) -> None:
        """Send the removals of the run and of these sub-blocks, table by table."""
        gone, events, as_they_came = self._gone, self._events, self._as_they_came
        self._gone, self._events, self._as_they_came = {}, [], True
        orders: dict[TableKey, list[Hash]] = {}
        for key in dict.fromkeys([*gone, *sub_blocks]):
            pairs = _with_parents(gone.get(key, {}))
            pairs += [(name, parent) for name, (parent, _) in sub_blocks.get(key, {}).items()]
            orders[key] = leaf_first(pairs)
        if as_they_came and not sub_blocks and all(orders[key] == list(blocks) for key, blocks in gone.items()):
            self._cache.leaving.extend(events)
            return
        for key, order in orders.items():
            chunks = gone.get(key, {}) | {name: chunk for name, (_, chunk) in sub_blocks.get(key, {}).items()}
            self._leave(order, chunks)

    def _leave(self, order: list[Hash], chunks: dict[Hash, Chunk]) -> None:
        """Send removals of one table's blocks in this order, one event for each run of blocks with the same fields."""
        for (medium, group_idx, hash_only), run in groupby(order, lambda block: _spelling(chunks[block])):
            names = tuple(run)
            kind: type[BlockRemoved] = HashOnlyRemoved if hash_only else BlockRemoved
            for first in range(0, len(names), MAX_RUN):
                self._cache.leaving.append(kind(names[first : first + MAX_RUN], medium, group_idx))


def _spelling(chunk: Chunk) -> tuple[str | None, Any, bool]:
    """Return the fields that a removal of blocks of this chunk carries."""
    return chunk.meta.medium, chunk.meta.group_idx, chunk.hash_only


def _named_alike(event: BlockRemoved, chunk: Chunk) -> bool:
    """Return whether an engine's removal has the fields that kvbus would give to a removal of this chunk's blocks."""
    meta = chunk.meta
    return meta.medium == event.medium and meta.group_idx == event.group_idx and not chunk.hash_only


# -- children before parents -------------------------------------------------------------------------------------------


def leaf_first(gone: Sequence[Gone]) -> list[Hash]:
    """Return the hashes of removed blocks, children before parents, otherwise in their original order.

    Cycles (possible where hashes are not chained, SGLang before 0.5.8) are broken at the member named first.
    """
    members = {block for block, _ in gone}
    children: dict[Hash, list[Hash]] = {}
    for block, parent in gone:
        if parent is not None and parent in members:
            children.setdefault(parent, []).append(block)
    done: set[Hash] = set()
    order: list[Hash] = []
    for root, _ in gone:
        stack: list[tuple[Hash, bool]] = [(root, False)]
        while stack:
            block, expanded = stack.pop()
            if expanded:
                order.append(block)
            elif block not in done:
                done.add(block)
                stack.append((block, True))
                stack.extend((child, False) for child in reversed(children.get(block, ())) if child not in done)
    return order


def _with_parents(gone: dict[Hash, Chunk]) -> list[Gone]:
    """Return removed blocks with their parents."""
    pairs: list[Gone] = []
    last: Chunk | None = None
    at = 0
    for block, chunk in gone.items():
        at = _position(chunk.hashes, block, at if chunk is last else len(chunk.hashes))
        last = chunk
        pairs.append((block, chunk.parent_of(at)))
    return pairs


def _position(names: tuple[Hash, ...], block: Hash, before: int) -> int:
    """Return the position of a block. Most engines remove a chunk block by block, from its end or from its root."""
    for at in (before - 1, before + 1):
        if 0 <= at < len(names) and names[at] == block:
            return at
    return names.index(block)
