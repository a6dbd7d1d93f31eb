"""The sequencer's phases as docs/ARCHITECTURE.md shows them: ``python -m tests.docs.phases`` prints it."""

import sys

from kvbus.core.sequencing.phases import diagram, phase_table


def page() -> str:
    """The table and the diagram."""
    return f"{phase_table()}\n```mermaid\n{diagram()}```\n"


if __name__ == "__main__":
    sys.stdout.write(page())
