"""SIGHUP and changed files (configuration, keys, tokens, certificates): load, check, hand the change to the daemon.

A configuration that is bad, or asks for more than can be changed, is refused as a whole with all its mistakes, and the
configuration before it stays in force. A change touches only what it is about: other sources keep their sockets, their
sequence and their state, and their routers notice nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kvbus.common.errors import ConfigError, KvbusError
from kvbus.config import Config
from kvbus.daemon.change import change_to
from kvbus.daemon.config_file import SETTLED, ConfigFile
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import read_keys
from kvbus.http.credentials import read_again

log = logging.getLogger("kvbus.daemon.reload")


class _ChangesError(Exception):
    """The configuration file changes while it is read: it is looked at again."""


class Reloader:
    """Loads configurations and keys for a daemon, and has it change to them.

    Args:
        daemon: the daemon.
        load: reads the configuration; called in a thread.
        file: the file it is in, which is looked at for changes; None: it changes at SIGHUP alone.
    """

    def __init__(self, daemon: Daemon, load: Callable[[], Config], file: ConfigFile | None = None) -> None:
        self._daemon = daemon
        self._load = load
        self._file = file
        self._config_problem = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._key_problem = ""
        self._credentials_problem = ""

    def reload(self) -> None:
        """Load the configuration and all files that it names again, soon."""
        self._begin(self._reload())

    def watch(self) -> None:
        """Look at those files, and at the configuration's own, every ``key_reload_interval``."""
        self._begin(self._watch())
        if self._file is not None:
            self._begin(self._watch_file(self._file))

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Change nothing any more."""
        for task in list(self._tasks):
            task.cancel()

    async def _reload(self, found: bytes | None = None) -> None:
        """Load the configuration.

        Args:
            found: fingerprint of the file that has changed; None: somebody has asked. A refusal that was said is said
                again to who asks.
        """
        daemon = self._daemon
        async with daemon.changing:
            await self._look_at_credentials()
            try:
                config = await asyncio.to_thread(self._load_file, found)
                with_found = daemon.discovery.preview(config)
                keys = await asyncio.to_thread(read_keys, with_found)
                change = change_to(daemon.config, with_found, daemon.source_sockets.is_open, daemon.placement)
                await daemon.changes.apply(change, keys)
                await daemon.discovery.adopt(config)
            except _ChangesError:
                return
            except KvbusError as error:
                text, said = str(error), self._config_problem
                keys_of = [problem.key for problem in error.problems] if isinstance(error, ConfigError) else [text]
                daemon.process.config_refused = list(dict.fromkeys(keys_of))
                self._config_problem = text
                if found is None or text != said:
                    daemon.process.config_reloads["refused"] += 1
                    log.error("configuration refused, the one before stays in force: %s", text)  # noqa: TRY400
            else:
                self._config_problem = ""
                daemon.process.config_refused = []
                daemon.process.config_reloads["applied"] += 1
                log.info("configuration loaded: %d sources", len(daemon.config.sources))

    def _load_file(self, found: bytes | None) -> Config:
        """Load the configuration, in a thread.

        Raises:
            KvbusError: it is refused.
            _ChangesError: the file does not hold any more, or not yet, what was ``found``.
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
                    if daemon.keys:
                        await self._look_at_keys()

    async def _watch_file(self, file: ConfigFile) -> None:
        """Load the file once it has changed. One that was refused is tried again: a Secret may come after it."""
        daemon = self._daemon
        while True:
            interval = daemon.config.key_reload_interval
            await asyncio.sleep(interval or 1.0)
            if not (interval and daemon.started and daemon.config.reload == "auto"):
                continue
            found = await file.settled(min(interval, SETTLED))
            if found is not None and (found != file.loaded or self._config_problem):
                await self._reload(found)

    async def _look_at_keys(self) -> None:
        daemon = self._daemon
        try:
            keys = await asyncio.to_thread(read_keys, daemon.config)
            if keys != daemon.keys:
                await daemon.changes.apply_keys(keys)
                daemon.process.key_reloads["applied"] += 1
        except ConfigError as error:
            if str(error) != self._key_problem:
                self._key_problem = str(error)
                daemon.process.key_reloads["refused"] += 1
                log.error("key files refused, the keys before stay in force: %s", error)  # noqa: TRY400
            return
        self._key_problem = ""

    async def _look_at_credentials(self) -> None:
        """Read HTTP's tokens and certificates again. What is bad changes nothing; what is good counts at once."""
        daemon = self._daemon
        before = daemon.admin.credentials
        found, problems = await asyncio.to_thread(read_again, daemon.config, before)
        text = str(ConfigError(problems)) if problems else ""
        if text not in ("", self._credentials_problem):
            daemon.process.key_reloads["refused"] += 1
            log.error("HTTP tokens or certificates refused, those before stay in force: %s", text)
        self._credentials_problem = text
        if found != before:
            daemon.admin.renew(found)
            daemon.process.key_reloads["applied"] += 1
            log.info("HTTP: other tokens or another certificate in force, %d tokens", len(found.tokens))
