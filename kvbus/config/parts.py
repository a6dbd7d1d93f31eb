"""Optional parts, found by entry points: a folder of code, a line of registration, an extra with what it needs.

Outputs register under ``kvbus.outputs``. What is not installed is not there: its name in a configuration is an error
that says what is installed, and nothing else notices.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

OUTPUTS: Final = "kvbus.outputs"
"""Group of the drivers of ``outputs[].type``; see :mod:`kvbus.outputs`."""


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def installed(group: str) -> list[str]:
    """The names that are registered in a group."""
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """What a name stands for.

    Raises:
        KeyError: nothing is registered under it.
        ImportError: it is registered, and what it needs is not installed.
    """
    return _found(group)[name].load()
