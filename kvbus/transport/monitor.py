"""The connection events of a socket, from libzmq's monitor: up, down, failed handshakes, abandoned endpoints."""

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
"""Seconds to wait for libzmq's event that it connects again. libzmq sends it at once or never."""

REFUSED_GRACE: Final = 2.0
"""Seconds to wait for the same event after a refused handshake: meanwhile the peer may add our key."""


class ConnectionMonitor:
    """Report a socket's first successful connection, and the loss of its last one.

    Args:
        socket: the socket to watch. Call :meth:`close` before you close the socket.
        changed: called with True for the first connection, and with False when the last one is lost.
        refused: called with the reason of each failed handshake.
        abandoned: for a socket that connects: called when libzmq has abandoned its endpoint, with True if a connection
            was up. libzmq abandons an endpoint after a frame over ``MAXMSGSIZE``, after other violations of the
            protocol, and after some failed handshakes. The socket then receives nothing until the next ``connect``.
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
        """Address and port of the newest connection's peer; None without a connection, or if it is not TCP."""
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
            self._failed = True  # libzmq's next event reports the end of this connection
            if self._refused is not None:
                self._refused(_reason(event, message["value"]))
        else:
            self.peer = None
            stood = not self._failed and self._peers > 0
            if self._failed:
                self._failed = False  # not counted as a peer: a probe of the port, or a peer with another protocol
            elif self._peers:
                self._peers -= 1
            self._wait(stood=stood)
        self._set(up=self._peers > 0)

    def _wait(self, *, stood: bool) -> None:
        """Wait for libzmq's event that it connects again; without that event it has abandoned the endpoint."""
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
        """Whether the kernel holds bytes of the newest connection that libzmq's thread has not read."""
        return self.peer is not None and unread(self._fd, self.peer)

    def close(self) -> None:
        """Stop watching the socket."""
        if not self._pump.closed:
            self._stop_waiting()
            self._watched.disable_monitor()
            self._pump.close()


def _peer_of(fd: int) -> tuple[str, int] | None:
    """Return the peer's address and port of a libzmq connection; None if it is closed already or is not TCP."""
    try:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            return _named(connection)
    except OSError:
        return None


def _named(connection: sockets.socket) -> tuple[str, int] | None:
    address = connection.getpeername()
    return (address[0].removeprefix("::ffff:"), address[1]) if isinstance(address, tuple) else None


def unread(fd: int, peer: tuple[str, int]) -> bool:
    """Return whether unread bytes wait on the connection to ``peer``.

    By now the descriptor may belong to another connection, so the peer is compared too.
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
