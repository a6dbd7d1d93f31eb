"""Roles define which socket types may talk to each other. Security mechanisms run the handshake after the greetings.

This module has NULL. CURVE is in :mod:`~kvbus.transport.zmtp.curve`, which needs PyNaCl. CURVE also seals every frame
after the handshake. NULL seals no frames, so without CURVE the bytes of a message are the same for every peer.
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
    """The socket type of an endpoint, and the socket types that its peers may have.

    PUB reads subscriptions as an XPUB does, but announces itself as "PUB". Engines' sockets are PUBs, so a router's SUB
    accepts that name, whatever its library is. No peer treats PUB and XPUB differently.
    """

    PUB = (b"PUB", SUBSCRIBERS)
    SUB = (b"SUB", PUBLISHERS)
    EITHER = (b"", SUBSCRIBERS | PUBLISHERS)
    """A PUB for subscribers and a SUB for publishers. The socket type in the peer's READY decides."""
    ROUTER = (b"ROUTER", frozenset({b"DEALER", b"REQ"}))
    DEALER = (b"DEALER", frozenset({b"ROUTER", b"REP", b"DEALER"}))

    def __init__(self, socket_type: bytes, peers: frozenset[bytes]) -> None:
        self.socket_type = socket_type
        self.peers = peers

    def towards(self, socket_type: bytes) -> Role:
        """Return the role of this endpoint for a peer of this socket type."""
        if self is not Role.EITHER:
            return self
        return Role.SUB if socket_type in PUBLISHERS else Role.PUB


class Sealing(Protocol):
    """The encryption of frames after the handshake of a mechanism."""

    overhead: int
    """Bytes that sealing adds to the body of a frame."""

    def seal(self, data: bytes) -> bytes:
        """Seal complete encoded frames. Call this in the order in which the frames are sent."""

    def unseal(self, frame: Frame) -> Frame:
        """Return the frame inside a sealed one.

        Raises:
            ProtocolError: the sealed frame is forged, or was received before.
        """


class Mechanism(Protocol):
    """One side of a handshake."""

    name: bytes
    """Name of the mechanism in the greeting."""
    expected: bytes
    """The command that the peer must send next."""
    peer: dict[bytes, bytes] | None
    """The peer's properties; None until the handshake is over."""
    peer_key: bytes
    """The public key that the peer has proven to own; empty without CURVE."""
    sealing: Sealing | None
    """Seals every frame after the handshake; None if frames are sent unsealed."""

    def start(self) -> bytes:
        """Return the bytes to send before the peer's first command."""

    def receive(self, data: bytes) -> bytes:
        """Process the data of the expected command, and return the bytes to send.

        Raises:
            ProtocolError: the handshake has failed.
        """


MechanismFactory = Callable[[Role], Mechanism]
"""Creates the mechanism of one connection."""


def ready_properties(role: Role) -> bytes:
    """Encode the properties of our READY."""
    return wire.encode_metadata({b"Socket-Type": role.socket_type})


class Null:
    """No security: both sides send READY with their properties, the dialling side first.

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
        """Return our READY if we dialled."""
        return b"" if self._accepting else self._ready()

    def receive(self, data: bytes) -> bytes:
        """Process the peer's READY; return our READY if we accepted the connection."""
        self.peer = wire.parse_metadata(data)
        self._role = self._role.towards(self.peer.get(b"socket-type", b""))
        return self._ready() if self._accepting else b""

    def _ready(self) -> bytes:
        return wire.command(wire.READY, ready_properties(self._role))
