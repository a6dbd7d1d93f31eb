"""An event bus between LLM engines' KV-cache events and KV-aware routers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_METADATA: Final = re.compile(r"kvbus(_client)?-(.+)\.dist-info")


class MixedVersionsError(ImportError):
    """kvbus and kvbus-client are installed in one place, in different versions."""


def check_versions(package: Path) -> None:
    """Refuse a folder in which kvbus and kvbus-client are installed in different versions.

    They share files, so an installer lets the second overwrite the first. Files of two versions would fail anywhere.

    Raises:
        MixedVersionsError: the metadata beside the package names two versions.
    """
    try:
        beside = [_METADATA.fullmatch(path.name) for path in package.parent.iterdir()]
    except NotADirectoryError:  # run out of a zipped wheel
        return
    found = {f"kvbus{'-client' if match[1] else ''}": match[2] for match in beside if match}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
        raise MixedVersionsError(
            f"{said} share files in {package.parent}: uninstall both, install one (kvbus has all that kvbus-client has)"
        )


check_versions(Path(__file__).parent)
