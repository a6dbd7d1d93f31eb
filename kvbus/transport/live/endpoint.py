"""What a stream of an output stands on: its end of a connection point, and what it shares there with other streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from kvbus.common.errors import BindError
from kvbus.transport.live.ring import Share
from kvbus.transport.live.states import StatePlaces

log = logging.getLogger("kvbus.outputs")

REOPEN: Final = 0.1
"""Seconds between two attempts to bind an address that was bound a moment ago."""

Handler = TypeVar("Handler")


class Endpoint(Protocol):
    """What peers connect to, or what dials them."""

    def close(self, linger: float = 0.0) -> None:
        """End all connections."""


def reopening(open_endpoint: Callable[[Handler], Endpoint]) -> Callable[[Handler], Endpoint]:
    """What opens an endpoint again, and goes on trying: another process may have taken the address in this moment."""
    return lambda handler: _Reopened(partial(open_endpoint, handler))


class _Reopened:
    """An endpoint, or the attempt to open it."""

    def __init__(self, open_endpoint: Callable[[], Endpoint]) -> None:
        self._open = open_endpoint
        self._opened: Endpoint | None = None
        self._again: asyncio.TimerHandle | None = None
        self._try()

    def _try(self) -> None:
        try:
            self._opened = self._open()
        except BindError as error:
            log.warning("%s; trying again", error)
            self._again = asyncio.get_running_loop().call_later(REOPEN, self._try)

    def close(self, linger: float = 0.0) -> None:
        """End all connections, and try no more."""
        if self._opened is not None:
            self._opened.close(linger)
        elif self._again is not None:
            self._again.cancel()


class Shared(NamedTuple):
    """What the streams of one endpoint share: see :mod:`kvbus.transport.live.hub`, which also counts their routers."""

    share: Share
    places: StatePlaces
