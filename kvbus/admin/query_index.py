"""The tree of prefixes of a running bus: there while somebody asks, and not when nobody does.

The first question has it built from the sources' indexes, in pieces beside the stream. From then on it takes in what
leaves for routers. It is dropped when nobody has asked for a while. While there is none, the relay's hot path pays one
comparison for each batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from typing import Final

from kvbus.admin.pace import Pace, client
from kvbus.admin.query_text import Texts
from kvbus.core.blocks.announce import slices
from kvbus.core.blocks.prefix_index import PrefixIndex, medium_of
from kvbus.core.relay import Relay
from kvbus.core.source import Source
from kvbus.core.stats import ProcessStats
from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.parts import hashes_of, is_store, value
from kvbus.core.wire.schema import AllBlocksCleared

SLICE: Final = 0.0002
"""Seconds of building that are a piece of work, as long as others of :mod:`~kvbus.admin.pace`."""

BUILDING: Final = "query index"
"""Takes turns with the addresses of those who ask, as one of them."""

FEW: Final = 64
"""Blocks between two looks at the clock."""

FREED: Final = 1000
"""Cleared blocks that are freed at a time, and :data:`FREE_EVERY` how often."""

FREE_EVERY: Final = 0.005

IDLE: Final = 60.0
"""Seconds without a question after which the tree is dropped."""

Place = tuple[str, Hash]
"""A block's medium and name."""


class QueryIndex:
    """Builds the tree, keeps it up, and drops it.

    Args:
        relay: whose blocks it shows.
        stats: where its size is counted.
        pace: when it is built.
        idle: seconds without a question after which it is dropped.
    """

    def __init__(self, relay: Relay, stats: ProcessStats, pace: Pace, idle: float = IDLE) -> None:
        self._relay = relay
        self._stats = stats
        self._pace = pace
        self._idle = idle
        self.index: PrefixIndex[int] | None = None
        """By slot of the source; None if there is none, or not all of it."""
        self.texts = Texts(stats)
        """Reads questions; keeps as long what it has read."""
        self._growing: PrefixIndex[int] = PrefixIndex()
        self._work: asyncio.Task[None] | None = None
        self._asked = 0.0
        self._unread: set[int] = set()
        """Slots whose blocks are still to be read."""
        self.reading: int | None = None
        """The slot whose blocks it reads."""
        self._gone: set[Place] = set()
        """Blocks of that slot that were removed since it began."""

    @property
    def unread(self) -> int:
        """Sources whose blocks are still to be read."""
        return len(self._unread) + (self.reading is not None)

    async def ask(self, within: float) -> PrefixIndex[int] | None:
        """The whole tree, built if need be; None if that takes longer than ``within`` seconds."""
        self._asked = time.monotonic()
        until = self._asked + within
        while self.index is None and time.monotonic() < until:
            if self._work is None or self._work.done():  # the last one may still be freed
                self._work = asyncio.create_task(self._live(), name="kvbus-query-index")
            await asyncio.sleep(FREE_EVERY)
        return self.index

    async def close(self) -> None:
        """End the work; nothing is freed in steps any more."""
        self._relay.follow(None)
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def _live(self) -> None:
        """Build, keep up, drop."""
        client.set(BUILDING)
        self._growing = PrefixIndex()
        self._unread = {slot for slot, source in enumerate(self._relay.sources) if _shown(source)}
        self._relay.follow(self._take)
        self.texts.keep()
        try:
            while self._unread:
                await self._pace.in_turns(self._read(next(iter(self._unread))))
            self.index = self._growing
            while time.monotonic() - self._asked < self._idle:
                busy = self._growing.collect(FREED)
                self._stats.query_index_blocks = len(self._growing)
                self._stats.query_path_bytes = self._growing.paths_size
                await asyncio.sleep(FREE_EVERY if busy else self._idle / 10)
        finally:
            self._relay.follow(None)
            self.index = None
            self._stats.query_index_blocks = self._stats.query_path_bytes = 0
            self.texts.forget()
        for slot in self._growing.workers:
            self._growing.clear(slot)
        busy = True
        while busy:
            busy = self._growing.collect(FREED) or self._growing.forget(FREED)
            await asyncio.sleep(FREE_EVERY)

    def _read(self, slot: int) -> Generator[None, None, None]:
        """Take in the blocks that a source holds now, in pieces, beside what happens to them meanwhile."""
        self._unread.remove(slot)
        source = self._relay.sources[slot]
        if not _shown(source):
            return
        group = source.normalizer.first_group
        index = source.normalizer.index.copy()
        index.keep_group(group)
        self.reading, self._gone = slot, set()
        begun = time.perf_counter()
        for events in slices(index, FEW):
            for event in events:
                self._read_store(slot, event)
            if time.perf_counter() - begun >= SLICE:
                yield
                begun = time.perf_counter()
            if self.reading is None:  # they were cleared
                return
        self.reading = None
        self._gone = set()

    def _read_store(self, slot: int, event: AnyEvent) -> None:
        """A store of the copy, without those of its blocks that are gone by now."""
        medium = medium_of(event)
        names = hashes_of(event) if self._gone else ()
        dead = [name for name in names if (medium, name) in self._gone and not self._growing.holds(slot, name, medium)]
        self._growing.apply(slot, event)
        for name in dead:  # its children keep their place
            self._growing.remove(slot, name, medium)

    def _take(self, slot: int, events: Sequence[AnyEvent]) -> None:
        """Take in what leaves of a source."""
        group = self._relay.sources[slot].normalizer.first_group
        reading = slot == self.reading
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._growing.clear(slot)
                if reading:
                    self.reading, reading = None, False
                continue
            if value(event, "group_idx") != group:
                continue
            if reading and not is_store(event):
                medium = medium_of(event)
                self._gone.update((medium, name) for name in hashes_of(event))
            self._growing.apply(slot, event)


def _shown(source: Source) -> bool:
    """Whether routers hold its blocks."""
    return not source.gone and not source.expired
