"""The TCP state of a connection: its options, its unacknowledged bytes, and whether the peer is gone.

For an application, a peer that is gone looks like a peer that does not read: the kernel accepts no more bytes. TCP can
tell them apart. If a peer does not read, its kernel still acknowledges, with a window of 0. The kernel of a peer that
is gone is silent. Keepalive detects that only while no data is outstanding; :func:`gone` detects the other cases.
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
"""Seconds without a due acknowledgement after which a peer is gone. Keepalive takes the same time."""

_TRIES: Final = 3
"""Number of unanswered retransmissions or window probes before a peer is gone: a single one may have been lost."""

INFO: Final = struct.Struct("=2x2B4x16xI28xI")
"""Fields of ``struct tcp_info``: retransmits, probes, unacked, last_ack_recv (milliseconds)."""
_COUNT: Final = struct.Struct("i")
NOTSENT_LOWAT: Final = 25  # TCP_NOTSENT_LOWAT of Linux; the socket module has no constant for it


def set_options(connection: socket.socket) -> None:
    """Set TCP_NODELAY, so that small writes are sent at once, and keepalive, so that the kernel probes an idle peer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, KEEPALIVE[zmq.TCP_KEEPALIVE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE[zmq.TCP_KEEPALIVE_IDLE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE[zmq.TCP_KEEPALIVE_INTVL])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE[zmq.TCP_KEEPALIVE_CNT])


def limit_unsent(connection: socket.socket, size: int) -> None:
    """Limit the unsent bytes that the kernel queues for a peer which does not read.

    Sent bytes do not count, even if they are not acknowledged. So the limit does not slow a link with high latency.
    """
    connection.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, size)


def queued_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the kernel holds because the peer has not acknowledged them.

    For a Unix socket it is the memory of the buffers, which is more than the bytes in them.
    """
    if connection.fileno() < 0:
        return 0
    count: int = _COUNT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]
    return count


def has_unread(connection: socket.socket) -> bool:
    """Return whether the kernel holds received bytes that kvbus has not read."""
    return connection.fileno() >= 0 and any(fcntl.ioctl(connection, termios.FIONREAD, bytes(_COUNT.size)))


class Silence(NamedTuple):
    """The silence of a peer's kernel, from ``TCP_INFO``.

    Attributes:
        retransmits: number of unacknowledged retransmissions of the oldest segment.
        probes: number of unanswered probes, of a window of 0 or of keepalive.
        unacked: number of segments that are sent but not acknowledged.
        seconds: seconds since the last acknowledgement, new or repeated.
    """

    retransmits: int
    probes: int
    unacked: int
    seconds: float


def silence(connection: socket.socket) -> Silence:
    """Read the silence of a connection's peer from the kernel."""
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    retransmits, probes, unacked, milliseconds = INFO.unpack(data)
    return Silence(retransmits, probes, unacked, milliseconds / 1000)


def gone(sign: Silence, after: float = GONE_AFTER) -> bool:
    """Return whether a peer is gone: it has not answered several tries, and was silent for ``after`` seconds."""
    tries = max(sign.retransmits if sign.unacked else 0, sign.probes)
    return tries >= _TRIES and sign.seconds >= after
