"""Read and set the TCP state of a connection: options, unacknowledged bytes, and whether the peer's machine is gone.

An application cannot distinguish a peer that is gone from a peer that does not read: in both cases the kernel accepts
no more bytes. TCP can distinguish them. If a peer does not read, its kernel still sends acknowledgements, with a window
of 0 bytes. If a peer is gone, no acknowledgements come. Keepalive detects that only if all sent data is acknowledged.
:func:`gone` detects all other cases.
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
"""Seconds without an expected acknowledgement after which a peer counts as gone.

TCP keepalive also needs this time to detect a peer that is gone.
"""

_TRIES: Final = 3
"""Minimum number of unanswered retransmissions or window probes before a peer counts as gone.

After fewer of them the network may only have lost a packet.
"""

INFO: Final = struct.Struct("=2x2B4x16xI28xI")
"""Layout of the used fields of Linux's ``struct tcp_info``: retransmits, probes, unacked, last_ack_recv
(milliseconds).
"""
_COUNT: Final = struct.Struct("i")
NOTSENT_LOWAT: Final = 25  # Linux's TCP_NOTSENT_LOWAT, which the socket module does not define


def set_options(connection: socket.socket) -> None:
    """Set the TCP options of a new connection.

    TCP_NODELAY makes the kernel send small writes at once. Keepalive makes the kernel probe an idle peer.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, KEEPALIVE[zmq.TCP_KEEPALIVE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE[zmq.TCP_KEEPALIVE_IDLE])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE[zmq.TCP_KEEPALIVE_INTVL])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE[zmq.TCP_KEEPALIVE_CNT])


def limit_unsent(connection: socket.socket, size: int) -> None:
    """Limit the unsent bytes that the kernel queues for a peer that does not read.

    Sent bytes do not count, even if they are not acknowledged. So the limit does not slow down a link with high
    latency.
    """
    connection.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, size)


def queued_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the kernel holds because the peer has not acknowledged them.

    For a Unix socket, the result is the memory of the buffers, which is more than the bytes in them.
    """
    if connection.fileno() < 0:
        return 0
    count: int = _COUNT.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]
    return count


def has_unread(connection: socket.socket) -> bool:
    """Return whether the kernel holds received bytes of a connection that kvbus has not read."""
    return connection.fileno() >= 0 and any(fcntl.ioctl(connection, termios.FIONREAD, bytes(_COUNT.size)))


class Silence(NamedTuple):
    """Signs that the kernel of a peer sends no acknowledgements, from Linux's ``TCP_INFO``.

    Attributes:
        retransmits: number of retransmissions of the oldest segment that were not acknowledged.
        probes: number of unanswered probes. The kernel probes a peer whose window is 0, and an idle peer.
        unacked: number of segments that are sent but not acknowledged.
        seconds: seconds since the last acknowledgement arrived, even if it acknowledged no new data.
    """

    retransmits: int
    probes: int
    unacked: int
    seconds: float


def silence(connection: socket.socket) -> Silence:
    """Return the signs that the peer of a connection sends no acknowledgements, as the kernel reports them."""
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
    retransmits, probes, unacked, milliseconds = INFO.unpack(data)
    return Silence(retransmits, probes, unacked, milliseconds / 1000)


def gone(sign: Silence, after: float = GONE_AFTER) -> bool:
    """Return whether a peer is gone: it has not answered several probes or retransmissions within ``after`` seconds.

    Args:
        sign: the state of the connection from :func:`silence`.
        after: minimum seconds since the peer's last acknowledgement.
    """
    tries = max(sign.retransmits if sign.unacked else 0, sign.probes)
    return tries >= _TRIES and sign.seconds >= after
