"""Builds the wheel `kvbus-client` from `kvbus.client` and the modules that it imports. `make client-wheel` runs it.

Version, requirements and other metadata come from pyproject.toml. docs/decisions/releases.md explains why the project
has two wheels, and what happens if both are installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.architecture.imports import closure

ROOT: Final = Path(__file__).parents[1]
NAME: Final = "kvbus-client"
REQUIRES: Final = ("msgspec", "pyzmq")
_NOT_OF_A_LIBRARY: Final = ("scripts", "entry-points", "optional-dependencies")


def files(root: Path) -> list[str]:
    """Return the files of the wheel: the modules and the marker `py.typed`."""
    found = (path.relative_to(root).as_posix() for path in closure(root, "kvbus.client").values())
    return sorted((*found, "kvbus/py.typed"))


def configuration(root: Path) -> dict[str, Any]:
    """Return pyproject.toml with the client's metadata."""
    config = tomllib.loads((root / "pyproject.toml").read_text())
    project: Mapping[str, Any] = config["project"]
    config["project"] = {key: value for key, value in project.items() if key not in _NOT_OF_A_LIBRARY} | {
        "name": NAME,
        "description": "Follow the KV-cache events of LLM engines, and ask which worker holds a prefix.",
        "readme": "docs/CLIENT.md",
        "dependencies": [each for each in project["dependencies"] if re.split(r"[^\w-]", each)[0] in REQUIRES],
    }
    config["tool"]["hatch"] = {"build": {"targets": {"wheel": {"only-include": files(root)}}}}
    return config


def main(where: str) -> None:
    """Build the wheel in a directory."""
    from hatchling.builders.wheel import WheelBuilder  # noqa: PLC0415 - tests have no build backend
    from hatchling.metadata.core import ProjectMetadata  # noqa: PLC0415
    from hatchling.plugin.manager import PluginManager  # noqa: PLC0415

    metadata = ProjectMetadata(str(ROOT), PluginManager(), configuration(ROOT))
    print(*WheelBuilder(str(ROOT), metadata=metadata).build(directory=where, versions=["standard"]))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
