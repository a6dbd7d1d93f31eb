"""Print the tables of a router's states for docs/ARCHITECTURE.md: ``python -m tests.docs.routers``."""

import sys

from kvbus.transport.live.router import MEANING, TRANSITIONS


def page() -> str:
    """Return a router's states, and the transitions between them, as two Markdown tables."""
    rows = ["| state | meaning |", "|---|---|"]
    rows += [f"| `{state}` | {meaning} |" for state, meaning in MEANING.items()]
    rows += ["", "| from | to | when |", "|---|---|---|"]
    for state, targets in TRANSITIONS.items():
        rows += [f"| `{state}` | `{target}` | {when} |" for target, when in targets.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
