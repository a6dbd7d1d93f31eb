"""The sequencer's phases as docs/ARCHITECTURE.md shows them: ``python -m tests.docs.phases`` prints it."""

import sys
from collections.abc import Iterator

from kvbus.core.sequencing.phases import CONNECTED, PHASES, ROWS, TABLE, Guard, Input, Phase


def transitions() -> Iterator[tuple[Phase, Input, Guard, Phase]]:
    """Every transition there is."""
    for (phase, cause), targets in TABLE.items():
        for guard, target in targets:
            yield phase, cause, guard, target


def phase_table() -> str:
    """The phases as a Markdown table."""
    rows = [
        "| phase | shown as | asks | meaning | a batch of the answer | its end, or none |",
        "|---|---|---|---|---|---|",
    ]
    for phase, about in PHASES.items():
        handlers = " | ".join(f"`{name}`" if name else "" for name in (about.batch, about.over))
        rows.append(f"| {phase} | `{about.shown}` | {about.asks or ''} | {about.meaning} | {handlers} |")
    return "\n".join(rows) + "\n"


def diagram() -> str:
    """The table as a Mermaid state diagram. What holds for every connected phase is drawn once."""
    edges: dict[tuple[str, str], list[str]] = {("[*]", Phase.AWAY): []}
    for phases, causes, targets in ROWS:
        common = len(phases) > len(CONNECTED) // 2
        sources = ["connected"] if common else [phase.value for phase in phases]
        but = ", ".join(phase for phase in CONNECTED if common and phase not in phases)
        for source in sources:
            for guard, target in targets:
                when = f" [not in {but}]" if but else f" [{guard}]" if guard else ""
                labels = [f"{cause}{when}" for cause in causes]
                edges.setdefault((source, target), []).extend(labels)
    lines = ["stateDiagram-v2", '    state "any phase with a connection" as connected']
    for (start, end), labels in edges.items():
        lines.append(f"    {start} --> {end}" + (f": {', '.join(labels)}" if labels else ""))
    return "\n".join(lines) + "\n"


def page() -> str:
    """The table and the diagram."""
    return f"{phase_table()}\n```mermaid\n{diagram()}```\n"


if __name__ == "__main__":
    sys.stdout.write(page())
