"""Which tests run in one worker: those with something dear to set up once, and those that would hold each other up.

pytest-xdist has a mark for it, which it puts into the names of tests; pytest 9.2 does not let it. So it goes by path.
Of what each worker needs, all modules, each makes a share for the others.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling  # type: ignore[import-untyped]

TOGETHER: Final = (
    "tests/bench/test_counted.py",
    "tests/chaos/test_chaos.py",
    "tests/daemon/test_state_damage.py",
    "tests/daemon/test_state_memory.py",
    "tests/image/",
    "tests/monitoring/",
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


def import_share(root: Path, args: Sequence[str], number: int, workers: int) -> None:
    """Import every so many of the modules that are asked for, before they are collected one after the other.

    Pytest rewrites the assertions of a module that it has not seen before, 10 CPU seconds for all of them, and keeps
    what comes of it. Workers that all begin with the first module would each do all of it.
    """
    paths = (root / arg.partition("::")[0] for arg in args)
    found = sorted({module for path in paths for module in (path.rglob("test_*.py") if path.is_dir() else (path,))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in found[number::workers]:
            try:
                importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
            except (Exception, pytest.skip.Exception):  # noqa: S112, BLE001 - collected, it says so where it is seen
                continue
