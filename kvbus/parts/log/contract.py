"""The contract of a log: what a writer, a reader and a pointer of one stream have to keep to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec

START: Final = 0
"""A position before everything that a log keeps of a stream."""


UNREACHABLE: Final = "unreachable"


class FencedError(Exception):
    """Another writer has taken the stream. What this one has appended stays, and it can append no more."""


class UnavailableError(Exception):
    """The log cannot be reached, or takes nothing now.

    Whether the records of a failed append are in the log is unknown. The writer's turn is over: close it, claim again,
    and begin with the state. Readers drop doubles by epoch and seq, and what the turn before has left undone by epoch.

    Attributes:
        reason: why, in a word for counters; :data:`UNREACHABLE` where nothing is known.
    """

    def __init__(self, text: str, reason: str = UNREACHABLE) -> None:
        super().__init__(text)
        self.reason = reason


class Entry(NamedTuple):
    """One record, with the key of its stream.

    ``position`` ascends along a stream, and says nothing of other streams. Reading goes on at ``position + 1``. A log
    that has lost what it had may begin again at lower ones; a reader then goes on at the first that it has.

    ``time`` is when the log got it, in seconds by the log's own clock: only two of them can be compared, and they are
    as far out of step as that log's servers are (in Kafka, without LogAppendTime, as its writers).
    """

    key: str
    position: int
    data: bytes
    time: float


class Pointer(msgspec.Struct, array_like=True, frozen=True):
    """Where a rebuild of one stream begins.

    Attributes:
        epoch: the newest epoch that was handed out.
        seq: of the CLEAR before the newest whole state; -1 if this epoch has none yet.
        position: of that CLEAR; of the stream's beginning or of an older state if this epoch has none yet.
    """

    epoch: Annotated[int, msgspec.Meta(ge=1)]
    seq: int = -1
    position: int = START


class Writer(Protocol):
    """One turn of writing one stream. Its ``epoch`` is greater than that of every turn before."""

    epoch: int

    async def append(self, records: Sequence[bytes]) -> int:
        """Append in this order, behind all that was appended before; return the last one's position.

        When it returns, the records survive whatever the log promises to survive.

        Raises:
            FencedError: another writer has taken the stream; none of these records is in the log.
            UnavailableError: see there.
        """

    async def point(self, pointer: Pointer) -> None:
        """Put the stream's pointer in place of the one before.

        Raises:
            FencedError: another writer has taken the stream; its pointer stands.
            UnavailableError: the pointer may stand, or the one before.
        """

    async def keeps(self, position: int) -> bool:
        """Whether retention has left what was appended from this position on.

        Raises:
            UnavailableError: nobody knows; the turn goes on.
        """

    async def close(self) -> None:
        """Stop writing. Nothing is withdrawn."""


class Reader(Protocol):
    """Streams from where they are wanted on, and then live."""

    async def take(self, seconds: float) -> list[Entry]:
        """What comes next, in each stream's order; empty if nothing has come for so long.

        Where records that were wanted are not kept any more, the oldest ones that are kept come next.

        Raises:
            UnavailableError: nothing was taken, and this may be called again.
        """

    async def ends(self) -> dict[str, int]:
        """For each stream a position below which everything lies that the log has of it now.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def reached(self, key: str) -> int:
        """The position at which reading a stream goes on: what is below was taken, or is not kept."""

    async def close(self) -> None:
        """Stop reading."""


class Log(Protocol):
    """Records by the keys of their streams, and one pointer a stream."""

    async def claim(self, key: str) -> Writer:
        """Take a stream: whoever had it is fenced when this returns.

        Raises:
            UnavailableError: nobody was fenced, or somebody was and the stream is nobody's; claim again.
        """

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """The pointers of all streams, or of one, the newest of each.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def read(self, starts: Mapping[str, int]) -> Reader:
        """Read these streams, each from a position on.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def close(self) -> None:
        """Let go of everything but writers and readers, which are closed before."""


def next_turn(last: Pointer | None) -> Pointer:
    """The pointer of the writer that follows: it has no state in the log yet, and the one before may have."""
    return Pointer(1) if last is None else Pointer(last.epoch + 1, -1, last.position)


_decoder: Final = msgspec.msgpack.Decoder(Pointer)


def write_pointer(pointer: Pointer) -> bytes:
    """A pointer as it stands in a log."""
    return msgspec.msgpack.encode(pointer)


def read_pointer(data: bytes) -> Pointer:
    """A pointer of a log.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _decoder.decode(data)


async def taken(log: Log, key: str, epoch: int, again: float) -> bool:
    """Whether another writer has a stream since this epoch, or it was erased; asked until the log answers.

    A broker also fences who keeps a transaction for too long.

    Args:
        log: where the stream is.
        key: the stream's.
        epoch: of the writer that was fenced.
        again: seconds before a log that is away is asked once more.
    """
    while True:
        with contextlib.suppress(UnavailableError):
            pointer = (await log.pointers(key)).get(key)
            return pointer is None or pointer.epoch > epoch
        await asyncio.sleep(again)
