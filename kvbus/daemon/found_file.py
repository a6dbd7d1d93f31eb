"""What discovery found last, kept beside the seq reservations: a restart goes on with it until it is asked anew.

So the sources are those that the state on disk belongs to, and one that cannot be asked after a restart costs nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbus.config import Config
from kvbus.daemon import small_file
from kvbus.daemon.disk import Disk
from kvbus.daemon.small_file import KeptFile
from kvbus.parts.discovery.contract import Engine

log = logging.getLogger("kvbus.daemon.discovery")

Found = dict[str, list[Engine]]
"""The engines that are sources, by entry."""


class FoundFile:
    """Keeps the engines that were found.

    Args:
        directory: None keeps nothing.
        config: the outputs in it say whose file it is.
        disk: the real one, or a test's.
        failures: where writes that failed are counted.
    """

    def __init__(self, directory: Path | None, config: Config, disk: Disk, failures: Counter[str]) -> None:
        self._directory = directory if any(source.discover is not None for source in config.sources) else None
        self._name = small_file.name_of(config, "found")
        self._disk = disk
        cost = "a restart finds engines anew"
        self._file = None if self._directory is None else KeptFile(disk, self._directory, self._name, cost, failures)
        self._kept: Mapping[str, list[Engine]] | None = None

    def read(self) -> Found:
        """What was kept; nothing where there is no file, or a damaged one."""
        content = None if self._directory is None else small_file.read(self._disk, self._directory, self._name)
        if content is None:
            return {}
        try:
            kept = msgspec.json.decode(content, type=Found)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s is damaged (%s): engines are found anew", self._name, error)
            return {}
        # an engine without a publisher can be no source
        self._kept = {name: [engine for engine in engines if engine.publishers] for name, engines in kept.items()}
        return dict(self._kept)

    def keep(self, found: Found, now: float) -> None:
        """Keep what was found."""
        if self._file is not None and found != self._kept:
            self._kept = found
            self._file.keep(msgspec.json.encode(found), now)

    def look(self, now: float) -> None:
        """Try again what could not be written."""
        if self._file is not None:
            self._file.look(now)
