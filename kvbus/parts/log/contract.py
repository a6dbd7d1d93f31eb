"""The contract of a log: the guarantees of its writers, its readers and its pointers."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec

from kvbus.core.log_relay import LAST
from kvbus.parts.log.record import RANDOM_BITS, TURN_BITS, Epoch

START: Final = 0
"""A position that is before every record of a stream in a log."""


TICKS: Final = 32
"""Units of time in a second. The number of a writer's turn is the present time in these units since 1970.

A turn is the time in which one writer owns a stream. See :func:`now_as_turn`. The present time in these units fits into
:data:`TURN_BITS` bits until 2106.
"""

UNREACHABLE: Final = "unreachable"


class FencedError(Exception):
    """Another writer has claimed the stream, so this writer cannot append any more records.

    The records that this writer has already appended stay in the log.
    """


class UnavailableError(Exception):
    """The log cannot be reached, or does not accept records now.

    If an append has failed with this error, its records may or may not be in the log. The writer must not be used any
    more. The caller has to close it, claim the stream again, and begin with the stream's state. Readers drop duplicate
    records by their epoch and seq. If the writer had appended only a part of a state, readers replace this part by the
    state of the new epoch.

    Attributes:
        reason: the cause in one word, as a label of counters; :data:`UNREACHABLE` if the cause is not known.
    """

    def __init__(self, text: str, reason: str = UNREACHABLE) -> None:
        super().__init__(text)
        self.reason = reason


Refused = deque[tuple[str, str]]
"""A queue of refusals by a log. Each has the reason, and the name of the stream or record that kvbus cannot read.

The same refusal may occur several times.
"""

MAX_REFUSED: Final = 1000
"""Maximum number of entries in :data:`Refused`, the queue of unreadable records and streams.

The log's caller counts and removes the entries.
"""

UNREADABLE_POINTER: Final = "unreadable_pointer"
UNREADABLE_BATCH: Final = "unreadable_batch"
WRONG_TYPE: Final = "wrong_type"
FOREIGN_KEY: Final = "foreign_key"
FOREIGN_ID: Final = "foreign_id"
SAME_NAME: Final = "same_name"


class Entry(NamedTuple):
    """One record in a log, with the key of its stream.

    ``position`` ascends along a stream. Positions of different streams cannot be compared. After this record, a reader
    continues at ``position + 1``. A log that has lost its records may begin again at lower positions. A reader then
    continues at the first record that the log has.

    ``time`` is when the log got the record, in seconds by the log's own clock. It can only be compared with the
    ``time`` of another entry, and the clocks of the log's servers may differ. In Kafka without LogAppendTime, the
    clocks are those of the writers.
    """

    key: str
    position: int
    data: bytes
    time: float


class Pointer(msgspec.Struct, array_like=True, frozen=True):
    """The place at which a new reader begins to read one stream: the stream's newest state.

    A state is the live blocks of the stream, as records. A CLEAR is the first of them.

    Attributes:
        epoch: the newest epoch of the stream.
        seq: the seq of the CLEAR with which the newest complete state begins; -1 if this epoch has no complete state
            yet.
        position: the position of that CLEAR. If this epoch has no complete state yet, it is the position of an older
            state, or of the beginning of the stream.
    """

    epoch: Epoch
    seq: Annotated[int, msgspec.Meta(ge=-1, lt=LAST)] = -1
    position: Annotated[int, msgspec.Meta(ge=START, le=2**63 - 1)] = START


class Writer(Protocol):
    """The writer of one stream for one *turn*. The turn lasts until the writer is closed, fails, or is fenced.

    A writer is fenced when another writer claims the stream. ``epoch`` identifies the turn. It is greater than the
    epoch of every earlier turn of the stream.
    """

    epoch: int

    async def append(self, records: Sequence[bytes]) -> int:
        """Append records to the stream in this order, and return the position of the last one.

        When the call returns, the log's servers have stored the records as safely as they are configured to.

        Raises:
            FencedError: another writer has claimed the stream. None of these records is in the log.
            UnavailableError: the log failed. These records may or may not be in it, and the writer must not be used any
                more.
        """

    async def point(self, pointer: Pointer) -> None:
        """Replace the stream's pointer, at which a new reader begins.

        Raises:
            FencedError: another writer has claimed the stream. The pointer of that writer stays in the log.
            UnavailableError: the log failed. It has either the new pointer or the former one.
        """

    async def keeps(self, position: int) -> bool:
        """Return whether the log still has all of the stream's records from ``position`` on.

        The log may have deleted the oldest records, because it keeps them only for a limited time.

        Raises:
            UnavailableError: the log does not answer. The writer may continue nevertheless.
        """

    async def close(self) -> None:
        """Stop writing, and release the connections. Appended records stay in the log."""


class Reader(Protocol):
    """A reader of several streams. It reads each stream from a given position on, and then waits for new records."""

    async def take(self, seconds: float) -> list[Entry]:
        """Return the next records, in the order of each stream; an empty list if no record comes within ``seconds``.

        If the log has deleted the records at the reading position, reading continues at the oldest record that is left.

        Raises:
            UnavailableError: the log failed. No record is skipped, and the call may be repeated.
        """

    async def ends(self) -> dict[str, int]:
        """Return a number for each stream, which stands for the present end of the stream.

        Once :meth:`take` has returned everything that the log has now, :meth:`reached` returns at least this number. So
        the caller knows when it has read a stream to its end.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def reached(self, key: str) -> int:
        """Return a number for the place in a stream up to which :meth:`take` has returned all records.

        If it is at least the stream's number from :meth:`ends`, the stream has been read to that end.
        """

    async def close(self) -> None:
        """Stop reading, and release the connections."""


class Log(Protocol):
    """A log, which has the records of each stream and one pointer for each stream. A stream is identified by its key.

    Attributes:
        refused: names of streams and records that this version cannot read. The caller counts and removes them.
    """

    refused: Refused

    async def claim(self, key: str) -> Writer:
        """Become the writer of a stream.

        When this method returns, the former writer of the stream cannot append any more.

        Raises:
            UnavailableError: the stream was not claimed. The former writer may be fenced nevertheless. Claim the stream
                again.
        """

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Return the newest pointer of every stream. With ``key``, return only the pointer of the stream with this key.

        A pointer that cannot be read is left out, and added to :attr:`refused`.

        Raises:
            UnavailableError: the log cannot be reached.
        """

    async def read(self, starts: Mapping[str, int]) -> Reader:
        """Open a reader of several streams.

        ``starts`` has the position of the first record to read, by the key of the stream.

        Raises:
            UnavailableError: the log cannot be reached.
        """


def now_as_turn() -> int:
    """Return the present time as the number of a writer's turn: the seconds since 1970 times :data:`TICKS`."""
    return int(time.time() * TICKS)


def next_epoch(last: int) -> int:
    """Return an epoch for the next writer of a stream. It is greater than ``last``.

    ``last`` is the newest known epoch of the stream; 0 if none is known.

    The upper bits of an epoch are the number of the writer's turn, which is at least the present time as a number. So
    no number is used twice, even if the log has lost everything and the writer remembers nothing. If the clock was also
    set back, a number may be used again, and the random lower bits distinguish the two epochs with this number. If the
    next number of a turn has too many bits, because another program wrote the pointer, the present time is used.
    """
    turn = max((last >> RANDOM_BITS) + 1, now_as_turn())
    return (turn if turn < 1 << TURN_BITS else now_as_turn()) << RANDOM_BITS | random.getrandbits(RANDOM_BITS)


def next_turn(last: Pointer | None, former: int = 0) -> Pointer:
    """Return the pointer that the next writer of a stream stores when it claims the stream.

    The next writer has no state in the log yet. So the pointer keeps the position of the last pointer, because the
    former writer's state may be there.

    Args:
        last: the pointer in the log; None if there is none.
        former: the newest epoch of the stream that this process has used. The log may have lost it.
    """
    epoch = next_epoch(max(former, 0 if last is None else last.epoch))
    return Pointer(epoch, -1, START if last is None else last.position)


_decoder: Final = msgspec.msgpack.Decoder(Pointer)


def write_pointer(pointer: Pointer) -> bytes:
    """Encode a pointer as Kafka and NATS store it. A pointer says where the newest state of a stream begins."""
    return msgspec.msgpack.encode(pointer)


def read_pointer(data: bytes) -> Pointer:
    """Decode a pointer that was read from Kafka or NATS.

    Raises:
        ValueError: the data is not a pointer.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a pointer: {error}") from None


def pointer_of(fields: Sequence[bytes]) -> Pointer:
    """Return the pointer that is stored in Redis as a hash with three decimal numbers: epoch, seq and position.

    Raises:
        ValueError: a value is not a number, or is out of range.
    """
    try:
        return msgspec.convert([int(field) for field in fields], Pointer)
    except (ValueError, msgspec.ValidationError):
        raise ValueError("not a pointer: a field is not a number, or is out of range") from None


def take_pointer(
    found: dict[str, Pointer], refused: Refused, name: bytes | str, value: bytes | Sequence[bytes]
) -> None:
    """Decode the pointer in ``value``, and put it into ``found`` under ``name``, the key of the stream.

    An empty value means that the operator has erased the stream, so ``name`` is removed from ``found``.

    A client with the permission to write a stream's pointer can write any bytes. If the value is not a pointer, the
    name is added to ``refused``, and other streams are not affected.
    """
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    found.pop(text, None)
    if value:
        try:
            found[text] = read_pointer(value) if isinstance(value, bytes) else pointer_of(value)
        except ValueError:
            refused.append((UNREADABLE_POINTER, text))
