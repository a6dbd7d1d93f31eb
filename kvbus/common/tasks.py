"""Tasks that are to end, and do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

AGAIN: Final = 5.0
"""Seconds that a task may take to clean up before it is cancelled once more."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks, and wait until each of them has ended, however it does.

    A cancellation can be lost: before Python 3.12 ``asyncio.wait_for`` forgets it where what it waits for comes in the
    same turn of the loop (python/cpython#86296), and dnspython and nats-py wait so. Such a task goes on as if nobody
    had said anything, so it is told again.

    Whoever waits here may be such a task of somebody else, and be told again itself: that is passed on at once, and
    ends the wait only when the tasks have ended.
    """
    every = {task for task in tasks if task is not None}
    left, cancelled = every, None
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=AGAIN)
        except asyncio.CancelledError as error:
            cancelled = error
        left = {task for task in left if not task.done()}
    for task in every:
        if not task.cancelled():
            task.exception()  # nobody else asks, and asyncio would complain of that
    if cancelled is not None:
        raise cancelled


_closing: Final[set[asyncio.Task[Any]]] = set()
"""Tasks that still close something. The event loop alone would not keep them."""


async def close_within(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Wait up to so many seconds for work that closes something. It goes on after that, and if the caller is cancelled.

    Errors of the work are dropped, because nobody needs what it closes.
    """
    task = asyncio.ensure_future(work)
    _closing.add(task)

    def ended(task: asyncio.Task[Any]) -> None:
        _closing.discard(task)
        if not task.cancelled():
            task.exception()

    task.add_done_callback(ended)
    await asyncio.wait([task], timeout=seconds)


def report_out_of_memory(error: Exception) -> None:
    """Pass a MemoryError on to the event loop, whose handler ends the process; for code that survives other errors."""
    if isinstance(error, MemoryError):
        asyncio.get_running_loop().call_exception_handler({"message": "out of memory", "exception": error})
