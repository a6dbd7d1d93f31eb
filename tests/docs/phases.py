"""Print the table and the diagram of the sequencer's phases for docs/ARCHITECTURE.md: ``python -m
tests.docs.phases``.
"""

import sys
from collections.abc import Iterator

from kvbus.core.sequencing.phases import CONNECTED, PHASES, ROWS, TABLE, Guard, Input, Phase


def transitions() -> Iterator[tuple[Phase, Input, Guard, Phase]]:
    """Return all transitions of the sequencer: phase, input, guard and next phase."""
    for (phase, cause), targets in TABLE.items():
        for guard, target in targets:
            yield phase, cause, guard, target


def phase_table() -> str:
    """Return the phases of the sequencer as a Markdown table."""
    rows = [
        "| phase | state that the operator sees | meaning | purpose of the request |",
        "|---|---|---|---|",
    ]
    for phase, about in PHASES.items():
        rows.append(f"| {phase} | `{about.shown}` | {about.meaning} | {about.purpose or ''} |")
    return "\n".join(rows) + "\n"


def diagram() -> str:
    """Return the sequencer's transitions between its phases as a Mermaid state diagram.

    If most phases with a connection share a transition, it is drawn only once, from the state `connected`.
    """
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
    """Return the table and the diagram of the sequencer's phases for docs/ARCHITECTURE.md."""
    return f"{phase_table()}\n```mermaid\n{diagram()}```\n"


if __name__ == "__main__":
    sys.stdout.write(page())
