"""The limits and timeouts of one endpoint, and the functions of the operating system that it needs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvbus.transport.unsent import UNLIMITED, Unsent
from kvbus.transport.zmtp import addresses, tcp
from kvbus.transport.zmtp.protocol import DEFAULT, Limits


@dataclass(frozen=True, slots=True)
class System:
    """The functions of the operating system that an endpoint needs besides its sockets. A simulation replaces them.

    Attributes:
        bind: binds an endpoint and listens.
        queued_bytes: returns the number of sent bytes of a connection that the peer has not acknowledged.
    """

    bind: Callable[[str], addresses.Bound] = addresses.bind
    queued_bytes: Callable[[socket.socket], int] = tcp.queued_bytes


SYSTEM: Final = System()


@dataclass(frozen=True, slots=True)
class Settings:
    """The limits and timeouts of one endpoint.

    Attributes:
        limits: limits for the data that kvbus keeps for one peer.
        publisher_limits: the same limits for a peer that publishes, if the role is EITHER.
        max_peers: maximum number of connected peers.
        max_publishers: maximum number of publishing peers in addition to ``max_peers``, if the role is EITHER. Because
            of this extra number, a large number of subscribers cannot keep publishers out.
        max_half_open: maximum number of connections in their handshake. For a further connection the oldest one is
            closed, so that silent peers cannot keep other peers out.
        handshake_timeout: maximum seconds for a handshake.
        high_water: number of bytes queued in kvbus for a peer above which the peer is not ``writable``.
        low_water: number of queued bytes at which the peer is ``writable`` again.
        read_bytes: maximum number of bytes that kvbus reads from a connection with one system call. kvbus may hold as
            many bytes of each connection that it has not decoded yet.
        unsent_bytes: maximum number of unsent bytes that the kernel queues for a peer; 0 for the kernel's default.
        gone_after: seconds without an expected acknowledgement from the peer's kernel after which the peer is gone.
        unsent: the limit for the bytes that wait for the peers, which several endpoints share.
        system: the operating system's functions.
    """

    limits: Limits = DEFAULT
    publisher_limits: Limits = DEFAULT
    max_peers: int = 4_096
    max_publishers: int = 0
    max_half_open: int = 1_024
    handshake_timeout: float = 3.0
    high_water: int = 256 * 1024
    low_water: int = 64 * 1024
    read_bytes: int = 16 * 1024
    unsent_bytes: int = 0
    gone_after: float = tcp.GONE_AFTER
    unsent: Unsent = UNLIMITED
    system: System = SYSTEM


DEFAULT_SETTINGS: Final = Settings()
