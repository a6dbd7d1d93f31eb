"""Build the outgoing events for routers that take several residencies of a block for one.

An engine may keep a block of one group on one medium several times, under different localities and owners. Some routers
do not distinguish these residencies, or not all of them (:data:`~kvbus.core.types.Residencies`). They get the block's
store with its first residency, and its removal with the last one.

Whether another residency has a block is looked up when the index changes, before any later event changes it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbus.core.blocks.announce import consecutive
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import TableKey, filed
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.reblocking import Reblocking, SubBlocks
from kvbus.core.types import Hash, Residencies
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import hashes_of, parts


class Filing:
    """The events of one source for routers that take several residencies of a block for one.

    If the engine has named no locality and no owner, the methods do nothing.
    """

    def __init__(self, cache: EngineCache, reblocking: Reblocking) -> None:
        self._cache = cache
        self._reblocking = reblocking
        self._shared: set[tuple[Residencies, TableKey, Hash]] = set()
        """The blocks whose removal is queued, but which another residency still had when they were removed."""

    def store(self, key: TableKey, stores: Sequence[AnyEvent]) -> None:
        """Append the stores of a residency's new blocks, without those blocks that the routers have already."""
        for residencies, leaving in self._cache.filed.items():
            others = [table for _, table in self._cache.index.siblings(key, residencies)]
            # Sub-blocks whose removal is held back until the end of the batch: routers still have them. The table that
            # had them may be gone.
            place = filed(key, residencies)
            held = [
                names
                for other, names in self._reblocking.removed.items()
                if other != key and filed(other, residencies) == place
            ]
            if not others and not held:
                leaving.extend(stores)
                continue
            for event in stores:
                new = [
                    at
                    for at, block in enumerate(hashes_of(event))
                    if not any(table.announces(block) for table in others) and not any(block in names for names in held)
                ]
                leaving.extend(parts(event, list(consecutive(new))))

    def remove(self, key: TableKey, block: Hash) -> None:
        """Remember whether another residency has a block that has just been removed from the residency ``key``."""
        for residencies in self._cache.filed:
            if any(table.announces(block) for _, table in self._cache.index.siblings(key, residencies)):
                self._shared.add((residencies, key, block))

    def forget(self) -> None:
        """Forget the queued removals, because they were sent, or because routers get a clear in place of them."""
        self._shared.clear()

    def last(
        self,
        residencies: Residencies,
        gone: Mapping[TableKey, Mapping[Hash, Chunk]],
        sub_blocks: Mapping[TableKey, SubBlocks],
    ) -> tuple[dict[TableKey, dict[Hash, Chunk]], dict[TableKey, SubBlocks]]:
        """Return those of the removed blocks and sub-blocks that no other residency has, as the routers file them."""
        last: dict[TableKey, dict[Hash, Chunk]] = {}
        for key, blocks in gone.items():
            own = {block: chunk for block, chunk in blocks.items() if (residencies, key, block) not in self._shared}
            last.setdefault(filed(key, residencies), {}).update(own)
        last_sub_blocks: dict[TableKey, SubBlocks] = {}
        for key, names in sub_blocks.items():
            others = self._cache.index.siblings(key, residencies)
            mine = {name: each for name, each in names.items() if not any(t.announces(name) for _, t in others)}
            last_sub_blocks.setdefault(filed(key, residencies), {}).update(mine)
        return last, last_sub_blocks
