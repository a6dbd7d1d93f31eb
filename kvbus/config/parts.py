"""Optional parts of kvbus. A part is a folder of code that is registered as a Python entry point.

If a part needs a library, an extra of the package kvbus installs it. Drivers of outputs register in the entry point
group ``kvbus.outputs``, discoverers in ``kvbus.discovery``, and proxies in front of an engine's API in
``kvbus.fronts``.

A configuration is rejected if it names a part that is not registered, or a part whose library is not installed.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final

OUTPUTS: Final = "kvbus.outputs"
"""Entry point group of the drivers for ``outputs[].type``. See :mod:`kvbus.parts.outputs`."""
DISCOVERY: Final = "kvbus.discovery"
"""Entry point group of the discoverers for ``sources[].discover``. See :mod:`kvbus.parts.discovery`."""
FRONTS: Final = "kvbus.fronts"
"""Entry point group of the proxies in front of an engine's API. See :mod:`kvbus.parts.front`."""


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def installed(group: str) -> list[str]:
    """Return the names of the parts in an entry point group, in alphabetical order."""
    return sorted(_found(group))


def has_libsodium() -> bool:
    """Return whether the extra ``curve`` is installed. kvbus's own ZMTP implementation needs it for CURVE keys."""
    return find_spec("nacl") is not None


def missing(group: str, name: str) -> str:
    """Return a sentence about the package that a part needs and that is not installed; empty if none is missing.

    The extra that installs the package has the same name as the part.
    """
    try:
        load(group, name)
    except ImportError as error:
        return f"{name} needs a package that is not installed ({error}): pip install 'kvbus[{name}]'"
    return ""


def load(group: str, name: str) -> Any:
    """Import a part, and return the object that its entry point names.

    Raises:
        KeyError: no part of the group has this name.
        ImportError: a package that the part needs is not installed.
    """
    return _found(group)[name].load()
