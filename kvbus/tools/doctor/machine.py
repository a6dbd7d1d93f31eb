"""What is wrong on this machine: libzmq, key files, the directory of the state."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvbus.common.errors import ConfigError, Problem, UnsupportedError
from kvbus.config import Config
from kvbus.daemon.keys import Keys, read_keys, read_state_keys_of
from kvbus.daemon.state_place import unusable
from kvbus.tools.doctor.findings import Finding, Severity
from kvbus.transport.sockets import check_library


def library() -> list[Finding]:
    """Check the version of libzmq."""
    try:
        check_library()
    except UnsupportedError as error:
        return [Finding(str(error), "libzmq", "pip install --upgrade pyzmq")]
    return []


def keys(config: Config) -> tuple[Keys, list[Finding]]:
    """Read the key files; what cannot be read is a finding, and its endpoints have no keys."""
    found: Keys = {}
    problems: list[Problem] = []
    try:
        found = read_keys(config)
    except ConfigError as error:
        problems += error.problems
    try:
        read_state_keys_of(config)
    except ConfigError as error:
        problems += error.problems
    findings = [
        Finding(f"{problem.value} {problem.wrong}", problem.key, "correct the file or its permissions")
        for problem in problems
    ]
    return found, findings


def state(config: Config, *, running: bool) -> list[Finding]:
    """Look at the directory of the state, without making or locking anything."""
    if config.state_dir is None or running:
        return []
    if config.state_dir == "auto":
        problems = unusable(config)
        if problems is None:
            return []
        cause = (
            f"state_dir auto finds no directory ({'; '.join(problems) or 'there is none'}): a restart loses the state"
        )
        return [Finding(cause, "state_dir", "name a directory", Severity.NOTE)]
    path = Path(config.state_dir)
    problem = _problem(path)
    return [Finding(f"state_dir {path} cannot be used: {problem}", "state_dir", "correct it")] if problem else []


def _problem(path: Path) -> str:
    try:
        info = path.stat()
    except FileNotFoundError:
        above = next(each for each in path.absolute().parents if each.exists())
        return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not to be written by this user"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    if not stat.S_ISDIR(info.st_mode):
        return "it is no directory"
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return "this user may not read and write it"
    if stat.S_IMODE(info.st_mode) & 0o007:
        return f"others may read it (mode {stat.S_IMODE(info.st_mode):04o}), and it holds token ids: chmod o="
    return ""
