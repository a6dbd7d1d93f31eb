"""The sockets of all outputs: for each stream a publisher and, where configured, a replay and a snapshot server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvbus.config import Config
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish
from kvbus.core.events import RelayEvent, ReplayAsked, SnapshotAsked
from kvbus.core.relay import Relay
from kvbus.daemon.keys import Keys, output_domain
from kvbus.transport.egress import LiveOutput
from kvbus.transport.replay import Budget, ReplayServer
from kvbus.transport.sockets import Context, Guard
from kvbus.transport.zap import ZapHandler

log = logging.getLogger("kvbus.daemon")

LOOK_AGAIN: Final = 0.01
"""Seconds between two looks at whether all answers are sent."""

Place = tuple[int, int]
"""Output and stream."""


class Outlets:
    """Open, feed and close them, by output and stream.

    Args:
        context: the process's context.
        config: the configuration.
        relay: whose outputs these are.
        feed: takes routers' requests.
        before_send: called before anything leaves; None where no state is kept.
        clock: seconds in which the process was running, for what is given up.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        relay: Relay,
        feed: Callable[[RelayEvent], None],
        before_send: Callable[[], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._config = config
        self._relay = relay
        self._feed = feed
        self._before_send = before_send
        self._clock = clock
        self._budgets = [Budget(config.limits.max_replay_sessions, output.stats) for output in relay.outputs]
        self._live: dict[Place, LiveOutput] = {}
        self._waiting: list[LiveOutput] = []
        self._replays: dict[Place, ReplayServer] = {}
        self._snapshots: dict[Place, ReplayServer] = {}

    def open(self, number: int, at: int, guard: Guard) -> None:
        """Bind (or dial) one stream's endpoints.

        Raises:
            BindError: one of them cannot be bound; none of this stream's is left open.
        """
        output = self._config.outputs[number]
        endpoints = output.stream_endpoints(at)
        try:
            self._live[number, at] = LiveOutput(
                self._context,
                endpoints.endpoint,
                bind=output.bind,
                send_hwm=output.send_hwm,
                queue_limit=output.queue_batches,
                stats=self._relay.outputs[number].stats,
                before_send=self._before_send,
                guard=guard,
                waiting=self._waiting,
            )
            log.info("output %s: %s %s", output.name, "bound" if output.bind else "dialling", endpoints.endpoint)
            if endpoints.replay_endpoint is not None:
                self._replays[number, at] = self._server(
                    number, endpoints.replay_endpoint, self._asker(number, at), guard
                )
                log.info("output %s: replay at %s", output.name, endpoints.replay_endpoint)
            if endpoints.snapshot_endpoint is not None:
                asker = self._snapshot_asker(number, at)
                self._snapshots[number, at] = self._server(number, endpoints.snapshot_endpoint, asker, guard)
                log.info("output %s: snapshots at %s", output.name, endpoints.snapshot_endpoint)
        except BaseException:
            self.close(number, at)
            raise

    def _server(
        self, number: int, endpoint: str, on_request: Callable[[list[bytes]], None], guard: Guard
    ) -> ReplayServer:
        return ReplayServer(
            self._context,
            endpoint,
            on_request=on_request,
            stats=self._relay.outputs[number].stats,
            budget=self._budgets[number],
            before_send=self._before_send,
            guard=guard,
            clock=self._clock,
        )

    def _asker(self, number: int, at: int) -> Callable[[list[bytes]], None]:
        return lambda frames: self._feed(ReplayAsked(number, at, frames))

    def _snapshot_asker(self, number: int, at: int) -> Callable[[list[bytes]], None]:
        return lambda frames: self._feed(SnapshotAsked(number, at, frames))

    def publish(self, command: Publish) -> None:
        """Send one batch."""
        self._live[command.output, command.stream].publish(
            command.topic, command.seq.to_bytes(8, "big") + command.publisher_id, command.payload, command.events
        )

    def flush(self) -> None:
        """The work at hand is done: send what it gave."""
        waiting = self._waiting
        while waiting:
            waiting.pop().turn()

    def answer(self, command: AnswerReplay | AnswerSnapshot) -> None:
        """Send an answer."""
        servers = self._replays if isinstance(command, AnswerReplay) else self._snapshots
        servers[command.output, command.stream].send(command.answer)

    def reopen(self, number: int, guard: Guard) -> None:
        """All of an output's sockets anew, with other keys."""
        for (output, _), live in self._live.items():
            if output == number:
                live.reopen(guard)
        for servers in (self._replays, self._snapshots):
            for (output, _), server in servers.items():
                if output == number:
                    server.reopen(guard)

    def close(self, number: int, at: int, linger: float = 0.0) -> None:
        """Close one stream's sockets; what is queued has ``linger`` seconds to leave."""
        for servers in (self._replays, self._snapshots):
            server = servers.pop((number, at), None)
            if server is not None:
                server.close(linger)
        live = self._live.pop((number, at), None)
        if live is not None:
            live.close(linger)

    async def drain(self, seconds: float) -> None:
        """Wait until all replay answers are sent; who still waits after ``seconds`` is sent END and counted."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        servers = [*self._replays.values(), *self._snapshots.values()]
        # they are sent by callbacks, which set no event
        while any(server.busy for server in servers) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN)
        cut_off = sum(server.end() for server in servers)
        if cut_off:
            log.warning("%d replay answers were not finished within shutdown_timeout", cut_off)

    def close_all(self, linger: float) -> None:
        """Close everything; what libzmq holds has ``linger`` seconds to leave."""
        for number, at in list(self._live):
            self.close(number, at, linger)


def guard_of(config: Config, number: int, keys: Keys) -> Guard:
    """What an output takes from its routers."""
    domain = output_domain(config.outputs[number].name)
    return Guard(config.limits.max_request_bytes, keys.get(domain), domain)


def allow(zap: ZapHandler, keys: Keys) -> None:
    """Tell the ZAP handler every allow-list."""
    for domain, curve in keys.items():
        zap.allow(domain, curve.clients)
