"""The contract of a log: what its writers, readers and pointers have to guarantee for a stream."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec

from kvbus.core.numbered import LAST
from kvbus.parts.log.record import RANDOM_BITS, TURN_BITS, Epoch

START: Final = 0
"""A position before all records that a log keeps of a stream."""


TICKS: Final = 32
"""Number of turns per second. The clock's turn since 1970 fits into :data:`TURN_BITS` bits until 2106."""

UNREACHABLE: Final = "unreachable"


class FencedError(Exception):
    """Another writer has claimed the stream.

    Records that this writer has appended stay, but it cannot append any more.
    """


class UnavailableError(Exception):
    """The log cannot be reached, or does not accept records now.

    It is unknown whether the records of a failed append are in the log. The writer's turn is over: close the writer,
    claim the stream again, and begin with the state. Readers drop duplicates by epoch and seq. They drop an unfinished
    state of the former turn by its epoch.

    Attributes:
        reason: the cause in one word, for counters; :data:`UNREACHABLE` if it is not known.
    """

    def __init__(self, text: str, reason: str = UNREACHABLE) -> None:
        super().__init__(text)
        self.reason = reason


Refused = deque[tuple[str, str]]
"""Refusals, each as a reason for counters and the name of what was refused. A refusal may be repeated."""

MAX_REFUSED: Final = 1000
"""Maximum number of refusals that a log keeps until they are counted."""

UNREADABLE_POINTER: Final = "unreadable_pointer"
UNREADABLE_BATCH: Final = "unreadable_batch"
WRONG_TYPE: Final = "wrong_type"
FOREIGN_KEY: Final = "foreign_key"
SAME_NAME: Final = "same_name"


class Entry(NamedTuple):
    """One record, with the key of its stream.

    ``position`` ascends along a stream. Positions of different streams cannot be compared. Reading continues at
    ``position + 1``. A log that has lost its records may begin again at lower positions. A reader then continues at the
    first record that the log has.

    ``time`` is when the log got the record, in seconds by the log's own clock. It can only be compared with the time of
    another entry, and the clocks of the log's servers may differ. In Kafka without LogAppendTime, the clocks are those
    of the writers.
    """

    key: str
    position: int
    data: bytes
    time: float


class Pointer(msgspec.Struct, array_like=True, frozen=True):
    """Where reading one stream from scratch begins.

    Attributes:
        epoch: the newest epoch that was handed out.
        seq: the seq of the CLEAR of the newest complete state; -1 if this epoch has none yet.
        position: the position of that CLEAR. If this epoch has none yet: the position of an older state, or of the
            stream's beginning.
    """

    epoch: Epoch
    seq: Annotated[int, msgspec.Meta(ge=-1, lt=LAST)] = -1
    position: Annotated[int, msgspec.Meta(ge=START, le=2**63 - 1)] = START


class Writer(Protocol):
    """The writer of one stream for one turn. Its ``epoch`` is greater than that of every earlier turn."""

    epoch: int

    async def append(self, records: Sequence[bytes]) -> int:
        """Append records in this order, after all records that were appended before. Return the last one's position.

        After it has returned, the records survive every failure that the log promises to survive.

        Raises:
            FencedError: another writer has claimed the stream. None of these records is in the log.
            UnavailableError: see there.
        """

    async def point(self, pointer: Pointer) -> None:
        """Replace the stream's pointer.

        Raises:
            FencedError: another writer has claimed the stream, and its pointer stays.
            UnavailableError: the log has either the new pointer or the former one.
        """

    async def keeps(self, position: int) -> bool:
        """Return whether the log still has the records from this position on.

        Raises:
            UnavailableError: the log cannot tell. The turn continues.
        """

    async def close(self) -> None:
        """Stop writing. Appended records stay."""


class Reader(Protocol):
    """A reader of several streams, each from a given position on, and then live."""

    async def take(self, seconds: float) -> list[Entry]:
        """Return the next records, in the order of each stream; an empty list if none has come within ``seconds``.

        If the log does not have the wanted records any more, the oldest records that it has come next.

        Raises:
            UnavailableError: no record was taken. The call may be repeated.
        """

    async def ends(self) -> dict[str, int]:
        """Return a mark for each stream.

        :meth:`reached` returns at least this mark once everything was taken that the log has now.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def reached(self, key: str) -> int:
        """Return how far a stream was read, as a mark like those of :meth:`ends`.

        Everything up to the mark was taken, or is not kept.
        """

    async def close(self) -> None:
        """Stop reading."""


class Log(Protocol):
    """A log of records under the keys of their streams, with one pointer for each stream.

    Attributes:
        refused: content of the log that this version cannot read. The caller empties it after counting.
    """

    refused: Refused

    async def claim(self, key: str) -> Writer:
        """Become the writer of a stream. The former writer is fenced when this returns.

        Raises:
            UnavailableError: the stream was not claimed, and the former writer may be fenced. Claim the stream again.
        """

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Return the newest pointer of each stream, or of one stream. A pointer that cannot be read is refused.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def read(self, starts: Mapping[str, int]) -> Reader:
        """Read these streams, each from a position on.

        Raises:
            UnavailableError: the log cannot be reached.
        """


def now_as_turn() -> int:
    """Return the wall clock as the turn of an epoch."""
    return int(time.time() * TICKS)


def next_epoch(last: int) -> int:
    """Return an epoch after the last known one. ``last`` is 0 if none is known.

    The log counts turns, and the clock raises the count. So no turn is handed out again, even if a log has lost
    everything and its writer remembers nothing. If the clock was set back, too, the random bits distinguish the two
    epochs. If the next turn does not fit, because the pointer was not written by kvbus, the clock's turn is used.
    """
    turn = max((last >> RANDOM_BITS) + 1, now_as_turn())
    return (turn if turn < 1 << TURN_BITS else now_as_turn()) << RANDOM_BITS | random.getrandbits(RANDOM_BITS)


def next_turn(last: Pointer | None, former: int = 0) -> Pointer:
    """Return the pointer of the next writer. It has no state yet, but the former writer's state may be in the log.

    Args:
        last: the pointer in the log; None if there is none.
        former: the newest epoch that this process has had. The log may have lost it.
    """
    epoch = next_epoch(max(former, 0 if last is None else last.epoch))
    return Pointer(epoch, -1, START if last is None else last.position)


_decoder: Final = msgspec.msgpack.Decoder(Pointer)


def write_pointer(pointer: Pointer) -> bytes:
    """Encode a pointer for a log."""
    return msgspec.msgpack.encode(pointer)


def read_pointer(data: bytes) -> Pointer:
    """Decode a pointer of a log.

    Raises:
        ValueError: the data is not a pointer.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a pointer: {error}") from None


def pointer_of(fields: Sequence[bytes]) -> Pointer:
    """Return the pointer with these fields, which are decimal numbers.

    Raises:
        ValueError: a field is not a number, or out of range.
    """
    try:
        return msgspec.convert([int(field) for field in fields], Pointer)
    except (ValueError, msgspec.ValidationError):
        raise ValueError("not a pointer: a field is no number, or out of range") from None


def take_pointer(
    found: dict[str, Pointer], refused: Refused, name: bytes | str, value: bytes | Sequence[bytes]
) -> None:
    """Add the pointer in ``value`` to ``found``. An empty value means that the stream was erased.

    A client that may write one stream's pointer can write anything there. A value that is not a pointer is refused, and
    other streams are not affected.
    """
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    found.pop(text, None)
    if value:
        try:
            found[text] = read_pointer(value) if isinstance(value, bytes) else pointer_of(value)
        except ValueError:
            refused.append((UNREADABLE_POINTER, text))
