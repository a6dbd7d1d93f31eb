"""Events that the daemon reports to the relay. Events name a source, a stream or an output by its slot or number."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.findings.finding import Finding
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.source_spec import SourceLocation, SourceSpec
from kvbus.core.types import Reason, Refused


class Started(msgspec.Struct, frozen=True):
    """The relay starts without the saved state of a previous process. This is the first event.

    ``wall`` is the time of day in seconds since 1970.
    """

    wall: float = 0.0


class SourcePlaced(msgspec.Struct, frozen=True):
    """A source is put into a slot. If another source is in the slot, it is removed. The other slots do not change.

    ``streams`` describes the slot's stream on each output. An output with one stream for all sources has no separate
    stream for the slot. The stream of a slot continues its numbering, even if another source gets the slot.
    """

    source: int
    spec: SourceSpec
    streams: Sequence[NewStream]


class SourceRemoved(msgspec.Struct, frozen=True):
    """A source is removed. Its blocks are cleared at the routers, and its slot becomes free."""

    source: int


class OutputPlaced(msgspec.Struct, frozen=True):
    """A new output replaces the output with the number ``output``, or is added if there is no such output."""

    output: int
    spec: OutputSpec


class SourceUp(msgspec.Struct, frozen=True):
    """A connection with the engine's publisher was established. Either side may have opened it."""

    source: int


class SourceDown(msgspec.Struct, frozen=True):
    """The last connection with the engine's publisher was lost.

    The daemon reports all messages received on a connection before this event.
    """

    source: int


class HandshakeFailed(msgspec.Struct, frozen=True):
    """The handshake of a connection with the engine's publisher failed."""

    source: int
    reason: Refused


class SourceUnreachable(msgspec.Struct, frozen=True):
    """The daemon has tried to find out why it cannot connect to the engine's publisher.

    ``why`` is a finding that explains the reason to the operator. It is None if the daemon has found no reason.
    """

    source: int
    why: Finding | None


class FurtherRankFound(msgspec.Struct, frozen=True):
    """The daemon has looked for ranks of the source's engine that are not configured.

    ``finding`` explains to the operator that there may be such ranks. It is None if there is no sign of them any more.
    """

    source: int
    finding: Finding | None


class SourcesNamed(msgspec.Struct, frozen=True):
    """The section of the configuration and the endpoints of each source, by slot.

    Findings name them to the operator.
    """

    locations: dict[int, SourceLocation]


class BatchReceived(msgspec.Struct, gc=False):
    """One multipart message of the source's live stream, with all its frames as received."""

    source: int
    frames: list[bytes]


class RecordReceived(msgspec.Struct, gc=False):
    """The next record of a source that is read from a log (Kafka, NATS, Redis): see :mod:`kvbus.core.log_relay`.

    Attributes:
        seq: the seq under which every router gets the record.
        payload: a batch in kvbus's own (canonical) encoding. It is empty for a lease (a sign of life of the log's
            writer), and for the first record of a state that has no blocks.
        begins: whether this is the first record of a state. It clears all blocks of the source.
        more: whether further records of the same state follow.
        ends: whether this is the last record of a state.
        known: whether the record repeats blocks that a reader already knows if it has all earlier records.
    """

    source: int
    seq: int
    payload: bytes = b""
    begins: bool = False
    more: bool = False
    ends: bool = False
    known: bool = False


class LogReached(msgspec.Struct, frozen=True):
    """The log from which a source is read has become readable (``reached`` is True) or unreadable.

    While the log cannot be read, the source's blocks stay: kvbus does not know of any change.
    """

    source: int
    reached: bool


class ReplayReceived(msgspec.Struct, gc=False):
    """One multipart message of an engine's answer to the replay request with the id ``request``."""

    source: int
    request: int
    frames: list[bytes]


class SnapshotReceived(msgspec.Struct, gc=False):
    """An engine's reply to the snapshot request with the id ``request``."""

    source: int
    request: int
    frames: list[bytes]


class StreamBroken(msgspec.Struct, frozen=True):
    """The engine broke a limit or a rule of ZMTP on the source's live stream, so the daemon closed the connection."""

    source: int
    reason: Reason


class ReplayAborted(msgspec.Struct, frozen=True):
    """The answer to replay request ``request`` ended early: a frame was larger than ``limits.max_frame_bytes``."""

    source: int
    request: int


class Unread(msgspec.Struct, frozen=True):
    """Messages from a source's engine wait in a socket of this process. kvbus has not read them yet.

    They belong to the answer to request ``request``, or to the live stream if ``request`` is None. The daemon reports
    this for an answer before each :class:`Tick`, and for the live stream before an answer begins.
    """

    source: int
    request: int | None = None


class RequestWaits(msgspec.Struct, frozen=True):
    """The request to an engine with the id ``request`` is not sent yet: it is queued after other requests.

    :class:`RequestSent` reports when it is sent.
    """

    source: int
    request: int


class RequestSent(msgspec.Struct, frozen=True):
    """The daemon has tried to send a request that was queued (:class:`RequestWaits`) to an engine.

    ``sent`` is False if sending failed. Such a request stays in the queue.
    """

    source: int
    request: int
    sent: bool


class ReplayAsked(msgspec.Struct, gc=False):
    """A router requests a replay of stream ``stream`` of output ``output``.

    ``frames`` are the frames as a ROUTER socket received them. ``routers`` are the subscribed routers that get states
    on their live connections and have the requester's address and key, so that the request may come from one of them.
    ``alone`` says that no other subscribed router has this address and key. ``rebuilds`` says that the requester is
    another kvbus (:data:`~kvbus.core.wire.frames.REBUILDS`).
    """

    output: int
    stream: int
    frames: list[bytes]
    routers: tuple[int, ...] = ()
    alone: bool = True
    rebuilds: bool = False


class SnapshotAsked(msgspec.Struct, gc=False):
    """A router requests a snapshot of stream ``stream`` of output ``output``.

    ``frames`` are the frames as a ROUTER socket received them.
    """

    output: int
    stream: int
    frames: list[bytes]


class Subscribed(msgspec.Struct, frozen=True):
    """The listed routers need the state of a stream: they have just subscribed, or kvbus dropped batches for them.

    The daemon sends them no live batch of the stream until it carries out the relay's
    :class:`~kvbus.core.commands.SendState`.
    """

    output: int
    stream: int
    routers: tuple[int, ...]


class EngineEmptied(msgspec.Struct, gc=False):
    """The API of a source's engine says that the engine sleeps. A sleeping engine's cache is empty.

    The relay needs this event because the engine's stream announces the clear only when the engine wakes up.
    """

    source: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed.

    The daemon sends a tick ten times a second, and without delay while :attr:`Relay.backlog` is set.

    ``wall`` is the time of day in seconds since 1970. It becomes the ``ts`` of batches that no engine sent. ``stood``
    is the number of seconds for which the process was suspended since the last tick. The relay's time (``now``) does
    not include them.
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
    | StreamBroken
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
