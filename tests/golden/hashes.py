"""Read and write the recorded hash of each golden case."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FILE: Final = Path(__file__).with_name("hashes.txt")


def digest(lines: Iterable[str]) -> str:
    """Return the hash of the lines of a golden case."""
    found = hashlib.sha256()
    for line in lines:
        found.update(line.encode() + b"\n")
    return found.hexdigest()[:32]


def recorded() -> dict[str, str]:
    """Return the recorded hash of each golden case's output, by the name of the case."""
    lines = FILE.read_text().splitlines()
    return {name: value for value, _, name in (line.partition(" ") for line in lines)}


def written(found: Mapping[str, str]) -> str:
    """Return the text of the file that records these hashes."""
    return "".join(f"{value} {name}\n" for name, value in found.items())
