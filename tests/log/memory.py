"""A log in the memory of the test's process: it fulfils the contract of a log without a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvbus.parts.log.contract import (
    MAX_REFUSED,
    Entry,
    FencedError,
    Pointer,
    Refused,
    next_turn,
    read_pointer,
    take_pointer,
    write_pointer,
)

LOOK_AGAIN: Final = 0.02
"""Seconds that a reader waits before it looks for new records again."""

MOST: Final = 500
"""Maximum number of records that one check reads from a stream."""


@dataclass
class Kept:
    """A stream of the log in memory. A record's position is the number of records before it."""

    key: str
    pointer: bytes = b""
    records: list[Entry] = field(default_factory=list)
    end: int = 0

    def known(self) -> Pointer | None:
        try:
            return read_pointer(self.pointer)
        except ValueError:
            return None

    def delete_before(self, position: int) -> None:
        self.records = [entry for entry in self.records if entry.position >= position]


class MemoryWriter:
    """A writer of a log in memory: see :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(self, kept: Kept, epoch: int) -> None:
        self.epoch = epoch
        self._kept = kept

    async def append(self, records: Sequence[bytes]) -> int:
        await self._own()
        now = time.time()
        for record in records:
            self._kept.records.append(Entry(self._kept.key, self._kept.end, record, now))
            self._kept.end += 1
        return self._kept.end - 1

    async def point(self, pointer: Pointer) -> None:
        await self._own()
        self._kept.pointer = write_pointer(pointer)

    async def keeps(self, position: int) -> bool:
        return bool(self._kept.records) and self._kept.records[0].position <= position

    async def _own(self) -> None:
        await asyncio.sleep(0)
        pointer = self._kept.known()
        if pointer is None or pointer.epoch != self.epoch:
            raise FencedError(f"epoch {pointer.epoch if pointer else None} is after {self.epoch}")

    async def close(self) -> None:
        """Do nothing, because a log in memory has no connection."""


class MemoryReader:
    """A reader of a log in memory: see :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, streams: Mapping[str, Kept], starts: Mapping[str, int]) -> None:
        self._streams = streams
        self._next = dict(starts)

    async def take(self, seconds: float) -> list[Entry]:
        until = time.monotonic() + seconds
        while True:
            found = [entry for key in self._next for entry in self._look(key)]
            if found or time.monotonic() >= until:
                return found
            await asyncio.sleep(LOOK_AGAIN)

    def _look(self, key: str) -> list[Entry]:
        kept = self._streams.get(key)
        found = [entry for entry in kept.records if entry.position >= self._next[key]][:MOST] if kept else []
        if found:
            self._next[key] = found[-1].position + 1
        return found

    async def ends(self) -> dict[str, int]:
        return {key: self._streams[key].end if key in self._streams else 0 for key in self._next}

    async def reached(self, key: str) -> int:
        return self._next[key]

    async def close(self) -> None:
        """Do nothing, because a log in memory has no connection."""


class MemoryLog:
    """A log in memory: see :class:`~kvbus.parts.log.contract.Log`. Objects with the same `streams` are the same log."""

    def __init__(self, streams: dict[str, Kept]) -> None:
        self._streams = streams
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)

    async def claim(self, key: str) -> MemoryWriter:
        await asyncio.sleep(0)
        kept = self._streams.setdefault(key, Kept(key))
        pointer = next_turn(kept.known())
        kept.pointer = write_pointer(pointer)
        return MemoryWriter(kept, pointer.epoch)

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        await asyncio.sleep(0)
        found: dict[str, Pointer] = {}
        for name, kept in self._streams.items():
            if key in {None, name}:
                take_pointer(found, self.refused, name, kept.pointer)
        return found

    async def read(self, starts: Mapping[str, int]) -> MemoryReader:
        return MemoryReader(self._streams, starts)

    async def close(self) -> None:
        """Do nothing, because a log in memory has no connection."""
