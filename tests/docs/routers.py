"""Print the tables of the states in which kvbus keeps a router: ``python -m tests.docs.routers``.

Copy the printed tables into docs/ARCHITECTURE.md.
"""

import sys

from kvbus.transport.live.router import MEANING, TRANSITIONS


def page() -> str:
    """Return a router's states, and the transitions between these states, as two Markdown tables."""
    rows = ["| state of a router | meaning |", "|---|---|"]
    rows += [f"| `{state}` | {meaning} |" for state, meaning in MEANING.items()]
    rows += ["", "| state of a router | next state | when the state changes |", "|---|---|---|"]
    for state, targets in TRANSITIONS.items():
        rows += [f"| `{state}` | `{target}` | {when} |" for target, when in targets.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
