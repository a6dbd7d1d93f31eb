"""Optional parts. A part is a folder of code and an entry point that registers it; some need a library, by an extra.

Output drivers register under ``kvbus.outputs``, ways to find engines under ``kvbus.discovery``, what stands before an
engine's API under ``kvbus.fronts``.

A configuration is refused if it names a part that is not registered, or one whose library is not installed.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final

OUTPUTS: Final = "kvbus.outputs"
"""Entry point group of the drivers for ``outputs[].type``; see :mod:`kvbus.parts.outputs`."""
DISCOVERY: Final = "kvbus.discovery"
"""Entry point group of the kinds of ``sources[].discover``; see :mod:`kvbus.parts.discovery`."""
FRONTS: Final = "kvbus.fronts"
"""Entry point group of what stands before an engine's API; see :mod:`kvbus.parts.front`."""


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def installed(group: str) -> list[str]:
    """Return the names registered in a group, sorted."""
    return sorted(_found(group))


def has_libsodium() -> bool:
    """Whether the extra ``curve`` is installed: kvbus's own ZMTP has CURVE with it alone."""
    return find_spec("nacl") is not None


def missing(group: str, name: str) -> str:
    """Return a sentence that says what a part lacks on this machine; empty if nothing.

    The extra that brings the library has the part's name.
    """
    try:
        load(group, name)
    except ImportError as error:
        return f"{name} needs a package that is not installed ({error}): pip install 'kvbus[{name}]'"
    return ""


def load(group: str, name: str) -> Any:
    """Import and return the object registered under a name.

    Raises:
        KeyError: no part has this name.
        ImportError: a package that the part needs is not installed.
    """
    return _found(group)[name].load()
