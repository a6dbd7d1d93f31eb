"""Count the physical copies of each block in an engine's cache.

vLLM sends a store for each physical copy of a block, and also a removal for each copy (``count``). Other engines send
only one removal, when the last copy is gone (``last``), or store a live block again although there is no new copy
(``ignore``). The stream does not show which rule holds, so the operator configures it. A removal with the field
``remaining_copy_counts`` overrides the configured rule.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Table
from kvbus.core.source_spec import Duplicates
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Hash, Reason
from kvbus.core.wire.schema import BlockRemoved
from kvbus.core.wire.tokens import divide

_decode_counts: Final = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]] | None).decode


class Copies:
    """The counter of the copies that one source's blocks have besides the first one.

    Args:
        rule: the operator's setting. ``count``: the engine sends a removal for each copy. ``last``: it sends one
            removal, when the last copy is gone. ``ignore``: a repeated store is not a copy.
        stats: the counters of the source.

    Attributes:
        counted: whether each store of a live block adds a copy, and each removal takes one copy away.
    """

    def __init__(self, rule: Duplicates, stats: SourceStats) -> None:
        self.counted: Final = rule == "count"
        self._stats = stats

    def store(self, table: Table, chunk: Chunk) -> None:
        """For each block of a store that is live already, count one more copy.

        At least one of the blocks must be live.
        """
        live = [block for block in chunk.hashes if block in table.blocks]
        for block in live:
            self.add(table, block, 1)
            self._stats.most_copies = max(self._stats.most_copies, table.copies.get(block, 0))
        self._stats.filtered[Filtered.COPY] += len(live)
        if collisions := _collisions(table, chunk, live):
            self._stats.rejected[Reason.HASH_COLLISION] += collisions
        if chunk.parent is None and 1 < len(live) == len(chunk.hashes):
            self._stats.reannounced += 1

    def add(self, table: Table, block: Hash, copies: int) -> None:
        """Add ``copies`` further copies to a live block."""
        if self.counted and copies:
            table.copies[block] = table.copies.get(block, 0) + copies

    def take(self, table: Table, block: Hash) -> bool:
        """Take one copy away from a live block. Return whether the block stays live, because other copies remain."""
        further = table.copies.pop(block, 0)
        if not further or not self.counted:
            return False
        if further > 1:
            table.copies[block] = further - 1
        return True

    def leave(self, table: Table | None, block: Hash, left: int) -> bool:
        """Set the number of a block's copies to ``left``, the engine's own count. Return whether the block stays live.

        The engine sends this count in removals, as vllm#48933 proposes.
        """
        if table is None or block not in table.blocks:
            return False
        table.copies.pop(block, None)
        if left > 1:
            table.copies[block] = left - 1
        if left:
            self._stats.filtered[Filtered.COPY] += 1
        return left > 0


def counts_left(event: BlockRemoved) -> list[int] | None:
    """Return the number of copies that each block of a removal still has, by the engine's own count.

    Return None unless the removal has a valid count for every block.
    """
    # The field is declared as Raw, but it is UNSET if the engine left it out. Any lets mypy accept the comparison.
    raw_counts: Any = event.remaining_copy_counts
    if raw_counts is msgspec.UNSET:
        return None
    try:
        counts = _decode_counts(raw_counts)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return counts if counts is not None and len(counts) == len(event.block_hashes) else None


def _collisions(table: Table, chunk: Chunk, live: list[Hash]) -> int:
    """Return the number of live blocks of a store for which the index has other tokens under the same hash."""
    blocks = table.blocks
    doubtful = [block for block in live if blocks[block].tokens != chunk.tokens]
    if not doubtful or chunk.hash_only:
        return 0
    mine = _tokens_by_block(chunk)
    holder, theirs = chunk, mine
    collisions = 0
    for block in doubtful:
        if blocks[block] is not holder:
            holder = blocks[block]
            theirs = _tokens_by_block(holder)
        collisions += theirs[block] != mine[block]
    return collisions


def _tokens_by_block(chunk: Chunk) -> dict[Hash, bytes]:
    return dict(zip(chunk.hashes, divide(chunk.tokens, chunk.block_size), strict=True))
