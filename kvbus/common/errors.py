"""The errors that kvbus raises on purpose, each with the exit code of the command that it ends.

The codes from 64 to 78 are the codes of ``sysexits.h``. So a supervisor can distinguish, without reading the log, a bad
configuration (a restart does not help) from an occupied port (a restart may help).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ExitCode(IntEnum):
    """The exit codes of all commands.

    If a signal ends a command, its exit code is 128 plus the number of the signal.
    """

    OK = 0
    FOUND = 1
    USAGE = 2
    UNAVAILABLE = 69
    INTERNAL = 70
    CONFIG = 78
    INTERRUPTED = 130


EXIT_MEANINGS: Final[Mapping[ExitCode, str]] = {
    ExitCode.OK: "the command finished, and found nothing wrong",
    ExitCode.FOUND: "the command finished, and found something wrong or left something undone",
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.UNAVAILABLE: "another program uses an address, or no program answers there",
    ExitCode.INTERNAL: "kvbus failed because of a defect in kvbus",
    ExitCode.CONFIG: "kvbus cannot use a configuration or a file",
    ExitCode.INTERRUPTED: "Ctrl-C ended the command before it had a result",
}
"""The meaning of each exit code, for the help text of every command."""


class KvbusError(Exception):
    """The base class of all errors that kvbus raises on purpose. The text is for the person who runs kvbus."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


MAX_VALUE: Final = 200
"""Maximum number of characters of a bad value that an error message shows."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration, with all parts of its error message.

    Attributes:
        key: the location, such as ``outputs[0].layout``, ``KVBUS_HTPP`` or ``kvbus.yaml``.
        wrong: a description of the problem, and the allowed values.
        value: the bad value as text; None if the key is missing.
        example: a valid setting, as a line of the configuration file.
        origin: the place from which the value comes, such as ``kvbus.yaml line 12``.
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
    """The configuration cannot be used. The error lists all problems of the configuration."""

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
    """Return the operating system's text for an error.

    asyncio and other libraries add the address to the text. It is left out here, because kvbus's message already names
    the address.
    """
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


class BindError(KvbusError):
    """kvbus cannot bind an address, or cannot connect to it.

    Args:
        endpoint: the ZeroMQ endpoint, or ``http ADDRESS``.
        reason: the reason, such as the operating system's error text.
        verb: the action that failed, such as ``listen on``, for the message.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, endpoint: str, reason: str, *, verb: str = "listen on") -> None:
        self.endpoint = endpoint
        self.reason = reason
        self.verb = verb
        super().__init__(f"cannot {verb} {endpoint}: {reason}")

    def about(self, key: str, remedy: str) -> BindError:
        """Return a copy of this error that also names the configuration key of the endpoint and a remedy."""
        return BindError(self.endpoint, f"{self.reason} [{key}]: {remedy}", verb=self.verb)


class InUseError(KvbusError):
    """Another process uses a resource that only one process at a time can use.

    kvbus can use it after that process has ended.

    Args:
        what: a description of the resource, such as a directory.
        holder: a description of the process that uses the resource.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, holder: str) -> None:
        self.holder = holder
        super().__init__(f"{what} is in use by {holder}; another bus needs a state_dir of its own")


class UnsupportedError(KvbusError):
    """A library that kvbus uses is too old.

    The exit code is the code of a bad configuration, because a restart does not help.
    """

    exit_code = ExitCode.CONFIG


class StateDirError(KvbusError):
    """kvbus cannot use the path in ``state_dir``, for example because it is a file."""

    exit_code = ExitCode.CONFIG

    def __init__(self, directory: object, reason: str) -> None:
        """Create the error for the path in ``state_dir`` and a reason."""
        super().__init__(f"state_dir {directory}: {reason}")
