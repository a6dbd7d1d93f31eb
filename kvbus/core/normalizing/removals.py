"""Apply the removals of one source: remove blocks from the index immediately, and send removals to routers leaf first.

A *run* consists of all removals up to the next store that is sent. kvbus sends the events of a run unchanged if each of
them fulfils three conditions: it removes the last copies of live blocks, names their residency as the stores did, and
has children before parents. Otherwise kvbus sends the removed blocks in new events, children before parents: a
router that keeps a tree (Dynamo) loses the descendants of a block that is removed before its children.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from itertools import groupby
from typing import Any, Final

from msgspec import UNSET

from kvbus.core.blocks.announce import removal_of, spelling
from kvbus.core.blocks.chunk import Chunk, carried_bytes, name_bytes
from kvbus.core.blocks.index import MAX_RUN, Table, TableKey
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.copies import counts_left
from kvbus.core.normalizing.filing import Filing
from kvbus.core.normalizing.reblocking import Reblocking, SubBlocks
from kvbus.core.types import LOCAL, Filtered, Hash
from kvbus.core.wire.schema import BlockRemoved

Gone = tuple[Hash, Hash | None]
"""The hash of a removed block, and the hash of its parent."""

_Gone = dict[TableKey, dict[Hash, Chunk]]
"""Removed blocks with their chunks, by table."""

_HERE: Final = (None, LOCAL)
"""Localities of blocks that the engine keeps on its own machine."""


class Removals:
    """The handler of one source's removals: it removes blocks from the index, and queues removals for routers."""

    def __init__(self, cache: EngineCache, reblocking: Reblocking, filing: Filing) -> None:
        self._cache = cache
        self._reblocking = reblocking
        self._filing = filing

        # The removals since the last store that was sent to routers (the current run).
        self.waits = False
        """Whether the current run has removals that are not among the outgoing events yet (:meth:`flush`)."""
        self._gone: dict[TableKey, dict[Hash, Chunk]] = {}
        """The blocks that the current run (the removals since the last store) has removed from the index, by table.

        The tables have the order in which the removals named them, and the blocks of a table the order of their
        removal.
        """
        self._events: list[BlockRemoved] = []
        self._as_they_came = True
        """Whether the engine's removals since the last store (the current run) may be sent unchanged."""
        self._children_first = True
        """Whether the current run is known to have removed no block before a child of the block.

        If not, kvbus sorts the blocks: routers get children first.
        """

        # The blocks that removals of the current batch have named.
        self.unfinished = False
        """Whether the current batch has removed or named blocks, so that it needs :meth:`finish`."""
        self._earlier: list[tuple[int | None, dict[Hash, Chunk]]] = []
        """The group and the removed blocks of each table in the earlier runs of the batch."""
        self._cut: dict[tuple[int | None, Hash], Chunk] = {}
        """The chunk of each removed block that kvbus had cut into sub-blocks, by group and hash."""
        self._unknown: dict[int | None, int] = {}
        """For each group, the number of unknown blocks that removals of the current batch have named."""

    def remove(self, event: BlockRemoved, key: TableKey) -> None:
        """Apply one removal of the engine: remove its blocks from the index, and queue it for routers.

        ``key`` is the table that the removal names. A usual block is live in this table, has one copy and is not cut.
        Any other block is left to :meth:`_take`.
        """
        cache, index = self._cache, self._cache.index
        table = index.tables.get(key)
        # Fields declared as Raw are UNSET if the engine left them out. Any lets mypy accept the comparison with UNSET.
        removal: Any = event
        counts = None if removal.remaining_copy_counts is UNSET else counts_left(event)
        unchanged = removal.remaining_copy_counts is UNSET
        blocks: MutableMapping[Hash, Chunk] = {}
        copies: dict[Hash, int] = {}
        gone: dict[Hash, Chunk] = {}
        if table is not None:
            gone = self._gone.setdefault(key, {})
            if counts is None and not cache.left_out.coarse:
                blocks, copies = table.blocks, table.copies
        last: Chunk | None = None
        position = 0
        self.waits = self.unfinished = True
        for at, block in enumerate(event.block_hashes):
            chunk = blocks.get(block)
            if chunk is None or block in copies or chunk.rest is not None:
                if counts and cache.copies.leave(table, block, counts[at]):
                    continue
                chunk = self._take(key, block)
                unchanged = unchanged and chunk is not None and _named_alike(event, chunk)
                continue
            hashes = chunk.hashes
            if chunk is not last:
                unchanged = unchanged and _named_alike(event, chunk)
                last, position = chunk, len(hashes)
            # Most engines remove the blocks of a chunk one after another, from its end or from its root.
            if position and hashes[position - 1] == block:
                position -= 1
            elif position + 1 < len(hashes) and hashes[position + 1] == block:
                position += 1
            else:
                position = hashes.index(block)
            if (hashes[position - 1] if position else chunk.parent) in gone:
                self._children_first = False
            gone[block] = index.take(blocks, block)
            if cache.filed:
                self._filing.remove(key, block)
        if unchanged:
            self._events.append(event)
        else:
            self._as_they_came = False

    def remove_one(self, key: TableKey, block: Hash) -> None:
        """Remove one copy of a block for a reason that is not a removal event of the engine.

        For example, the block's lifetime has ended, or the engine has cleared a medium.
        """
        self.waits = self.unfinished = True
        self._as_they_came = False
        self._take(key, block)

    def _take(self, key: TableKey, block: Hash) -> Chunk | None:
        """Remove one copy of a block.

        Return its chunk if no copy remains and routers know the block by the engine's hash. Otherwise return None.
        """
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
        return self._take_live(meant, table, block)

    def replace(self, key: TableKey, table: Table, block: Hash) -> None:
        """Remove a live block with all its copies, because a store of the block with more content follows."""
        self._as_they_came = False
        self._take_live(key, table, block)

    def _take_live(self, key: TableKey, table: Table, block: Hash) -> Chunk | None:
        """Remove a live block with all its copies. Return its chunk if routers know it by the engine's hash."""
        chunk = self._cache.index.take(table.blocks, block)
        table.copies.pop(block, None)
        self.waits = self.unfinished = True
        self._children_first = False
        if chunk.derived is not None:
            self._cut[key[0], block] = chunk
            self._reblocking.remove(key, chunk, block)
            return None
        self._gone.setdefault(key, {})[block] = chunk
        self._filing.remove(key, block)
        return chunk

    def _meant(self, key: TableKey, block: Hash) -> TableKey | None:
        """Return the key of the table that holds the block which a removal names.

        A missing locality and ``LOCAL`` stand for each other if only one of the two has the block. Return None if the
        removal names no group and several groups have the block, because it may mean any of them.
        """
        group, medium, locality, owner = key
        if group is not None and locality not in _HERE:
            return key
        table = self._cache.index.tables.get(key)
        if table is not None and block in table.blocks:
            return key
        near = {each for each, _ in self._cache.index.tables_with(medium, block)}
        near |= self._cache.left_out.coarse_with(medium, block)
        holders = {each for each in near if each[3] == owner and (each[0] == group or group is None)}
        named = {each for each in holders if each[2] == locality}
        if not named and locality in _HERE:
            named = {each for each in holders if each[2] in _HERE}
        if key in named or not named:
            return key
        return named.pop() if len(named) == 1 else None

    def just_removed(self, group: int | None, block: Hash) -> Chunk | None:
        """Return the chunk of a block that the current batch has removed; None if the batch has not removed it."""
        runs = [*self._earlier, *((key[0], gone) for key, gone in self._gone.items())]
        found = (gone[block] for own, gone in reversed(runs) if own == group and block in gone)
        return next(found, None) or self._cut.get((group, block))

    # -- sending removals ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Append the queued removals to the outgoing events.

        Removals of sub-blocks stay queued until the end of the batch (:meth:`flush_all`), because a later event of the
        batch may store the sub-blocks again.
        """
        if self.waits:
            self._end_run({})

    def flush_all(self) -> None:
        """Append all queued removals to the outgoing events, also the removals of sub-blocks.

        A sub-block of a removed block is not removed if the batch has meanwhile stored it again in another block.
        """
        if self._reblocking.removed:
            self._end_run(self._reblocking.removed)
            self._reblocking.removed = {}
        elif self.waits:
            self._end_run({})

    def drop(self) -> None:
        """Forget the queued removals, because routers get an AllBlocksCleared in place of them."""
        self._begin_run()
        self._filing.forget()
        self._reblocking.removed = {}

    def finish(self, *, complete: bool = True) -> None:
        """End a part of a batch: append all queued removals to the outgoing events.

        If the batch is ``complete``, count its unknown blocks by reason. They are counted only then, because only the
        complete batch shows which groups kvbus leaves out.
        """
        self.flush_all()
        if not complete:
            return
        for group, count in self._unknown.items():
            left_out = group in self._cache.stream.no_prefix
            self._cache.stats.filtered[Filtered.GROUP if left_out else Filtered.UNKNOWN_BLOCK] += count
        self._unknown.clear()
        self._earlier.clear()
        self._cut.clear()
        self.unfinished = False

    def _begin_run(self) -> None:
        """Begin a run without removals, and keep the blocks of the present run for :meth:`just_removed`."""
        self._earlier += [(key[0], gone) for key, gone in self._gone.items()]
        self._gone, self._events = {}, []
        self.waits, self._as_they_came, self._children_first = False, True, True

    def put_back(self) -> None:
        """Put the blocks of queued removals back into the index, because routers still have these blocks.

        The caller then replaces the index, and builds the removals of all its blocks.
        """
        for key, gone in self._gone.items():
            self._cache.index.table(*key).blocks.update(gone)
        for key, names in self._reblocking.removed.items():
            table = self._cache.index.table(*key)
            for name, (_, chunk) in names.items():
                derived, per_block = chunk.reblocked()
                table.blocks.setdefault(chunk.hashes[derived.index(name) // per_block], chunk)
                table.sub_blocks += 1

    def _end_run(self, sub_blocks: dict[TableKey, SubBlocks]) -> None:
        """Queue the removals since the last store (the current run) for routers, and removals of ``sub_blocks``.

        The outgoing events are the engine's own, if these can be sent unchanged. Otherwise they are new events, made
        for one table (a residency) after the other.
        """
        gone, events, as_they_came = self._gone, self._events, self._as_they_came and not sub_blocks
        children_first = self._children_first
        self._begin_run()
        unchanged = as_they_came and children_first
        if not unchanged:
            orders = _orders(gone, sub_blocks)
            unchanged = as_they_came and all(orders[key] == list(blocks) for key, blocks in gone.items())
        self._cache.leaving.extend(events if unchanged else _built(orders, gone, sub_blocks))
        for residencies, leaving in self._cache.filed.items():
            if unchanged and not any(self._cache.index.siblings(key, residencies) for key in gone):
                leaving.extend(events)
                continue
            last = self._filing.last(residencies, gone, sub_blocks)
            leaving.extend(_built(_orders(*last), *last))
        if self._cache.filed:
            self._filing.forget()


def _orders(gone: _Gone, sub_blocks: dict[TableKey, SubBlocks]) -> dict[TableKey, list[Hash]]:
    """Return the names of each table's removed blocks and sub-blocks in the order in which routers get them."""
    orders: dict[TableKey, list[Hash]] = {}
    for key in dict.fromkeys([*gone, *sub_blocks]):
        pairs = _with_parents(gone.get(key, {}))
        pairs += [(name, parent) for name, (parent, _) in sub_blocks.get(key, {}).items()]
        orders[key] = leaf_first(pairs)
    return orders


def _built(
    orders: dict[TableKey, list[Hash]], gone: _Gone, sub_blocks: dict[TableKey, SubBlocks]
) -> Iterator[BlockRemoved]:
    """Yield the removals of blocks and sub-blocks, table by table, in the order ``orders``.

    Consecutive blocks whose residency the engine wrote in the same way share an event of up to :data:`MAX_RUN` blocks.
    """
    for key, order in orders.items():
        chunks = gone.get(key, {}) | {name: chunk for name, (_, chunk) in sub_blocks.get(key, {}).items()}
        for spelled, run in groupby(order, lambda block: spelling(chunks[block])):  # noqa: B023 - read at once
            names = tuple(run)
            for first in range(0, len(names), MAX_RUN):
                yield removal_of(spelled, names[first : first + MAX_RUN])


def _named_alike(event: BlockRemoved, chunk: Chunk) -> bool:
    """Return whether an engine's removal has the same form as kvbus's own removal of this chunk's blocks would have.

    It has the same form if it names the residency in the same way, and the tokens of the blocks are known. Without
    known tokens, kvbus's removal is of the type HashOnlyRemoved, which no engine sends.
    """
    meta = chunk.meta
    if meta.medium != event.medium or meta.group_idx != event.group_idx or chunk.hash_only:
        return False
    sent: Any = event
    if meta.locality is meta.ownership is None:
        return sent.locality is sent.ownership is UNSET
    names = carried_bytes(event.locality), carried_bytes(event.ownership)
    return names == (name_bytes(meta.locality), name_bytes(meta.ownership))


# -- children before parents -------------------------------------------------------------------------------------------


def leaf_first(gone: Sequence[Gone]) -> list[Hash]:
    """Return the hashes of removed blocks with children before parents. Otherwise keep their order.

    Blocks may form a cycle if an engine's hashes do not include the parent (SGLang before 0.5.8). The member of the
    cycle that comes first is then treated as its root.
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
    """Return the hash of each removed block together with the hash of its parent."""
    pairs: list[Gone] = []
    last: Chunk | None = None
    at = 0
    for block, chunk in gone.items():
        at = _position(chunk.hashes, block, at if chunk is last else len(chunk.hashes))
        last = chunk
        pairs.append((block, chunk.parent_of(at)))
    return pairs


def _position(names: tuple[Hash, ...], block: Hash, before: int) -> int:
    """Return the position of a block in a chunk's hashes. First try the positions next to ``before``, the last result.

    This saves time, because most engines remove the blocks of a chunk one after another, from its end or from its root.
    """
    for at in (before - 1, before + 1):
        if 0 <= at < len(names) and names[at] == block:
            return at
    return names.index(block)
