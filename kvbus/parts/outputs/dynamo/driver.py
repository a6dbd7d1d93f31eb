"""The driver of outputs on Dynamo's event plane.

Each stream has a live endpoint, at which routers get RouterEvents, and records in Dynamo's discovery.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvbus.config import DynamoPlane, OutputConfig, parse_endpoint
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.events import Subscribed
from kvbus.core.stats import RouterView
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.dynamo.announcer import Announcer, Source, Store
from kvbus.parts.outputs.dynamo.messages import TOPIC, Numbering, rank_of
from kvbus.parts.outputs.dynamo.registry import EtcdStore, FileStore, Scope
from kvbus.transport.live.endpoint import reopening
from kvbus.transport.live.stream import UNSENT, LivePublisher
from kvbus.transport.sender import Sender
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.reasons import DISCONNECTS, REFUSALS, Reason
from kvbus.transport.zmtp.settings import Settings

log = logging.getLogger("kvbus.daemon")

SETTLE: Final = 1.0
"""Time in seconds from a router's connection until kvbus sends it the state.

After connecting, a router first combines the discovery records of kvbus with the model card of the worker. Until it has
done that, it silently drops events.
"""

PUBLISHER_BITS: Final = 53
"""Number of bits of a publisher id. The ids are written as JSON, which represents integers of up to 53 bits exactly."""


class Stream(LivePublisher):
    """The live publisher of one stream. It numbers the events for each connection separately."""

    numbering: Numbering

    def opened(self, peer: Peer) -> None:
        """Accept a router's new connection, and give it its own counter of Dynamo's event ids."""
        peer.rewrite = self.numbering.connection().rewrite
        super().opened(peer)


class DynamoOutput:
    """The driver of one output on Dynamo's event plane; see :class:`~kvbus.parts.outputs.contract.OutputDriver`.

    Args:
        output: the output's index in the configuration.
        config: the output's configuration.
        services: the daemon's counters, functions and limits for this driver.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        self._output = output
        self._config = config
        self._services = services
        self._live: dict[int, Stream] = {}
        self._waiting: list[Callable[[], None]] = []
        self._sender = Sender()
        plane = config.dynamo or DynamoPlane()
        self._plane = plane
        scope = Scope(plane.namespace, plane.component, plane.endpoint)
        self._host = plane.advertise or _own_address(config.endpoint)
        self._announcer = Announcer(config.name, scope, self._store(), self._host)
        stats = services.stats
        stats.router_queue_limit = config.send_hwm
        stats.refused.update(dict.fromkeys(REFUSALS, 0))
        stats.router_disconnects.update(dict.fromkeys(DISCONNECTS, 0))

    def open(self, stream: int, topic: bytes, policy: PeerPolicy) -> None:
        """Bind one stream's endpoint.

        Announce the endpoint in Dynamo's discovery as soon as the stream's worker is known there.

        Raises:
            BindError: the endpoint cannot be bound.
        """
        del policy  # not needed, because Dynamo's routers have no CURVE keys
        worker, _, rank = topic.decode().rpartition("@")
        endpoint = self._config.stream_endpoints(stream).endpoint
        source = Source(
            worker,
            int(rank) if rank.isdigit() else 0,
            self._advertised(endpoint),
            self._plane.workers.get(worker),
            lambda: secrets.randbits(PUBLISHER_BITS),
            lambda worker, publisher, rank: self._moved(stream, worker, publisher, rank),
        )
        self._live[stream] = self._live_side(stream, endpoint, Numbering(0, 0, source.rank, self._left_out))
        fields = {"output": self._config.name, "stream": stream}
        log.info("output %s: bound %s for Dynamo", self._config.name, endpoint, extra=fields)
        self._announcer.add(stream, source)

    def _store(self) -> Store:
        discovery = self._plane.discovery
        parts = urlsplit(discovery)
        return FileStore(Path(unquote(parts.path))) if parts.scheme == "file" else EtcdStore(discovery, self._gone)

    def _gone(self, path: str) -> None:
        self._services.stats.records_gone += 1
        log.warning(
            "output %s: another process deleted or replaced record %s; kvbus writes it again", self._config.name, path
        )

    def _advertised(self, endpoint: str) -> str:
        return f"tcp://{self._host}:{parse_endpoint(endpoint).port}"

    def _moved(self, stream: int, worker: int | None, publisher: int, rank: int) -> None:
        """Use a new publisher id and new event ids for a stream whose worker or rank has changed.

        Disconnect its routers, because they know the stream by its former publisher id.
        """
        live = self._live[stream]
        live.numbering = Numbering(publisher, worker or 0, rank, self._left_out)
        for peer in live.peers:
            peer.close(Reason.CLOSED)

    def _left_out(self, events: int) -> None:
        self._services.stats.dropped_events["not_local"] += events

    def _live_side(self, stream: int, endpoint: str, numbering: Numbering, *, again: bool = False) -> Stream:
        config, services = self._config, self._services

        def refused(reason: str, address: str, _detail: str) -> None:
            services.stats.refused[reason] += 1
            fields = {"output": config.name, "stream": stream, "peer": address}
            log.info(
                "output %s: refused a connection from %s: %s", config.name, address or "a peer", reason, extra=fields
            )

        def open_endpoint(handler: PeerHandler) -> Listener:
            settings = Settings(unsent_bytes=UNSENT, unsent=services.unsent, system=services.system)
            return Listener(endpoint, Role.PUB, handler, settings=settings, refused=refused)

        made = Stream(
            stream,
            TOPIC,
            config.name,
            reopening(open_endpoint) if again else open_endpoint,
            sender=self._sender,
            stats=services.stats,
            queue_batches=config.queue_batches,
            send_hwm=config.send_hwm,
            send_bytes=config.send_bytes,
            request_state=self._requests(stream) if config.on_subscribe == "state" else None,
            waiting=self._waiting,
        )
        made.numbering = numbering
        return made

    def _requests(self, stream: int) -> Callable[[tuple[int, ...]], None]:
        def request_state(routers: tuple[int, ...]) -> None:
            """Request the state for those of ``routers`` that have been connected for at least :data:`SETTLE` seconds.

            The live publisher calls this function again for the remaining routers.
            """
            now = asyncio.get_running_loop().time()
            peers = self._live[stream].peers
            settled = tuple(peer.id for peer in peers if peer.id in routers and now - peer.since >= SETTLE)
            if settled:
                self._services.feed(Subscribed(self._output, stream, settled))

        return request_state

    def publish(self, command: Publish) -> None:
        """Queue one batch for the routers of its stream."""
        rank = rank_of(command.payload)
        if rank != self._live[command.stream].numbering.rank:
            self._announcer.set_rank(command.stream, rank)
        self._live[command.stream].publish(TOPIC, command.seq.to_bytes(8, "big"), command.payload, command.events)

    def flush(self) -> None:
        """Send the batches that were queued since the last flush."""
        waiting = self._waiting
        while waiting:
            waiting.pop()()

    def answer(self, command: AnswerReplay | AnswerSnapshot, messages: Iterator[list[bytes]]) -> None:
        """Do nothing, because the routers of this output cannot send requests."""

    def send_state(self, command: SendState) -> None:
        """Send a stream's state (its live blocks) to the routers that have subscribed or have lost batches."""
        live = self._live.get(command.stream)
        if live is not None:
            live.send_state(command)

    @property
    def routers(self) -> list[RouterView]:
        """The connected routers and the most recently disconnected routers."""
        return [view for live in self._live.values() for view in (*live.connected, *live.left)]

    @property
    def queue_max(self) -> int:
        """Number of batches that wait for the router with the longest queue."""
        return max((live.queue_max for live in self._live.values()), default=0)

    @property
    def behind_seconds(self) -> float:
        """Age in seconds of the oldest batch that some connected router lacks."""
        return max((live.behind_seconds for live in self._live.values()), default=0.0)

    def allow(self, policy: PeerPolicy) -> bool:
        """Return False (nothing was changed), because this output has no list of allowed keys."""
        del policy
        return False

    def reopen(self, policy: PeerPolicy) -> None:
        """Disconnect all routers, and open the endpoints again."""
        del policy
        for stream, live in list(self._live.items()):
            live.close()
            endpoint = self._config.stream_endpoints(stream).endpoint
            self._live[stream] = self._live_side(stream, endpoint, live.numbering, again=True)

    @property
    def streams(self) -> list[int]:
        """Slots (numbers) of the streams that this output serves now."""
        return list(self._live)

    @property
    def busy(self) -> int:
        """Number of routers to which data was not completely sent yet."""
        return sum(live.busy for live in self._live.values())

    def end_answers(self) -> int:
        """Return 0, because this output sends no answers."""
        return 0

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Delete one stream's records in Dynamo's discovery, and close the stream's endpoint.

        Before the endpoint closes, send its queued messages for up to ``linger`` seconds.
        """
        self._announcer.remove(stream)
        live = self._live.pop(stream, None)
        if live is not None:
            live.close(linger)


def _own_address(endpoint: str) -> str:
    """Return the address at which routers on other hosts reach this host.

    It is the host in ``endpoint``. If that is a wildcard, it is the address to which this host's name resolves.
    """
    address = parse_endpoint(endpoint)
    if not address.is_wildcard:
        return address.host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
