"""Remember blocks that kvbus does not announce to routers, so that it recognizes the engine's removals of them.

*Coarse* blocks are large blocks whose tokens the engine also announces in smaller blocks. kvbus remembers only the
number of copies of each. *Tail blocks* are the ends of prompts that do not fill a block: vLLM announces them before the
block is full, and removes them once it is full. kvbus remembers tail blocks with their tokens. It announces them if it
later learns that all blocks of the group have the size of these tail blocks.
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
"""Function that decides how kvbus treats a chunk's blocks: whether it sends, cuts, leaves out or refuses them.

Its arguments are the key of the blocks' table and the chunk.
"""

_ANNOUNCED = (Treatment.NATIVE, Treatment.REBLOCK)


class SuppressedBlocks:
    """The blocks of one source that are in the engine's cache, but that kvbus does not announce to routers.

    They are coarse blocks (large blocks whose tokens the engine also announces in smaller blocks) and tail blocks
    (incomplete blocks at the end of a prompt). They are not in the index of live blocks.

    Args:
        stats: the counters of the source, which count these blocks.
        copies: the counter of copies. It says whether a removal removes a block, or only one of its copies.
    """

    def __init__(self, stats: SourceStats, copies: Copies) -> None:
        self._stats = stats
        self._copies = copies
        self.coarse: dict[TableKey, dict[Hash, int]] = {}
        """Number of copies of each coarse block, by the key of its table and by its hash.

        A coarse block is a large block whose tokens the engine also announces in smaller blocks.
        """
        self.coarse_blocks = 0
        """Number of coarse blocks, each with all its copies."""
        self.tails = Index()

    def __len__(self) -> int:
        return self.coarse_blocks + self.tails.blocks

    @property
    def bytes(self) -> int:
        """Approximate number of bytes that kvbus needs to remember the blocks that it does not announce."""
        return ITEM_BYTES * self.coarse_blocks + self.tails.bytes

    @property
    def media(self) -> set[str]:
        """The media on which the engine has a block that kvbus does not announce."""
        return {*self.tails.media_names} | {key[1] for key in self.coarse}

    def new(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> int:
        """Return how many of a chunk's blocks are not remembered yet.

        ``treatment`` says what the blocks are: a tail block, or coarse blocks (large blocks whose tokens the engine
        also announces in smaller blocks).
        """
        tails = self.tails.tables.get(key)
        known = self.coarse.get(key, {}) if treatment is Treatment.COARSE else tails.blocks if tails else {}
        return sum(block not in known for block in chunk.hashes)

    def store(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> None:
        """Remember the blocks of a store that is not announced.

        They are a tail block, or coarse blocks: large blocks whose tokens the engine also announces in smaller blocks.
        """
        if treatment is Treatment.TAIL:
            self._store_tail(key, chunk.hashes[0], chunk, 0)
            return
        self._stats.filtered[Filtered.COARSE] += 1
        for block in chunk.hashes:
            self.add_coarse(key, block, 1)

    def add_coarse(self, key: TableKey, block: Hash, copies: int) -> None:
        """Remember ``copies`` copies of a coarse block, besides the copies that are remembered already.

        The tokens of a coarse block are also announced in smaller blocks.
        """
        table = self.coarse.setdefault(key, {})
        self.coarse_blocks += block not in table
        table[block] = table.get(block, 0) + copies

    def _store_tail(self, key: TableKey, block: Hash, chunk: Chunk, copies: int) -> None:
        """Remember a tail block with ``copies`` copies besides the first one.

        If the tail block is remembered already, this store is one more copy of it.
        """
        self._stats.filtered[Filtered.TAIL] += 1
        table = self.tails.table(*key)
        if block in table.blocks:
            copies += 1
        else:
            self.tails.put(table, chunk, 0, 1)
        self._copies.add(table, block, copies)

    # -- removals --------------------------------------------------------------------------------------------------

    def coarse_with(self, medium: str, block: Hash) -> set[TableKey]:
        """Return the keys of the tables on this medium that have ``block`` as a coarse block.

        The tokens of a coarse block are also announced in smaller blocks.
        """
        return {key for key, table in self.coarse.items() if key[1] == medium and block in table}

    def remove_coarse(self, key: TableKey, block: Hash) -> bool:
        """Remove one copy of a coarse block, or the complete block if copies are not counted.

        A coarse block is a large block whose tokens the engine also announces in smaller blocks. Return whether the
        block was remembered.
        """
        table = self.coarse.get(key, {})
        left = table.get(block)
        if left is None:
            return False
        if left == 1 or not self._copies.counted:
            self.coarse_blocks -= 1
            del table[block]
            if not table:
                del self.coarse[key]
        else:
            table[block] = left - 1
        self._stats.filtered[Filtered.COARSE] += 1
        return True

    def remove_tail(self, key: TableKey, block: Hash) -> bool:
        """Remove one copy of a tail block. If it has no other copy, remove the block.

        Return whether the block was found.

        If the engine's removal names no group, the block is found only if exactly one group has it.
        """
        table = self.tails.tables.get(key)
        if table is None or block not in table.blocks:
            near = self.tails.tables_with(key[1], block) if key[0] is None else []
            holders = [each for each in near if each[0][2:] == key[2:]]
            if len(holders) != 1:
                return False
            table = holders[0][1]
        if not self._copies.take(table, block):
            self.tails.take(table.blocks, block)
        self._stats.filtered[Filtered.TAIL] += 1
        return True

    def keep(self, media: AbstractSet[str]) -> None:
        """Forget the blocks on all media that are not in ``media``."""
        for key in [key for key in self.coarse if key[1] not in media]:
            self.coarse_blocks -= len(self.coarse.pop(key))
        self.tails.keep(media)

    # -- other block sizes -----------------------------------------------------------------------------------------

    def take_from(self, key: TableKey, table: Table, treatment_of: TreatmentOf) -> None:
        """Move the blocks that must not be announced any more from a table of the index into this object.

        This does not update the numbers of blocks: the caller must call ``count`` of the index and of the tail blocks
        (:attr:`tails`) afterwards.
        """
        for block, chunk in list(table.blocks.items()):
            treatment = treatment_of(key, chunk)
            if treatment not in _ANNOUNCED:
                del table.blocks[block]
                self._take(key, block, chunk, table.copies.pop(block, 0), treatment)

    def give_back(self, index: Index, treatment_of: TreatmentOf) -> None:
        """Look at each tail block again after kvbus has learned more about the group's block size.

        Blocks that turn out to be complete blocks are moved into the index, so that kvbus announces them. Coarse blocks
        are remembered as coarse. The caller must then count all blocks again.
        """
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
