"""Security mechanisms: what is said between the greeting and the first message.

Only NULL exists. CURVE would be a second class here. It also wraps each message, so :class:`Mechanism` would get two
methods more, which a peer calls with each message it sends and receives; NULL's return their argument.
"""

from __future__ import annotations

from typing import Protocol

from kvbus.transport.zmtp import commands
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.roles import Role


class Mechanism(Protocol):
    """One side of a handshake."""

    name: bytes
    """Its name in the greeting."""
    peer: dict[bytes, bytes] | None
    """The peer's properties; None until the handshake is over."""

    def start(self) -> bytes:
        """Return what to send before anything was received."""

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in a command of the peer, and return what to send.

        Raises:
            ProtocolError: the handshake has failed.
        """


class Null:
    """No security: both sides say READY with their properties.

    The dialling side begins. The accepting side answers with READY, or with ERROR in its place.

    Args:
        role: our socket type, and the peers it accepts.
        accepting: True for the side that accepted the connection.
    """

    name = b"NULL"

    def __init__(self, role: Role, *, accepting: bool) -> None:
        self._role = role
        self._accepting = accepting
        self.peer: dict[bytes, bytes] | None = None

    def _ready(self) -> bytes:
        return commands.command(commands.READY, commands.encode_metadata({b"Socket-Type": self._role.socket_type}))

    def start(self) -> bytes:
        """Return the READY of the dialling side."""
        return b"" if self._accepting else self._ready()

    def receive(self, name: bytes, data: bytes) -> bytes:
        """Take in the peer's READY, or its ERROR."""
        if name == commands.ERROR:
            raise ProtocolError(Reason.REFUSED, f"the peer says: {data[1:].decode('ascii', 'replace')}")
        if name != commands.READY:
            raise ProtocolError(Reason.COMMAND, f"{name!r} in place of READY")
        peer = commands.parse_metadata(data)
        check_type(self._role, peer.get(b"socket-type", b""))
        if len(peer.get(b"identity", b"")) > commands.MAX_IDENTITY:
            raise ProtocolError(Reason.COMMAND, "the identity is too long")
        self.peer = peer
        return self._ready() if self._accepting else b""


def check_type(role: Role, socket_type: bytes) -> None:
    """Check that a peer's socket type can talk to ours.

    Raises:
        ProtocolError: it cannot.
    """
    if socket_type not in role.peers:
        text = f"socket type {socket_type.decode('ascii', 'replace')} cannot talk to {role.socket_type.decode()}"
        raise ProtocolError(Reason.SOCKET_TYPE, text)
