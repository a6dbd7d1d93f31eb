"""Blocks that kvbus does not announce to routers, but remembers so that it recognizes their removals.

*Coarse* blocks repeat the blocks of a finer stream. kvbus remembers only the number of copies of each. *Tail blocks*
are the ends of prompts that do not fill a block: vLLM announces them before the block is full, and removes them once it
is full. kvbus keeps tail blocks with their tokens, because it has to announce them if the group's blocks turn out to be
of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from kvbus.core.blocks.chunk import ITEM_BYTES, Chunk
from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.copies import Copies
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Hash

TreatmentOf = Callable[[TableKey, Chunk], Treatment]
"""Function that returns the treatment of the blocks of a table's chunk."""

_ANNOUNCED = (Treatment.NATIVE, Treatment.REBLOCK)


class SuppressedBlocks:
    """The blocks of one source that are in the engine's cache but not in the index.

    Args:
        stats: counts the suppressed blocks.
        copies: decides whether each copy of a block needs its own removal.
    """

    def __init__(self, stats: SourceStats, copies: Copies) -> None:
        self._stats = stats
        self._copies = copies
        self.coarse: dict[TableKey, dict[Hash, int]] = {}
        """Number of copies, by table and hash. No table is empty."""
        self._coarse_blocks = 0
        self.tails = Index()

    def __len__(self) -> int:
        return self._coarse_blocks + self.tails.blocks

    @property
    def bytes(self) -> int:
        """Approximate size of these blocks in bytes."""
        return ITEM_BYTES * self._coarse_blocks + self.tails.bytes

    @property
    def media(self) -> set[str]:
        """All media with a suppressed block."""
        return {*self.tails.media_names} | {medium for _, medium in self.coarse}

    def new(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> int:
        """Return the number of blocks of a chunk that are not remembered yet."""
        tails = self.tails.tables.get(key)
        held = self.coarse.get(key, {}) if treatment is Treatment.COARSE else tails.blocks if tails else {}
        return sum(block not in held for block in chunk.hashes)

    def store(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> None:
        """Remember the blocks of a store."""
        if treatment is Treatment.TAIL:
            self._store_tail(key, chunk.hashes[0], chunk, 0)
            return
        self._stats.filtered[Filtered.COARSE] += 1
        for block in chunk.hashes:
            self.add_coarse(key, block, 1)

    def add_coarse(self, key: TableKey, block: Hash, copies: int) -> None:
        """Add a number of copies to a coarse block."""
        table = self.coarse.setdefault(key, {})
        self._coarse_blocks += block not in table
        table[block] = table.get(block, 0) + copies

    def _store_tail(self, key: TableKey, block: Hash, chunk: Chunk, copies: int) -> None:
        """Remember a tail with ``copies`` further copies. If the tail is known, count it as one further copy, too."""
        self._stats.filtered[Filtered.TAIL] += 1
        table = self.tails.table(*key)
        if block in table.blocks:
            copies += 1
        else:
            self.tails.put(table, chunk, 0, 1)
        self._copies.add(table, block, copies)

    # -- removals --------------------------------------------------------------------------------------------------

    def coarse_with(self, medium: str, block: Hash) -> set[TableKey]:
        """Return every table that has this coarse block on this medium."""
        return {key for key, table in self.coarse.items() if key[1] == medium and block in table}

    def remove_coarse(self, key: TableKey, block: Hash) -> bool:
        """Forget a coarse block, or one copy of it; return False if it is not remembered."""
        table = self.coarse.get(key, {})
        left = table.get(block)
        if left is None:
            return False
        if left == 1 or not self._copies.counted:
            self._coarse_blocks -= 1
            del table[block]
            if not table:
                del self.coarse[key]
        else:
            table[block] = left - 1
        self._stats.filtered[Filtered.COARSE] += 1
        return True

    def remove_tail(self, key: TableKey, block: Hash) -> bool:
        """Forget a tail, or one copy of it; return False if it is not remembered.

        If the removal names no group, remove the tail only if exactly one group has it.
        """
        table = self.tails.tables.get(key)
        if table is None or block not in table.blocks:
            holders = self.tails.tables_with(key[1], block) if key[0] is None else []
            if len(holders) != 1:
                return False
            table = holders[0][1]
        if not self._copies.take(table, block):
            self.tails.take(table, block)
        self._stats.filtered[Filtered.TAIL] += 1
        return True

    def keep(self, media: AbstractSet[str]) -> None:
        """Forget the blocks on all media except these."""
        for key in [key for key in self.coarse if key[1] not in media]:
            self._coarse_blocks -= len(self.coarse.pop(key))
        self.tails.keep(media)

    # -- other block sizes -----------------------------------------------------------------------------------------

    def take_from(self, key: TableKey, table: Table, treatment_of: TreatmentOf) -> None:
        """Move the blocks that are not announced any more from the index to here. The caller recounts both."""
        for block, chunk in list(table.blocks.items()):
            treatment = treatment_of(key, chunk)
            if treatment not in _ANNOUNCED:
                del table.blocks[block]
                self._take(key, block, chunk, table.copies.pop(block, 0), treatment)

    def give_back(self, index: Index, treatment_of: TreatmentOf) -> None:
        """Move the tails that are now announced into the index. The caller recounts both."""
        for key, table in self.tails.tables.items():
            for block, chunk in list(table.blocks.items()):
                treatment = treatment_of(key, chunk)
                if treatment is Treatment.TAIL:
                    continue
                del table.blocks[block]
                copies = table.copies.pop(block, 0)
                if treatment not in _ANNOUNCED:
                    self._take(key, block, chunk, copies, treatment)
                    continue
                announced = index.table(*key)
                if block in announced.blocks:
                    copies += 1
                else:
                    index.put(announced, chunk, 0, 1)
                if copies:
                    announced.copies[block] = announced.copies.get(block, 0) + copies

    def _take(self, key: TableKey, block: Hash, chunk: Chunk, copies: int, treatment: Treatment) -> None:
        if treatment is Treatment.TAIL:
            self._store_tail(key, block, chunk, copies)
            return
        self._stats.filtered[Filtered.COARSE] += 1
        self.add_coarse(key, block, 1 + copies)
