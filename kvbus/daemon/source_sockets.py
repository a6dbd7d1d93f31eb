"""The sockets of all sources: one subscription for each source, and one connection for each request to an engine."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from kvbus.common.errors import BindError
from kvbus.config import SourceStream
from kvbus.core.commands import CancelReplay, RequestReplay, RequestSnapshot
from kvbus.core.events import (
    HandshakeFailed,
    RelayEvent,
    ReplayAborted,
    ReplayReceived,
    RequestSent,
    RequestWaits,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    StreamBroken,
    Unread,
)
from kvbus.core.outputs.snapshot import REQUEST as SNAPSHOT_REQUEST
from kvbus.core.types import Reason, Refused
from kvbus.core.wire.frames import ASKS_REPLAY, replay_request
from kvbus.daemon.runtime import EngineSockets
from kvbus.parts.discovery.contract import Carrier
from kvbus.transport.interposed import Interposed, InterposedStream
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.subscription import AcceptedStream, BoundStream, Events

log = logging.getLogger("kvbus.daemon")

_NONE: Final[Mapping[str, Interposed]] = {}

FIRST_PAUSE: Final = 0.05
LAST_PAUSE: Final = 1.0
"""Longest pause in seconds before a failed request is sent again.

The first pause is FIRST_PAUSE. The pause doubles after each failure.
"""

OF_SOURCE: Final = 4
"""Number of file descriptors that one source needs: for its subscription, and for the ports of its stream on an output.
"""

OF_REQUEST: Final = 16
"""Number of file descriptors that one request needs.

Four are open while the request is under way. The rest is for earlier requests, which keep four each until libzmq has
closed their sockets.
"""


def _most_requests(sources: int) -> int:
    """Return how many requests may be under way if there are this many sources.

    Requests get a third of the process's file descriptors that sources do not need. The other two thirds are for
    routers, HTTP and files, and for sockets that libzmq closes late.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - OF_SOURCE * sources) // 3 // OF_REQUEST)


class Subscription(Protocol):
    """The methods of a source's live stream."""

    @property
    def unread(self) -> bool:
        """Whether received batches wait to be read by kvbus."""

    @property
    def reached(self) -> str | None:
        """The address that kvbus has dialled and is connected to; None if there is none."""

    def beside(self, endpoint: str) -> str:
        """Return another endpoint of the same engine, with its host name replaced by the connected address."""

    def close(self) -> None:
        """Close the live stream."""


class Request(Protocol):
    """The methods of a request to an engine."""

    @property
    def unread(self) -> bool:
        """Whether received messages of the answer wait to be read by kvbus."""

    def close(self) -> None:
        """Close the connection, and drop the messages of the answer that kvbus has not read."""


class _Failed:
    """A request that could not be sent.

    The relay gets the failure only in the next iteration of the event loop, because it is still handling the event that
    has led to the request.

    Args:
        failed: reports the failure to the relay.
        again: tries to send the request again.
        pause: seconds until ``again`` is called.
    """

    unread = False

    def __init__(self, failed: Callable[[], None], again: Callable[[], None], pause: float) -> None:
        loop = asyncio.get_running_loop()
        self._handles = (loop.call_soon(failed), loop.call_later(pause, again))

    def close(self) -> None:
        for handle in self._handles:
            handle.cancel()


class _Carried:
    """The live stream of a source without a socket. A discoverer delivers its batches, for example from a log."""

    unread = False
    reached = None

    def __init__(
        self,
        carrier: Carrier,
        stream: SourceStream,
        feed: Callable[[RelayEvent], None],
        drained: Callable[[], None],
    ) -> None:
        self._carrier = carrier
        self._slot = stream.index
        carrier.open(stream.endpoint, stream.index, feed, drained)

    def beside(self, endpoint: str) -> str:
        """Return the engine's endpoint unchanged.

        A source with a socket replaces the endpoint's host name by the address of the live connection. This source has
        no connection to the engine.
        """
        return endpoint

    def close(self) -> None:
        """Make the discoverer stop delivering batches of this source."""
        self._carrier.close(self._slot)


class SourceSockets:
    """The sockets of all sources, by the source's slot.

    Args:
        sockets: creates the sockets.
        feed: called with each event except live batches: connections, answers and failures.
        take: called with the slot and the messages that one wakeup has read from a source's live stream. It removes
            each message from the deque before it handles the message.
        feed_record: called with each event of a source that a discoverer delivers.
        drained: called after each burst of such events.
        interposed: the ports that an output shares with its engines (``interpose``), by endpoint.
        carrier: returns the discoverer that delivers a source's batches; None for a source with a socket.
    """

    def __init__(
        self,
        sockets: EngineSockets,
        feed: Callable[[RelayEvent], None],
        take: Callable[[int, deque[list[bytes]]], None],
        feed_record: Callable[[RelayEvent], None],
        drained: Callable[[], None],
        interposed: Mapping[str, Interposed] = _NONE,
        carrier: Callable[[SourceStream], Carrier | None] = lambda _: None,
    ) -> None:
        self._sockets = sockets
        self._feed = feed
        self._take = take
        self._feed_record = feed_record
        self._drained = drained
        self._interposed = interposed
        self._carrier = carrier
        self._live: dict[int, Subscription] = {}
        self._bursts: dict[int, deque[list[bytes]]] = {}
        """The messages that the current wakeup has read from each source's live stream."""
        self._streams: dict[int, SourceStream] = {}
        self._policies: dict[int, PeerPolicy] = {}
        self._requests: dict[tuple[int, int], Request] = {}
        self._waiting: dict[tuple[int, int], RequestReplay | RequestSnapshot] = {}
        """Requests that wait for free file descriptors, oldest first."""
        self._next: asyncio.Handle | None = None

    def open(self, stream: SourceStream, policy: PeerPolicy) -> None:
        """Open the live stream of one source.

        Args:
            stream: the stream that the source's engine publishes.
            policy: the CURVE keys and size limits for the connection.

        Raises:
            BindError: the endpoint cannot be bound.
        """
        slot = stream.index
        self._streams[slot], self._policies[slot] = stream, policy
        # Subscribe to all topics. Batches under other topics show that the configured topic is wrong, or that a second
        # publisher is at this endpoint.
        topics = (b"", ASKS_REPLAY) if stream.replay_endpoint else (b"",)
        burst = self._bursts[slot] = deque[list[bytes]]()
        events = Events(
            burst.append,
            self._connector(stream),
            self._refuser(stream),
            self._breaker(stream),
            lambda: self._take_burst(slot),
        )
        carrier = self._carrier(stream)
        if carrier is not None:
            self._live[slot] = _Carried(carrier, stream, self._feed_record, self._drained)
            log.info("source %s: kvbus reads it from %s", stream.label, stream.endpoint, extra=stream.log_fields)
            return
        port = self._interposed.get(stream.endpoint)
        if port is not None:
            self._live[slot] = InterposedStream(port, topics=topics, events=events)
            log.info(
                "source %s: bound %s, and the engine connects to it",
                stream.label,
                stream.endpoint,
                extra=stream.log_fields,
            )
            return
        if stream.bind:
            self._live[slot] = self._sockets.accept(stream.endpoint, topics=topics, events=events, policy=policy)
            log.info("source %s: bound %s", stream.label, stream.endpoint, extra=stream.log_fields)
            return
        self._live[slot] = self._sockets.subscribe(stream.endpoint, topics=topics, events=events, policy=policy)
        log.info("source %s: connecting to %s", stream.label, stream.endpoint, extra=stream.log_fields)

    def allow(self, slot: int, policy: PeerPolicy) -> None:
        """Replace the keys of the engines that may publish as a source.

        This has an effect only if engines connect to kvbus.
        """
        self._policies[slot] = policy
        live = self._live.get(slot)
        if isinstance(live, BoundStream) and policy.curve is not None:
            live.allow(policy.curve.clients)

    def _take_burst(self, slot: int) -> None:
        """Pass on the messages that this wakeup has read. Call this before any other event of the same source."""
        burst = self._bursts.get(slot)
        if burst:
            self._take(slot, burst)

    def _connector(self, stream: SourceStream) -> Callable[[bool], None]:
        def changed(up: bool) -> None:
            state = "connected" if up else "connection lost"
            log.info("source %s: %s", stream.label, state, extra=stream.log_fields)
            self._take_burst(stream.index)
            self._feed(SourceUp(stream.index) if up else SourceDown(stream.index))

        return changed

    def _refuser(self, stream: SourceStream) -> Callable[[Refused], None]:
        def refused(reason: Refused) -> None:
            self._feed(HandshakeFailed(stream.index, reason))
            log.warning("source %s: handshake failed: %s", stream.label, reason.value, extra=stream.log_fields)

        return refused

    def _breaker(self, stream: SourceStream) -> Callable[[Reason, str], None]:
        def broken(reason: Reason, detail: str) -> None:
            text = "source %s: closed the connection to the engine: %s (%s)"
            log.warning(text, stream.label, reason.value, detail, extra=stream.log_fields)
            self._take_burst(stream.index)
            self._feed(StreamBroken(stream.index, reason))

        return broken

    def ask(self, command: RequestReplay | RequestSnapshot) -> None:
        """Send a replay request or a snapshot request to an engine.

        If too few file descriptors are free, the request waits, and the relay gets an event about it. A request that
        cannot be sent is tried again until the relay cancels it.
        """
        if isinstance(command, RequestReplay):
            stream = self._streams[command.source]
            log.debug("source %s: replay requested from seq %d", stream.label, command.start, extra=stream.log_fields)
        if self._has_room() and not self._waiting:
            self._ask(command, FIRST_PAUSE, late=False)
            return
        key = command.source, command.request
        self._waiting[key] = command
        # Report this in the next iteration of the event loop, because the relay is still handling the event that has
        # led to the request.
        asyncio.get_running_loop().call_soon(self._say_waiting, key)
        self._go_on()

    def _has_room(self) -> bool:
        return len(self._requests) < _most_requests(len(self._live))

    def _say_waiting(self, key: tuple[int, int]) -> None:
        if key in self._waiting:
            self._feed(RequestWaits(*key))

    def _go_on(self) -> None:
        """Schedule the sending of the oldest request that waits for free file descriptors.

        Each iteration of the event loop sends one such request.
        """
        if self._waiting and self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._send_oldest)

    def _send_oldest(self) -> None:
        self._next = None
        if self._waiting and self._has_room():
            self._ask(self._waiting.pop(next(iter(self._waiting))), FIRST_PAUSE, late=True)
            self._go_on()

    def _ask(self, command: RequestReplay | RequestSnapshot, pause: float, *, late: bool) -> None:
        slot, number = command.source, command.request
        try:
            self._requests[slot, number] = self._connection(command)
        except BindError as error:
            stream = self._streams[slot]
            log.warning("source %s: %s; trying again", stream.label, error, extra=stream.log_fields)
            self._requests[slot, number] = _Failed(
                lambda: self._feed(RequestSent(slot, number, sent=False)),
                lambda: self._ask(command, min(2 * pause, LAST_PAUSE), late=True),
                pause,
            )
            return
        if late:
            self._feed(RequestSent(slot, number, sent=True))

    def _connection(self, command: RequestReplay | RequestSnapshot) -> Request:
        slot, stream = command.source, self._streams[command.source]
        event: type[ReplayReceived | SnapshotReceived]
        if isinstance(command, RequestReplay):
            endpoint, request, event = stream.replay_endpoint, replay_request(command.start), ReplayReceived
        else:
            endpoint, request, event = stream.snapshot_endpoint, [SNAPSHOT_REQUEST], SnapshotReceived
        # The relay requests a replay or a snapshot only of a source that has an endpoint for it.
        where = cast("str", endpoint)
        live = self._live.get(slot)
        begun = False

        def answered(frames: list[bytes]) -> None:
            nonlocal begun
            self._take_burst(slot)
            if not begun and live is not None and live.unread:
                self._feed(Unread(slot))
            begun = True
            self._feed(event(slot, command.request, frames))

        return self._sockets.request(
            where if live is None else live.beside(where),
            request,
            answered,
            on_abort=lambda: self._feed(ReplayAborted(slot, command.request)),
            policy=self._policies[slot],
            max_frames=MAX_KEPT_FRAMES if isinstance(command, RequestReplay) else sys.maxsize,
        )

    def look(self) -> None:
        """Pass on all messages that are read, and report to the relay which answers have unread messages.

        Call this before the relay checks timeouts, so that no batch and no answer times out that has arrived.
        """
        for slot in [slot for slot, burst in self._bursts.items() if burst]:
            self._take_burst(slot)
        for key in list(self._requests):  # a copy, because after an event the relay may cancel requests
            request = self._requests.get(key)
            if request is not None and request.unread:
                self._feed(Unread(*key))

    def is_open(self, slot: int) -> bool:
        """Return whether a source has an open live stream. It has none if its endpoint could not be bound."""
        return slot in self._live

    def reached(self, slot: int) -> str | None:
        """Return the address of the engine that kvbus has dialled for a source; None without such a connection."""
        live = self._live.get(slot)
        return None if live is None else live.reached

    def dialled_in(self, slot: int) -> list[str] | None:
        """Return the addresses of the engines that have connected to kvbus for this source.

        It is None if kvbus dials the engine.
        """
        live = self._live.get(slot)
        return live.peers if isinstance(live, AcceptedStream) else None

    def cancel(self, command: CancelReplay) -> None:
        """Abort a request to an engine."""
        key = command.source, command.request
        self._waiting.pop(key, None)
        connection = self._requests.pop(key, None)
        if connection is not None:
            connection.close()
            self._go_on()

    def close(self, slot: int) -> None:
        """Close the live stream and all requests of one source."""
        self._waiting = {key: command for key, command in self._waiting.items() if key[0] != slot}
        for source, request in [key for key in self._requests if key[0] == slot]:
            self._requests.pop((source, request)).close()
        self._take_burst(slot)
        self._bursts.pop(slot, None)
        live = self._live.pop(slot, None)
        if live is not None:
            live.close()
        self._go_on()

    def close_all(self) -> None:
        """Close the live streams and requests of all sources."""
        self._waiting.clear()
        if self._next is not None:
            self._next.cancel()
        for slot in {*self._live, *(slot for slot, _ in self._requests)}:
            self.close(slot)
