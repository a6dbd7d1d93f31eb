"""Generate the tables of docs/METRICS.md from the tables of metrics in the code: ``python -m tests.docs.metrics``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvbus.telemetry.metrics import FINDING, FINDING_LABELS
from kvbus.telemetry.table import DISCOVERY, FRONT, FRONT_GRPC, HISTOGRAMS, OUTPUTS, PROCESS, SOURCES, Row

PAGE: Final = Path(__file__).parents[2] / "docs" / "METRICS.md"
EVENTS: Final = ("events_rejected_total", "events_filtered_total", "blocks")
"""Names of metrics of sources that docs/METRICS.md lists in a separate table."""

_PLACE: Final = re.compile(r"(<!-- rendered by tests\.docs\.metrics: (\w+) -->\n\n)(?:\|.*\n)*")


def tables() -> dict[str, str]:
    """Return the tables of docs/METRICS.md by name."""
    replay = tuple(row for row in OUTPUTS if row.name.startswith("replay_"))
    return {
        "sources": _table("source", tuple(row for row in SOURCES if row.name not in EVENTS)),
        "events": _table("source", tuple(row for row in SOURCES if row.name in EVENTS)),
        "outputs": _table("output", tuple(row for row in OUTPUTS if row not in replay)),
        "replay": _table("output", replay),
        "discovery": _table("discovery", DISCOVERY),
        "front": _table("", FRONT),
        "front_grpc": _table("", FRONT_GRPC),
        "process": _table("", PROCESS)
        + _line(FINDING, "gauge", "`, `".join(FINDING_LABELS))
        + "".join(_line(row, "histogram", "") for row in HISTOGRAMS),
    }


def _table(label: str, rows: tuple[Row, ...]) -> str:
    lines = (_line(row, "counter" if row.name.endswith("_total") else "gauge", label) for row in rows)
    return "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "".join(lines)


def _line(row: Row, kind: str, label: str) -> str:
    labels = ", ".join(f"`{each}`" for each in (label, row.label) if each)
    return f"| `kvbus_{row.name}` | {kind} | {labels} | {row.text.removesuffix('.')} |\n"


def rendered(text: str) -> str:
    """Return the text of docs/METRICS.md with the current tables."""
    found = tables()
    return _PLACE.sub(lambda place: place[1] + found[place[2]], text)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
