"""CURVE keys for the endpoints of kvbus's own ZMTP implementation.

This implementation needs libsodium for CURVE. ``pip install kvbus[curve]`` installs libsodium with PyNaCl.
"""

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
    """The security of one endpoint: CURVE with keys, or no security.

    Args:
        curve: the keys; None for an endpoint without CURVE.
        bind: True if the endpoint accepts connections. Otherwise it dials the peer whose public key is
            ``curve.server``.

    Raises:
        KeyFileError: the endpoint dials, but ``curve.server`` is None.
    """

    def __init__(self, curve: Curve | None, *, bind: bool) -> None:
        self.mechanism: MechanismFactory | None = None
        """Creates the CURVE mechanism of each connection; None for an endpoint without CURVE."""
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
        """Replace the allow-list of public keys, and disconnect every peer whose key is not on the new list.

        On an endpoint that dials or has no keys this does nothing, because it has no allow-list.

        Args:
            clients: public keys of the peers that may connect, 32 raw bytes each.
            peers: the connected peers.
        """
        if self._server is not None:
            self._server.allow(clients, peers)
