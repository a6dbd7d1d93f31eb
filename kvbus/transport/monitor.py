"""Connections of a socket, from libzmq's own monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbus.transport.pump import Pump
from kvbus.transport.sockets import Socket

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class ConnectionMonitor:
    """Tell when a socket has its first connection whose handshake succeeded, and when its last one is gone.

    Args:
        socket: watched until :meth:`close`, which has to come before the socket's own.
        changed: called with True or False.
    """

    def __init__(self, socket: Socket, changed: Callable[[bool], None]) -> None:
        self._watched = socket
        self._changed = changed
        self._peers: set[int] = set()
        self.up = False
        self._pump = Pump(socket.get_monitor_socket(_EVENTS), self._event)

    def _event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event, value = message["event"], message["value"]
        if event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
            self._peers.add(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._set(up=True)
        elif event == zmq.EVENT_DISCONNECTED:
            self._peers.discard(value)
            if not self._peers:
                self._set(up=False)

    def _set(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            self._changed(up)

    def close(self) -> None:
        """Stop watching."""
        if not self._pump.closed:
            self._watched.disable_monitor()
            self._pump.close()
