"""Expire blocks on media whose removals an engine never announces.

If LMCache runs without its server's log of events, it announces the blocks that it stores on the CPU, but not the
blocks that it evicts there. kvbus removes such a block if the engine has not stored it again for the configured time. A
store of a block also proves that the block's ancestors still exist: otherwise the engine would have stored them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UnsetType

from kvbus.core.blocks.index import BlockKey, Index, Table, TableKey, key_of
from kvbus.core.blocks.live_order import in_order
from kvbus.core.types import Hash, medium_key
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, Event

SLICE: int = 4096
"""Maximum number of expired blocks that kvbus removes at one tick."""

STEPS: int = 64
"""Number of steps into which the lifetime of a block is divided. The time of a store is rounded down to a step."""


class Lifetimes:
    """The blocks of one source that can expire, with the time at which the engine last stored each of them.

    Time advances in steps of a 64th of ``seconds``, so a block may expire up to one step too early. The steps save
    work: if the engine stores several descendants of a block within one step, kvbus updates the block's time only once.

    Args:
        media: the media whose blocks expire.
        seconds: lifetime of a block, from the last store of the block or of one of its descendants.
        index: the live blocks of the source.
    """

    def __init__(self, media: frozenset[str], seconds: float, index: Index) -> None:
        self._media = media
        self._seconds = seconds
        self._index = index
        self._step = seconds / STEPS
        self._heard: dict[BlockKey, float] = {}
        """For each block, the time at which a store last proved that the block exists. The oldest time comes first.

        Times are rounded down to a step.
        """

    def __len__(self) -> int:
        return len(self._heard)

    def begin(self, now: float) -> None:
        """Start the lifetime of each block of the index that has none yet.

        After a restart of kvbus, the time at which the engine last stored a block is unknown.
        """
        now -= now % self._step
        for key, chunk, a, b in in_order(self._index):
            if key[1] in self._media:
                for block in chunk.hashes[a:b]:
                    self._heard.setdefault((*key, block), now)

    def forget(self) -> None:
        """Forget the times of all blocks, because the content of the engine's cache is no longer known."""
        self._heard.clear()

    def see(self, events: Iterable[Event], now: float) -> None:
        """Restart the lifetimes of the blocks that a batch stores, and end those of the blocks that it removes.

        The caller must have applied the batch to the index.
        """
        now -= now % self._step
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._heard = {block_key: at for block_key, at in self._heard.items() if self._is_live(block_key)}
                continue
            if medium_key(event.medium) not in self._media:
                continue
            key = key_of(event)
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
        """Restart the lifetime of a block and its ancestors, because the engine has stored the block.

        If several lifetimes are restarted at the same time, the one that is restarted first ends first. A child must
        not outlive its parent, so its lifetime is restarted before the parent's.
        """
        while block is not None and (chunk := table.blocks.get(block)) is not None:
            if self._heard.get((*key, block)) == now:
                return
            for name in chunk.hashes[chunk.hashes.index(block) :: -1]:
                if name in table.blocks:
                    self._heard.pop((*key, name), None)
                    self._heard[*key, name] = now
            block = chunk.parent

    def _is_live(self, block_key: BlockKey) -> bool:
        table = self._index.tables.get(block_key[:4])
        return table is not None and block_key[4] in table.blocks

    def due(self, now: float) -> list[BlockKey]:
        """Return up to :data:`SLICE` live blocks whose lifetime has ended, and stop tracking them."""
        found: list[BlockKey] = []
        while self._heard and len(found) < SLICE:
            block_key = next(iter(self._heard))
            if self._heard[block_key] + self._seconds > now:
                break
            del self._heard[block_key]
            if self._is_live(block_key):
                found.append(block_key)
        return found
