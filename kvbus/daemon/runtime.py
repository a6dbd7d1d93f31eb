"""The clocks, random numbers, sockets and store of a daemon. A test or a simulation passes its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from kvbus.config import Config
from kvbus.state.contract import Store
from kvbus.state.place import open_store
from kvbus.transport.accepted import BoundStream
from kvbus.transport.dialling import Dialled, dial
from kvbus.transport.ingress import LiveStream, RequestConnection
from kvbus.transport.sockets import Context, end, make_context
from kvbus.transport.zmtp.endpoint import SYSTEM, System

LONGEST_STEP: Final = 0.2
"""Seconds between two clock readings that still count as running. The daemon's tick reads twice as often."""


class RunningClock:
    """The clock of the relay. It counts only the seconds in which this process was running.

    A stopped process (SIGSTOP, a frozen cgroup, a node without CPU) does not read its peers' messages. When it
    continues, every deadline has passed on a normal clock, though no peer was late. So this clock counts only
    :data:`LONGEST_STEP` of a step that is longer.

    Args:
        read: the underlying clock, in seconds.
    """

    __slots__ = ("_announced", "_last", "_read", "paused")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last = read()
        self.paused = 0.0
        """Seconds of all pauses so far."""
        self._announced = 0.0

    def time(self) -> float:
        """Return the time in seconds; compare it only with earlier readings of this clock."""
        now = self._read()
        step = now - self._last
        self._last = now
        if step > LONGEST_STEP:
            self.paused += step - LONGEST_STEP
        return now - self.paused

    def stood(self) -> float:
        """Return the seconds of pauses since the last call."""
        self.time()
        before, self._announced = self._announced, self.paused
        return self.paused - before


Dial = Callable[..., AbstractAsyncContextManager[Dialled]]
"""A function that dials an endpoint once. See :func:`kvbus.transport.dialling.dial`."""


class EngineSockets:
    """A factory of sockets to engines. The libzmq sockets share one context.

    A running event loop is required.

    Args:
        context: the ZeroMQ context; :meth:`close` ends it. None: a new one.
    """

    def __init__(self, context: Context | None = None) -> None:
        self._context = make_context() if context is None else context

    def subscribe(self, endpoint: str, **options: Any) -> LiveStream:
        """Subscribe to an engine publisher. See :class:`~kvbus.transport.ingress.LiveStream`."""
        return LiveStream(self._context, endpoint, **options)

    def request(self, endpoint: str, *args: Any, **options: Any) -> RequestConnection:
        """Send one request to an engine. See :class:`~kvbus.transport.ingress.RequestConnection`."""
        return RequestConnection(self._context, endpoint, *args, **options)

    def accept(self, endpoint: str, **options: Any) -> BoundStream:
        """Listen for an engine publisher. See :class:`~kvbus.transport.accepted.BoundStream`."""
        return BoundStream(endpoint, **options)

    async def close(self) -> None:
        """Close every socket, and end the context."""
        await asyncio.sleep(0)  # asyncio releases descriptors one iteration after their sockets are closed
        await asyncio.sleep(0)
        await asyncio.to_thread(end, self._context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The clocks, random numbers, sockets and store of a daemon. The defaults are those of this machine.

    Attributes:
        wall_clock: returns the time of day, in seconds.
        stopwatch: returns seconds since an arbitrary time, to measure short durations.
        random_bytes: returns the given number of random bytes.
        open_store: opens the store of a configuration's state; returns None if no directory can be used.
        engine_sockets: creates the sockets to engines.
        dial: dials an engine to find out why there is no connection to it.
        system: the sockets to routers.
        state_batch_blocks: maximum number of blocks in a batch of a state; None: as many as routers accept.
    """

    wall_clock: Callable[[], float] = time.time
    stopwatch: Callable[[], float] = time.perf_counter
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    open_store: Callable[[Config], Store | None] = open_store
    engine_sockets: Callable[[], EngineSockets] = EngineSockets
    dial: Dial = dial
    system: System = SYSTEM
    state_batch_blocks: int | None = None


RUNTIME = Runtime()
