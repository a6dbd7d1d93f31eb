"""Endpoints of kvbus's own ZMTP: a listener accepts connections, and a dialler keeps up one connection.

An endpoint owns its connections, during and after their handshakes, and limits the memory that they need. It never
blocks the event loop. If a listener cannot accept a connection, it tries again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from kvbus.common.errors import BindError
from kvbus.common.look_ups import addresses_of
from kvbus.transport.zmtp import addresses, tcp
from kvbus.transport.zmtp.mechanism import PUBLISHERS, MechanismFactory, Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.protocol import Protocol
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS, Settings

CHECK: Final = 5.0
"""Seconds between two checks for peers whose kernel no longer acknowledges data."""

ACCEPTS: Final = 16
"""Maximum number of connections that a listener accepts in one iteration of the event loop."""

PAUSE_SECONDS: Final = 0.1
"""Seconds until a listener accepts again after the operating system had no resources for another connection."""

RESERVE: Final = 64
"""Number of file descriptors that kvbus keeps free of routers, so that HTTP probes, engines and state files can always
get one.

If a quarter of the process's descriptors is less than this number, kvbus keeps only that quarter free.
"""

FIRST: Final = 0.1
"""Maximum seconds before the second attempt to dial. Each further wait is twice as long, up to :data:`LONGEST`."""

LONGEST: Final = 2.0
"""Maximum seconds between two attempts to dial, so that kvbus reconnects to a restarted peer within two seconds."""

CONNECT_TIMEOUT: Final = 5.0
"""Maximum seconds for connecting to one address."""

MAX_READ: Final = 64 * 1024
"""Largest :attr:`Settings.read_bytes`."""

_buffers = threading.local()
"""The buffer into which the connections of all endpoints of a thread read, as the attribute ``scratch``."""

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Refused = Callable[[str, str, str], None]
"""Called for each connection that does not become a peer.

Its arguments are the reason, the address, and a description of the violation (empty if the peer broke no rule).
"""


class Endpoint:
    """The connections of one endpoint, in the running event loop.

    Args:
        role: kvbus's socket type at the endpoint, and the socket types that the peers may have.
        handler: receives the events of the peers.
        settings: limits and timeouts.
        refused: called for each connection that does not become a peer; None for no call.
        mechanism: creates the security mechanism of each connection; None for NULL.
    """

    def __init__(
        self,
        role: Role,
        handler: PeerHandler,
        settings: Settings = DEFAULT_SETTINGS,
        refused: Refused | None = None,
        mechanism: MechanismFactory | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.handler = handler
        self.settings = settings
        if not hasattr(_buffers, "scratch"):
            _buffers.scratch = memoryview(bytearray(MAX_READ))
        self.scratch: memoryview = _buffers.scratch[: settings.read_bytes]
        """The buffer into which the connections read. Each one copies the bytes immediately after a read."""
        self.peers: dict[int, Peer] = {}
        """The peers whose handshake has succeeded, by :attr:`Peer.id`."""
        self._role = role
        self._mechanism = mechanism
        self._half_open: dict[Peer, asyncio.TimerHandle] = {}
        self._refused = refused
        self._starting: set[asyncio.Task[None]] = set()
        self._check: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def half_open(self) -> int:
        """Number of connections in their handshake."""
        return len(self._half_open)

    def start(self, connected: socket.socket, *, accepting: bool) -> Peer | None:
        """Start the handshake on a connected socket, and return the peer.

        Return None and close the socket if the endpoint has its maximum number of peers.

        Args:
            connected: the connected socket.
            accepting: True if kvbus has accepted the connection, False if it has dialled.
        """
        settings, address = self.settings, addresses.peer_address(connected)
        if self._closed or len(self.peers) >= settings.max_peers + settings.max_publishers:
            self.refuse(Reason.TOO_MANY_PEERS, address)
            connected.close()
            return None
        if len(self._half_open) >= settings.max_half_open:
            oldest = next(iter(self._half_open))
            self._half_open.pop(oldest).cancel()
            oldest.close(Reason.HALF_OPEN)
        if settings.unsent_bytes and connected.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the peer may have disconnected already
                tcp.limit_unsent(connected, settings.unsent_bytes)
        zmtp = Protocol(
            self._role,
            accepting=accepting,
            limits=settings.limits,
            publisher_limits=settings.publisher_limits,
            mechanism=None if self._mechanism is None else self._mechanism(self._role),
        )
        peer = Peer(self, connected, address, zmtp)
        timeout = settings.handshake_timeout
        self._half_open[peer] = self.loop.call_later(timeout, peer.close, Reason.HANDSHAKE_TIMEOUT)
        task = self.loop.create_task(self._start(peer, connected))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return peer

    async def _start(self, peer: Peer, connected: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: peer, connected)
        except OSError as error:  # the connection has ended in the meantime
            connected.close()
            if not peer.ended.done():
                peer.connection_lost(error)

    def refuse(self, reason: str, address: str, detail: str = "") -> None:
        """Call ``refused`` for a connection that does not become a peer.

        Args:
            reason: the reason.
            address: the peer's address.
            detail: a description of the violation; empty if the peer broke no rule.
        """
        if self._refused is not None and not self._closed:
            self._refused(reason, address, detail)

    def admit(self, socket_type: bytes) -> bool:
        """Return whether the endpoint has room for another peer of this socket type."""
        settings = self.settings
        if self._role is not Role.EITHER:
            return len(self.peers) < settings.max_peers
        publishes = socket_type in PUBLISHERS
        same = sum((peer.socket_type in PUBLISHERS) == publishes for peer in self.peers.values())
        return same < (settings.max_publishers if publishes else settings.max_peers)

    def opened(self, peer: Peer) -> None:
        """Add a peer whose handshake has succeeded, and report it to the handler."""
        self._half_open.pop(peer).cancel()
        self.peers[peer.id] = peer
        self.settings.unsent.peers.add(peer)
        if self._check is None:
            self._check = self.loop.call_later(CHECK, self._look)
        self.handler.opened(peer)

    def lost(self, peer: Peer, reason: str) -> None:
        """Remove a connection that has ended.

        Tell the handler about the end of a peer. If the handshake had not ended, report a refused connection.
        """
        if peer.is_open:
            del self.peers[peer.id]
            self.settings.unsent.peers.discard(peer)
            self.handler.closed(peer, reason)
            return
        timer = self._half_open.pop(peer, None)
        if timer is not None:
            timer.cancel()
        self.refuse(reason, peer.address, peer.detail)

    def _look(self) -> None:
        """Close the connections of the peers whose kernel no longer acknowledges data."""
        self._check = None
        for peer in list(self.peers.values()):
            if peer.silent_for(self.settings.gone_after):
                peer.close(Reason.GONE)
        if self.peers:
            self._check = self.loop.call_later(min(CHECK, self.settings.gone_after), self._look)

    def close(self, linger: float = 0.0) -> None:
        """Close all connections and accept no further ones. Queued bytes are sent for up to ``linger`` seconds.

        :meth:`~kvbus.transport.zmtp.peer.PeerHandler.closed` is called for each peer.
        """
        self._closed = True
        for peer in list(self._half_open):
            peer.close(Reason.CLOSED)
        for peer in list(self.peers.values()):
            peer.close(Reason.CLOSED, linger=linger)
        if self._check is not None:
            self._check.cancel()
            self._check = None


class Listener(Endpoint):
    """A bound endpoint, which accepts peers until :meth:`close`.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``. The host may be ``*`` for every address, or the name of a
            network interface.
        role: PUB, SUB, EITHER or ROUTER.
        handler: receives the events of the peers.
        settings: limits and timeouts.
        refused: called for each connection that does not become a peer; None for no call.
        mechanism: creates the security mechanism of each connection; None for NULL.

    Raises:
        BindError: the endpoint is in use, malformed, or not an address of this machine.
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
        super().__init__(role, handler, settings, refused, mechanism)
        self._bound = settings.system.bind(endpoint)
        self._again: asyncio.TimerHandle | None = None
        self._descriptors = _descriptors()
        self._listen()

    @property
    def endpoint(self) -> str:
        """The bound endpoint, with the real port if the system chose one."""
        return self._bound.endpoint

    def _listen(self) -> None:
        self._again = None
        self.loop.add_reader(self._bound.socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, _ = self._bound.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    continue  # the connection ended before it was accepted
                # No descriptor is free. The connection still waits, so the listening socket stays readable. Without a
                # pause, the event loop would call this method again at once.
                self.loop.remove_reader(self._bound.socket.fileno())
                self._again = self.loop.call_later(PAUSE_SECONDS, self._listen)
                self.refuse(Reason.NO_DESCRIPTOR, "")
                return
            self._take(connected)

    def _take(self, connected: socket.socket) -> None:
        if connected.fileno() >= self._descriptors:
            self.refuse(Reason.NO_DESCRIPTOR, "")
            connected.close()
            return
        try:
            addresses.prepare(connected)
        except OSError:  # the peer has disconnected already
            connected.close()
        else:
            self.start(connected, accepting=True)

    def close(self, linger: float = 0.0) -> None:
        """Stop listening, which frees the address at once, and close all connections as :meth:`Endpoint.close` does."""
        if self._closed:
            return
        if self._again is not None:
            self._again.cancel()
        else:
            self.loop.remove_reader(self._bound.socket.fileno())
        self._bound.close()
        super().close(linger)


def _descriptors() -> int:
    """Return the lowest file descriptor with which a listener refuses a connection.

    The system always assigns the lowest free number, so a high number means that few descriptors are free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - min(RESERVE, limit // 4)


class Dialler(Endpoint):
    """An endpoint that keeps up a connection to one peer until :meth:`close`.

    The peer is an engine, or a router that binds its SUB.

    Args:
        endpoint: ``tcp://host:port`` or ``ipc://path``. kvbus looks up the host name at every attempt.
        role: SUB or PUB.
        handler: receives the events of the peer.
        settings: limits and timeouts.
        refused: called for each connection that does not become a peer; None for no call.
        mechanism: creates the security mechanism of each connection; None for NULL.

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
        super().__init__(role, handler, settings, refused, mechanism)
        self.endpoint = endpoint
        self._path = addresses.ipc_address(endpoint)
        self._host, self._port = "", 0
        if self._path is None:
            try:
                self._host, self._port = addresses.split_tcp(endpoint)
            except ValueError as error:
                raise BindError(endpoint, str(error), verb="connect to") from error
        self._task = self.loop.create_task(self._run())

    async def _run(self) -> None:
        wait = FIRST
        while True:
            connected = await self._dial()
            peer = None if connected is None else self.start(connected, accepting=False)
            if peer is not None:
                await peer.ended
                # A peer that breaks a rule each time is not dialled more and more often.
                if peer.is_open and self.loop.time() - peer.since >= wait:
                    wait = FIRST
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 - so that many do not dial at once
            wait = min(2 * wait, LONGEST)

    async def _dial(self) -> socket.socket | None:
        """Connect to the endpoint's first address that accepts, and return the socket; None if all addresses fail."""
        for family, address in await self._resolve():
            with contextlib.suppress(OSError):  # such as a TimeoutError, or no free file descriptor
                connected = await self._connect(family, address)
                if self._path is not None or connected.getsockname() != connected.getpeername():
                    return connected
                # If nothing listens at a local port, TCP may connect the port to itself.
                connected.close()
        return None

    async def _connect(self, family: int, address: Any) -> socket.socket:
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            addresses.prepare(connected)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self.loop.sock_connect(connected, address)
            connected.getpeername()  # raises an OSError if the peer has disconnected already
        except BaseException:
            connected.close()
            raise
        return connected

    async def _resolve(self) -> list[tuple[int, Any]]:
        if self._path is not None:
            return [(socket.AF_UNIX, self._path)]
        with contextlib.suppress(OSError):
            return await addresses_of(self._host, self._port)
        return []

    def close(self, linger: float = 0.0) -> None:
        """Stop dialling, and close the connection as :meth:`Endpoint.close` does."""
        self._task.cancel()
        super().close(linger)
