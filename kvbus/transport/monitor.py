"""Report the connection events of a libzmq socket: connections made and lost, failed handshakes, abandoned endpoints.

libzmq writes these events to a second socket, the monitor socket.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket as sockets
import termios
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.core.types import Refused
from kvbus.transport.pump import Pump
from kvbus.transport.sockets import Socket

_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DIALS: Final = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED

GRACE: Final = 0.25
"""Seconds to wait, after a connection was lost, for libzmq to report that it dials the endpoint again.

libzmq reports this at once, or it has abandoned the endpoint and never reports it.
"""

REFUSED_GRACE: Final = 2.0
"""Seconds to wait, after a failed handshake, for libzmq to report that it dials the endpoint again.

If it does not, kvbus connects again. The wait is longer than :data:`GRACE`, so that the peer has time to add kvbus's
key to its allow-list.
"""


class ConnectionMonitor:
    """A watcher of one socket, which reports when its first connection is made and its last connection is lost.

    Args:
        socket: the socket to watch. Call :meth:`close` before you close the socket.
        changed: called with True when the first connection is made, and with False when the last connection is lost.
        refused: called after each failed handshake, with the reason for the failure.
        abandoned: called when libzmq has abandoned the endpoint that the socket dials; None for a socket that binds.
            The argument is True if a connection was up before. libzmq abandons an endpoint after a frame larger than
            ``MAXMSGSIZE``, after other violations of ZMTP, and after some failed handshakes. The socket then receives
            nothing until the next ``connect``.
    """

    def __init__(
        self,
        socket: Socket,
        changed: Callable[[bool], None],
        *,
        refused: Callable[[Refused], None] | None = None,
        abandoned: Callable[[bool], None] | None = None,
    ) -> None:
        self._watched = socket
        self._changed = changed
        self._refused = refused
        self._abandoned = abandoned
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._peers = 0
        self._failed = False
        self.up = False
        self._fd = -1
        self.peer: tuple[str, int] | None = None
        """Address and port of the peer of the newest connection; None without a connection, or if the peer is not on
        TCP.
        """
        events = _EVENTS if abandoned is None else _EVENTS | _DIALS
        self._pump = Pump(socket.get_monitor_socket(events), self._event)

    def _event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = message["event"]
        if event & _DIALS:
            self._stop_waiting()
            if event == zmq.EVENT_CONNECTED:
                self._fd = message["value"]
                self.peer = _peer_of(self._fd)
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._peers += 1
        elif event != zmq.EVENT_DISCONNECTED:
            self._failed = True  # the next event is EVENT_DISCONNECTED, for the connection whose handshake has failed
            if self._refused is not None:
                self._refused(_reason(event, message["value"]))
        else:
            self.peer = None
            stood = not self._failed and self._peers > 0
            if self._failed:
                self._failed = False  # this connection was never counted in _peers, because its handshake failed
            elif self._peers:
                self._peers -= 1
            self._wait(stood=stood)
        self._set(up=self._peers > 0)

    def _wait(self, *, stood: bool) -> None:
        """Start the timer that calls ``abandoned`` unless libzmq reports that it dials the endpoint again.

        Args:
            stood: whether the lost connection had finished its handshake.
        """
        self._stop_waiting()
        if self._abandoned is not None:
            self._timer = self._loop.call_later(GRACE if stood else REFUSED_GRACE, self._abandoned, stood)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._changed(up)

    @property
    def unread(self) -> bool:
        """Whether the kernel holds received bytes of the newest connection that libzmq has not read."""
        return self.peer is not None and unread(self._fd, self.peer)

    def close(self) -> None:
        """Stop watching the socket. The socket itself stays open."""
        if not self._pump.closed:
            self._stop_waiting()
            self._watched.disable_monitor()
            self._pump.close()


def _peer_of(fd: int) -> tuple[str, int] | None:
    """Return the address and port of the peer of a libzmq connection.

    The result is None if the connection is closed already, or if it is not a TCP connection.

    Args:
        fd: the file descriptor of the connection, as libzmq reports it.
    """
    try:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            return _named(connection)
    except OSError:
        return None


def _named(connection: sockets.socket) -> tuple[str, int] | None:
    address = connection.getpeername()
    return (address[0].removeprefix("::ffff:"), address[1]) if isinstance(address, tuple) else None


def unread(fd: int, peer: tuple[str, int]) -> bool:
    """Return whether the kernel holds unread bytes of the connection to ``peer``.

    The peer of the descriptor is compared with ``peer``, because libzmq may have closed the connection, and the
    descriptor may now belong to another connection.

    Args:
        fd: the file descriptor of the connection, as libzmq has reported it.
        peer: address and port of the connection's peer.
    """
    try:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            count = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
            return _named(connection) == peer and any(count)
    except OSError:
        return False


def _reason(event: int, value: int) -> Refused:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refused.KEY
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return Refused.MECHANISM if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else Refused.PROTOCOL
    return Refused.CLOSED
