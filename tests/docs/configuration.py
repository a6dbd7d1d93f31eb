"""Generate the tables of docs/CONFIGURATION.md, and deploy/kvbus.yaml, from the configuration's keys.

Run it with ``python -m tests.docs.configuration``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvbus.config.reference import example, kinds, table

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "CONFIGURATION.md"
EXAMPLE: Final = ROOT / "deploy" / "kvbus.yaml"


def rendered(text: str) -> str:
    """Return the page with newly generated tables. An old table is found by its header and its first key."""
    for new in (table(), table(kinds())):
        head, line, first, *_ = new.splitlines()
        start = re.escape(f"{head}\n{line}\n{first.split(' |')[0]} |")
        old = re.search(rf"{start}.*\n(?:\|.*\n)*", text)
        if old is None:
            raise ValueError(f"docs/CONFIGURATION.md has no table that begins with {first!r}")
        text = text.replace(old[0], f"{new.rstrip()}\n")
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    EXAMPLE.write_text(example())
