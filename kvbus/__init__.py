"""An event bus that carries KV-cache events from LLM engines to KV-aware routers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_METADATA: Final = re.compile(r"kvbus(_client)?-(.+)\.dist-info")


class MixedVersionsError(ImportError):
    """kvbus and kvbus-client are installed in the same folder, in different versions."""


def check_versions(package: Path) -> None:
    """Raise an error if kvbus and kvbus-client are installed in the same folder in different versions.

    The two distributions contain the same files, so the one installed last overwrites files of the other. A mix of two
    versions could fail anywhere.

    Args:
        package: the folder of the package `kvbus`. The metadata of both distributions is in its parent folder.

    Raises:
        MixedVersionsError: the installed metadata names two versions.
    """
    try:
        beside = [_METADATA.fullmatch(path.name) for path in package.parent.iterdir()]
    except NotADirectoryError:  # kvbus runs from a zipped wheel, which contains the files of one distribution only
        return
    found = {f"kvbus{'-client' if match[1] else ''}": match[2] for match in beside if match}
    if len(set(found.values())) > 1:
        versions = " and ".join(f"{name} {version}" for name, version in sorted(found.items()))
        raise MixedVersionsError(
            f"{versions} share files in {package.parent}: uninstall both, install one (kvbus contains kvbus-client)"
        )


check_versions(Path(__file__).parent)
