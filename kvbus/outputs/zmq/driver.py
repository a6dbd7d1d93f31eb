"""The ZeroMQ driver: for each stream a publisher and, where configured, a replay and a snapshot server."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvbus.config import OutputConfig
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish
from kvbus.core.events import ReplayAsked, SnapshotAsked
from kvbus.outputs.contract import Services
from kvbus.transport.egress import LiveOutput
from kvbus.transport.libzmq_replay import LibzmqReplayServer
from kvbus.transport.replay import ReplayServer
from kvbus.transport.replay_budget import Budget
from kvbus.transport.sockets import PeerPolicy

log = logging.getLogger("kvbus.daemon")

AnswerServer = ReplayServer | LibzmqReplayServer


class ZmqOutput:
    """One output's sockets, by stream; see :class:`~kvbus.outputs.contract.OutputDriver`.

    Args:
        output: index of the output in the configuration.
        config: the output's configuration.
        services: the daemon's services.
    """

    def __init__(self, output: int, config: OutputConfig, services: Services) -> None:
        self._output = output
        self._config = config
        self._services = services
        self._budget = Budget(services.max_replay_sessions, services.stats)
        self._live: dict[int, LiveOutput] = {}
        self._waiting: list[LiveOutput] = []
        self._replays: dict[int, AnswerServer] = {}
        self._snapshots: dict[int, AnswerServer] = {}

    def open(self, stream: int, policy: PeerPolicy) -> None:
        """Bind one stream's endpoints, or connect its live endpoint.

        Raises:
            BindError: an endpoint cannot be bound; nothing of the stream is left open.
        """
        config, services = self._config, self._services
        endpoints = config.stream_endpoints(stream)
        try:
            self._live[stream] = LiveOutput(
                services.context,
                endpoints.endpoint,
                bind=config.bind,
                send_hwm=config.send_hwm,
                queue_limit=config.queue_batches,
                stats=services.stats,
                before_send=services.before_send,
                policy=policy,
                waiting=self._waiting,
            )
            log.info("output %s: %s %s", config.name, "bound" if config.bind else "connecting to", endpoints.endpoint)
            if endpoints.replay_endpoint is not None:
                self._replays[stream] = self._server(
                    endpoints.replay_endpoint, lambda frames: ReplayAsked(self._output, stream, frames), policy
                )
                log.info("output %s: replay at %s", config.name, endpoints.replay_endpoint)
            if endpoints.snapshot_endpoint is not None:
                self._snapshots[stream] = self._server(
                    endpoints.snapshot_endpoint, lambda frames: SnapshotAsked(self._output, stream, frames), policy
                )
                log.info("output %s: snapshots at %s", config.name, endpoints.snapshot_endpoint)
        except BaseException:
            self.close(stream)
            raise

    def _server(
        self, endpoint: str, event: Callable[[list[bytes]], ReplayAsked | SnapshotAsked], policy: PeerPolicy
    ) -> AnswerServer:
        services = self._services

        def on_request(frames: list[bytes]) -> None:
            services.feed(event(frames))

        if policy.curve is None:
            return ReplayServer(
                endpoint,
                on_request=on_request,
                stats=services.stats,
                budget=self._budget,
                before_send=services.before_send,
                policy=policy,
                clock=services.clock,
            )
        return LibzmqReplayServer(  # kvbus's own ZMTP does not know CURVE
            services.context,
            endpoint,
            on_request=on_request,
            stats=services.stats,
            budget=self._budget,
            before_send=services.before_send,
            policy=policy,
            clock=services.clock,
        )

    def publish(self, command: Publish) -> None:
        """Queue one batch."""
        self._live[command.stream].publish(
            command.topic, command.seq.to_bytes(8, "big") + command.publisher_id, command.payload, command.events
        )

    def flush(self) -> None:
        """Send the batches of this burst."""
        waiting = self._waiting
        while waiting:
            waiting.pop().turn()

    def answer(self, command: AnswerReplay | AnswerSnapshot) -> None:
        """Send an answer."""
        servers = self._replays if isinstance(command, AnswerReplay) else self._snapshots
        servers[command.stream].send(command.answer)

    def reopen(self, policy: PeerPolicy) -> None:
        """Open all sockets again, with other keys."""
        for live in self._live.values():
            live.reopen(policy)
        for server in self._servers:
            server.reopen(policy)

    @property
    def streams(self) -> list[int]:
        """Slots of the open streams."""
        return list(self._live)

    @property
    def _servers(self) -> list[AnswerServer]:
        return [*self._replays.values(), *self._snapshots.values()]

    @property
    def busy(self) -> int:
        """Unfinished answers."""
        return sum(server.busy for server in self._servers)

    def end_answers(self) -> int:
        """Send END for every answer that is not sent whole, and count them; how many they were."""
        return sum(server.end() for server in self._servers)

    def close(self, stream: int, linger: float = 0.0) -> None:
        """Close one stream's sockets; queued messages have ``linger`` seconds to leave."""
        for servers in (self._replays, self._snapshots):
            server = servers.pop(stream, None)
            if server is not None:
                server.close(linger)
        live = self._live.pop(stream, None)
        if live is not None:
            live.close(linger)
