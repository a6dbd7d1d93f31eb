"""Run the daemon with signals: SIGTERM and SIGINT shut it down gracefully, and SIGHUP makes it read its files again.

A reload reads keys, tokens, certificates and the log level. A changed file causes a reload too. Discovery adds and
removes sources while kvbus runs. Every other configuration key needs a restart, after which routers get the state
again. If the changed configuration changes such a key, the log names the key. If the changed configuration is invalid,
the log lists all its mistakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvbus.common.errors import ConfigError, ExitCode, KvbusError
from kvbus.config import Config
from kvbus.config.yamlfile import MAX_BYTES
from kvbus.core.findings.bus import RELOAD_REFUSED
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import read_keys
from kvbus.http.credentials import read_again
from kvbus.state.writer import StoppedError

log = logging.getLogger("kvbus.daemon")

FEW_DESCRIPTORS: Final = 1024

SETTLED: Final = 1.0
"""Seconds for which a changed file must stay unchanged before kvbus reads it."""


class ConfigFile:
    """The configuration's file, which kvbus checks for changes.

    kvbus finds a change by the content of the file, because time and size of the file may be the same after a change.
    In Kubernetes, the file is behind a symbolic link (``..data``) that is replaced atomically. Elsewhere an editor may
    write the file in place. Therefore a changed file is read only after it has stayed the same for a while.

    Args:
        path: the path of the file. The constructor reads the file, so call it before the configuration is loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.loaded = self.content()
        """Fingerprint of the content that kvbus has loaded."""

    def content(self) -> bytes:
        """Return a fingerprint of the file's content; empty if the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                return hashlib.sha256(file.read(MAX_BYTES + 1)).digest()
        except OSError:
            return b""

    async def settled(self, seconds: float = SETTLED) -> bytes | None:
        """Return a fingerprint of the content; None if the content changes within ``seconds``.

        A file that is changing may be incomplete.
        """
        found = await asyncio.to_thread(self.content)
        if found == self.loaded:
            return found
        await asyncio.sleep(seconds)
        return found if found == await asyncio.to_thread(self.content) else None


class _ChangesError(Exception):
    """The configuration file changed while kvbus was reading it, so kvbus will read it again."""


class Reloader:
    """A reader of changed files, which applies them to a running daemon.

    Args:
        daemon: the running daemon.
        load: reads the configuration. It is called in a thread.
        file: the configuration's file, which is checked for changes. None: the configuration is read only at SIGHUP.
    """

    def __init__(self, daemon: Daemon, load: Callable[[], Config], file: ConfigFile | None = None) -> None:
        self._daemon = daemon
        self._load = load
        self._file = file
        self._broken = False
        """Whether the last attempt to load the configuration failed.

        The attempt is repeated, because a Kubernetes Secret that the configuration needs may be created later.
        """
        self._config_problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._key_problem = ""
        self._credentials_problem = ""

    def reload(self) -> None:
        """Start reading the configuration, the keys, the tokens and the certificates again."""
        self._begin(self._reload())

    def watch(self) -> None:
        """Start checking the files with keys, tokens and certificates every ``key_reload_interval`` seconds.

        If the configuration's file is to be checked too, start checking it.
        """
        self._begin(self._watch())
        if self._file is not None:
            self._begin(self._watch_file(self._file))

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop checking files, and abort a reload."""
        for task in list(self._tasks):
            task.cancel()

    async def _reload(self, found: bytes | None = None) -> None:
        """Read the configuration, the keys, the tokens and the certificates again, and apply them.

        Args:
            found: fingerprint of the changed configuration file; None at SIGHUP. At SIGHUP, every problem is logged,
                even a known one.
        """
        daemon = self._daemon
        async with daemon.changing:
            if found is None:
                self._key_problem = self._credentials_problem = ""
            await self._look_at_credentials()
            await self._look_at_keys()
            try:
                config = await asyncio.to_thread(self._load_file, found)
            except _ChangesError:
                return
            except KvbusError as error:
                self._broken = True
                problems = error.problems if isinstance(error, ConfigError) else []
                keys = [problem.key for problem in problems] or [str(error)]
                self._refuse(list(dict.fromkeys(keys)), str(error), found, "is not valid, the previous one stays: %s")
                facts = {"key": keys[0], "why": str(problems[0]) if problems else str(error)}
                daemon.reload_findings["configuration"] = RELOAD_REFUSED(
                    **facts, what="the configuration", do="correct the file; `kvbus check FILE` lists all mistakes"
                )
                return
            self._broken = False
            daemon.set_log_level(config.log_level)
            if keys := changed_keys(daemon.configured, config):
                text = "changes %s: restart kvbus to apply that"
                self._refuse(keys, ", ".join(keys), found, text)
                facts = {"key": keys[0], "why": f"{', '.join(keys)} changed, and needs a restart"}
                daemon.reload_findings["configuration"] = RELOAD_REFUSED(
                    **facts, what="the configuration", do="restart kvbus, or take the change back"
                )
                return
            self._config_problem = ""
            daemon.process.config_refused = []
            daemon.reload_findings.pop("configuration", None)
            daemon.process.config_reloads["applied"] += 1
            log.info("the configuration was read again, and all of it is in force")

    def _refuse(self, keys: list[str], problem: str, found: bytes | None, text: str) -> None:
        """Count and log that a changed configuration is not in force.

        The same problem is logged only once, except at SIGHUP.

        Args:
            keys: the configuration keys that cause the refusal, for a metric.
            problem: the problem, which is put into ``text``.
            found: fingerprint of the changed file; None at SIGHUP.
            text: the end of the log line.
        """
        daemon, known = self._daemon, self._config_problem
        self._config_problem = problem
        daemon.process.config_refused = keys
        if found is None or problem != known:
            daemon.process.config_reloads["refused"] += 1
            log.error(f"the configuration {text}", problem)  # noqa: G004 - one of two texts

    def _load_file(self, found: bytes | None) -> Config:
        """Load the configuration from its file. This method is called in a thread.

        Args:
            found: fingerprint of the changed file; None at SIGHUP.

        Raises:
            KvbusError: the configuration is not valid.
            _ChangesError: the content of the file no longer has the fingerprint ``found``.
        """
        file = self._file
        if file is None:
            return self._load()
        now = file.content()
        try:
            return self._load()
        finally:
            if found is not None and not found == now == file.content():
                raise _ChangesError
            file.loaded = now

    async def _watch(self) -> None:
        daemon = self._daemon
        while True:
            await asyncio.sleep(daemon.config.key_reload_interval or 1.0)
            if daemon.config.key_reload_interval and daemon.started:
                async with daemon.changing:
                    await self._look_at_credentials()
                    await self._look_at_keys()

    async def _watch_file(self, file: ConfigFile) -> None:
        """Reload when the configuration file has changed, and repeat a failed attempt until it succeeds."""
        daemon = self._daemon
        while True:
            interval = daemon.config.key_reload_interval
            await asyncio.sleep(interval or 1.0)
            if not (interval and daemon.started and daemon.config.reload == "auto"):
                continue
            found = await file.settled(min(interval, SETTLED))
            if found is not None and (found != file.loaded or self._broken):
                await self._reload(found)

    async def _look_at_keys(self) -> None:
        """Read the CURVE keys again, and apply them if they have changed. If a file is not usable, no key changes."""
        daemon = self._daemon
        try:
            keys = await asyncio.to_thread(read_keys, daemon.config)
            if keys != daemon.keys:
                await daemon.changes.apply_keys(keys)
                daemon.process.key_reloads["applied"] += 1
        except KvbusError as error:
            if str(error) != self._key_problem:
                self._key_problem = str(error)
                daemon.process.key_reloads["refused"] += 1
                log.error("key files refused, the previous keys stay in force: %s", error)  # noqa: TRY400
            problems = error.problems if isinstance(error, ConfigError) else []
            key, why = (problems[0].key, problems[0]) if problems else ("curve_client_keys", error)
            facts = {"key": key, "why": str(why)}
            daemon.reload_findings["keys"] = RELOAD_REFUSED(
                **facts, what="the changed CURVE keys", do="correct the file"
            )
            return
        self._key_problem = ""
        daemon.reload_findings.pop("keys", None)

    async def _look_at_credentials(self) -> None:
        """Read the HTTP tokens and certificates again, and apply the changed ones.

        An unusable file changes nothing, and does not keep the other files from being applied.
        """
        daemon = self._daemon
        before = daemon.admin.credentials
        found, problems = await asyncio.to_thread(read_again, daemon.config, before)
        text = str(ConfigError(problems)) if problems else ""
        if text not in ("", self._credentials_problem):
            daemon.process.key_reloads["refused"] += 1
            log.error("HTTP tokens or certificates refused, the previous ones stay in force: %s", text)
        self._credentials_problem = text
        daemon.reload_findings.pop("credentials", None)
        if problems:
            facts = {"key": problems[0].key, "why": str(problems[0])}
            daemon.reload_findings["credentials"] = RELOAD_REFUSED(
                **facts, what="the changed HTTP tokens or certificates", do="correct the file"
            )
        if found != before:
            daemon.admin.renew(found)
            daemon.process.key_reloads["applied"] += 1
            log.info("HTTP: new tokens or a new certificate in force, %d tokens", len(found.tokens))


def changed_keys(running: Config, wanted: Config) -> list[str]:
    """Return the keys that differ between two configurations and need a restart, such as ``outputs[0].layout``."""
    found: list[str] = []

    def compare(name: str, one: Any, other: Any) -> None:
        if isinstance(one, dict) and isinstance(other, dict):
            for key in one | other:
                compare(f"{name}.{key}" if name else key, one.get(key), other.get(key))
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for at, pair in enumerate(zip(one, other, strict=True)):
                compare(f"{name}[{at}]", *pair)
        elif one != other:
            found.append(name)

    compare("", running.to_dict(), wanted.to_dict())
    return [name for name in found if name != "log_level"]


# -- signals and the process -----------------------------------------------------------------------------------------


def _raise_descriptors() -> None:
    """Raise the process's soft limit of file descriptors to its hard limit. Log a warning if the hard limit is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FEW_DESCRIPTORS:
        text = "kvbus may open only %d files and sockets: each router and engine needs some, so raise ulimit -Hn"
        log.warning(text, hard)


def _failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle an exception that a callback of the event loop has raised.

    A MemoryError ends the process, because the relay's data may be inconsistent after it. The state is written to
    ``state_dir`` before a batch is sent, so the next process continues without a gap. Every other exception is logged.
    """
    if isinstance(context.get("exception"), MemoryError):
        log.critical("out of memory: kvbus ends; its next start continues with the state in state_dir")
        os._exit(ExitCode.INTERNAL)
    loop.default_exception_handler(context)


async def serve(config: Config, load: Callable[[], Config], file: ConfigFile | None = None) -> None:
    """Run the daemon until SIGTERM or SIGINT. A second such signal ends the process immediately.

    Args:
        config: the configuration to run.
        load: reads the configuration again, at SIGHUP and when the file has changed.
        file: the configuration's file; None if it is not checked for changes.

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
            # Restore the signal's default action and raise the signal again, so that the parent process sees that the
            # signal has ended this process.
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            os._exit(128 + signum)  # reached if the raised signal does not end the process, as for PID 1 of a container
        log.info("%s: shutting down; send the signal again to exit at once", signal.Signals(signum).name)
        stop.set()

    # Reading the state blocks the event loop, so the loop's own signal handlers could not run during that time. These
    # handlers can run.
    for signum in (signal.SIGTERM, signal.SIGINT):
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
