"""Which tests run in one worker: those with something dear to set up once, and those that would hold each other up.

pytest-xdist has a mark for it, which it puts into the names of tests; pytest 9.2 does not let it. So it goes by path.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

TOGETHER: Final = (
    "tests/chaos/test_chaos.py",
    "tests/image/",
    "tests/monitoring/",
    "tests/state/test_damage.py",
    "tests/state/test_memory.py",
    "tests/wire/test_goldens.py",
)
"""What the names of tests begin with that share a worker. So do the cases ``kafka`` of all suites, and the tests of Kafka alone: one broker
runs. Likewise ``nats`` and ``redis``.
"""


def place(nodeid: str) -> str:
    """What a test shares a worker with; its own name if with nothing."""
    for server in ("kafka", "nats", "redis"):
        if f"[{server}" in nodeid or nodeid.startswith(f"tests/log/test_{server}_"):
            return server
    return next((each for each in TOGETHER if nodeid.startswith(each)), nodeid)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A worker takes one test after the other, or all that stand together."""

    def _split_scope(self, nodeid: str) -> str:
        return place(nodeid)
