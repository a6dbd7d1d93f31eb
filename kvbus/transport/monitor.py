"""Connections of a socket, from libzmq's own monitor: up and down, refused handshakes, endpoints given up."""

from __future__ import annotations

import asyncio
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
"""Seconds in which libzmq says that it will connect again (it does so at once), or it never will."""

REFUSED_GRACE: Final = 2.0
"""The same after a refused handshake: whoever refused us may be given our key."""


class ConnectionMonitor:
    """Tell when a socket has its first connection whose handshake succeeded, and when its last one is gone.

    Args:
        socket: watched until :meth:`close`, which has to come before the socket's own.
        changed: called with True or False.
        refused: called for each handshake that failed.
        abandoned: for a socket that connects: called when libzmq has given its endpoint up, with True if a connection
            stood. It does so after a frame over ``MAXMSGSIZE`` and other violations of the protocol, and after some
            refused handshakes; without another ``connect`` the socket is deaf from then on.
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
        events = _EVENTS if abandoned is None else _EVENTS | _DIALS
        self._pump = Pump(socket.get_monitor_socket(events), self._event)

    def _event(self, frames: list[bytes]) -> None:
        message = parse_monitor_message(frames)
        event = message["event"]
        if event & _DIALS:
            self._stop_waiting()
            return
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._peers += 1
        elif event != zmq.EVENT_DISCONNECTED:
            self._failed = True  # libzmq says that this connection is gone, too, next
            if self._refused is not None:
                self._refused(_reason(event, message["value"]))
        else:
            stood = not self._failed and self._peers > 0
            if self._failed:
                self._failed = False  # it was never counted: a probe of the port, or a peer that speaks something else
            elif self._peers:
                self._peers -= 1
            self._wait(stood=stood)
        self._set(up=self._peers > 0)

    def _wait(self, *, stood: bool) -> None:
        """A connection is over: if libzmq does not say that it will try again, it will not."""
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

    def close(self) -> None:
        """Stop watching."""
        if not self._pump.closed:
            self._stop_waiting()
            self._watched.disable_monitor()
            self._pump.close()


def _reason(event: int, value: int) -> Refused:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Refused.KEY
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return Refused.MECHANISM if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else Refused.PROTOCOL
    return Refused.CLOSED
