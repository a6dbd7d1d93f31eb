"""What kvbus sets and reads of a TCP connection: options, bytes that the peer has not acknowledged, signs of life.

A peer that is gone and a peer that merely does not read look the same from above: nothing leaves any more. TCP knows
the difference. The kernel of a peer that does not read goes on acknowledging, with a window of 0; that of a peer that
is gone is silent. Keepalive finds the second kind only where nothing is outstanding, so :func:`gone` looks at the rest.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import Final, NamedTuple

import zmq

from kvbus.transport.sockets import KEEPALIVE

GONE_AFTER: Final = 60.0
"""Seconds without an acknowledgement, while one is due, after which a peer is gone. Keepalive takes as long."""

_TRIES: Final = 3
"""Repeated segments, or probes of a window of 0, that must be without an answer. Only one may have been lost."""

INFO: Final = struct.Struct("=2x2B4x16xI28xI")
"""Of ``struct tcp_info``: retransmits, probes, unacked, last_ack_recv (milliseconds)."""
_COUNT: Final = struct.Struct("i")
NOTSENT_LOWAT: Final = 25  # Linux; the socket module has no name for it


def set_options(connection: socket.socket) -> None:
    """Send small writes at once, and let the kernel probe an idle peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, KEEPALIVE[zmq.TCP_KEEPALIVE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE[zmq.TCP_KEEPALIVE_IDLE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE[zmq.TCP_KEEPALIVE_INTVL])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE[zmq.TCP_KEEPALIVE_CNT])


def limit_unsent(connection: socket.socket, size: int) -> None:
    """Let the kernel keep no more than this many bytes that it cannot send, because the peer does not read.

    What is on its way does not count, so a long link is as fast as ever.
    """
    connection.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, size)


def queued_bytes(connection: socket.socket) -> int:
    """Return how many bytes of a TCP connection the kernel holds because the peer has not acknowledged them.

    A local socket counts the memory of its buffers instead, which is more than what is in them.
    """
    if connection.fileno() < 0:
        return 0
    count: int = _COUNT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]
    return count


def has_unread(connection: socket.socket) -> bool:
    """Return whether the kernel has bytes of the peer that nobody has read."""
    return connection.fileno() >= 0 and any(fcntl.ioctl(connection, termios.FIONREAD, bytes(_COUNT.size)))


class Silence(NamedTuple):
    """How long a peer's kernel has been silent, from ``TCP_INFO``.

    Attributes:
        retransmits: how often the kernel has repeated the oldest segment, without an acknowledgement.
        probes: how many probes of a window of 0, or of keepalive, are without an answer.
        unacked: segments that are sent and not acknowledged.
        seconds: since the last acknowledgement, new or repeated.
    """

    retransmits: int
    probes: int
    unacked: int
    seconds: float


def silence(connection: socket.socket) -> Silence:
    """Read the state of a TCP connection."""
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    retransmits, probes, unacked, milliseconds = INFO.unpack(data)
    return Silence(retransmits, probes, unacked, milliseconds / 1000)


def gone(sign: Silence, after: float = GONE_AFTER) -> bool:
    """Return whether a peer is gone: something is outstanding, was tried again and again, and nobody answers."""
    tries = max(sign.retransmits if sign.unacked else 0, sign.probes)
    return tries >= _TRIES and sign.seconds >= after
