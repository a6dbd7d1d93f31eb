"""The contract of a log: what a writer, a reader and a pointer of one stream have to keep to."""

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
"""A position before everything that a log keeps of a stream."""


TICKS: Final = 32
"""Turns that a second has room for. The clock's turn since 1970 has :data:`TURN_BITS` bits until 2106."""

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


Refused = deque[tuple[str, str]]
"""A reason for counters, and the name of what was refused; both may come again."""

MAX_REFUSED: Final = 1000
"""Refusals that a log keeps for whoever counts them."""

UNREADABLE_POINTER: Final = "unreadable_pointer"
UNREADABLE_BATCH: Final = "unreadable_batch"
WRONG_TYPE: Final = "wrong_type"
FOREIGN_KEY: Final = "foreign_key"
SAME_NAME: Final = "same_name"


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

    epoch: Epoch
    seq: Annotated[int, msgspec.Meta(ge=-1, lt=LAST)] = -1
    position: Annotated[int, msgspec.Meta(ge=START, le=2**63 - 1)] = START


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
        """For each stream a mark: what :meth:`reached` says of it once everything was taken that the log has now.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def reached(self, key: str) -> int:
        """A mark as :meth:`ends` gives it; everything up to there was taken, or is not kept."""

    async def close(self) -> None:
        """Stop reading."""


class Log(Protocol):
    """Records by the keys of their streams, and one pointer a stream.

    Attributes:
        refused: what somebody has put there and this version cannot read. Whoever counts it empties it.
    """

    refused: Refused

    async def claim(self, key: str) -> Writer:
        """Take a stream: whoever had it is fenced when this returns.

        Raises:
            UnavailableError: nobody was fenced, or somebody was and the stream is nobody's; claim again.
        """

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """The pointers of all streams, or of one, the newest of each. One that cannot be read is refused.

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


def now_as_turn() -> int:
    """The wall clock as the turn of an epoch."""
    return int(time.time() * TICKS)


def next_epoch(last: int) -> int:
    """An epoch after the last one that is known; 0 where none is.

    The log counts turns, and the clock moves the count on: a log that has lost everything, with a writer that remembers
    nothing, hands out no turn again. Where the clock was set back, too, the random bits tell the two epochs apart. A
    turn that has no room (somebody has written that pointer) is the clock's again.
    """
    turn = max((last >> RANDOM_BITS) + 1, now_as_turn())
    return (turn if turn < 1 << TURN_BITS else now_as_turn()) << RANDOM_BITS | random.getrandbits(RANDOM_BITS)


def next_turn(last: Pointer | None, former: int = 0) -> Pointer:
    """The pointer of the next writer: it has no state in the log yet, but the writer before may have one.

    Args:
        last: the pointer in the log, if there is one.
        former: the newest epoch that this process has had, which the log may have lost.
    """
    epoch = next_epoch(max(former, 0 if last is None else last.epoch))
    return Pointer(epoch, -1, START if last is None else last.position)


_decoder: Final = msgspec.msgpack.Decoder(Pointer)


def write_pointer(pointer: Pointer) -> bytes:
    """A pointer as it stands in a log."""
    return msgspec.msgpack.encode(pointer)


def read_pointer(data: bytes) -> Pointer:
    """A pointer of a log.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a pointer: {error}") from None


def pointer_of(fields: Sequence[bytes]) -> Pointer:
    """A pointer whose fields are decimal numbers.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.convert([int(field) for field in fields], Pointer)
    except (ValueError, msgspec.ValidationError):
        raise ValueError("not a pointer: a field is no number, or out of range") from None


def take_pointer(
    found: dict[str, Pointer], refused: Refused, name: bytes | str, value: bytes | Sequence[bytes]
) -> None:
    """Take what stands in the place of a pointer; nothing there says that the stream was erased.

    Whoever may write the pointer of one stream may write anything there. That is refused, and no other stream suffers.
    """
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    found.pop(text, None)
    if value:
        try:
            found[text] = read_pointer(value) if isinstance(value, bytes) else pointer_of(value)
        except ValueError:
            refused.append((UNREADABLE_POINTER, text))
