"""Roles and security mechanisms of a ZMTP connection.

A role defines which socket types may exchange messages. A security mechanism does the handshake after the greetings.
This module contains the mechanism NULL. CURVE is in :mod:`~kvbus.transport.zmtp.curve`, which needs PyNaCl. CURVE also
encrypts ("seals") every frame after the handshake. NULL does not, so without CURVE the bytes of a message are the same
for every peer.
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
    """The socket type of one of kvbus's endpoints, and the socket types that its peers may have.

    A PUB endpoint reads subscriptions as an XPUB does, but announces itself as "PUB". Engines have PUB sockets, so
    every router's SUB accepts this type, with any ZeroMQ library. No peer treats PUB and XPUB differently.
    """

    PUB = (b"PUB", SUBSCRIBERS)
    SUB = (b"SUB", PUBLISHERS)
    EITHER = (b"", SUBSCRIBERS | PUBLISHERS)
    """Acts as a PUB for a peer that subscribes, and as a SUB for a peer that publishes.

    The socket type in the peer's READY decides.
    """
    ROUTER = (b"ROUTER", frozenset({b"DEALER", b"REQ"}))
    DEALER = (b"DEALER", frozenset({b"ROUTER", b"REP", b"DEALER"}))

    def __init__(self, socket_type: bytes, peers: frozenset[bytes]) -> None:
        self.socket_type = socket_type
        self.peers = peers

    def towards(self, socket_type: bytes) -> Role:
        """Return the role for a peer of this socket type: SUB or PUB if this role is EITHER, otherwise this role."""
        if self is not Role.EITHER:
            return self
        return Role.SUB if socket_type in PUBLISHERS else Role.PUB


class Sealing(Protocol):
    """The encryption of the frames of one connection after the handshake of its mechanism."""

    overhead: int
    """Number of bytes by which encryption makes the body of a frame longer."""

    def seal(self, data: bytes) -> bytes:
        """Encrypt complete encoded frames. Call this in the order in which the frames are sent."""

    def unseal(self, frame: Frame) -> Frame:
        """Decrypt a received frame, and return the frame that was encrypted in it.

        Raises:
            ProtocolError: the received frame is forged, or was received before.
        """


class Mechanism(Protocol):
    """kvbus's side of the handshake of one connection."""

    name: bytes
    """The mechanism's name in the greeting."""
    expected: bytes
    """The name of the command that the peer must send next."""
    peer: dict[bytes, bytes] | None
    """The properties in the peer's READY, such as its socket type; None until the handshake has succeeded."""
    peer_key: bytes
    """The public key that the peer has proven to own; empty without CURVE."""
    sealing: Sealing | None
    """Encrypts and decrypts every frame after the handshake; None without encryption."""

    def start(self) -> bytes:
        """Return the bytes that kvbus sends before the peer's first command."""

    def receive(self, data: bytes) -> bytes:
        """Process the data of the peer's command :attr:`expected`, and return the bytes to send as an answer.

        Raises:
            ProtocolError: the handshake has failed.
        """


MechanismFactory = Callable[[Role], Mechanism]
"""Creates the security mechanism of one connection, for kvbus's role."""


def ready_properties(role: Role) -> bytes:
    """Encode the properties that kvbus sends in its READY."""
    return wire.encode_metadata({b"Socket-Type": role.socket_type})


class Null:
    """The mechanism without security: both sides send a READY with their properties, the dialling side first.

    Args:
        role: kvbus's socket type, and the socket types that the peer may have.
        accepting: True if kvbus has accepted the connection, False if it has dialled.
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
        """Return kvbus's READY if kvbus has dialled, or no bytes if it has accepted the connection."""
        return b"" if self._accepting else self._ready()

    def receive(self, data: bytes) -> bytes:
        """Process the peer's READY; return kvbus's READY if kvbus has accepted the connection."""
        self.peer = wire.parse_metadata(data)
        self._role = self._role.towards(self.peer.get(b"socket-type", b""))
        return self._ready() if self._accepting else b""

    def _ready(self) -> bytes:
        return wire.command(wire.READY, ready_properties(self._role))
