"""Run the coroutine of a command until it ends or the user presses Ctrl-C, and print messages to the user."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import click

from kvbus.common.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def say(text: str) -> None:
    """Print a message to the user on standard error, because standard output is only for data."""
    click.echo(f"kvbus: {text}", err=True)


def run_until_signal(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run the coroutine `main(stop)`, on uvloop if it is installed. SIGINT and SIGTERM set the event `stop`.

    A second signal ends the process without waiting for `main`.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_watched(main))


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Run the coroutine `work` until it ends. If the event `stop` is set first, cancel it.

    An exception of `work` is raised here.
    """
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        stopped.cancel()


async def _watched(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            raise SystemExit(ExitCode.INTERRUPTED)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await main(stop)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
