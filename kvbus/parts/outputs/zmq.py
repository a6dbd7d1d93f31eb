"""The driver of outputs over ZeroMQ.

Each stream has a live endpoint and, if configured, a replay server and a snapshot server.

With ``layout: per_topic`` all streams share one live endpoint, and a :class:`~kvbus.transport.live.hub.Hub` manages its
routers.

kvbus implements ZMTP itself (:mod:`kvbus.transport.zmtp`). So it can identify each router, send the state to a single
router, and count the batches that each router loses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from kvbus.config import OutputConfig
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.events import ReplayAsked, SnapshotAsked, Subscribed
from kvbus.core.stats import RouterView
from kvbus.core.wire.frames import REBUILDS
from kvbus.parts.outputs.contract import Services
from kvbus.transport.interposed import Interposed
from kvbus.transport.live.endpoint import Endpoint, reopening
from kvbus.transport.live.hub import Hub
from kvbus.transport.live.ring import Ring
from kvbus.transport.live.stream import UNSENT, LivePublisher
from kvbus.transport.replay import ReplayServer, sender_of_output
from kvbus.transport.sockets import PLAIN, PeerPolicy
from kvbus.transport.zmtp.endpoint import Dialler, Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.protocol import DEFAULT, Limits
from kvbus.transport.zmtp.reasons import DISCONNECTS, REFUSALS, Reason
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp_keys import Keys

log = logging.getLogger("kvbus.daemon")

_HUB: Final = -1
"""The key in :attr:`ZmqOutput._keys` for an endpoint that all streams of an output share.

Every other key is the slot of a stream.
"""


class ViewDispatcher:
    """A handler of connections, which passes each router's connection to the view of the router's CURVE key.

    A view is a separate version of a stream, with only the blocks that keys with certain rights may see. The class
    implements :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    Args:
        pick: function that returns the handler of a peer's view; None if that view is not open.
    """

    def __init__(self, pick: Callable[[Peer], PeerHandler | None]) -> None:
        self._pick = pick
        self._handlers: dict[int, PeerHandler] = {}

    def opened(self, peer: Peer) -> None:
        """Choose the view for a newly connected peer by its key. Close the connection if that view is not open."""
        handler = self._pick(peer)
        if handler is None:
            peer.close(Reason.REVOKED)
            return
        self._handlers[peer.id] = handler
        handler.opened(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Pass a peer's subscription to the peer's view."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.subscribed(peer, topic)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Pass a peer's cancellation of a subscription to the peer's view."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Pass a peer's message to the peer's view."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.received(peer, frames)

    def drained(self, peer: Peer) -> None:
        """Inform the peer's view that the peer's socket is writable again."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Inform the peer's view that the connection has ended, and forget the peer."""
        if (handler := self._handlers.pop(peer.id, None)) is not None:
            handler.closed(peer, reason)


class NoListener:
    """A listener without connections, for a view's version of a stream.

    Routers do not connect to it. They connect to the listener of the stream with all blocks, and
    :class:`ViewDispatcher` passes each connection to the view of the router's key.
    """

    def close(self, linger: float = 0.0) -> None:
        """Do nothing, because this listener has no connections."""


class ZmqOutput:
    """The driver of one output over ZeroMQ; see :class:`~kvbus.parts.outputs.contract.OutputDriver`.

    Args:
        output: the output's index in the configuration.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        self._output = output
        self._config = config
        self._services = services
        self._sender = sender_of_output(services.stats, services.max_replay_sessions, services.clock)
        self._policy = PLAIN
        self._live: dict[tuple[int, int], LivePublisher] = {}
        """The publishers of live streams, by number and slot.

        The number is that of the output or of one of its views. The slot is that of the stream.
        """
        self._waiting: list[Callable[[], None]] = []
        self._topics: dict[int, bytes] = {}
        self._keys: dict[int, Keys] = {}
        """The CURVE keys of each live endpoint, by the stream's slot.

        If all streams share one endpoint, its CURVE keys are at :data:`_HUB`.
        """
        self._hub: Hub | None = None
        self._replays: dict[int, ReplayServer] = {}
        self._snapshots: dict[int, ReplayServer] = {}
        services.stats.router_queue_limit = config.send_hwm
        services.stats.refused.update(dict.fromkeys(REFUSALS, 0))
        services.stats.router_disconnects.update(dict.fromkeys(DISCONNECTS, 0))

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Bind one stream's endpoints.

        If the output is configured to connect, connect its live endpoint instead of binding it.

        Raises:
            BindError: an endpoint cannot be bound. All other endpoints of the stream are closed.
        """
        config = self._config
        self._policy = policy
        self._topics[stream] = topic
        endpoints = config.stream_endpoints(stream)
        try:
            if config.layout == "per_topic" and self._hub is None:
                opener, stats = self._opener(_HUB, endpoints.endpoint), self._services.stats
                self._hub = Hub(config.name, opener, stats=stats, send_bytes=config.send_bytes, name_of=self._name_of)
            self._live[self._output, stream] = self._live_side(stream, topic, endpoints.endpoint)
            verb, fields = "bound" if config.bind else "connecting to", {"output": config.name, "stream": stream}
            log.info("output %s: %s %s", config.name, verb, endpoints.endpoint, extra=fields)
            if endpoints.replay_endpoint is not None:
                self._replays[stream] = self._server(
                    endpoints.replay_endpoint, lambda frames: self._asked(stream, frames), stream
                )
                log.info("output %s: replay at %s", config.name, endpoints.replay_endpoint, extra=fields)
            if endpoints.snapshot_endpoint is not None:
                self._snapshots[stream] = self._server(
                    endpoints.snapshot_endpoint, lambda frames: self._snapshot_asked(stream, frames), stream
                )
                log.info("output %s: snapshots at %s", config.name, endpoints.snapshot_endpoint, extra=fields)
        except BaseException:
            self.close(stream)
            raise

    def _opener(self, key: int, endpoint: str) -> Callable[[PeerHandler], Endpoint]:
        """Return a function that binds or connects a live endpoint. Its argument is the handler of the connections.

        ``key`` is the stream's slot, or :data:`_HUB` for an endpoint that all streams share.
        """
        config, services, policy = self._config, self._services, self._policy.at(key)
        limits = DEFAULT
        if policy.max_frame_bytes >= 0:
            limits = Limits(frame_bytes=policy.max_frame_bytes, message_bytes=policy.max_frame_bytes)
        settings = Settings(limits, unsent_bytes=UNSENT, unsent=services.unsent, system=services.system)
        keys = self._keys[key] = Keys(policy.curve, bind=config.bind)

        def refused(reason: str, address: str, detail: str) -> None:
            services.stats.refused[reason] += 1
            fields = {"output": config.name, "peer": address} | ({} if key == _HUB else {"stream": key})
            why = f"{reason} ({detail})" if detail else reason
            log.info("output %s: refused a connection from %s: %s", config.name, address or "a peer", why, extra=fields)

        def open_endpoint(handler: PeerHandler) -> Endpoint:
            if config.interpose:
                both = replace(settings, publisher_limits=services.publisher_limits)
                port = Interposed(endpoint, handler, settings=both, stats=services.stats, refused=refused)
                services.interposed[endpoint] = port
                return port
            kind = Listener if config.bind else Dialler
            if policy.curve is not None and config.bind and self._hub is None:
                handler = ViewDispatcher(lambda peer: self._live.get((self._view_of(peer.key), key)))
            return kind(endpoint, Role.PUB, handler, settings=settings, refused=refused, mechanism=keys.mechanism)

        return open_endpoint

    def _live_side(self, stream: int, topic: bytes, endpoint: str) -> LivePublisher:
        hub = self._hub
        opener: Callable[[LivePublisher], Endpoint]
        opener = self._opener(stream, endpoint) if hub is None else partial(hub.open, stream, topic)
        return self._publisher(self._output, stream, topic, opener)

    def _publisher(
        self, number: int, stream: int, topic: bytes, opener: Callable[[LivePublisher], Endpoint]
    ) -> LivePublisher:
        config, services, hub = self._config, self._services, self._hub

        def request_state(routers: tuple[int, ...]) -> None:
            services.feed(Subscribed(number, stream, routers))

        return LivePublisher(
            stream,
            topic,
            config.name,
            opener,
            sender=self._sender,
            stats=services.stats,
            queue_batches=config.queue_batches,
            send_hwm=config.send_hwm,
            send_bytes=config.send_bytes,
            request_state=request_state if config.on_subscribe == "state" else None,
            waiting=self._waiting,
            shared=None if hub is None else hub.shared,
            name_of=self._name_of,
            left=None if number == self._output else self._live[self._output, stream].left,
        )

    def open_view(self, number: int, stream: int, topic: bytes) -> None:
        """Start serving one stream to the routers of a view.

        These routers connect to the same port as the routers that may read all blocks. :class:`ViewDispatcher` passes
        their connections to the view's stream.
        """
        self._live[number, stream] = self._publisher(number, stream, topic, lambda _: NoListener())

    def close_view(self, number: int, stream: int) -> None:
        """Stop serving one stream of a view, and disconnect its routers."""
        live = self._live.pop((number, stream))
        for peer in live.peers:
            peer.close(Reason.REVOKED)
        live.close()

    @property
    def views(self) -> list[tuple[int, int]]:
        """The open streams of all views, each as a tuple of the view's number and the stream's slot."""
        return [key for key in self._live if key[0] != self._output]

    def _view_of(self, key: bytes) -> int:
        return self._policy.views.get(key, self._output)

    def _name_of(self, key: bytes) -> str:
        curve = self._policy.curve
        client = None if curve is None else curve.clients.get(key)
        return "" if client is None else client.name

    def _server(
        self, endpoint: str, event: Callable[[list[bytes]], ReplayAsked | SnapshotAsked | None], stream: int
    ) -> ReplayServer:
        services = self._services

        def on_request(frames: list[bytes]) -> None:
            asked = event(frames)
            if asked is not None:
                services.feed(asked)

        return ReplayServer(
            endpoint,
            on_request=on_request,
            sender=self._sender,
            stats=services.stats,
            policy=self._policy.at(stream),
            unsent=services.unsent,
            system=services.system,
        )

    def _asked(self, stream: int, frames: list[bytes]) -> ReplayAsked | None:
        """Return the relay's event for a router's replay request; None if the view of the router is no longer open.

        The event also names the routers that may have sent the request.
        """
        peer = self._replays[stream].peer_of(frames[0])
        number = self._view_of(peer.key)
        live = self._live.get((number, stream))
        if live is None:
            return None
        rebuilds = peer.identity.startswith(REBUILDS)
        routers, alone = ((), True) if rebuilds else live.routers_of(peer)
        return ReplayAsked(number, stream, frames, routers, alone, rebuilds)

    def _snapshot_asked(self, stream: int, frames: list[bytes]) -> SnapshotAsked | None:
        number = self._view_of(self._snapshots[stream].peer_of(frames[0]).key)
        return SnapshotAsked(number, stream, frames) if (number, stream) in self._live else None

    def publish(self, command: Publish) -> None:
        """Queue one batch for the routers of its stream."""
        self._live[command.output, command.stream].publish(
            command.topic, command.seq.to_bytes(8, "big") + command.publisher_id, command.payload, command.events
        )

    def flush(self) -> None:
        """Send the batches that were queued since the last flush."""
        waiting = self._waiting
        while waiting:
            waiting.pop()()

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Send the answer to a replay or snapshot request."""
        servers = self._replays if isinstance(command, AnswerReplay) else self._snapshots
        servers[command.stream].send(command.answer, messages)
        if isinstance(command, AnswerReplay) and command.again:
            self._live[command.output, command.stream].repeat_state(command.again)

    def send_state(self, command: SendState) -> None:
        """Send a stream's state (its live blocks) to the routers that have subscribed or have lost batches."""
        live = self._live.get((command.output, command.stream))
        if live is not None:
            live.send_state(command)

    @property
    def routers(self) -> list[RouterView]:
        """The connected routers and the most recently disconnected routers."""
        if self._hub is not None:
            return self._hub.routers
        return [
            view
            for (number, _), live in self._live.items()
            for view in (*live.connected, *(live.left if number == self._output else ()))
        ]

    @property
    def rings(self) -> list[Ring]:
        """The ring of recent batches of each stream. kvbus sends them to routers that have not got them yet."""
        return [live.ring for live in self._live.values()]

    @property
    def queue_max(self) -> int:
        """Number of batches that wait for the router with the longest queue."""
        return max((live.queue_max for live in self._live.values()), default=0)

    @property
    def behind_seconds(self) -> float:
        """Age in seconds of the oldest batch that some connected router lacks."""
        return max((live.behind_seconds for live in self._live.values()), default=0.0)

    def allow(self, policy: PeerPolicy) -> bool:
        """Replace the list of CURVE keys whose owners may connect. Return False if the output uses no keys.

        Disconnect the routers whose keys are not on the new list, or have other rights on it.
        """
        if policy.curve is None:
            return False
        before, self._policy = self._policy.curve, policy
        known = {} if before is None else before.clients
        # Disconnect routers whose rights have changed. They connect again, and then get the view for their new rights.
        moved = {key for key, each in policy.curve.clients.items() if key in known and known[key].grant != each.grant}
        for stream, keys in self._keys.items():
            clients = policy.clients(stream)
            for allowed in (clients.keys() - moved, clients):
                keys.allow(allowed, self._peers_of(stream))
        for servers in (self._replays, self._snapshots):
            for stream, server in servers.items():
                clients = policy.clients(stream)
                server.allow(clients.keys() - moved)
                server.allow(clients)
        return True

    def _peers_of(self, stream: int) -> list[Peer]:
        if self._hub is not None:
            return self._hub.peers
        return [peer for (_, at), live in self._live.items() if at == stream for peer in live.peers]

    def reopen(self, policy: PeerPolicy) -> None:
        """Close all sockets, and open them again with the keys of ``policy``."""
        self._policy = policy
        if self._hub is not None:
            self._hub.reopen(self._opener(_HUB, self._config.endpoint))
        else:
            for stream in self.streams:
                self._live[self._output, stream].close()
                opener = reopening(self._opener(stream, self._config.stream_endpoints(stream).endpoint))
                self._live[self._output, stream] = self._publisher(self._output, stream, self._topics[stream], opener)
        for servers in (self._replays, self._snapshots):
            for stream, server in servers.items():
                server.reopen(policy.at(stream))

    @property
    def streams(self) -> list[int]:
        """Slots (numbers) of the streams that this output serves now."""
        return [stream for number, stream in self._live if number == self._output]

    @property
    def _servers(self) -> list[ReplayServer]:
        return [*self._replays.values(), *self._snapshots.values()]

    @property
    def busy(self) -> int:
        """Number of answers that are not completely sent, plus the number of routers to which data is being sent."""
        return sum(live.busy for live in self._live.values()) + sum(server.busy for server in self._servers)

    def end_answers(self) -> int:
        """End all unfinished answers to replay and snapshot requests with the marker END.

        Count them, and return their number.
        """
        return sum(server.end() for server in self._servers)

    def retire(self, stream: int) -> None:
        """Stop serving one stream for good, because its source no longer exists.

        Before that, send the stream's state to the routers that lack batches. The state is empty by then, so these
        routers remove the stream's blocks.
        """
        live = self._live.get((self._output, stream))
        if live is not None:
            live.retire()
        self.close(stream)

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Close one stream's sockets. Before that, send its queued messages for up to ``linger`` seconds."""
        for servers in (self._replays, self._snapshots):
            server = servers.pop(stream, None)
            if server is not None:
                server.close(linger)
        self._keys.pop(stream, None)
        own = self._live.pop((self._output, stream), None)
        for key in [key for key in self._live if key[1] == stream]:
            self._live.pop(key).close()
        if own is not None:
            self._services.interposed.pop(self._config.stream_endpoints(stream).endpoint, None)
            own.close(linger)
