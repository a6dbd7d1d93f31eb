"""Print the table of the states in which kvbus keeps a router: ``python -m tests.docs.routers``.

docs/ARCHITECTURE.md contains this table.
"""

import sys

from kvbus.transport.live.router import MEANING


def page() -> str:
    """Return a router's states as a Markdown table."""
    rows = ["| state of a router | meaning |", "|---|---|"]
    rows += [f"| `{state}` | {meaning} |" for state, meaning in MEANING.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
