"""Connections of a socket, from libzmq's own monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.transport.pump import Pump
from kvbus.transport.sockets import Socket

_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class ConnectionMonitor:
    """Tell when a socket has its first connection whose handshake succeeded, and when its last one is gone.

    Args:
        socket: watched until :meth:`close`, which has to come before the socket's own.
        changed: called with True or False.
    """

    def __init__(self, socket: Socket, changed: Callable[[bool], None]) -> None:
        self._watched = socket
        self._changed = changed
        self._peers = 0
        self._failed = False
        self.up = False
        self._pump = Pump(socket.get_monitor_socket(_EVENTS), self._event)

    def _event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = message["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._peers += 1
        elif event != zmq.EVENT_DISCONNECTED:
            self._failed = True  # libzmq says that this connection is gone, too, next
        elif self._failed:
            self._failed = False  # it was never counted: a probe of the port, or a peer that speaks something else
        elif self._peers:
            self._peers -= 1
        self._set(up=self._peers > 0)

    def _set(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._changed(up)

    def close(self) -> None:
        """Stop watching."""
        if not self._pump.closed:
            self._watched.disable_monitor()
            self._pump.close()
