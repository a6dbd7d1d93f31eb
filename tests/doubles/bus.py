"""A kvbus daemon on real sockets, in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvbus.config import Config, load
from kvbus.core.source import Source
from kvbus.daemon.changing import change_to
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import read_keys
from tests.doubles.runtimes import runtime_of
from tests.ports import free_ports

PATIENCE = 150.0
"""Seconds that a test waits for a condition before it fails."""


async def eventually(condition: Callable[..., object], what: str, patience: float = PATIENCE) -> None:
    """Wait until a condition holds, and fail after ``patience`` seconds.

    The condition is a function or a coroutine function.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while not ((await found) if inspect.isawaitable(found := condition()) else found):
        if loop.time() > end:
            raise AssertionError(f"not within {patience:g} s: {what}")
        await asyncio.sleep(0.005)


def wait_for(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Block until a condition holds, and return its result. This function needs no event loop."""
    end = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {patience:g} s: {what}"
        time.sleep(0.01)
    return found


class Bus:
    """A running kvbus daemon on free loopback ports, with one output and, by default, one engine rank as its source."""

    def __init__(self, daemon: Daemon, ports: list[int]) -> None:
        self.daemon = daemon
        self.engine, self.engine_replay, self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in ports[:4])

    @property
    def source(self) -> Source:
        return self.daemon.relay.sources[0]

    def caught_up(self, seq: int) -> bool:
        """Return whether kvbus has relayed the engine's batch with the number `seq`, and the source is ``live``."""
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


async def change_sources(daemon: Daemon, wanted: Config) -> None:
    """Change the daemon's sources to those of another configuration.

    Raises:
        KvbusError: an endpoint, the store of seqs or a key file is not available. The daemon has changed nothing.
    """
    async with daemon.changing:
        change = change_to(daemon.config, wanted, daemon.source_sockets.is_open, daemon.placement)
        await daemon.changes.apply(change, await asyncio.to_thread(read_keys, wanted))
