"""Removals of one batch: blocks leave the index at once, and routers hear of them leaf first.

A run is all removals up to the next store that leaves. Where each of its events names single copies of known blocks as
they were stored, children before parents, the events leave as they came. Otherwise the run is put together anew.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET
from msgspec.structs import astuple

from kvbus.core.blocks.chunk import Chunk, Meta
from kvbus.core.blocks.index import MAX_RUN, Index, Table, TableKey
from kvbus.core.normalizing.leaving import Leaving
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.removal_order import Gone, leaf_first
from kvbus.core.normalizing.validate import counts_left
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered, Hash, medium_key
from kvbus.core.wire.schema import BlockRemoved, HashOnlyRemoved

_NONE: Final = (UNSET, UNSET, UNSET)


class Removals:
    """Takes blocks out of the index.

    Args:
        index: the live blocks.
        left_out: those that are not announced.
        no_prefix: groups that are left out.
        leaving: takes the events.
        stats: where blocks that are unknown or left out are counted.
    """

    def __init__(
        self, index: Index, left_out: LeftOut, no_prefix: set[int | None], leaving: Leaving, stats: SourceStats
    ) -> None:
        self._index = index
        self._left_out = left_out
        self._no_prefix = no_prefix
        self._leaving = leaving
        self._stats = stats

        # The run under way.
        self.waiting = False
        """There is a run."""
        self._events: list[BlockRemoved] = []
        """As they came."""
        self._as_they_came = True
        """They may leave like that."""
        self._gone: dict[TableKey, dict[Hash, Chunk]] = {}
        """The blocks, in the order they went."""

        self._last: Chunk | None = None
        self._last_at = 0
        """Which block went last."""

        # The batch under way.
        self.busy = False
        """There are removals."""
        self._unknown: dict[int | None, int] = {}
        """Removals of blocks that are not known, by group: which groups are left out is known when the batch ends."""
        self._left: list[dict[TableKey, dict[Hash, Chunk]]] = []
        """Blocks of the runs that have left."""
        self._cut: dict[tuple[int | None, Hash], Chunk] = {}
        """Blocks that were reblocked."""
        self._reblocked: dict[TableKey, dict[Hash, tuple[Hash | None, Chunk]]] = {}
        """Sub-blocks whose removal leaves at the end of the batch, unless they are stored again; with their parents."""

    def remove(self, event: BlockRemoved) -> None:
        """Apply one event."""
        fields: tuple[Any, ...] = astuple(event)
        hashes: tuple[Hash, ...] = fields[0]
        medium: Any = fields[1]
        group_idx: Any = fields[2]
        group: Any = None if group_idx is UNSET else group_idx
        key: Any = (group, medium_key(medium))  # one object for each time it is looked up
        table = self._index.tables.get(key)
        self.waiting = self.busy = True
        if table is None and group is not None and not self._left_out:
            self._as_they_came = False
            self._unknown[group] = self._unknown.get(group, 0) + len(hashes)
            return
        plain = fields[3:] == _NONE
        if not plain and fields[5] is not UNSET:
            self._remove_counted(event, key)
            return
        if table is None:
            self._as_they_came = False
            for block in hashes:
                self.remove_one(key, block)
            return
        coarse = self._left_out.coarse.get(key)
        if coarse is not None:
            self._as_they_came = plain = False
            if any(block in coarse for block in hashes):
                hashes = tuple([block for block in hashes if not self._left_out.remove_coarse(key, block)])
                if not hashes:
                    return
        gone = self._gone.get(key)
        if gone is None:
            gone = self._gone[key] = {}
        copies, pop = table.copies, table.blocks.pop
        size = self._index.size
        watched = size.left
        before: Chunk | None = None
        """Whose block went last."""
        parent: Hash | None = None
        """Of its first block."""
        meta: Meta | None = None
        """The last one that was looked at."""
        start = at = -1
        """The places there of the first and of the last one that went, with all between."""
        names: tuple[Hash, ...] = ()
        went = 0
        for block in hashes:
            if copies and block in copies and self._left_out.copies.keeps(table, block):
                plain = False
                continue
            chunk = pop(block, None)
            if chunk is None:
                self.remove_one(key, block)
                plain = False
                continue
            went += 1
            if watched:
                size.one_less(chunk)
            if chunk is before and at and names[at - 1] == block:
                at -= 1  # the usual order, a chain from its end
            elif chunk is before and at + 1 < len(names) and names[at + 1] == block:
                at += 1  # from its root
                plain = False
            else:
                if before is not None:
                    size.run_gone(table, before, start, at)
                    if (names[at - 1] if at else parent) in gone:
                        plain = False
                its: tuple[Any, ...] = astuple(chunk)
                if len(its[2]) == 1:  # see Chunk.hash_only
                    plain = False
                before, names, parent = chunk, its[0], its[1]
                start = at = 0
                if len(names) > 1:
                    start = at = self._last_at - 1  # engines that remove one by one go on before the last one
                    if chunk is not self._last or at < 0 or names[at] != block:
                        start = at = _place(names, block)
                if its[3] is not meta:
                    meta = its[3]
                    if meta.medium != medium or meta.group_idx != group_idx:
                        plain = False
                if its[5] is not None and its[5].derived is not None:
                    plain = False
                    before = None
                    if not at:
                        size.firsts_gone.append((table, chunk))
                    self._unreference(key, table, chunk, at)
                    continue
            gone[block] = chunk
        if before is not None:
            size.run_gone(table, before, start, at)
            if (names[at - 1] if at else parent) in gone:
                plain = False
            self._last, self._last_at = before, at
        size.blocks -= went
        if plain:
            self._events.append(event)
        else:
            self._as_they_came = False

    def remove_one(self, key: TableKey, block: Hash) -> None:
        """Take one copy of a block away, wherever it is. Without a group, the only group that has it is meant."""
        self.waiting = self.busy = True
        self._as_they_came = False
        group: int | None = key[0]
        medium = key[1]
        table = self._index.tables.get(key)
        if group is None and (table is None or block not in table.blocks):
            holders = {each for each, _ in self._index.tables_with(medium, block)}
            holders |= self._left_out.coarse_with(medium, block)
            if key not in holders and holders:
                if len(holders) > 1:
                    self._unknown[group] = self._unknown.get(group, 0) + 1
                    return
                (key,) = holders
                table = self._index.tables.get(key)
        if self._left_out.coarse and self._left_out.remove_coarse(key, block):
            return
        if table is None or block not in table.blocks:
            if not self._left_out.remove_tail(key, block):
                self._unknown[group] = self._unknown.get(group, 0) + 1
            return
        if block in table.copies and self._left_out.copies.keeps(table, block):
            return
        chunk = table.blocks.pop(block)
        self._index.size.remove(table, block, chunk)
        if chunk.derived is None:
            self._gone.setdefault(key, {})[block] = chunk
        else:
            self._unreference(key, table, chunk, chunk.hashes.index(block))

    def _remove_counted(self, event: BlockRemoved, key: TableKey) -> None:
        """Apply an event that says how many copies are left of each block; one that says it badly, as if it did not."""
        counts = counts_left(event)
        self._as_they_came = False
        for at, block in enumerate(event.block_hashes):
            if counts is None or not self._left_out.copies.say(self._index.tables.get(key), block, counts[at]):
                self.remove_one(key, block)

    def just_removed(self, group: int | None, block: Hash) -> Chunk | None:
        """The chunk of a block that this batch has removed."""
        for run in (self._gone, *reversed(self._left)):
            for key, gone in run.items():
                if key[0] == group and block in gone:
                    return gone[block]
        return self._cut.get((group, block))

    def _unreference(self, key: TableKey, table: Table, chunk: Chunk, at: int) -> None:
        """Block ``at`` of a reblocked chunk is gone: so are those of its sub-blocks that no other block has."""
        self._cut[key[0], chunk.hashes[at]] = chunk
        derived, per_block = chunk.reblocked()
        for i in range(at * per_block, (at + 1) * per_block):
            name = derived[i]
            table.refs[name] -= 1
            if not table.refs[name]:
                del table.refs[name]
                self._reblocked.setdefault(key, {})[name] = (derived[i - 1] if i else chunk.out_parent, chunk)

    def stored_again(self, key: TableKey, name: Hash) -> bool:
        """A sub-block is live again; whether its removal has not left."""
        names = self._reblocked.get(key)
        return names is not None and names.pop(name, None) is not None

    # -- what leaves -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send out the removals that wait."""
        if not self.waiting:
            return
        self.waiting = False
        if self._as_they_came:
            self._leaving.events.extend(self._events)
        else:
            for gone in self._gone.values():
                self._leave(gone, {})
            self._as_they_came = True
        self._events.clear()
        self._left.append(self._gone)
        self._gone = {}

    def leave(self) -> None:
        """Let everything leave, sub-blocks that were not stored again, too."""
        if self._reblocked:
            for key in self._reblocked:
                self._gone.setdefault(key, {})
            for key, gone in self._gone.items():
                self._leave(gone, self._reblocked.get(key, {}))
            self.drop()
        else:
            self.flush()

    def finish(self) -> None:
        """The batch ends."""
        self.leave()
        if self._unknown:
            for group, count in self._unknown.items():
                reason = Filtered.GROUP if group in self._no_prefix else Filtered.UNKNOWN_BLOCK
                self._stats.filtered[reason] += count
            self._unknown.clear()
        self._left.clear()
        self._cut.clear()
        self.busy = False

    def drop(self) -> None:
        """All of it has left, or a clear says it."""
        self._events.clear()
        self._left.append(self._gone)
        self._gone = {}
        self._reblocked.clear()
        self._as_they_came, self.waiting = True, False

    def _leave(self, gone: dict[Hash, Chunk], derived: dict[Hash, tuple[Hash | None, Chunk]]) -> None:
        """Blocks and sub-blocks of one table leave, leaves first: an event (or several) per run of one spelling."""
        pairs, chunks = _with_parents(gone), gone
        if derived:
            pairs += [(name, parent) for name, (parent, _) in derived.items()]
            chunks = gone | {name: chunk for name, (_, chunk) in derived.items()}
        named: list[Hash] = []
        last: Chunk | None = None
        for block in leaf_first(pairs):
            chunk = chunks[block]
            full = len(named) == MAX_RUN
            if full or chunk is not last:
                if last is not None and (full or not _alike(chunk, last)):
                    self._leave_run(named, last)
                    named = []
                last = chunk
            named.append(block)
        if last is not None:
            self._leave_run(named, last)

    def _leave_run(self, named: list[Hash], last: Chunk) -> None:
        meta = last.meta
        kind: type[BlockRemoved] = HashOnlyRemoved if last.hash_only else BlockRemoved
        self._leaving.events.append(kind(tuple(named), meta.medium, meta.group_idx))

    def put_back(self) -> None:
        """The index is about to be given up: it gets the blocks whose removal has not left, for the right order."""
        for key, gone in self._gone.items():
            self._index.table(*key).blocks.update(gone)
        for key, names in self._reblocked.items():
            table = self._index.table(*key)
            for name, (_, chunk) in names.items():
                derived, per_block = chunk.reblocked()
                table.blocks.setdefault(chunk.hashes[derived.index(name) // per_block], chunk)
                table.sub_blocks += 1


def _place(names: tuple[Hash, ...], block: Hash) -> int:
    """Where a block is, nearly always at an end."""
    if names[0] == block:
        return 0
    last = len(names) - 1
    return last if names[last] == block else names.index(block)


def _alike(one: Chunk, other: Chunk) -> bool:
    """Whether one removal may name blocks of both."""
    mine, theirs = one.meta, other.meta
    return one.hash_only is other.hash_only and (
        mine is theirs or (mine.medium == theirs.medium and mine.group_idx == theirs.group_idx)
    )


def _with_parents(gone: dict[Hash, Chunk]) -> list[Gone]:
    """Blocks with their parents; the usual orders need no search."""
    pairs: list[Gone] = []
    before: Chunk | None = None
    names: tuple[Hash, ...] = ()
    at = 0
    for block, chunk in gone.items():
        if chunk is not before:
            before, names = chunk, chunk.hashes
            at = _place(names, block)
        elif at and names[at - 1] == block:
            at -= 1
        elif at + 1 < len(names) and names[at + 1] == block:
            at += 1
        else:
            at = names.index(block)
        pairs.append((block, names[at - 1] if at else chunk.parent))
    return pairs
