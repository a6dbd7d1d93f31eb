"""The clocks, random numbers, sockets and store that a daemon uses. Tests and simulations replace them."""

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
from kvbus.state.directory import open_store
from kvbus.transport.dialling import Dialled, dial
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import Context, end, make_context
from kvbus.transport.subscription import BoundStream, DialledStream
from kvbus.transport.zmtp.settings import SYSTEM, System

LONGEST_STEP: Final = 0.2
"""Maximum seconds that the relay's clock counts for the interval between two readings.

The daemon reads the clock every 0.1 s. The rest of a longer interval counts as a pause in which the process was
stopped.
"""


class RunningClock:
    """The clock of the relay. It counts only the seconds in which this process was running.

    A stopped process (SIGSTOP, a frozen cgroup, a node without CPU) reads no messages of its peers. When it continues,
    all deadlines of a normal clock have passed, although no peer was late. Therefore this clock counts a long interval
    between two readings as :data:`LONGEST_STEP` seconds.

    Args:
        read: returns the time of the underlying clock, in seconds.
    """

    __slots__ = ("_announced", "_last", "_read", "paused")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last = read()
        self.paused = 0.0
        """Total seconds for which the process was suspended so far."""
        self._announced = 0.0

    def time(self) -> float:
        """Return the time in seconds. Compare it only with other readings of this clock."""
        now = self._read()
        step = now - self._last
        self._last = now
        if step > LONGEST_STEP:
            self.paused += step - LONGEST_STEP
        return now - self.paused

    def stood(self) -> float:
        """Return how many seconds the process was suspended, as by SIGSTOP, since the previous call of this method."""
        self.time()
        before, self._announced = self._announced, self.paused
        return self.paused - before


Dial = Callable[..., AbstractAsyncContextManager[Dialled]]
"""A function that connects to an endpoint once, to examine it. See :func:`kvbus.transport.dialling.dial`."""


class EngineSockets:
    """A factory of sockets to engines. Live streams use kvbus's own ZMTP, and requests use one ZeroMQ context.

    A running event loop is required.

    Args:
        context: the ZeroMQ context, which :meth:`close` terminates; None for a new context.
    """

    def __init__(self, context: Context | None = None) -> None:
        self._context = make_context() if context is None else context

    def subscribe(self, endpoint: str, **options: Any) -> DialledStream:
        """Connect to an engine's live stream. See :class:`~kvbus.transport.subscription.DialledStream`."""
        return DialledStream(endpoint, **options)

    def request(self, endpoint: str, *args: Any, **options: Any) -> RequestConnection:
        """Send one request to an engine. See :class:`~kvbus.transport.request.RequestConnection`."""
        return RequestConnection(self._context, endpoint, *args, **options)

    def accept(self, endpoint: str, **options: Any) -> BoundStream:
        """Listen on an endpoint to which engines connect. See :class:`~kvbus.transport.subscription.BoundStream`."""
        return BoundStream(endpoint, **options)

    async def close(self) -> None:
        """Close every socket, and terminate the ZeroMQ context."""
        await asyncio.sleep(0)  # asyncio releases a socket's descriptor one iteration after the socket is closed
        await asyncio.sleep(0)
        await asyncio.to_thread(end, self._context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The clocks, random numbers, sockets and store that a daemon uses. The defaults are those of the operating system.

    Attributes:
        wall_clock: returns the time of day, in seconds since 1970.
        stopwatch: returns seconds since an arbitrary time, to measure short durations.
        random_bytes: returns the given number of random bytes.
        open_store: opens the store for the state of a configuration; returns None if no directory is usable.
        engine_sockets: creates the factory of the sockets to engines.
        dial: connects to an engine once, to find out why the source has no connection.
        system: provides the sockets to routers.
        state_batch_blocks: maximum number of blocks in one batch of a state; None: as many as routers accept.
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
