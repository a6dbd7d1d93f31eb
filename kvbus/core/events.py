"""Events that a shell reports to the relay. They name sources and streams by their position in the configuration."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.findings.finding import Finding
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.source_spec import Place, SourceSpec
from kvbus.core.types import Refused


class Started(msgspec.Struct, frozen=True):
    """The relay starts without the state of a previous process. This event comes before all others.

    ``wall`` is the time of day, as in :class:`Tick`.
    """

    wall: float = 0.0


class SourcePlaced(msgspec.Struct, frozen=True):
    """A source is put into a slot. If the slot has a source, it is removed. All other sources are unaffected.

    ``streams`` describes the slot's stream on each output. A merged output has no separate stream. The numbering of a
    slot continues, whichever source has the slot.
    """

    source: int
    spec: SourceSpec
    streams: Sequence[NewStream]


class SourceRemoved(msgspec.Struct, frozen=True):
    """A source is removed: its blocks are cleared downstream, and its slot is free."""

    source: int


class OutputPlaced(msgspec.Struct, frozen=True):
    """An output replaces the one with this number, or is added after all others."""

    output: int
    spec: OutputSpec


class SourceUp(msgspec.Struct, frozen=True):
    """A connection to (or from) the engine's publisher was established."""

    source: int


class SourceDown(msgspec.Struct, frozen=True):
    """The last connection to the engine's publisher was lost.

    Messages received on it are reported before this event.
    """

    source: int


class HandshakeFailed(msgspec.Struct, frozen=True):
    """The handshake of a connection with the engine's publisher failed."""

    source: int
    reason: Refused


class SourceUnreachable(msgspec.Struct, frozen=True):
    """Why there is no connection to the engine's publisher, as found by the shell; None if there should be one."""

    source: int
    why: Finding | None


class FurtherRankFound(msgspec.Struct, frozen=True):
    """The engine of this source may have more ranks than are configured, as found by the shell; None: no longer."""

    source: int
    finding: Finding | None


class SourcesNamed(msgspec.Struct, frozen=True):
    """The positions of sources in the configuration, by slot. Findings name them."""

    places: dict[int, Place]


class BatchReceived(msgspec.Struct, gc=False):
    """One multipart message of the live stream, with all frames, as received."""

    source: int
    frames: list[bytes]


class RecordReceived(msgspec.Struct, gc=False):
    """The next record of a source that is read from a log, see :mod:`kvbus.core.numbered`.

    ``seq`` is the number under which all routers get the record. The payload is a batch in the canonical encoding. It
    is empty if nothing has happened, or if a state without blocks begins. ``begins`` marks the first record of a state:
    it clears all blocks. ``more`` says that other records of the state follow. ``ends`` marks the last record. A record
    is ``known`` if readers of all earlier records already have its content.
    """

    source: int
    seq: int
    payload: bytes = b""
    begins: bool = False
    more: bool = False
    ends: bool = False
    known: bool = False


class LogReached(msgspec.Struct, frozen=True):
    """Whether the log of a source can be read. Meanwhile its blocks stay, because no change of them is known."""

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
    """A frame of the live stream was too large to accept, so the connection was closed."""

    source: int


class ReplayAborted(msgspec.Struct, frozen=True):
    """The answer to replay request ``request`` broke off at a frame that is too large to accept."""

    source: int
    request: int


class Unread(msgspec.Struct, frozen=True):
    """Messages wait to be read: of the answer to request ``request`` or, with None, of the live stream.

    The shell reports this for an answer before each :class:`Tick`, and for the live stream before an answer begins.
    """

    source: int
    request: int | None = None


class RequestWaits(msgspec.Struct, frozen=True):
    """Request ``request`` is queued after others. :class:`RequestSent` says when it has been sent."""

    source: int
    request: int


class RequestSent(msgspec.Struct, frozen=True):
    """Request ``request`` has been sent after all. If ``sent`` is False, sending failed, and the request waits."""

    source: int
    request: int
    sent: bool


class ReplayAsked(msgspec.Struct, gc=False):
    """A router asks stream ``stream`` of output ``output`` for a replay. The frames are as a ROUTER received them.

    ``has_state`` says that the state of a subscription answers the request: docs/PROTOCOL.md has the conditions.
    ``rebuilds`` says that the request comes from one of kvbus's own readers (:data:`~kvbus.core.wire.frames.REBUILDS`).
    """

    output: int
    stream: int
    frames: list[bytes]
    has_state: bool = False
    rebuilds: bool = False


class SnapshotAsked(msgspec.Struct, gc=False):
    """A router asks stream ``stream`` of output ``output`` for a snapshot. The frames are as a ROUTER received them."""

    output: int
    stream: int
    frames: list[bytes]


class Subscribed(msgspec.Struct, frozen=True):
    """These routers need the state of a stream: they have just subscribed, or batches for them were dropped.

    They get nothing of the live stream until the shell carries out the relay's :class:`~kvbus.core.commands.SendState`.
    """

    output: int
    stream: int
    routers: tuple[int, ...]


class EngineEmptied(msgspec.Struct, gc=False):
    """The engine says that it sleeps: it holds no blocks, but its stream announces that only when it wakes up."""

    source: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Sent several times a second, and at once while :attr:`Relay.backlog` is set.

    ``wall`` is the time of day in seconds since 1970, for the ``ts`` of batches that no engine sent. ``stood`` is the
    number of seconds since the last tick in which the process did not run. The time of events does not include them.
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
    | FurtherRankFound
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
