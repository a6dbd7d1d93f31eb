"""When blocks were stored last, on media whose removals an engine never announces.

LMCache announces the blocks that it stores on the CPU, and not those that it evicts (LMCache#5076). kvbus takes such a
block for gone if the engine has not stored it again for a while. A store also shows that the blocks before it are
still there: else the engine would have stored them with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UnsetType

from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.blocks.live_order import in_order
from kvbus.core.types import Hash, medium_key
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, Event

SLICE: int = 4096
"""Maximum number of blocks that expire at a time."""

STEPS: int = 64
"""Parts of a block's lifetime by which time advances."""

Place = tuple[int | None, str, Hash]
"""Group, medium key and hash of a block."""


class Lifetimes:
    """The blocks of one source on media whose blocks expire.

    Time advances in steps of a 64th of ``seconds``, so a block may expire by one step too early. Within a step a chain
    is walked once, however many blocks are stored after it.

    Args:
        media: the media whose blocks expire.
        seconds: how long a block stays after the engine has stored it, or a block after it.
        index: the live blocks.
    """

    def __init__(self, media: frozenset[str], seconds: float, index: Index) -> None:
        self._media = media
        self._seconds = seconds
        self._index = index
        self._step = seconds / STEPS
        self._heard: dict[Place, float] = {}
        """The step in which each block was heard of last, the oldest first."""

    def __len__(self) -> int:
        return len(self._heard)

    def begin(self, now: float) -> None:
        """Count blocks of the index that were never heard of from now on: nothing is known of their age."""
        now -= now % self._step
        for (group, medium), chunk, a, b in in_order(self._index):
            if medium in self._media:
                for block in chunk.hashes[a:b]:
                    self._heard.setdefault((group, medium, block), now)

    def forget(self) -> None:
        """Forget every block: nothing is known of the cache any more."""
        self._heard.clear()

    def see(self, events: Iterable[Event], now: float) -> None:
        """Take in the events of a batch, which the index has already."""
        now -= now % self._step
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._heard = {place: at for place, at in self._heard.items() if self._is_live(place)}
                continue
            medium = medium_key(event.medium)
            if medium not in self._media or medium is None:
                continue
            key = (None if isinstance(event.group_idx, UnsetType) else event.group_idx, medium)
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    if not self._is_live((*key, block)):
                        self._heard.pop((*key, block), None)
            elif (table := self._index.tables.get(key)) is not None:
                for block in event.block_hashes[::-1]:
                    self._hear(key, table, block, now)
                if not isinstance(event.parent_block_hash, UnsetType):
                    self._hear(key, table, event.parent_block_hash, now)

    def _hear(self, key: TableKey, table: Table, block: Hash | None, now: float) -> None:
        """Note that this block and those before it were heard of, up to the root, children first."""
        while block is not None and (chunk := table.blocks.get(block)) is not None:
            if self._heard.get((*key, block)) == now:
                return
            for name in chunk.hashes[chunk.hashes.index(block) :: -1]:
                if name in table.blocks:
                    self._heard.pop((*key, name), None)
                    self._heard[*key, name] = now
            block = chunk.parent

    def _is_live(self, place: Place) -> bool:
        table = self._index.tables.get(place[:2])
        return table is not None and place[2] in table.blocks

    def due(self, now: float) -> list[Place]:
        """Return live blocks whose time is over, up to :data:`SLICE`, and forget them."""
        found: list[Place] = []
        while self._heard and len(found) < SLICE:
            place = next(iter(self._heard))
            if self._heard[place] + self._seconds > now:
                break
            del self._heard[place]
            if self._is_live(place):
                found.append(place)
        return found
