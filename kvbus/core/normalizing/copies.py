"""How an engine removes a block that it has several copies of, found out from its stream.

vLLM stores a hash once for each physical copy. Up to 0.33 it removes it as often; with vllm#55092 it removes it once,
when the last copy goes. On the wire the two look the same, until a block that has gone is removed again: only an engine
that removes each copy does that.

Until then a removal takes the whole block away. That is exact for an engine of the second kind. For one of the first
kind blocks may be missing, and none is there that the engine does not have. They are remembered as *unsure* ones, with
the copies that would be left. When it shows that the engine removes each copy, they are live again, and all blocks are
announced anew: nothing is missing any more, not even at a router that lost what is behind a removed block. What one
removal says of a medium is true of this medium: each has a pool of its own.

Nothing in a stream shows an engine of the second kind: one of the first kind may send the same. So ``count`` stays what
it is, whatever comes. Blocks that were removed once and never again are counted, and a remark says what they may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from kvbus.core.blocks.announce import single
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import MEDIA, Filtered, Hash

Duplicates = Literal["count", "detect", "ignore", "last"]

MAX_UNSURE: int = 65_536
"""Unsure blocks that are remembered. The oldest of a table are given up first: they stay missing until stored again."""

MAX_BYTES: int = 2**26
"""About what they may hold."""

_COPY: Final = Filtered.COPY

MAX_ONCE: int = 256
"""Where copies count: blocks removed once that are watched for a second removal."""


class Copies:
    """Decides what a removal of a block with copies takes away.

    Args:
        rule: the operator's word; ``detect`` leaves it to the stream.
        stats: where such removals are counted.
        each: media of which it is known that each copy is removed.
    """

    def __init__(self, rule: Duplicates, stats: SourceStats, each: set[str]) -> None:
        self._detects = rule == "detect"
        self._always = rule == "count"
        self._stats = stats
        self.each = each
        self.counted = self._detects or self._always
        """A store of a live block is one more copy."""
        self.unsure = Index()
        """Blocks that have gone by one removal. The copies of a table are those beyond the first that may be left."""
        self.blocks = self.bytes = 0
        """How many they are, and about what they hold."""
        self.proven: set[str] = set()
        """Media of which the batch under way has shown that each copy is removed."""
        self.changed = False
        """Something was proven, or is unsure now."""
        self.once: dict[tuple[TableKey, Hash], Table] = {}
        """Where copies count by the operator's word: blocks that had copies, were removed, and not stored since."""
        self.never_twice = 0
        """Those of them that were not removed again for a long time, while nothing was: dead, if ``last`` is right."""

    def one_by_one(self, medium: str) -> bool:
        """Whether a removal takes one copy away."""
        return self._always or medium in self.each

    def keeps(self, key: TableKey, table: Table, block: Hash) -> bool:
        """Take a live block with copies for removed once; whether others are left. If not, the block has to go."""
        further = table.copies.pop(block)
        if self._always or key[1] in self.each:
            if further > 1:
                table.copies[block] = further - 1
            if key[1] not in self.each:
                self._watch(key, table, block)
            self._stats.filtered[_COPY] += 1
            return True
        if self._detects:
            self._stats.filtered[Filtered.COPY_UNSURE] += 1
            self._remember(key, block, table.blocks[block], further)
            self.changed = True
        return False

    def _watch(self, key: TableKey, table: Table, block: Hash) -> None:
        """A block that stays live was removed once. The oldest such block shows what a removal means, or nothing."""
        if len(self.once) >= MAX_ONCE:
            oldest = next(iter(self.once))
            if oldest[1] not in self.once.pop(oldest).blocks:
                self.each.add(oldest[0][1])
                self.once.clear()
                self.never_twice = 0
                return
            self.never_twice += 1
        self.once[key, block] = table

    def _remember(self, key: TableKey, block: Hash, chunk: Chunk, copies: int) -> None:
        unsure = self.unsure.table(*key)
        self._put(unsure, block, single(chunk, chunk.hashes.index(block)), copies)
        while unsure.blocks and (self.blocks > MAX_UNSURE or self.bytes > MAX_BYTES):
            self._take(unsure, next(iter(unsure.blocks)))
            self._stats.filtered[Filtered.COPY_FORGOTTEN] += 1

    def _put(self, table: Table, block: Hash, chunk: Chunk, copies: int) -> None:
        if block not in table.blocks:
            self.unsure.size.add(chunk, 1, chunk_bytes(chunk), first=True)
            self.count()
        table.add(block, chunk, copies - 1, count=True)

    def _take(self, table: Table, block: Hash) -> tuple[Chunk, int]:
        """Forget an unsure block; what is remembered of it, and how many copies may be left."""
        copies = 1 + table.copies.pop(block, 0)
        chunk = table.blocks.pop(block)
        self.unsure.size.remove(table, block, chunk)
        self.count()
        return chunk, copies

    def removed_again(self, key: TableKey, block: Hash) -> bool:
        """A block that is not live is removed; whether it is an unsure one. Its medium's engine removes each copy."""
        table = self.unsure.tables.get(key)
        if table is None or block not in table.blocks:
            return False
        chunk, copies = self._take(table, block)
        if copies > 1:
            self._put(table, block, chunk, copies - 1)
        self._prove(key[1])
        self._stats.filtered[_COPY] += 1
        return True

    def _prove(self, medium: str) -> None:
        if not self.one_by_one(medium):
            self.proven.add(medium)
            self.changed = True

    def say(self, key: TableKey, table: Table | None, block: Hash, left: int) -> bool:
        """The engine says how many copies are left (vllm#48933); whether no block has to go for that."""
        if left:
            self._prove(key[1])
        live = table is not None and block in table.blocks
        unsure = self.unsure.tables.get(key)
        if unsure is not None and block in unsure.blocks:
            chunk, _ = self._take(unsure, block)
            if not live:
                if left:
                    self._put(unsure, block, chunk, left)
                self._stats.filtered[_COPY] += 1
                return True
        if table is None or not live:
            return False
        table.copies.pop(block, None)
        if left > 1:
            table.copies[block] = left - 1
        if left:
            self._stats.filtered[_COPY] += 1
        return left > 0

    def known(self) -> None:
        """It is known that the engine removes each copy, whatever the medium."""
        if self._detects:
            self.each.update(MEDIA)
            self.proven.update(MEDIA)
            self.changed = True

    def settle(self) -> Iterator[tuple[TableKey, Hash, Chunk, int]]:
        """Take what was proven for known: the unsure blocks of these media, with their copies, are live."""
        proven, self.proven = self.proven, set()
        self.each |= proven
        for key, table in self.unsure.tables_on(proven):
            for block in list(table.blocks):
                yield key, block, *self._take(table, block)

    def forget(self) -> None:
        """A store was not taken in, or did not come: a removal proves nothing about blocks from before."""
        self.once.clear()
        if self.blocks:
            self._stats.filtered[Filtered.COPY_FORGOTTEN] += self.blocks
            self.unsure.clear()
            self.count()
        self.proven.clear()

    def keep(self, media: set[str]) -> None:
        """Forget what is on any other medium."""
        self.once.clear()
        self.unsure.keep(media)
        self.count()

    def count(self) -> None:
        """The unsure blocks have changed."""
        self.blocks, self.bytes = self.unsure.size.blocks, self.unsure.size.bytes
