"""Keys for endpoints of kvbus's own ZMTP. CURVE needs libsodium there: ``pip install kvbus[curve]`` brings PyNaCl."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from zmq.utils import z85

from kvbus.transport.curve import Curve, KeyFileError

if TYPE_CHECKING:
    from kvbus.transport.zmtp.curve import ServerKeys
    from kvbus.transport.zmtp.mechanism import MechanismFactory
    from kvbus.transport.zmtp.peer import Peer


class Keys:
    """The keys of one endpoint, or none.

    Args:
        curve: the keys, from their files.
        bind: whether the endpoint accepts; else it dials the peer whose key ``curve`` names as the server's.

    Raises:
        KeyFileError: the endpoint dials, and the keys have no public key of a server.
    """

    def __init__(self, curve: Curve | None, *, bind: bool) -> None:
        self.mechanism: MechanismFactory | None = None
        """Makes the mechanism of a connection; None without keys."""
        self._server: ServerKeys | None = None
        if curve is None:
            return

        from kvbus.transport.zmtp.curve import ClientKeys, ServerKeys  # noqa: PLC0415 - it may not be installed

        public, secret = z85.decode(curve.public), z85.decode(curve.secret)
        if bind:
            self._server = ServerKeys(public, secret, curve.clients)
            self.mechanism = self._server.mechanism
            return
        if curve.server is None:
            raise KeyFileError("the peer's public key is missing")
        self.mechanism = ClientKeys(public, secret, z85.decode(curve.server)).mechanism

    def allow(self, clients: Collection[bytes], peers: Iterable[Peer]) -> None:
        """Replace the allow-list, and end the connections of those peers that are not on it any more.

        An endpoint that dials, or has no keys, has no such list.
        """
        if self._server is not None:
            self._server.allow(clients, peers)
