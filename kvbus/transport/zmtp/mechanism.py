"""Security mechanisms: what is said between the greeting and the first message.

NULL is here, and CURVE in :mod:`~kvbus.transport.zmtp.curve`, which needs a package of its own. CURVE also seals what
is said afterwards. NULL does not, so there a message's bytes are the same for every peer and are handed on untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvbus.transport.zmtp import commands
from kvbus.transport.zmtp.frames import Frame
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.roles import Role


class Sealing(Protocol):
    """What a mechanism does to frames once its handshake is over."""

    overhead: int
    """Bytes that a sealed frame is longer than the frame's body."""

    def seal(self, data: bytes) -> bytes:
        """Seal encoded frames, whole ones, in the order in which they are sent."""

    def unseal(self, frame: Frame) -> Frame:
        """Return the frame that a sealed one holds.

        Raises:
            ProtocolError: it is forged, or was received before.
        """


class Mechanism(Protocol):
    """One side of a handshake."""

    name: bytes
    """Its name in the greeting."""
    peer: dict[bytes, bytes] | None
    """The peer's properties; None until the handshake is over."""
    peer_key: bytes
    """The public key that the peer has proven to own; empty without one."""
    sealing: Sealing | None
    """Seals what follows the handshake; None if nothing does."""

    def start(self) -> bytes:
        """Return what to send before anything was received."""

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in a command of the peer, and return what to send.

        Raises:
            ProtocolError: the handshake has failed.
        """


MechanismFactory = Callable[[Role], Mechanism]
"""Makes the mechanism of one connection."""


class Null:
    """No security: both sides say READY with their properties.

    The dialling side begins. The accepting side answers with READY, or with ERROR in its place.

    Args:
        role: our socket type, and the peers it accepts.
        accepting: True for the side that accepted the connection.
    """

    name = b"NULL"
    peer_key = b""
    sealing: Sealing | None = None

    def __init__(self, role: Role, *, accepting: bool) -> None:
        self._role = role
        self._accepting = accepting
        self.peer: dict[bytes, bytes] | None = None

    def _ready(self) -> bytes:
        return commands.command(commands.READY, ready_properties(self._role))

    def start(self) -> bytes:
        """Return the READY of the dialling side."""
        return b"" if self._accepting else self._ready()

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in the peer's READY, or its ERROR."""
        if name == commands.ERROR:
            raise commands.refusal(data)
        if name != commands.READY:
            raise ProtocolError(Reason.COMMAND, f"{name!r} in place of READY")
        self.peer = check_properties(self._role, data)
        self._role = self._role.towards(self.peer[b"socket-type"])
        return self._ready() if self._accepting else b""


def ready_properties(role: Role) -> bytes:
    """Encode our properties."""
    return commands.encode_metadata({b"Socket-Type": role.socket_type})


def check_properties(role: Role, data: bytes) -> dict[bytes, bytes]:
    """Parse a peer's properties, and check that it can talk to us.

    Raises:
        ProtocolError: they are malformed, or it cannot.
    """
    peer = commands.parse_metadata(data)
    check_type(role, peer.get(b"socket-type", b""))
    if len(peer.get(b"identity", b"")) > commands.MAX_IDENTITY:
        raise ProtocolError(Reason.COMMAND, "the identity is too long")
    return peer


def check_type(role: Role, socket_type: bytes) -> None:
    """Check that a peer's socket type can talk to ours.

    Raises:
        ProtocolError: it cannot.
    """
    if socket_type not in role.peers:
        ours = role.socket_type.decode() or "PUB or SUB"
        text = f"socket type {socket_type.decode('ascii', 'replace')} cannot talk to {ours}"
        raise ProtocolError(Reason.SOCKET_TYPE, text)
