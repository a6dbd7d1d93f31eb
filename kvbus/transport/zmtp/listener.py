"""A bound endpoint: it accepts connections, within bounds, and never stops accepting for good."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
from collections.abc import Mapping
from typing import Final

from kvbus.transport.zmtp import addresses
from kvbus.transport.zmtp.connections import Connections, Refused
from kvbus.transport.zmtp.mechanism import MechanismFactory
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.roles import Role
from kvbus.transport.zmtp.settings import DEFAULT_SETTINGS, Settings

ACCEPTS: Final = 16
"""Connections accepted in one turn of the loop."""

REST: Final = 0.1
"""Seconds before it accepts again after the system had no resources for another connection."""

RESERVE: Final = 64
"""File descriptors, a quarter of all at most, that are left for HTTP probes, engines and the state."""

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _descriptors() -> int:
    """Return the descriptor from which on a connection is refused. The system gives out the lowest free number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - min(RESERVE, limit // 4)


class Listener:
    """Accept peers on one endpoint, until :meth:`close`. It needs a running event loop.

    Args:
        endpoint: ``tcp://host:port`` (``*`` for every address, or the name of a network interface), or ``ipc://path``.
        role: PUB or ROUTER.
        handler: what to do with peers.
        settings: bounds and times.
        refused: called with reason and address for each connection that does not become a peer.
        mechanism: makes each connection's security mechanism; None for NULL.

    Raises:
        BindError: the endpoint is taken, malformed, or no address of this machine.
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
        self._loop = asyncio.get_running_loop()
        self._bound = settings.system.bind(endpoint)
        self._connections = Connections(role, handler, settings, refused, mechanism)
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._descriptors = _descriptors()
        self._listen()

    @property
    def endpoint(self) -> str:
        """The endpoint, with the port that the system picked if it was asked to."""
        return self._bound.endpoint

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The peers, by id."""
        return self._connections.peers

    @property
    def half_open(self) -> int:
        """Connections in their handshake."""
        return len(self._connections.half_open)

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._bound.socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                connected, _ = self._bound.socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    continue  # this connection is gone already
                # the listening socket stays readable: without a rest the loop would spin
                self._loop.remove_reader(self._bound.socket.fileno())
                self._again = self._loop.call_later(REST, self._listen)
                self._connections.refuse(Reason.NO_DESCRIPTOR, "")
                return
            if connected.fileno() >= self._descriptors:
                self._connections.refuse(Reason.NO_DESCRIPTOR, "")
                connected.close()
                continue
            self._take(connected)

    def _take(self, connected: socket.socket) -> None:
        try:
            addresses.prepare(connected)
        except OSError:  # it is gone already
            connected.close()
        else:
            self._connections.start(connected, accepting=True)

    def close(self, linger: float = 0.0) -> None:
        """Stop listening and end all connections; what waits for a peer has ``linger`` seconds to leave.

        The endpoint is free at once. :meth:`~kvbus.transport.zmtp.peer.PeerHandler.closed` is called for each peer.
        """
        if self._closed:
            return
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        else:
            self._loop.remove_reader(self._bound.socket.fileno())
        self._bound.close()
        self._connections.close(linger)
