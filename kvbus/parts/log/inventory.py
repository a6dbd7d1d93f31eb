"""What a log holds of each stream, the end of one, and what an erasure has left: the same for every log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvbus.parts.log.contract import TICKS, Pointer, Writer
from kvbus.parts.log.record import SCHEMA, Kind, Record, Stream, read, write


@dataclass
class Held:
    """What a log holds of one stream.

    Attributes:
        partition: of Kafka, where its records are; -1 if there is none.
        records: how many.
        bytes: of their values; in Redis the memory that they take.
        first: position of the first one.
        last: position of the last one.
        over: the last one says that the stream is over.
        content: position of the last one that says anything else; -1 if there is none.
    """

    partition: int = -1
    records: int = 0
    bytes: int = 0
    first: int = -1
    last: int = -1
    over: bool = False
    content: int = -1


@dataclass
class Inventory:
    """What a log holds, by key."""

    streams: dict[str, Held] = field(default_factory=dict)
    pointers: dict[str, Pointer] = field(default_factory=dict)

    def leave_out_erased(self) -> None:
        """Forget the streams of which nothing is left but their ends."""
        for key in [key for key, held in self.streams.items() if held.content < 0 and key not in self.pointers]:
            del self.streams[key]

    def keys(self, wanted: Callable[[Stream], bool]) -> list[str]:
        """The keys of these streams."""
        return sorted(key for key in {*self.streams, *self.pointers} if _is(key, wanted))

    def ended(self, key: str) -> bool:
        """Whether there is no pointer to a stream, and its last record is its end."""
        return key not in self.pointers and (key not in self.streams or self.streams[key].over)

    def needs(self, key: str) -> int | None:
        """The position from which on a reader rebuilds a stream; None if there is nothing to rebuild.

        Where the pointer's state is gone already, the next one may be among what there is, and no pointer to it yet.
        """
        pointer, held = self.pointers.get(key), self.streams.get(key)
        if pointer is None or held is None or held.over:
            return None
        return max(pointer.position, held.first)


@dataclass(frozen=True)
class Erased:
    """What became of one partition of Kafka.

    Attributes:
        partition: its number.
        wanted: everything before this offset was to go.
        reached: everything before this one is gone.
        states: keys of other streams whose states were to go too: they have, or they have held the erasure up.
    """

    partition: int
    wanted: int
    reached: int
    states: tuple[str, ...]


def count(held: Held, position: int, record: bytes) -> None:
    """Count one more record, the newest."""
    held.records += 1
    held.bytes += len(record)
    held.last = position
    held.over = over(record)
    if not held.over:
        held.content = position


def _is(key: str, wanted: Callable[[Stream], bool]) -> bool:
    with contextlib.suppress(ValueError):
        return wanted(Stream.parse(key))
    return False


def over(value: bytes) -> bool:
    """Whether a record says that its stream is over."""
    with contextlib.suppress(ValueError):
        return read(value).kind is Kind.GONE
    return False


class Ending(Writer, Protocol):
    """A writer that can take its stream's pointer away."""

    async def withdraw(self) -> None:
        """Put nothing in place of the pointer: the next writer begins at epoch 1.

        Raises:
            FencedError: another writer has taken the stream.
            UnavailableError: the pointer may stand.
        """


class Erasable(Protocol):
    """A log whose streams can be ended."""

    async def claim(self, key: str) -> Ending:
        """See :meth:`kvbus.parts.log.contract.Log.claim`."""


async def finish(log: Erasable, key: str) -> None:
    """Fence whoever writes a stream, append its end, which readers are to see, and take its pointer away.

    Raises:
        FencedError: somebody has claimed the stream meanwhile.
        UnavailableError: the log did not do it all.
    """
    writer = await log.claim(key)
    gone = Record(SCHEMA, Kind.GONE, writer.epoch, 0, b"", 0, 0, more=False, resync=False, packed=False)
    try:
        await writer.append([write(gone)])
        await writer.withdraw()
    finally:
        await writer.close()
    await asyncio.sleep(1 / TICKS)  # the next writer's epoch is of a later tick, and so above this one
