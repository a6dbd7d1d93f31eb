"""The errors kvbus raises on purpose, each with the exit code its process ends with.

The numbers are those of ``sysexits.h``, so that a supervisor can tell a bad configuration (do not restart)
from a busy port (try again) without reading the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class ExitCode(IntEnum):
    """What an exit code of ``kvbus`` means."""

    OK = 0
    USAGE = 2
    CANNOT_BIND = 69
    INTERNAL = 70
    CONFIG = 78
    INTERRUPTED = 130


class KvbusError(Exception):
    """The base of every error raised on purpose; its text is meant for the person who runs kvbus."""

    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration.

    Attributes:
        key: Where it is, such as ``outputs[0].layout``, ``KVBUS_HTPP`` or ``kvbus.yaml``.
        wrong: What is wrong and what is allowed.
        value: The bad value as text, ``None`` where there is none (a missing key).
        example: A good setting, written as it would be in the file.
        origin: Where the value came from, such as ``kvbus.yaml line 12``.
    """

    key: str
    wrong: str
    value: str | None = None
    example: str | None = None
    origin: str | None = None

    def __str__(self) -> str:
        text = self.key if self.value is None else f"{self.key} = {self.value}"
        text += f": {self.wrong}"
        if self.example is not None:
            text += f"; for example {self.example}"
        if self.origin is not None:
            text += f" ({self.origin})"
        return text


class ConfigError(KvbusError):
    """A configuration kvbus refuses, with everything that is wrong with it at once."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "the configuration has a problem:" if count == 1 else f"the configuration has {count} problems:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


class BindError(KvbusError):
    """An endpoint or address that cannot be bound or connected to.

    Args:
        endpoint: the endpoint, or ``http ADDRESS``.
        reason: why not, such as the system's words for it.
        verb: what was tried.
    """

    exit_code = ExitCode.CANNOT_BIND

    def __init__(self, endpoint: str, reason: str, *, verb: str = "listen on") -> None:
        self.endpoint = endpoint
        self.reason = reason
        super().__init__(f"cannot {verb} {endpoint}: {reason}")


class InUseError(KvbusError):
    """Something that belongs to one process at a time is another's; trying again helps once that one has ended.

    Args:
        what: The thing, such as a directory.
        holder: The process that has it, in words.
    """

    exit_code = ExitCode.CANNOT_BIND

    def __init__(self, what: str, holder: str) -> None:
        super().__init__(f"{what} is in use by {holder}; another bus needs a state_dir of its own")


class UnsupportedError(KvbusError):
    """Something kvbus runs on is too old; trying again does not help, so it ends as a bad configuration does."""

    exit_code = ExitCode.CONFIG


class StateDirError(KvbusError):
    """``state_dir`` cannot be used; a misconfiguration, as a file where a directory is wanted."""

    exit_code = ExitCode.CONFIG

    def __init__(self, directory: object, reason: str) -> None:
        """Name the directory and what is wrong with it."""
        super().__init__(f"state_dir {directory}: {reason}")
