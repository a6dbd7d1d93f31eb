"""The socket types that kvbus speaks ZMTP as, and the peers that each of them accepts."""

from __future__ import annotations

from enum import Enum
from typing import Final

TYPES: Final = (b"PAIR", b"PUB", b"SUB", b"REQ", b"REP", b"DEALER", b"ROUTER", b"PULL", b"PUSH", b"XPUB", b"XSUB")
"""Socket types by their number in ZMTP 2.0 (libzmq numbers XPUB and XSUB too)."""

PUBLISHERS: Final = frozenset({b"PUB", b"XPUB"})


class Role(Enum):
    """What an endpoint is.

    PUB reads subscriptions as an XPUB does, but announces itself as "PUB". The engines' sockets are PUBs, so every
    router's SUB accepts that name, whatever its library; and no peer treats the two differently.
    """

    PUB = (b"PUB", frozenset({b"SUB", b"XSUB"}))
    ROUTER = (b"ROUTER", frozenset({b"DEALER", b"REQ"}))
    EITHER = (b"", frozenset({b"SUB", b"XSUB", b"PUB", b"XPUB"}))
    """A PUB towards subscribers and a SUB towards publishers: which of them, the peer's own type says."""

    # What looks at a peer dials as these, and takes any type: the type is what it wants to know.
    SUB = (b"SUB", frozenset(TYPES))
    DEALER = (b"DEALER", frozenset(TYPES))

    def __init__(self, socket_type: bytes, peers: frozenset[bytes]) -> None:
        self.socket_type = socket_type
        self.peers = peers

    def towards(self, socket_type: bytes) -> Role:
        """Return what it is to a peer of this type."""
        if self is not Role.EITHER:
            return self
        return Role.SUB if socket_type in PUBLISHERS else Role.PUB
