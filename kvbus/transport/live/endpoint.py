"""The live endpoint of an output's stream, and the resources that the streams of one endpoint share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from kvbus.common.errors import BindError
from kvbus.transport.live.ring import Share
from kvbus.transport.live.states import StateSlots

log = logging.getLogger("kvbus.outputs")

REOPEN: Final = 0.1
"""Seconds between two attempts to bind an address again."""

Handler = TypeVar("Handler")


class Endpoint(Protocol):
    """An open endpoint: a listener that routers connect to, or a dialler that connects to a router."""

    def close(self, linger: float = 0.0) -> None:
        """Close all connections. Queued bytes are sent for up to ``linger`` seconds."""


def reopening(open_endpoint: Callable[[Handler], Endpoint]) -> Callable[[Handler], Endpoint]:
    """Return a function that opens an endpoint like ``open_endpoint``, but tries again until the address can be bound.

    It is used when kvbus binds an address again, because another process may hold the address for a moment.
    """
    return lambda handler: _Reopened(partial(open_endpoint, handler))


class _Reopened:
    """An endpoint that is open, or that kvbus tries to open every :data:`REOPEN` seconds."""

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
        """Close all connections of the open endpoint, or stop trying to open it."""
        if self._opened is not None:
            self._opened.close(linger)
        elif self._again is not None:
            self._again.cancel()


class Shared(NamedTuple):
    """The resources that the streams of one endpoint share.

    A stream with shared resources does not count its routers, because :mod:`kvbus.transport.live.hub` counts them.

    Attributes:
        share: the byte limit for the recent batches that all streams together keep for slow routers.
        state_slots: the scheduler that limits how many states are sent at the same time.
    """

    share: Share
    state_slots: StateSlots
