"""Functions that end asyncio tasks reliably, and that close resources within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

AGAIN: Final = 5.0
"""Seconds after which a cancelled task that has not ended is cancelled again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks, and wait until each of them has ended. Errors of the tasks are ignored.

    A cancellation can be lost. Before Python 3.12, ``asyncio.wait_for`` drops the cancellation if the awaited result
    arrives in the same iteration of the event loop (python/cpython#86296). dnspython and nats-py use
    ``asyncio.wait_for``. The task then continues to run, so it is cancelled again every :data:`AGAIN` seconds.

    If the calling task is cancelled while it waits here, the tasks are cancelled again immediately. The CancelledError
    of the calling task is raised only after the tasks have ended.
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
            task.exception()  # otherwise asyncio logs the exception as never retrieved
    if cancelled is not None:
        raise cancelled


_closing: Final[set[asyncio.Task[Any]]] = set()
"""Tasks of :func:`close_within`. They are kept here because the event loop holds only weak references to tasks."""


async def close_within(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Wait for work that closes something, but not longer than ``seconds``.

    If the time is over, or the caller is cancelled, the work continues in the background. Its errors are ignored,
    because nothing uses the closed object any more.
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
    """Pass a MemoryError to the exception handler of the event loop, which ends the process. Ignore any other error.

    Code that catches all errors and continues must call this. Otherwise it would continue without memory.
    """
    if isinstance(error, MemoryError):
        asyncio.get_running_loop().call_exception_handler({"message": "out of memory", "exception": error})
