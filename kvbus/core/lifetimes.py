"""Expire blocks on media whose removals an engine never announces.

LMCache announces the blocks that it stores on the CPU, but not the blocks that it evicts (LMCache#5076). kvbus removes
such a block if the engine has not stored it again for a while. A store also proves that the blocks before it still
exist: otherwise the engine would have stored them with it.
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
"""Number of time steps per lifetime of a block."""

Place = tuple[int | None, str, Hash]
"""Group, medium key and hash of a block."""


class Lifetimes:
    """The blocks of one source on media whose blocks expire.

    Time advances in steps of a 64th of ``seconds``, so a block may expire up to one step too early. Within a step, a
    chain is walked once, however many blocks are stored after it.

    Args:
        media: the media whose blocks expire.
        seconds: lifetime of a block after the engine has stored it, or a block after it.
        index: the live blocks.
    """

    def __init__(self, media: frozenset[str], seconds: float, index: Index) -> None:
        self._media = media
        self._seconds = seconds
        self._index = index
        self._step = seconds / STEPS
        self._heard: dict[Place, float] = {}
        """The step in which each block was last stored or proven to exist, the oldest first."""

    def __len__(self) -> int:
        return len(self._heard)

    def begin(self, now: float) -> None:
        """Start the lifetime of blocks in the index that have none yet. Their age is unknown."""
        now -= now % self._step
        for (group, medium), chunk, a, b in in_order(self._index):
            if medium in self._media:
                for block in chunk.hashes[a:b]:
                    self._heard.setdefault((group, medium, block), now)

    def forget(self) -> None:
        """Forget every block: nothing is known about the cache any more."""
        self._heard.clear()

    def see(self, events: Iterable[Event], now: float) -> None:
        """Record the events of a batch. They must already be applied to the index."""
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
        """Renew the lifetime of this block and its ancestors, children first."""
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
        """Return up to :data:`SLICE` live blocks whose lifetime is over, and forget them."""
        found: list[Place] = []
        while self._heard and len(found) < SLICE:
            place = next(iter(self._heard))
            if self._heard[place] + self._seconds > now:
                break
            del self._heard[place]
            if self._is_live(place):
                found.append(place)
        return found
