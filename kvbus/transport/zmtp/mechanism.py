"""Roles, which say who may talk to whom, and security mechanisms, which run the handshake after the greetings.

NULL is here. CURVE is in :mod:`~kvbus.transport.zmtp.curve`, which needs PyNaCl. CURVE also seals every frame after its
handshake. NULL seals nothing, so without CURVE a message's bytes are the same for every peer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from kvbus.transport.zmtp import wire
from kvbus.transport.zmtp.wire import Frame

PUBLISHERS: Final = frozenset({b"PUB", b"XPUB"})
SUBSCRIBERS: Final = frozenset({b"SUB", b"XSUB"})


class Role(Enum):
    """What an endpoint is, and which socket types its peers may have.

    PUB reads subscriptions as an XPUB does, but announces itself as "PUB". The engines' sockets are PUBs, so every
    router's SUB accepts that name, whatever its library; and no peer treats the two differently.
    """

    PUB = (b"PUB", SUBSCRIBERS)
    SUB = (b"SUB", PUBLISHERS)
    EITHER = (b"", SUBSCRIBERS | PUBLISHERS)
    """A PUB for subscribers and a SUB for publishers. The peer's READY decides which one."""
    ROUTER = (b"ROUTER", frozenset({b"DEALER", b"REQ"}))
    DEALER = (b"DEALER", frozenset({b"ROUTER", b"REP", b"DEALER"}))

    def __init__(self, socket_type: bytes, peers: frozenset[bytes]) -> None:
        self.socket_type = socket_type
        self.peers = peers

    def towards(self, socket_type: bytes) -> Role:
        """Return the role that it has for a peer of this type."""
        if self is not Role.EITHER:
            return self
        return Role.SUB if socket_type in PUBLISHERS else Role.PUB


class Sealing(Protocol):
    """What a mechanism does to frames after its handshake."""

    overhead: int
    """Bytes that a sealed frame is longer than the frame's body."""

    def seal(self, data: bytes) -> bytes:
        """Seal whole encoded frames, in the order in which they are sent."""

    def unseal(self, frame: Frame) -> Frame:
        """Return the frame inside a sealed one.

        Raises:
            ProtocolError: it is forged, or was received before.
        """


class Mechanism(Protocol):
    """One side of a handshake."""

    name: bytes
    """Its name in the greeting."""
    expected: bytes
    """The command that the peer must send next."""
    peer: dict[bytes, bytes] | None
    """The peer's properties; None until the handshake is over."""
    peer_key: bytes
    """The public key that the peer has proven to own; empty without one."""
    sealing: Sealing | None
    """Seals every frame after the handshake; None if frames travel as they are."""

    def start(self) -> bytes:
        """Return the bytes to send before anything was received."""

    def receive(self, data: bytes) -> bytes:
        """Take in the data of the expected command, and return the bytes to send.

        Raises:
            ProtocolError: the handshake has failed.
        """


MechanismFactory = Callable[[Role], Mechanism]
"""Makes the mechanism of one connection."""


def ready_properties(role: Role) -> bytes:
    """Encode our properties."""
    return wire.encode_metadata({b"Socket-Type": role.socket_type})


class Null:
    """No security: both sides say READY with their properties, and the dialling side begins.

    Args:
        role: our role.
        accepting: True for the side that accepted the connection.
    """

    name = b"NULL"
    expected = wire.READY
    peer_key = b""
    sealing: Sealing | None = None

    def __init__(self, role: Role, *, accepting: bool) -> None:
        self._role = role
        self._accepting = accepting
        self.peer: dict[bytes, bytes] | None = None

    def start(self) -> bytes:
        """Return the READY of the dialling side."""
        return b"" if self._accepting else self._ready()

    def receive(self, data: bytes) -> bytes:
        """Take in the peer's READY, and answer it on the accepting side."""
        self.peer = wire.parse_metadata(data)
        self._role = self._role.towards(self.peer.get(b"socket-type", b""))
        return self._ready() if self._accepting else b""

    def _ready(self) -> bytes:
        return wire.command(wire.READY, ready_properties(self._role))
