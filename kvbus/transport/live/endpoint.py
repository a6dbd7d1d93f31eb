"""What a stream of an output stands on: its end of a connection point, and what it shares there with other streams."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvbus.transport.live.ring import Share
from kvbus.transport.live.transfers import Transfers


class Endpoint(Protocol):
    """What peers connect to, or what dials them."""

    def close(self, linger: float = 0.0) -> None:
        """End all connections."""


class Shared(NamedTuple):
    """What the streams of one endpoint share: see :mod:`kvbus.transport.live.hub`, which also counts their routers."""

    share: Share
    transfers: Transfers
