"""Reconnect to an engine whose host name has a new address while the old connection still exists.

An engine that freezes or loses its network sends no FIN packet, so the TCP connection remains. A live stream resolves
a host name only when it connects. Therefore kvbus regularly resolves the host name of each silent engine. If the
address of the connection is no longer among the results, kvbus reconnects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Final

from kvbus.common.tasks import end_tasks
from kvbus.config import SourceStream
from kvbus.config.endpoints import parse_endpoint
from kvbus.daemon.changing import ChangingHost

log = logging.getLogger("kvbus.daemon")

INTERVAL: Final = 15.0
"""Seconds between two rounds in which kvbus resolves the host names of silent engines.

An engine is silent if it has sent no batch since the previous round.
"""


class MovedNames:
    """A watch that resolves the host names of silent engines, and reconnects to engines with a new address.

    Args:
        daemon: the daemon with the sources.
    """

    def __init__(self, daemon: ChangingHost) -> None:
        self._daemon = daemon
        self._batches: dict[int, int] = {}
        """Number of batches that each source had received when kvbus last looked for silent engines, by slot."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start resolving the names of silent engines."""
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
            for host, streams in by_host.items():  # one by one, so that a hanging DNS server blocks only one thread
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
            text = "source %s: the host name in %s now has address %s, and no longer %s: connecting again"
            where = ", ".join(sorted(addresses))
            log.warning(text, stream.label, stream.endpoint, where, reached, extra=stream.log_fields)
            await daemon.changes.reconnect(stream)


async def _look_up(host: str) -> set[str]:
    """Return the IP addresses of a host name.

    The set is empty if ``host`` is an IP address, or if it cannot be resolved.
    """
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
