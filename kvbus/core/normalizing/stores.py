"""Apply the stores of one source: new blocks, copies, orphans, offloads, and blocks that are to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import astuple

from kvbus.core.blocks.announce import announce, out_parent, reblocked_stores, stores_of
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.blocks.live_order import in_order
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.normalizing.admission import Checked, Step, chunk_of
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.derived_hashes import derive_chunk
from kvbus.core.normalizing.leaving import Leaving
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.offloads import offloaded
from kvbus.core.normalizing.removals import Removals
from kvbus.core.normalizing.shape import Shape, Sizes
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered, Hash, Reason
from kvbus.core.wire.encoding import with_extras
from kvbus.core.wire.parts import extras_of
from kvbus.core.wire.schema import BlockStored, Extras
from kvbus.core.wire.tokens import divide


class Stores:
    """Puts blocks into the index.

    Args:
        spec: the source as configured.
        index: the live blocks.
        left_out: those that are not announced.
        sizes: block sizes, by group.
        removals: those of the batch.
        leaving: takes the events.
        stats: where everything is counted.
        refused: takes medium and reason of each store that is refused.
    """

    def __init__(
        self,
        spec: SourceSpec,
        index: Index,
        left_out: LeftOut,
        sizes: dict[int | None, Sizes],
        removals: Removals,
        leaving: Leaving,
        stats: SourceStats,
        refused: set[tuple[str, str]],
    ) -> None:
        self._spec = spec
        self._index = index
        self._left_out = left_out
        self._sizes = sizes
        self._removals = removals
        self._leaving = leaving
        self._stats = stats
        self._refused = refused

        # The run under way.
        self._run_end = 0
        self._holders: dict[tuple[int | None, Hash], int] = {}
        """Where a block of the run is stored first."""
        self._early: set[int] = set()
        """Stores, by identity, that a child before them in the run needed."""

    def finish(self) -> None:
        """The batch ends."""
        self._run_end = 0
        self._early.clear()

    def store(self, steps: Sequence[Step], at: int) -> None:
        """Apply the store at this place. A parent that comes later in the same run goes first."""
        waiting = [at] if id(steps[at]) not in self._early else []
        while waiting:
            later = self._parent_later(steps, waiting[-1], at)
            if later is not None:
                self._early.add(id(steps[later]))
                waiting.append(later)
                continue
            self._apply(steps[waiting.pop()])  # type: ignore[arg-type]

    def _parent_later(self, steps: Sequence[Step], at: int, now: int) -> int | None:
        """Where the unknown parent of a store comes, if later in the run, and not under way."""
        if now + 1 >= len(steps):
            return None
        step: Checked = steps[at]  # type: ignore[assignment]
        parent, group = step.event.parent_block_hash, step.shape.group
        if parent is None or parent is UNSET or self._index.find(group, parent) is not None:
            return None
        if now >= self._run_end:
            self._look_at_run(steps, now)
        later = self._holders.get((group, parent))
        return None if later is None or later <= now or id(steps[later]) in self._early else later

    def _look_at_run(self, steps: Sequence[Step], now: int) -> None:
        """Find out where each block of the run of stores around this place is stored first."""
        start, end = now, now + 1
        while start and type(steps[start - 1]) is Checked:
            start -= 1
        while end < len(steps) and type(steps[end]) is Checked:
            end += 1
        self._run_end = end
        self._holders.clear()
        for at in range(end - 1, start - 1, -1):
            step: Checked = steps[at]  # type: ignore[assignment]
            for block in step.event.block_hashes:
                self._holders[step.shape.group, block] = at

    def _apply(self, step: Checked) -> None:
        event, shape, chunk = step.event, step.shape, step.chunk
        if not shape.complete:
            shape.as_sent(event)
        if event.parent_block_hash is UNSET:
            event.parent_block_hash = None
        if chunk is not None:
            self.place(event, shape, chunk, step.extras)
            return
        runs = offloaded(event, shape.group, self._index, self._removals)
        if not runs and event.block_size:
            self._note(Filtered.HASH_ONLY, shape.medium)
            self.place(event, shape, chunk_of(self._index, event, step.extras), step.extras)
        elif not runs:
            self._note(Filtered.TOKENLESS, shape.medium)
        hashes, extras = event.block_hashes, step.extras
        for run in runs:
            first = hashes.index(run.block_hashes[0])
            own = extras and extras_of(extras, len(hashes), first, first + len(run.block_hashes))
            self.place(run, shape, chunk_of(self._index, run, own), own)

    def place(self, event: BlockStored, shape: Shape, chunk: Chunk, extras: Extras | None) -> None:
        """Apply one store, whatever has become of its parent. All fields that kvbus sends are there."""
        sizes = self._sizes[shape.group]
        fields: tuple[Any, ...] = astuple(chunk)
        hashes: tuple[Hash, ...] = fields[0]
        key = (shape.group, shape.medium)
        treatment = self._treatment(key, chunk)
        if treatment is Treatment.REJECT:
            self._refuse(Reason.BLOCK_SIZE, shape.medium)
            return
        if treatment is Treatment.COARSE or treatment is Treatment.TAIL:
            self._leave_out(key, chunk, treatment)
            return
        table = self._index.table(*key)
        if treatment is Treatment.NATIVE:
            sizes.fine.add(shape.medium)
        if fields[1] is not None and not self._parent_ok(shape, chunk, table):
            return
        fresh = table.blocks.keys().isdisjoint(hashes)
        copies = {} if fresh or chunk.hash_only else self._without_tokens(key, table, hashes)
        if copies:
            fresh = table.blocks.keys().isdisjoint(hashes)
        new = len(hashes) if fresh else len(hashes) - sum(map(table.blocks.__contains__, hashes))
        if treatment is Treatment.REBLOCK:
            self._reblocked(chunk, shape.group, sizes.base)
        if new:
            held = chunk_bytes(chunk)
            if not self.fits(new, held):
                self._refused.add((shape.medium, Reason.INDEX_FULL))
                return
            self._index.size.add(chunk, new, held, first=fresh or hashes[0] not in table.blocks)
        if not fresh:
            self._store_copies(key, table, chunk)
        else:
            table.blocks.update(dict.fromkeys(hashes, chunk))
            if treatment is Treatment.NATIVE:
                self._removals.flush()
                self._leaving.events.append(with_extras(event, extras) if extras else event)
            else:
                self._announce_new(key, chunk, 0, len(hashes))
        if self._left_out.copies.counted:
            table.copies.update(copies)

    def _without_tokens(self, key: TableKey, table: Table, hashes: Sequence[Hash]) -> dict[Hash, int]:
        """Take out live blocks whose tokens were not known, and now are: they are announced anew, with their tokens.

        Returns:
            How many copies of each there are beyond the one that is about to be stored.
        """
        copies: dict[Hash, int] = {}
        for block in hashes:
            held = table.blocks.get(block)
            if held is not None and held.hash_only:
                copies[block] = 1 + table.copies.pop(block, 0)
                self._removals.remove_one(key, block)
        return copies

    def _note(self, reason: Filtered, medium: str) -> None:
        """Count a store without tokens, of which some routers or all get nothing."""
        self._stats.filtered[reason] += 1
        self._refused.add((medium, reason))

    def _refuse(self, reason: Reason, medium: str) -> None:
        self._stats.rejected[reason] += 1
        self._refused.add((medium, reason))

    def fits(self, blocks: int, held: int) -> bool:
        """Return whether this number of blocks and bytes may be added; if not, count the refusal."""
        size, left_out, spec = self._index.size, self._left_out, self._spec
        room = spec.max_blocks - len(left_out) - size.blocks
        room_bytes = spec.max_index_bytes - left_out.bytes
        # the bytes are counted only if their upper bound is too high
        if room >= blocks and (room_bytes - size.at_most >= held or room_bytes - size.bytes >= held):
            return True
        self._stats.rejected[Reason.INDEX_FULL] += 1
        return False

    def _leave_out(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> None:
        hashes = chunk.hashes
        if chunk.hash_only:
            self._refused.add((key[1], Filtered.TOKENLESS))
        new = self._left_out.new(key, hashes, treatment)
        if new and not self.fits(new, chunk_bytes(chunk)):
            if treatment is Treatment.COARSE:
                # its removal may be taken for that of a fine block of the same name
                self._refused.add((key[1], Reason.INDEX_FULL))
            return
        if treatment is Treatment.TAIL:
            self._left_out.store_tail(key, hashes[0], chunk)
        else:
            self._left_out.store_coarse(key, hashes)

    def _parent_ok(self, shape: Shape, chunk: Chunk, table: Table) -> bool:
        parent = chunk.parent
        if parent in chunk.hashes and parent not in table.blocks:
            self._refuse(Reason.SELF_PARENT, shape.medium)
            return False
        if parent is None:
            return True
        holder = self._index.find(shape.group, parent)
        if holder is None:
            if self._spec.orphans == "drop":
                self._stats.filtered[Filtered.ORPHAN_DROPPED] += 1
                if self._refused:  # its parent may have been refused
                    self._refused.update([(shape.medium, reason) for _, reason in self._refused])
                return False
            self._stats.filtered[Filtered.ORPHAN_PASSED] += 1
        elif holder.hashes[-1] == parent:
            chunk.parent = holder.hashes[-1]  # the same object: a chain of single blocks keeps each hash once
        return True

    # -- copies ----------------------------------------------------------------------------------------------------

    def _store_copies(self, key: TableKey, table: Table, chunk: Chunk) -> None:
        """Apply a store of which some blocks are live: those are copies, the others leave as one store per run."""
        blocks, copies, stats = table.blocks, table.copies, self._stats
        counted = self._left_out.copies.counted
        first_new = None
        live = 0
        mine: list[bytes] = []
        last: Chunk | None = None
        names: tuple[Hash, ...] = ()
        theirs: list[bytes] = []
        """The tokens of its blocks, if they are other ones."""
        at = 0
        for i, block in enumerate(chunk.hashes):
            held = blocks.get(block)
            if held is None:
                first_new = i if first_new is None else first_new
                continue
            if first_new is not None:
                self._add_run(key, table, chunk, first_new, i)
                first_new = None
            live += 1
            if counted:
                copies[block] = count = copies.get(block, 0) + 1
                stats.most_copies = max(stats.most_copies, count)
            if held is not last:
                last, names, theirs, at = held, held.hashes, [], -1
                if held.tokens != chunk.tokens and not chunk.hash_only:
                    theirs = divide(held.tokens, held.block_size)
                    mine = mine or divide(chunk.tokens, chunk.block_size)
            if theirs:
                at += 1
                if at == len(names) or names[at] != block:
                    at = names.index(block)
                if theirs[at] != mine[i]:
                    stats.rejected[Reason.HASH_COLLISION] += 1
        if first_new is not None:
            self._add_run(key, table, chunk, first_new, len(chunk.hashes))
        stats.filtered[Filtered.COPY] += live
        if chunk.parent is None and 1 < live == len(chunk.hashes):
            stats.reannounced += 1

    def _add_run(self, key: TableKey, table: Table, chunk: Chunk, a: int, b: int) -> None:
        blocks = table.blocks
        for block in chunk.hashes[a:b]:
            blocks[block] = chunk
        self._announce_new(key, chunk, a, b)

    def _announce_new(self, key: TableKey, chunk: Chunk, a: int, b: int) -> None:
        if chunk.derived is None:
            stores = list(stores_of(self._index, chunk, a, b))
        else:
            stores = list(reblocked_stores(chunk, self._reference(key, chunk, a, b)))
        if stores:
            self._removals.flush()
            self._leaving.events.extend(stores)

    # -- reblocking ------------------------------------------------------------------------------------------------

    def _reblocked(self, chunk: Chunk, group: int | None, base: int) -> None:
        before = out_parent(self._index, group, chunk.parent)
        chunk.reblock_into(derive_chunk(chunk, base, before), before)

    def _reference(self, key: TableKey, chunk: Chunk, a: int, b: int) -> list[int]:
        """Count the sub-blocks of blocks ``[a, b)``. Returns the positions of those that routers do not have.

        A sub-block that was removed earlier in the same batch (a radix node was split: removed, and stored again as
        two) has not left yet, and stays: a router with a tree would lose all that hangs on a removed inner block.
        """
        refs = self._index.table(*key).refs
        derived, per_block = chunk.reblocked()
        fresh = []
        for at in range(a * per_block, b * per_block):
            name = derived[at]
            count = refs.get(name, 0)
            refs[name] = count + 1
            if not count and not self._removals.stored_again(key, name):
                fresh.append(at)
        return fresh

    def rebuild(self) -> None:
        """Block sizes turned out different from what was assumed: cut and leave out all blocks anew."""
        for key, table in self._index.tables.items():
            table.refs.clear()
            for chunk in table.blocks.values():
                chunk.reblock_into(None, None)
            self._left_out.take_from(key, table, self._treatment)
        self._left_out.give_back(self._index, self._treatment)
        for key, chunk, a, b in in_order(self._index):
            if self._treatment(key, chunk) is Treatment.REBLOCK:
                if chunk.derived is None:
                    self._reblocked(chunk, key[0], self._sizes[key[0]].base)
                self._reference(key, chunk, a, b)
        self._index.count()
        self._left_out.tails.count()
        self._leaving.events.extend(announce(self._index))

    def _treatment(self, key: TableKey, chunk: Chunk) -> Treatment:
        found = self._sizes[key[0]].treatment(chunk.block_size, len(chunk.hashes), key[1])
        # sub-blocks are named by their tokens
        return Treatment.COARSE if found is Treatment.REBLOCK and chunk.hash_only else found
