"""The sockets of all sources: one subscription each, and one connection for each request to the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvbus.config import SourceStream
from kvbus.core.commands import CancelReplay, RequestReplay, RequestSnapshot
from kvbus.core.events import (
    BatchReceived,
    Oversize,
    RelayEvent,
    ReplayAborted,
    ReplayReceived,
    SnapshotReceived,
    SourceDown,
    SourceUp,
)
from kvbus.core.outputs.snapshot import REQUEST as SNAPSHOT_REQUEST
from kvbus.core.relay import Relay
from kvbus.core.stats import Histogram
from kvbus.core.types import Refused
from kvbus.core.wire.frames import ASKS_REPLAY, replay_request
from kvbus.transport.ingress import Events, LiveStream, RequestConnection
from kvbus.transport.pump import Handler
from kvbus.transport.sockets import Context, PeerPolicy

log = logging.getLogger("kvbus.daemon")


class SourceSockets:
    """Open, use and close the sockets, by the source's slot.

    Args:
        context: the process's ZeroMQ context.
        relay: the relay that has the sources.
        feed: called with each event: connections, answers, failures.
        feed_live: called with each live batch, as an event; batches arrive in bursts, and ``drained`` follows each.
        latency: histogram of the seconds from a batch's receipt to its hand-over to the transport.
    """

    def __init__(
        self,
        context: Context,
        relay: Relay,
        feed: Callable[[RelayEvent], None],
        feed_live: Callable[[RelayEvent], None],
        drained: Callable[[], None],
        latency: Histogram,
    ) -> None:
        self._context = context
        self._relay = relay
        self._feed = feed
        self._feed_live = feed_live
        self._drained = drained
        self._latency = latency
        self._live: dict[int, LiveStream] = {}
        self._streams: dict[int, SourceStream] = {}
        self._policies: dict[int, PeerPolicy] = {}
        self._requests: dict[tuple[int, int], RequestConnection] = {}

    def open(self, stream: SourceStream, policy: PeerPolicy) -> None:
        """Subscribe to one engine publisher.

        Raises:
            BindError: its endpoint cannot be bound.
        """
        slot = stream.index
        self._streams[slot], self._policies[slot] = stream, policy
        self._live[slot] = LiveStream(
            self._context,
            stream.endpoint,
            bind=stream.bind,
            topics=(stream.topic, ASKS_REPLAY) if stream.replay_endpoint else (stream.topic,),
            events=Events(
                self._receiver(slot),
                self._connector(stream),
                self._refuser(stream),
                self._oversize(stream),
                self._drained,
            ),
            policy=policy,
        )
        log.info("source %s: %s %s", stream.label, "bound" if stream.bind else "connecting to", stream.endpoint)

    def _receiver(self, slot: int) -> Handler:
        latency, feed = self._latency, self._feed_live
        clock = time.perf_counter

        def received(frames: list[bytes]) -> None:
            begin = clock()
            feed(BatchReceived(slot, frames))
            latency.observe(clock() - begin)

        return received

    def _connector(self, stream: SourceStream) -> Callable[[bool], None]:
        def changed(up: bool) -> None:
            log.info("source %s: %s", stream.label, "connected" if up else "connection lost")
            self._feed(SourceUp(stream.index) if up else SourceDown(stream.index))

        return changed

    def _refuser(self, stream: SourceStream) -> Callable[[Refused], None]:
        def refused(reason: Refused) -> None:
            self._relay.sources[stream.index].stats.refused[reason] += 1
            log.warning("source %s: handshake failed: %s", stream.label, reason.value)

        return refused

    def _oversize(self, stream: SourceStream) -> Callable[[], None]:
        def oversize() -> None:
            log.warning("source %s: a frame over limits.max_frame_bytes; connecting again", stream.label)
            self._feed(Oversize(stream.index))

        return oversize

    def ask(self, command: RequestReplay | RequestSnapshot) -> None:
        """Ask an engine for a replay or a snapshot."""
        slot, stream = command.source, self._streams[command.source]
        event: type[ReplayReceived | SnapshotReceived]
        if isinstance(command, RequestReplay):
            endpoint, request, event = stream.replay_endpoint, replay_request(command.start), ReplayReceived
            log.debug("source %s: replay asked from %d", stream.label, command.start)
        else:
            endpoint, request, event = stream.snapshot_endpoint, [SNAPSHOT_REQUEST], SnapshotReceived
        if endpoint is None:  # pragma: no cover - the relay asks only where there is an endpoint
            return
        self._requests[slot, command.request] = RequestConnection(
            self._context,
            self._live[slot].beside(endpoint) if slot in self._live else endpoint,
            request,
            lambda frames: self._feed(event(slot, command.request, frames)),
            on_abort=lambda: self._feed(ReplayAborted(slot, command.request)),
            policy=self._policies[slot],
        )

    def is_open(self, slot: int) -> bool:
        """Return whether the source has a subscription; it has none if its endpoint could not be bound."""
        return slot in self._live

    def cancel(self, command: CancelReplay) -> None:
        """Abort a request."""
        connection = self._requests.pop((command.source, command.request), None)
        if connection is not None:
            connection.close()

    def close(self, slot: int) -> None:
        """Close one source's sockets."""
        for source, request in [key for key in self._requests if key[0] == slot]:
            self._requests.pop((source, request)).close()
        live = self._live.pop(slot, None)
        if live is not None:
            live.close()

    def close_all(self) -> None:
        """Close the sockets of all sources."""
        for slot in list(self._live):
            self.close(slot)
