"""A simulated process: an event loop in virtual time, which can be paused, slowed down and killed.

An iteration of the loop has asyncio's order: readable descriptors, then due timers, then callbacks that were ready
before. Each callback takes virtual time, in which nothing else of the process runs. So events wait while deadlines
pass, as on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.vopr.schedule import Schedule
from tests.vopr.store import KilledError

COST = 0.000_02
"""Virtual seconds that a callback takes. Each reading of the clock takes the same time in addition."""


DESCRIPTORS = 10**6
"""Default maximum number of file descriptors of a simulated process."""


class SimLoop:
    """The event loop of a simulated process.

    Args:
        schedule: the schedule of the world.
        failed: called with each unhandled exception.
    """

    def __init__(self, schedule: Schedule, failed: Callable[[str, BaseException | None], None]) -> None:
        self.schedule = schedule
        self.asyncio: Any = self
        """This object, but with the type ``Any``, because asyncio's classes require a real event loop type."""
        self.dead = False
        self.cost = COST
        self.busy_until = self.paused_until = self.paused_for = 0.0
        self.sockets: dict[int, Any] = {}
        """All open sockets by descriptor. They are closed when the process is killed."""
        self.max_descriptors = DESCRIPTORS
        self.after_turn: Callable[[], None] = lambda: None
        self._failed = failed
        self._base = self._cpu = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._io: dict[Any, asyncio.Handle] = {}
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = 0
        self._next_turn: float | None = None
        self._readers: dict[int, asyncio.Handle] = {}
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._running = False

    # -- iterations --------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the time of the process's clock in seconds. The clock advances while a callback runs."""
        if self._running:
            self._cpu += self.cost
            return self._base + self._cpu
        return max(self.schedule.now, self.busy_until)

    def _wake(self, when: float) -> None:
        when = max(when, self.busy_until, self.schedule.now)
        if self._next_turn is None or when < self._next_turn:
            self._next_turn = when
            self.schedule.at(when, self._turn, when)

    def _turn(self, planned: float) -> None:
        if self.dead or planned != self._next_turn:
            self.schedule.steps -= 1
            return
        self._next_turn = None
        now = self.schedule.now
        if now < self.busy_until:
            self._wake(self.busy_until)
            return
        ready = self._ready
        if self._io:
            ready.extend(self._io.values())
            self._io.clear()
        timers = self._timers
        while timers and timers[0][0] <= now:
            ready.append(heapq.heappop(timers)[2])
        self._base, self._cpu = now, 0.0
        with self.running():
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle.cancelled():
                    self.schedule.steps += 1
                    self._cpu += self.cost
                    try:
                        handle._run()  # noqa: SLF001
                    except KilledError:
                        assert self.dead
                    if self.dead:
                        return
        self.busy_until = now + self._cpu
        self.after_turn()
        if ready or self._io:
            self._wake(self.busy_until)
        elif timers:
            self._wake(timers[0][0])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Make this loop asyncio's running loop for the duration of a ``with`` block."""
        asyncio._set_running_loop(self.asyncio)  # noqa: SLF001
        self._running = True
        try:
            yield
        finally:
            self._running = False
            asyncio._set_running_loop(None)  # noqa: SLF001

    def spend(self, seconds: float) -> None:
        """Let the callback that is running take this many seconds more of virtual time."""
        self._cpu += seconds

    def pause(self, seconds: float) -> None:
        """Pause the process for this many seconds, as SIGSTOP, a frozen cgroup or a lack of CPU does."""
        if self.paused_until <= self.schedule.now:
            self.paused_for = 0.0
        self.paused_for += seconds
        self.busy_until = self.paused_until = max(self.busy_until, self.schedule.now) + seconds

    def kill(self) -> None:
        """Kill the process as SIGKILL does: run none of its callbacks any more, and close its sockets."""
        self.dead = True
        self._ready.clear()
        self._io.clear()
        self._timers.clear()
        for task in self._tasks.values():
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        for opened in list(self.sockets.values()):
            opened.close()

    # -- asyncio's interface of a loop ---------------------------------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self.asyncio, context)
        if not self.dead:
            self._ready.append(handle)
            if not self._running:
                self._wake(self.schedule.now)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self.asyncio, context)
        if not self.dead:
            self._order += 1
            heapq.heappush(self._timers, (when, self._order, handle))
            if not self._running:
                self._wake(when)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing, because the loop skips a cancelled timer when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.asyncio)

    def create_task(self, coro: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self.asyncio, **more)
        self._order += 1
        number = self._order
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._done(number))
        return task

    def _done(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None and not task.cancelled() and task.exception() is not None:
            self.call_exception_handler({"message": "a task failed", "exception": task.exception()})

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run the function immediately, without a thread.

        The future gets its result in the next iteration of the loop.
        """
        del executor
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - the caller that awaits the future gets it
            self.call_soon(_settle, future.set_exception, future, error)
        else:
            self.call_soon(_settle, future.set_result, future, result)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._failed(context.get("message", ""), context.get("exception"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self.dead

    # -- descriptors -------------------------------------------------------------------------------------------------

    def mark(self, key: Any, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a callback for the next iteration, because a descriptor is readable or writable.

        Several calls for the same descriptor cause one callback.
        """
        if self.dead or key in self._io:
            return
        self._io[key] = asyncio.Handle(callback, args, self.asyncio)
        if not self._running:
            self._wake(self.schedule.now)

    def unmark(self, key: Any) -> None:
        """Cancel a callback that `mark` has scheduled."""
        self._io.pop(key, None)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self._readers[fd] = asyncio.Handle(callback, args, self.asyncio)
        self.sockets[fd].notify()

    def remove_reader(self, fd: Any) -> bool:
        self.unmark((fd, "r"))
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        """Call the reader callback of a descriptor in the next iteration of the loop."""
        handle = self._readers.get(fd)
        if handle is not None:
            self.mark((fd, "r"), handle._run)  # noqa: SLF001

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        protocol = protocol_factory()
        waiter = self.create_future()
        return sock.transport_for(protocol, waiter), protocol, await waiter


def _settle(setter: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        setter(value)
