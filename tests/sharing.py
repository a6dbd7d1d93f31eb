"""Choose which tests run in the same worker process of pytest-xdist.

Tests share a worker if their setup is expensive, or if they would slow each other down. pytest-xdist has a mark for
this, but it changes the names of tests, which pytest 9.2 does not allow. Therefore the choice depends on the path.
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
"""Prefixes of test ids. All tests with the same prefix run in one worker.

The same holds for the cases ``kafka`` of all suites and for Kafka's own tests, so that only one broker runs. It also
holds for ``nats`` and ``redis``.
"""


def place(nodeid: str) -> str:
    """Return the name of the group of tests with which a test runs in the same pytest-xdist worker process.

    If the test has no group, return the test's own id.
    """
    for server in ("kafka", "nats", "redis"):
        if f"[{server}" in nodeid or nodeid.startswith(f"tests/log/test_{server}_"):
            return server
    return next((each for each in TOGETHER if nodeid.startswith(each)), nodeid)


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler that gives a worker one test at a time, or all tests of a group."""

    def _split_scope(self, nodeid: str) -> str:
        return place(nodeid)
