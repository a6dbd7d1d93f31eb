"""Check whether kvbus can use the files that a configuration names, and the directory for its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config
from kvbus.daemon.keys import Keys, read_keys
from kvbus.daemon.views import AccessScopes
from kvbus.http.credentials import read_credentials
from kvbus.parts.log.location import check_files
from kvbus.state.directory import unwritable

T = TypeVar("T")


def look(config: Config) -> tuple[Keys, list[Problem]]:
    """Read every file as the daemon does at its start, and check whether the directory for the state is writable.

    Args:
        config: the configuration that names the files.

    Returns:
        The CURVE keys of the readable files, and the problems that would make a start fail.
    """
    problems: list[Problem] = []

    def attempt(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    keys = attempt(lambda: read_keys(config)) or {}
    attempt(lambda: AccessScopes(config, keys))
    attempt(lambda: read_credentials(config))
    attempt(lambda: check_files(config))
    if wrong := unwritable(config):
        problems.append(Problem("state_dir", wrong, str(config.state_dir), "state_dir: auto"))
    return keys, problems
