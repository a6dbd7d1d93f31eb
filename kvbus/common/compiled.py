"""Whether the core runs compiled, and that compiled code is what the sources say.

A wheel with compiled modules, or a tree in which they were built, has a stamp: for which Python they are, and the
digest of every source of the core. Compiled code of sources that have changed since is refused, because nothing else
would tell that an edit has no effect. ``KVBUS_PURE=1`` runs the sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final, Literal

PURE: Final = "KVBUS_PURE"
"""The variable that makes the sources run though compiled modules are there."""

Core = Literal["compiled", "pure"]


class StaleError(ImportError):
    """Compiled modules are of other sources than those beside them."""


class _Sources(MetaPathFinder):
    """Finds the sources of one package's modules, where extension modules would come first."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :meth:`importlib.abc.MetaPathFinder.find_spec`."""
        if not path or not fullname.startswith(self._prefix):
            return None
        loader = (SourceFileLoader, SOURCE_SUFFIXES)
        specs = (FileFinder(entry, loader).find_spec(fullname, target) for entry in path)
        return next((spec for spec in specs if spec is not None), None)


def changed(package: Path) -> list[str]:
    """Sources that are not those the compiled modules were made of; none if there are no modules for this Python."""
    try:
        stamp = json.loads((package / "compiled.json").read_text())
    except (FileNotFoundError, NotADirectoryError):  # the latter where kvbus is run out of a zipped wheel
        return []
    if stamp["suffix"] not in EXTENSION_SUFFIXES:
        return []
    sources: dict[str, str] = stamp["sources"]
    there = {path.relative_to(package).as_posix() for path in (package / "core").rglob("*.py")}
    kept = {name for name in there & sources.keys() if _digest(package / name) == sources[name]}
    return sorted((there | sources.keys()) - kept)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def choose(package: Path, name: str) -> None:
    """Have the right modules imported from now on.

    Raises:
        StaleError: compiled modules are of other sources.
    """
    if os.environ.get(PURE):
        sys.meta_path.insert(0, _Sources(name))
    elif stale := changed(package):
        raise StaleError(
            f"{stale[0]} is not what the compiled modules in {package} were made of ({len(stale)} such): "
            f"make compiled, make pure, or {PURE}=1"
        )


def core() -> Core:
    """Which core runs."""
    found = find_spec("kvbus.core.relay")
    return "compiled" if found is not None and isinstance(found.loader, ExtensionFileLoader) else "pure"
