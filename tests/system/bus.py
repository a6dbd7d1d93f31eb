"""A bus under test on real sockets, an engine in front of it and a router behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvbus.config import load
from kvbus.core.source import Source
from kvbus.daemon.daemon import Daemon
from tests.doubles.runtimes import runtime_of
from tests.doubles.socket_router import END, Context, SocketRouter
from tests.ports import free_ports

PATIENCE = 150.0
"""Seconds after which a condition that should hold is a failure."""


async def eventually(condition: Callable[..., object], what: str, patience: float = PATIENCE) -> None:
    """Wait until the condition holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while not condition():
        if loop.time() > end:
            raise AssertionError(f"not within {patience:g} s: {what}")
        await asyncio.sleep(0.005)


class Bus:
    """A running daemon with one engine rank (unless told otherwise) and one output, on free ports of loopback."""

    def __init__(self, daemon: Daemon, ports: list[int]) -> None:
        self.daemon = daemon
        self.engine, self.engine_replay, self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in ports[:4])

    @property
    def source(self) -> Source:
        return self.daemon.relay.sources[0]

    def caught_up(self, seq: int) -> bool:
        """Whether the batch `seq` of the engine has been relayed and the source is at rest."""
        return self.source.sequencer.next == seq + 1 and self.source.state == "live"


@contextlib.asynccontextmanager
async def running_bus(*, bind: bool = False, one_port: bool = False, **settings: Any) -> AsyncIterator[Bus]:
    ports = free_ports(4)
    if one_port:
        bind, ports[0] = True, ports[2]
    engine, engine_replay, out, out_replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    source = {"name": "engine", "endpoint": engine, "replay_endpoint": engine_replay, "bind": bind}
    output = {"name": "routers", "endpoint": out, "replay_endpoint": out_replay, "heartbeat": 0}
    output |= {"interpose": one_port} | settings.pop("output", {})
    source |= settings.pop("source", {})
    overrides = {
        "sources": [source, *settings.pop("more_sources", ())],
        "outputs": [output],
        "http": "127.0.0.1:0",
        "probe_interval": 0.2,
        "replay_timeout": 1.0,
        **settings,
    }
    daemon = Daemon(load(None, env={}, overrides=overrides), runtime=runtime_of(settings))
    await daemon.start()
    try:
        yield Bus(daemon, ports)
    finally:
        await daemon.close(drain=0)


class RouterOnASet(SocketRouter):
    """A trusting router: repairs holes by the standard replay, as routers do, and takes whatever it is answered."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        super().__init__(endpoint, replay_endpoint, context)
        self._highest = -1
        self._held: list[tuple[int, bytes]] = []

    def _take(self, seq: int, payload: bytes) -> None:
        self.view.apply(seq, payload)
        self.next = max(self.next, seq + 1)

    def read(self) -> int:
        """Take in whatever the live stream has; the next seq."""
        for seq, payload in self.arrived():
            self._take(seq, payload)
        return self.next

    async def follow(self) -> None:
        """Take in the live stream; where it has a hole, ask the replay for what is missing first."""
        for seq, payload in self.arrived():
            self.went_back += seq <= self._highest
            self._highest = max(self._highest, seq)
            self._held.append((seq, payload))
        while self._held:
            if self._held[0][0] > self.next:
                await self.replay(self.next)
                if self._held[0][0] > self.next:
                    return  # the bus itself is not that far: it is being started
            self._take(*self._held.pop(0))

    async def replay(self, start: int = 0) -> list[int]:
        """Ask the standard replay and take in the answer; its seqs."""
        seqs: list[int] = []
        dealer = self.request(start)
        try:
            while True:
                await eventually(lambda: dealer.poll(0), "an answer to a replay request")
                frames = dealer.recv_multipart()
                if frames[-2] == END:
                    return seqs
                seqs.append(int.from_bytes(frames[-2], "big"))
                self._take(seqs[-1], frames[-1])
        finally:
            dealer.close(0)
