"""A socket's connections, from libzmq's monitor: up and down, failed handshakes, abandoned endpoints."""

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
"""Seconds to wait for libzmq's event that it connects again. It comes at once, or never."""

REFUSED_GRACE: Final = 2.0
"""The same after a refused handshake: the peer may get our key meanwhile."""


class ConnectionMonitor:
    """Report a socket's first successful connection, and the loss of its last one.

    Args:
        socket: the socket to watch; call :meth:`close` before the socket's own.
        changed: called with True for the first connection, with False when the last one is gone.
        refused: called with the reason of each failed handshake.
        abandoned: for a socket that connects: called when libzmq has abandoned its endpoint, with True if a connection
            was up. libzmq does so after a frame over ``MAXMSGSIZE``, after other violations of the protocol, and after
            some failed handshakes. The socket then receives nothing until another ``connect``.
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
        """Address and port that the newest connection has reached; None where there is none, or it is no TCP."""
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
            self._failed = True  # libzmq's next event says that this connection is gone
            if self._refused is not None:
                self._refused(_reason(event, message["value"]))
        else:
            self.peer = None
            stood = not self._failed and self._peers > 0
            if self._failed:
                self._failed = False  # never counted: a probe of the port, or a peer with another protocol
            elif self._peers:
                self._peers -= 1
            self._wait(stood=stood)
        self._set(up=self._peers > 0)

    def _wait(self, *, stood: bool) -> None:
        """Wait for libzmq's event that it connects again; without one it has abandoned the endpoint."""
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
        """Whether the kernel has bytes of the newest connection that libzmq's thread has not taken."""
        return self.peer is not None and unread(self._fd, self.peer)

    def close(self) -> None:
        """Stop watching."""
        if not self._pump.closed:
            self._stop_waiting()
            self._watched.disable_monitor()
            self._pump.close()


def _peer_of(fd: int) -> tuple[str, int] | None:
    """Return whom a connection of libzmq's has reached. The connection may be gone already."""
    try:
        with sockets.socket(fileno=os.dup(fd)) as connection:
            return _named(connection)
    except OSError:
        return None


def _named(connection: sockets.socket) -> tuple[str, int] | None:
    address = connection.getpeername()
    return (address[0].removeprefix("::ffff:"), address[1]) if isinstance(address, tuple) else None


def unread(fd: int, peer: tuple[str, int]) -> bool:
    """Return whether something waits on the connection to ``peer``; its descriptor may be another's by now."""
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
