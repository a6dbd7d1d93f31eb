"""Optional parts. A part is a folder of code that an entry point registers. An extra installs its library, if any.

Output drivers register in the entry point group ``kvbus.outputs``, discoverers of engines in ``kvbus.discovery``, and
proxies in front of an engine's API in ``kvbus.fronts``.

A configuration is rejected if it names a part that is not registered or whose library is not installed.
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
"""Entry point group of the proxies in front of an engine's API; see :mod:`kvbus.parts.front`."""


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def installed(group: str) -> list[str]:
    """Return the sorted names of the parts in a group."""
    return sorted(_found(group))


def has_libsodium() -> bool:
    """Return whether the extra ``curve`` is installed. kvbus's own implementation of ZMTP needs it for CURVE."""
    return find_spec("nacl") is not None


def missing(group: str, name: str) -> str:
    """Return a sentence about the package that a part needs and that is not installed; empty if none is missing.

    The extra that installs the package has the part's name.
    """
    try:
        load(group, name)
    except ImportError as error:
        return f"{name} needs a package that is not installed ({error}): pip install 'kvbus[{name}]'"
    return ""


def load(group: str, name: str) -> Any:
    """Import and return the object that is registered under a name.

    Raises:
        KeyError: no part has this name.
        ImportError: a package that the part needs is not installed.
    """
    return _found(group)[name].load()
