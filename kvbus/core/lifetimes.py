"""When blocks were stored last, on media of which an engine never says that a block has gone.

LMCache announces what it stores on the CPU, and not what it evicts (LMCache#5076). Such a block is taken for gone when
it was not heard of for a while. A store tells of the blocks before it, too: they were there, or they would have been
stored with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.blocks.live_order import in_order
from kvbus.core.types import Hash, medium_key
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored, Event

SLICE: int = 4096
"""Blocks that go at a time."""

STEPS: int = 64
"""Of a block's lifetime."""

Place = tuple[int | None, str, Hash]
"""Group, medium key and hash of a block."""


class Lifetimes:
    """The blocks of one source on media whose blocks expire.

    Time goes in steps of a 64th of ``seconds``, by which a block may go earlier: within a step a chain is walked once,
    however many blocks are stored behind it.

    Args:
        media: these media.
        seconds: how long a block stays after it was heard of.
        index: the live blocks.
    """

    def __init__(self, media: frozenset[str], seconds: float, index: Index) -> None:
        self._media = media
        self._seconds = seconds
        self._index = index
        self._step = seconds / STEPS
        self._heard: dict[Place, float] = {}
        """In which step each block was heard of, the oldest first."""

    def __len__(self) -> int:
        return len(self._heard)

    def begin(self, now: float) -> None:
        """What the index holds and was not heard of yet counts from now on: nothing is known of its age."""
        now -= now % self._step
        for (group, medium), chunk, a, b in in_order(self._index):
            if medium in self._media:
                for block in chunk.hashes[a:b]:
                    self._heard.setdefault((group, medium, block), now)

    def forget(self) -> None:
        """Nothing is known of the cache any more."""
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
            else:
                self._stored(event, key, now)

    def _stored(self, event: BlockStored, key: TableKey, now: float) -> None:
        table = self._index.tables.get(key)
        if table is None:
            return
        for block in event.block_hashes[::-1]:
            if block in table.blocks:
                self._hear(key, block, now)
        parent = event.parent_block_hash
        if parent is not None and parent is not UNSET:
            self._hear_before(key, table, parent, now)

    def _hear_before(self, key: TableKey, table: Table, block: Hash | None, now: float) -> None:
        """The blocks from this one up to the root, children first."""
        while block is not None and (chunk := table.blocks.get(block)) is not None:
            if self._heard.get((*key, block)) == now:
                return
            for name in chunk.hashes[chunk.hashes.index(block) :: -1]:
                if name in table.blocks:
                    self._hear(key, name, now)
            block = chunk.parent

    def _hear(self, key: TableKey, block: Hash, now: float) -> None:
        place = (*key, block)
        self._heard.pop(place, None)
        self._heard[place] = now

    def _is_live(self, place: Place) -> bool:
        table = self._index.tables.get(place[:2])
        return table is not None and place[2] in table.blocks

    def due(self, now: float) -> list[Place]:
        """The live blocks whose time is over, at most :data:`SLICE` at a time; they are forgotten here."""
        found: list[Place] = []
        while self._heard and len(found) < SLICE:
            place = next(iter(self._heard))
            if self._heard[place] + self._seconds > now:
                break
            del self._heard[place]
            if self._is_live(place):
                found.append(place)
        return found
