"""All connections of one endpoint: those in their handshake, the peers, and the bounds of both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

from kvbus.transport.zmtp import tcp
from kvbus.transport.zmtp.addresses import peer_address
from kvbus.transport.zmtp.connection import Connection
from kvbus.transport.zmtp.mechanism import MechanismFactory
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.roles import PUBLISHERS, Role
from kvbus.transport.zmtp.settings import Settings
from kvbus.transport.zmtp.turns import Turns

CHECK: Final = 5.0
"""Seconds between two looks for peers that are gone."""

_SCRATCH: Final = 16 * 1024
"""Bytes of one read."""

Refused = Callable[[str, str, str], None]
"""Called for each connection that ended before its handshake did, or was not even begun: reason, address, and what the
peer did where it broke a rule."""


class Connections:
    """The connections of a listener or a dialler.

    Args:
        role: the endpoint's socket type.
        handler: what the role does with peers.
        settings: bounds and times.
        refused: called for each connection that does not become a peer.
        mechanism: makes each connection's security mechanism; None for NULL.
    """

    def __init__(
        self,
        role: Role,
        handler: PeerHandler,
        settings: Settings,
        refused: Refused | None,
        mechanism: MechanismFactory | None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.role = role
        self.handler = handler
        self.settings = settings
        self.mechanism = mechanism
        self.turns = Turns()
        self.scratch = memoryview(bytearray(_SCRATCH))
        self.peers: dict[int, Peer] = {}
        self.half_open: dict[Connection, asyncio.TimerHandle] = {}
        self._open: dict[int, Connection] = {}
        self._publishers = 0
        self._refused = refused
        self._starting: set[asyncio.Task[None]] = set()
        self._check: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self, connected: socket.socket, *, accepting: bool) -> Connection | None:
        """Begin a handshake on a connected socket; None if there is no room for another peer."""
        address = peer_address(connected)
        if self._closed or len(self.peers) >= self.settings.max_peers + self.settings.max_publishers:
            self.refuse(Reason.TOO_MANY_PEERS, address)
            connected.close()
            return None
        if len(self.half_open) >= self.settings.max_half_open:
            oldest = next(iter(self.half_open))
            self.half_open.pop(oldest).cancel()
            oldest.end(Reason.HALF_OPEN)
        if self.settings.unsent_bytes and connected.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it is gone already
                tcp.limit_unsent(connected, self.settings.unsent_bytes)
        connection = Connection(self, connected, address, accepting=accepting)
        timeout = self.settings.handshake_timeout
        self.half_open[connection] = self.loop.call_later(timeout, connection.end, Reason.HANDSHAKE_TIMEOUT)
        task = self.loop.create_task(self._start(connection, connected))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return connection

    async def _start(self, connection: Connection, connected: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, connected)
        except OSError as error:  # it was closed meanwhile
            connected.close()
            if not connection.over.done():
                connection.connection_lost(error)

    def refuse(self, reason: str, address: str, detail: str = "") -> None:
        """Count a connection that does not become a peer."""
        if self._refused is not None and not self._closed:
            self._refused(reason, address, detail)

    def report(self, error: Exception) -> None:
        """Report an error of a handler's."""
        self.loop.call_exception_handler({"message": "a handler of peers failed", "exception": error})

    def admit(self, connection: Connection, socket_type: bytes) -> bool:
        """Return whether a connection may become a peer of this type; end it if there is no room."""
        most, others = self.settings.max_peers, len(self.peers) - self._publishers
        if socket_type in PUBLISHERS and self.role is Role.EITHER:
            most, others = self.settings.max_publishers, self._publishers
        if others < most:
            return True
        connection.end(Reason.TOO_MANY_PEERS)
        return False

    def opened(self, connection: Connection, peer: Peer) -> None:
        """Take in a connection whose handshake is over."""
        self.half_open.pop(connection).cancel()
        self.peers[peer.id] = peer
        self._open[peer.id] = connection
        self._publishers += peer.socket_type in PUBLISHERS
        if self._check is None:
            self._check = self.loop.call_later(CHECK, self._look)
        self.handler.opened(peer)

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is gone."""
        reason = connection.reason or Reason.LEFT
        peer = connection.peer
        if peer is None:
            timer = self.half_open.pop(connection, None)
            if timer is not None:
                timer.cancel()
            self.refuse(reason, connection.address, connection.detail)
            return
        del self.peers[peer.id]
        del self._open[peer.id]
        self._publishers -= peer.socket_type in PUBLISHERS
        self.handler.closed(peer, reason)

    def _look(self) -> None:
        """End the connections of peers that are gone."""
        self._check = None
        for peer in list(self.peers.values()):
            if peer.silent_for(self.settings.gone_after):
                peer.close(Reason.GONE)
        if self.peers:
            self._check = self.loop.call_later(min(CHECK, self.settings.gone_after), self._look)

    def close(self, linger: float = 0.0) -> None:
        """End all connections; what waits for a peer has ``linger`` seconds to leave."""
        self._closed = True
        for connection in list(self.half_open):
            connection.end(Reason.CLOSED)
        for connection in list(self._open.values()):
            connection.end(Reason.CLOSED, linger=linger)
        if self._check is not None:
            self._check.cancel()
            self._check = None
