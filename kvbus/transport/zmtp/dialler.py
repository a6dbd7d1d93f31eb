"""A connecting endpoint: for a router that binds its SUB. It dials again and again, and never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Mapping
from typing import Final

from kvbus.common.errors import BindError
from kvbus.transport.zmtp import addresses
from kvbus.transport.zmtp.connections import Connections, Refused
from kvbus.transport.zmtp.mechanism import MechanismFactory
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.roles import Role
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS, Settings

FIRST: Final = 0.1
"""Seconds before the second attempt. Each further wait is twice as long."""

LONGEST: Final = 2.0
"""Seconds before an attempt, at most: a restarted router is found again within two seconds."""

CONNECT_TIMEOUT: Final = 5.0
"""Seconds for one address to accept."""


class Dialler:
    """Keep a connection to one endpoint, until :meth:`close`. It needs a running event loop.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``. A name is looked up at every attempt.
        role: PUB or ROUTER.
        handler: what to do with the peer.
        settings: bounds and times.
        refused: called with reason and address for each connection that does not become a peer.
        mechanism: makes each connection's security mechanism; None for NULL.

    Raises:
        BindError: the endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        role: Role,
        handler: PeerHandler,
        *,
        settings: Settings = DEFAULT_SETTINGS,
        refused: Refused | None = None,
        mechanism: MechanismFactory | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._path = addresses.ipc_address(endpoint)
        self._host, self._port = "", 0
        if self._path is None:
            try:
                self._host, self._port = addresses.split_tcp(endpoint)
            except ValueError as error:
                raise BindError(endpoint, str(error), verb="connect to") from error
        self._connections = Connections(role, handler, settings, refused, mechanism)
        self._task = self._loop.create_task(self._run())

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The peer, if there is one, by its id."""
        return self._connections.peers

    async def _run(self) -> None:
        wait = FIRST
        while True:
            connected = await self._dial()
            if connected is not None:
                connection = self._connections.start(connected, accepting=False)
                if connection is not None and await connection.over:
                    wait = FIRST
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - so that many do not dial at once
            wait = min(2 * wait, LONGEST)

    async def _dial(self) -> socket.socket | None:
        """Connect to the first address that accepts; None if there is none."""
        for family, address in await self._resolve():
            connected = socket.socket(family, socket.SOCK_STREAM)
            try:
                addresses.prepare(connected)
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await self._loop.sock_connect(connected, address)
            except OSError:  # TimeoutError is one
                connected.close()
            except BaseException:
                connected.close()
                raise
            else:
                return connected
        return None

    async def _resolve(self) -> list[tuple[int, tuple[object, ...] | str]]:
        if self._path is not None:
            return [(socket.AF_UNIX, self._path)]
        with contextlib.suppress(OSError):
            found = await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            return [(family, address) for family, _, _, _, address in found]
        return []

    def close(self, linger: float = 0.0) -> None:
        """End the connection and dial no more; what waits for the peer has ``linger`` seconds to leave."""
        self._task.cancel()
        self._connections.close(linger)
