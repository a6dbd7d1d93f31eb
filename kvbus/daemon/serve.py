"""Run the daemon with signals: SIGTERM and SIGINT shut it down gracefully, SIGHUP reads files again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, Final

from kvbus.common.errors import ExitCode
from kvbus.config import Config
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.reload import ConfigFile, Reloader
from kvbus.state.writer import StoppedError

log = logging.getLogger("kvbus.daemon")

FEW_DESCRIPTORS: Final = 1024


def _raise_descriptors() -> None:
    """Raise the soft limit of file descriptors to the hard one, and say so in the log if that is still low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FEW_DESCRIPTORS:
        text = "only %d file descriptors: each router and each engine takes some, so raise the limit (ulimit -Hn)"
        log.warning(text, hard)


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Take an error that a callback has raised. After a MemoryError nothing in this process can be trusted.

    What routers have been sent is written to ``state_dir`` before it is sent, so a new process goes on exactly.
    """
    if isinstance(context.get("exception"), MemoryError):
        log.critical("out of memory: kvbus ends; the next start goes on from the state in state_dir")
        os._exit(ExitCode.INTERNAL)
    loop.default_exception_handler(context)


async def serve(config: Config, load: Callable[[], Config], file: ConfigFile | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        config: the configuration to run.
        load: reads the configuration again, at SIGHUP and when the file has changed.
        file: the file it is in.

    Raises:
        BindError: an endpoint cannot be bound.
        ConfigError: kvbus cannot use a key file.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_failed)
    _raise_descriptors()
    stop = asyncio.Event()

    def asked(signum: int) -> None:
        if stop.is_set():
            # use the default action, so that the parent process sees a death by signal
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            os._exit(128 + signum)  # PID 1 of a container has no default actions
        log.info("%s: shutting down; send it again to exit at once", signal.Signals(signum).name)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):  # the loop's own handlers do not run while the state is read
        signal.signal(signum, lambda number, _: asked(number))
    try:
        daemon = Daemon(config, stopped=stop.is_set)
    except StoppedError:
        return
    reloader = Reloader(daemon, load, file)

    hung_up = asyncio.Event()

    def again() -> None:
        hung_up.set()
        if daemon.started and not stop.is_set():
            hung_up.clear()
            reloader.reload()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked, signum)
    loop.add_signal_handler(signal.SIGHUP, again)
    try:
        await daemon.start()
        reloader.watch()
        if hung_up.is_set():
            again()
        await stop.wait()
    finally:
        reloader.close()
        if daemon.started:
            await daemon.close()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(signum)
