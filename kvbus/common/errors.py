"""The errors that kvbus raises on purpose, each with its exit code.

The codes from 64 to 78 are those of ``sysexits.h``. They let a supervisor distinguish a bad configuration (do not
restart) from a busy port (try again) without reading the log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ExitCode(IntEnum):
    """The exit codes of all commands. If a signal ends a command, its exit code is 128 plus the signal's number."""

    OK = 0
    FOUND = 1
    USAGE = 2
    UNAVAILABLE = 69
    INTERNAL = 70
    CONFIG = 78
    INTERRUPTED = 130


EXIT_MEANINGS: Final[Mapping[ExitCode, str]] = {
    ExitCode.OK: "done, and nothing is wrong",
    ExitCode.FOUND: "done, and something is wrong or left undone",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.UNAVAILABLE: "an address is taken, or nobody answers there",
    ExitCode.INTERNAL: "a defect of kvbus",
    ExitCode.CONFIG: "kvbus cannot use a configuration or a file",
    ExitCode.INTERRUPTED: "Ctrl-C, before there was a result",
}
"""The meaning of each exit code, for every command."""


class KvbusError(Exception):
    """The base of every error that kvbus raises on purpose. Its text is for the person who runs kvbus."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


MAX_VALUE: Final = 200
"""Number of characters of a bad value that are shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        key: the location, such as ``outputs[0].layout``, ``KVBUS_HTPP`` or ``kvbus.yaml``.
        wrong: what is wrong, and what is allowed.
        value: the bad value as text; None for a missing key.
        example: a valid setting, as a line of the file.
        origin: the value's source, such as ``kvbus.yaml line 12``.
    """

    key: str
    wrong: str
    value: str | None = None
    example: str | None = None
    origin: str | None = None

    def __str__(self) -> str:
        value = self.value
        if value is not None and len(value) > MAX_VALUE:
            value = f"{value[:MAX_VALUE]}…"
        text = self.key if value is None else f"{self.key} = {value}"
        text += f": {self.wrong}"
        if self.example is not None:
            text += f"; for example {self.example}"
        if self.origin is not None:
            text += f" ({self.origin})"
        return text


class ConfigError(KvbusError):
    """kvbus refuses a configuration. The error lists all of its problems."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "the configuration has a problem:" if count == 1 else f"the configuration has {count} problems:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


class FileError(KvbusError):
    """kvbus cannot read, write or replace a file."""

    exit_code = ExitCode.CONFIG


def os_reason(error: OSError) -> str:
    """Return the system's text of an error, without the address that a library adds to it."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


class BindError(KvbusError):
    """kvbus cannot bind an endpoint or address, or cannot connect to it.

    Args:
        endpoint: the endpoint, or ``http ADDRESS``.
        reason: the reason, such as the operating system's error text.
        verb: the action that failed, for the message.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, endpoint: str, reason: str, *, verb: str = "listen on") -> None:
        self.endpoint = endpoint
        self.reason = reason
        self.verb = verb
        super().__init__(f"cannot {verb} {endpoint}: {reason}")

    def about(self, key: str, remedy: str) -> BindError:
        """Return this error with the configuration key that it concerns, and a remedy."""
        return BindError(self.endpoint, f"{self.reason} [{key}]: {remedy}", verb=self.verb)


class InUseError(KvbusError):
    """Another process uses a resource that only one process may use. Trying again helps once that process has ended.

    Args:
        what: the resource, such as a directory.
        holder: the process that uses it, in words.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, holder: str) -> None:
        super().__init__(f"{what} is in use by {holder}; another bus needs a state_dir of its own")


class UnsupportedError(KvbusError):
    """A library under kvbus is too old.

    The exit code is that of a bad configuration, because a restart does not help.
    """

    exit_code = ExitCode.CONFIG


class StateDirError(KvbusError):
    """kvbus cannot use ``state_dir``, for example because it is a file."""

    exit_code = ExitCode.CONFIG

    def __init__(self, directory: object, reason: str) -> None:
        """Create the error for a directory and a reason."""
        super().__init__(f"state_dir {directory}: {reason}")
