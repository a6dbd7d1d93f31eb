"""How an endpoint treats its connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.transport.zmtp.addresses import Bound, bind
from kvbus.transport.zmtp.limits import DEFAULT, Limits
from kvbus.transport.zmtp.tcp import GONE_AFTER, queued_bytes


@dataclass(frozen=True, slots=True)
class System:
    """What an endpoint asks of the operating system beside its sockets. A simulation has its own.

    Attributes:
        bind: binds an endpoint and listens.
        queued_bytes: returns how many bytes of a connection the peer has not acknowledged.
    """

    bind: Callable[[str], Bound] = bind
    queued_bytes: Callable[[socket.socket], int] = queued_bytes


SYSTEM = System()


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds and times of one endpoint.

    Attributes:
        limits: what one peer may make kvbus keep.
        publisher_limits: the same for a peer that publishes, where the role is EITHER.
        max_peers: connections whose handshake is over.
        max_publishers: those of peers that publish, beside ``max_peers``: subscribers cannot keep them out.
        max_half_open: connections in their handshake. Beyond that the oldest one ends, so that silent ones cannot keep
            others out.
        handshake_timeout: seconds for a handshake.
        high_water: bytes waiting for a peer's kernel at which the peer is not ``writable`` any more.
        low_water: bytes waiting at which it is again.
        unsent_bytes: bytes that the kernel keeps for a peer and cannot send yet; 0 for as many as it likes.
        gone_after: seconds in which a peer's kernel acknowledges nothing that is due, until the peer is gone.
        system: the operating system.
    """

    limits: Limits = DEFAULT
    publisher_limits: Limits = DEFAULT
    max_peers: int = 4_096
    max_publishers: int = 0
    max_half_open: int = 1_024
    handshake_timeout: float = 3.0
    high_water: int = 256 * 1024
    low_water: int = 64 * 1024
    unsent_bytes: int = 0
    gone_after: float = GONE_AFTER
    system: System = SYSTEM


DEFAULT_SETTINGS = Settings()
