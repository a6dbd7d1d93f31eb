"""End asyncio tasks reliably, and close resources within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

AGAIN: Final = 5.0
"""Seconds that a task may take to clean up before it is cancelled again."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks, and wait until each of them has ended, whether normally or with an error.

    A cancellation can be lost. Before Python 3.12 ``asyncio.wait_for`` drops it if its awaited result arrives in the
    same iteration of the loop (python/cpython#86296), and dnspython and nats-py use it. Such a task continues, so it is
    cancelled again after :data:`AGAIN`.

    If the calling task is cancelled while it waits, the tasks are cancelled again at once. Its CancelledError is raised
    only after they have ended.
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
            task.exception()  # mark the exception as retrieved, or asyncio logs it
    if cancelled is not None:
        raise cancelled


_closing: Final[set[asyncio.Task[Any]]] = set()
"""Tasks that still close something. The event loop holds only weak references to tasks."""


async def close_within(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Wait up to ``seconds`` for work that closes something.

    The work continues after that time, and if the caller is cancelled. Its errors are dropped, because nothing uses the
    closed object.
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
    """Pass a MemoryError on to the event loop, whose handler ends the process.

    Code that survives other errors calls this.
    """
    if isinstance(error, MemoryError):
        asyncio.get_running_loop().call_exception_handler({"message": "out of memory", "exception": error})
