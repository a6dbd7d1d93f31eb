"""Reconnect to engines whose host name has a new address while the old connection still exists.

An engine that is frozen, or has lost its route, sends no FIN. So the connection remains, and libzmq resolves a name
only when it connects. Therefore kvbus resolves the name of each silent engine again. If the connected address is no
longer in the answer, kvbus reconnects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Final, Protocol

from kvbus.common.tasks import end_tasks
from kvbus.config import SourceStream
from kvbus.config.endpoints import parse_endpoint
from kvbus.core.relay import Relay
from kvbus.daemon.changing import Changes
from kvbus.daemon.source_sockets import SourceSockets

log = logging.getLogger("kvbus.daemon")

INTERVAL: Final = 15.0
"""Seconds between two rounds. An engine is silent if it has sent no batch since the last round."""


class Daemon(Protocol):
    """The sources of the daemon, and the means to reconnect them."""

    streams: dict[int, SourceStream]
    relay: Relay
    source_sockets: SourceSockets
    changing: asyncio.Lock

    @property
    def changes(self) -> Changes:
        """The changes of the daemon, which reconnect a source."""


class MovedNames:
    """A watch of silent engines' host names.

    Args:
        daemon: the daemon with the sources.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._batches: dict[int, int] = {}
        """Number of batches received until the last round, by slot."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start resolving names."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop resolving names."""
        await end_tasks([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            by_host: dict[str, list[SourceStream]] = {}
            for stream in self._silent():
                by_host.setdefault(parse_endpoint(stream.endpoint).host, []).append(stream)
            for host, streams in by_host.items():  # one at a time: a DNS server that hangs then blocks only one thread
                addresses = await _look_up(host)
                for stream in streams if addresses else ():
                    await self._follow(stream, addresses)

    def _silent(self) -> list[SourceStream]:
        before, sources = self._batches, self._daemon.relay.sources
        self._batches = {slot: sources[slot].stats.batches for slot in self._daemon.streams}
        return [
            stream
            for slot, stream in self._daemon.streams.items()
            if self._batches[slot] == before.get(slot) and self._daemon.source_sockets.reached(slot) is not None
        ]

    async def _follow(self, stream: SourceStream, addresses: set[str]) -> None:
        daemon = self._daemon
        async with daemon.changing:
            reached = daemon.source_sockets.reached(stream.index)
            if daemon.streams.get(stream.index) is not stream or reached is None or reached in addresses:
                return
            text = "source %s: the name in %s leads to %s now, and no longer to %s: connecting again"
            where = ", ".join(sorted(addresses))
            log.warning(text, stream.label, stream.endpoint, where, reached, extra=stream.log_fields)
            await daemon.changes.reconnect(stream)


async def _look_up(host: str) -> set[str]:
    """Return the addresses of a host name; empty if it is an address, or cannot be resolved now."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            log.debug("%s cannot be looked up: %s", host, error)
            return set()
        return {str(address[0]) for *_, address in found}
    return set()
