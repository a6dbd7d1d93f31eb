"""Blocks that are not announced to routers, remembered so that their removals are recognised.

*Coarse* blocks repeat what a finer stream says; of them the number of copies is enough. *Tail blocks* are the ends of
prompts that do not fill a block: vLLM announces them before the block is full, and removes them when it is. They are
kept whole: if the group's blocks turn out to be of their size, they have to be announced after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.blocks.size import ITEM_BYTES, chunk_bytes
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.copies import Copies
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered, Hash

TreatmentOf = Callable[[TableKey, Chunk], Treatment]
"""What becomes of a chunk of a table."""


class LeftOut:
    """What the cache of one source holds beside its index.

    Args:
        stats: where blocks that are left out are counted.
        copies: whether a copy has to be removed once more, before the block is gone.
    """

    def __init__(self, stats: SourceStats, copies: Copies) -> None:
        self._stats = stats
        self.copies = copies
        self.coarse: dict[TableKey, dict[Hash, int]] = {}
        """Copies, by table and hash; no table is empty."""
        self._coarse_blocks = 0
        self.tails = Index()

    def __len__(self) -> int:
        return self._coarse_blocks + self.tails.size.blocks

    @property
    def bytes(self) -> int:
        """About what is held."""
        return ITEM_BYTES * self._coarse_blocks + self.tails.size.bytes

    @property
    def media(self) -> set[str]:
        """Every medium that something is left out on."""
        return {*self.tails.media_names} | {medium for _, medium in self.coarse}

    def new(self, key: TableKey, hashes: Sequence[Hash], treatment: Treatment) -> int:
        """How many of these blocks, coarse ones or a tail, are not remembered yet."""
        tails = self.tails.tables.get(key)
        held = self.coarse.get(key, {}) if treatment is Treatment.COARSE else tails.blocks if tails else {}
        return sum(block not in held for block in hashes)

    def store_coarse(self, key: TableKey, hashes: Sequence[Hash]) -> None:
        """Remember an event of coarse blocks."""
        self._stats.filtered[Filtered.COARSE] += 1
        for block in hashes:
            self.add_coarse(key, block, 1)

    def add_coarse(self, key: TableKey, block: Hash, copies: int) -> None:
        """Remember so many copies of a coarse block."""
        table = self.coarse.setdefault(key, {})
        self._coarse_blocks += block not in table
        table[block] = table.get(block, 0) + copies

    def store_tail(self, key: TableKey, block: Hash, chunk: Chunk, copies: int = 0) -> None:
        """Remember a tail, or one more copy of it, with so many copies beyond."""
        self._stats.filtered[Filtered.TAIL] += 1
        table = self.tails.table(*key)
        if block not in table.blocks:
            self.tails.size.add(chunk, 1, chunk_bytes(chunk), first=True)
        table.add(block, chunk, copies, count=self.copies.counted)

    def take_from(self, key: TableKey, table: Table, treatment_of: TreatmentOf) -> None:
        """Take over the blocks of the index that are not announced any more. The caller counts both anew."""
        for block, chunk in list(table.blocks.items()):
            treatment = treatment_of(key, chunk)
            if treatment is not Treatment.NATIVE and treatment is not Treatment.REBLOCK:
                del table.blocks[block]
                self._take(key, block, chunk, table.copies.pop(block, 0), treatment)

    def give_back(self, index: Index, treatment_of: TreatmentOf) -> None:
        """Put the tails that are blocks like the others into the index. The caller counts both anew."""
        for key, table in self.tails.tables.items():
            for block, chunk in list(table.blocks.items()):
                treatment = treatment_of(key, chunk)
                if treatment is Treatment.TAIL:
                    continue
                del table.blocks[block]
                copies = table.copies.pop(block, 0)
                if treatment is Treatment.NATIVE or treatment is Treatment.REBLOCK:
                    index.table(*key).add(block, chunk, copies, count=True)
                else:
                    self._take(key, block, chunk, copies, treatment)

    def _take(self, key: TableKey, block: Hash, chunk: Chunk, copies: int, treatment: Treatment) -> None:
        if treatment is Treatment.TAIL:
            self.store_tail(key, block, chunk, copies)
            return
        self._stats.filtered[Filtered.COARSE] += 1
        self.add_coarse(key, block, 1 + copies)

    def coarse_with(self, medium: str, block: Hash) -> set[TableKey]:
        """Every table with this coarse block on this medium."""
        return {key for key, table in self.coarse.items() if key[1] == medium and block in table}

    def remove_coarse(self, key: TableKey, block: Hash) -> bool:
        """Forget a coarse block, or one copy of it; False if there is none."""
        table = self.coarse.get(key, {})
        left = table.get(block)
        if left is None:
            return False
        if left == 1 or not self.copies.counted:
            self._coarse_blocks -= 1
            del table[block]
            if not table:
                del self.coarse[key]
        else:
            table[block] = left - 1
        self._stats.filtered[Filtered.COARSE] += 1
        return True

    def remove_tail(self, key: TableKey, block: Hash) -> bool:
        """Forget one copy of a tail; False if there is none. Without a group, the only group that has it is meant."""
        table = self.tails.tables.get(key)
        if table is None or block not in table.blocks:
            holders = self.tails.tables_with(key[1], block) if key[0] is None else []
            if len(holders) != 1:
                return False
            table = holders[0][1]
        chunk = table.remove(block)
        if chunk is not None:
            self.tails.size.remove(table, block, chunk)
        self._stats.filtered[Filtered.TAIL] += 1
        return True

    def keep(self, media: set[str]) -> None:
        """Forget what is on any other medium."""
        for key in [key for key in self.coarse if key[1] not in media]:
            self._coarse_blocks -= len(self.coarse.pop(key))
        self.tails.keep(media)
