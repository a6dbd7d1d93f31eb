"""What a shell tells the relay. Sources and streams are named by their position in the configuration."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.findings import Finding
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.source_spec import Place, SourceSpec
from kvbus.core.types import Refused


class Started(msgspec.Struct, frozen=True):
    """The relay begins, with no state of a former process; before all other events.

    ``wall`` is the time of day, as in :class:`Tick`.
    """

    wall: float = 0.0


class SourcePlaced(msgspec.Struct, frozen=True):
    """A source is put into a slot; one that was there is gone. All others go on as if nothing had happened.

    ``streams`` says for each output how the slot's own stream is to be; a merged output has none. The numbering of a
    slot goes on, whichever source has it.
    """

    source: int
    spec: SourceSpec
    streams: Sequence[NewStream]


class SourceRemoved(msgspec.Struct, frozen=True):
    """A source is taken away: its blocks are cleared downstream, and its slot is free."""

    source: int


class OutputPlaced(msgspec.Struct, frozen=True):
    """An output is put in place of the one with this number, or behind all others."""

    output: int
    spec: OutputSpec


class SourceUp(msgspec.Struct, frozen=True):
    """A connection to (or from) the engine's publisher stands."""

    source: int


class SourceDown(msgspec.Struct, frozen=True):
    """The last connection to the engine's publisher is gone. What it has brought comes before this."""

    source: int


class HandshakeFailed(msgspec.Struct, frozen=True):
    """A connection with the engine's publisher failed before anything was said."""

    source: int
    reason: Refused


class SourceUnreachable(msgspec.Struct, frozen=True):
    """The shell has found out why no connection to the engine's publisher stands; None if one should."""

    source: int
    why: Finding | None


class SourcesNamed(msgspec.Struct, frozen=True):
    """The shell says where sources stand in the configuration, by slot; findings name that."""

    places: dict[int, Place]


class BatchReceived(msgspec.Struct, gc=False):
    """One multipart message of the live stream, all frames, as received."""

    source: int
    frames: list[bytes]


class RecordReceived(msgspec.Struct, gc=False):
    """The next record of a source that is read from a log, see :mod:`kvbus.core.numbered`.

    ``seq`` is the number that routers get, wherever they get it. The payload is a batch in the canonical encoding, or
    empty where nothing has happened, or where a state begins without a block. A state ``begins`` with AllBlocksCleared,
    has ``more`` behind it and ``ends``.
    Whoever has all records before one that is ``known`` has what it says.
    """

    source: int
    seq: int
    payload: bytes = b""
    begins: bool = False
    more: bool = False
    ends: bool = False
    known: bool = False


class LogReached(msgspec.Struct, frozen=True):
    """Whether the log can be read that a source comes from. Its blocks stand meanwhile: nobody knows of a change."""

    source: int
    reached: bool


class ReplayReceived(msgspec.Struct, gc=False):
    """One multipart message of the answer to replay request ``request``."""

    source: int
    request: int
    frames: list[bytes]


class SnapshotReceived(msgspec.Struct, gc=False):
    """The reply to snapshot request ``request``."""

    source: int
    request: int
    frames: list[bytes]


class Oversize(msgspec.Struct, frozen=True):
    """A frame of the live stream was too large to be taken, and cost the connection."""

    source: int


class ReplayAborted(msgspec.Struct, frozen=True):
    """The answer to replay request ``request`` broke off at a frame that is too large to be taken."""

    source: int
    request: int


class Unread(msgspec.Struct, frozen=True):
    """Something waits to be read: of the answer to request ``request``, or, if that is None, of the live stream.

    Of an answer it is said before each :class:`Tick`, of the live stream before an answer begins.
    """

    source: int
    request: int | None = None


class RequestWaits(msgspec.Struct, frozen=True):
    """Request ``request`` has not been sent yet: others go first. :class:`RequestSent` says when it has left."""

    source: int
    request: int


class RequestSent(msgspec.Struct, frozen=True):
    """Request ``request`` has left after all, or, if ``sent`` is False, waits because it could not be sent."""

    source: int
    request: int
    sent: bool


class ReplayAsked(msgspec.Struct, gc=False):
    """A router asks stream ``stream`` of output ``output`` for a replay; frames as a ROUTER received them.

    ``has_state`` says that the state of a subscription answers the request: docs/PROTOCOL.md has the conditions.
    ``rebuilds`` says that the request comes from one of kvbus's own readers
    (:data:`~kvbus.core.wire.frames.REBUILDS`).
    """

    output: int
    stream: int
    frames: list[bytes]
    has_state: bool = False
    rebuilds: bool = False


class SnapshotAsked(msgspec.Struct, gc=False):
    """A router asks stream ``stream`` of output ``output`` for a snapshot; frames as a ROUTER received them."""

    output: int
    stream: int
    frames: list[bytes]


class Subscribed(msgspec.Struct, frozen=True):
    """These routers need the state of a stream: they have just subscribed, or batches for them were dropped.

    They get nothing of the live stream until the relay's :class:`~kvbus.core.commands.SendState` is carried out.
    """

    output: int
    stream: int
    routers: tuple[int, ...]


class EngineEmptied(msgspec.Struct, gc=False):
    """The engine says that it sleeps: it holds no block, and its stream says so only when it wakes up."""

    source: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; sent several times a second, and at once while :attr:`Relay.backlog` is set.

    ``wall`` is the time of day in seconds since 1970, for the ``ts`` of batches no engine sent. ``stood`` is for how
    many seconds the process has not run since the last one: the time of events leaves them out.
    """

    wall: float = 0.0
    stood: float = 0.0


RelayEvent = (
    Started
    | SourcePlaced
    | SourceRemoved
    | OutputPlaced
    | SourceUp
    | SourceDown
    | SourceUnreachable
    | SourcesNamed
    | HandshakeFailed
    | BatchReceived
    | RecordReceived
    | LogReached
    | Oversize
    | ReplayReceived
    | ReplayAborted
    | SnapshotReceived
    | RequestSent
    | RequestWaits
    | Unread
    | ReplayAsked
    | SnapshotAsked
    | Subscribed
    | EngineEmptied
    | Tick
)
