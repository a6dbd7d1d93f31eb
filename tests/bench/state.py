"""What ``state_dir`` costs on the way of a batch: through the real process, and measured alone.

Throughput with and without says what a user would see, dumps included, but a process whose index grows is mostly busy
with getting memory, which costs more or less from minute to minute. So the write path is measured alone as well: one
relay without sockets, which keeps a log of every other :data:`~tests.bench.core.SLICE` batches. Both halves meet the same
memory and the same minute; what the one takes more than the other is the write path.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvbus.core.write_ahead_log import Records
from kvbus.daemon.collector import rest_collector
from kvbus.daemon.generations import SPARE
from kvbus.daemon.state_store import MIN_ROTATE, StateStore

from .core import SLICE, Driver
from .loads import load_named
from .processes import MEASURED_CORE, run_child
from .report import Section, Series, Table, Target
from .setups import Result, Setup
from .setups import run as run_setup
from .turns import alternate


class Load(NamedTuple):
    """A load, how much of it, and what comes before the clock starts."""

    name: str
    batches: int
    prefill: int = 0


THROUGHPUT: Final = (Load("mix", 60_000, 120_000), Load("8x8", 28_000), Load("1x1", 250_000))
"""Of ``mix`` two logs are full before the clock starts, and one more is while it runs: what follows is the same again."""

ALONE: Final = (Load("mix", 40_000, 10_000), Load("8x8", 24_000), Load("1x1", 150_000))
"""Less than it takes to rotate a log."""

_OLD: Final = bytes(1024 * 1024)


def run(*, quick: bool, runs: int) -> Section:
    """At saturation, which no engine reaches: each microsecond shows."""
    section = Section("state", "The write path of `state_dir`")
    by = 10 if quick else 1
    each = _through(section, runs, by)
    _alone(section, runs, by, each)
    return section


def _through(section: Section, runs: int, by: int) -> dict[str, float]:
    """Throughput; CPU microseconds a batch without ``state_dir``, by load."""
    table = Table("As fast as it is taken", ["load", "`state_dir`", "batches/s", "spread", "CPU us a batch", "spread"])
    each = {}
    for load in THROUGHPUT:
        found = alternate(
            f"state {load.name}",
            runs,
            [False, True],
            lambda kept, load=load: run_setup(
                Setup(
                    "kvbus", load.name, (load.prefill + load.batches) // by, prefill=load.prefill // by, state_dir=kept
                )
            ),
        )
        for kept, results in found.items():
            rate = Series([result.batches / result.seconds for result in results])
            cpu = Series([result.cpu["relay"] / result.batches * 1e6 for result in results])
            table.add(load.name, "yes" if kept else "no", rate.median, rate.spread, cpu.median, cpu.spread)
            if not kept:
                each[load.name] = cpu.median
        if load.prefill:
            section.targets.append(
                Target(
                    f"state-{load.name}",
                    f"throughput that `state_dir` costs, load {load.name}, a full cache, dumps included",
                    Series([_cost(*pair) for pair in zip(found[False], found[True], strict=True)], "%"),
                    5.0,
                )
            )
    section.tables.append(table)
    return each


def _cost(without: Result, kept: Result) -> float:
    """Percent."""
    return (1 - without.seconds / kept.seconds) * 100


def _alone(section: Section, runs: int, by: int, each: dict[str, float]) -> None:
    """The write path alone, and its share of a batch's way through the process."""
    table = Table("The write path alone", ["load", "log", "us a batch", "spread", "% of a batch's CPU time"])
    for used in (True, False):
        for load in ALONE:
            cost = Series(
                [
                    run_child(
                        "tests.bench.state",
                        load.name,
                        load.prefill // by,
                        load.batches // by,
                        used,
                        cores=(MEASURED_CORE,),
                    )["us_per_batch"]
                    for _ in range(runs)
                ]
            )
            shares = Series([value / (each[load.name] + value) * 100 for value in cost.values], "%")
            log = "written over an older one" if used else "the first of a new directory"
            table.add(load.name, log, cost.median, cost.spread, shares.median)
            section.targets.append(
                Target(
                    f"write-{load.name}-{'used' if used else 'new'}",
                    f"the write path's share of a batch's CPU time, load {load.name}, a log {log}",
                    shares,
                    5.0,
                )
            )
    section.tables.append(table)


def measure_write_path(load: str, prefill: int, batches: int, directory: Path) -> dict[str, Any]:
    """CPU microseconds that a batch takes more where it is kept: the median of pairs of slices."""
    driver = Driver(load_named(load).make(0))
    store = StateStore(directory, ["bench"])
    store.load(driver.relay, 0.0)
    store.begin(driver.relay)
    driver.relay.records = None
    driver.feed(prefill)
    more = []
    for pair in range(batches // SLICE // 2):
        spent = {}
        for kept in (True, False) if pair % 2 else (False, True):
            driver.relay.records = Records() if kept else None
            spent[kept] = driver.feed(SLICE)
            begin = time.thread_time_ns()
            store.flush()
            spent[kept] += time.thread_time_ns() - begin
        more.append(spent[True] - spent[False])
    driver.check(None)
    assert not store.failed
    return {"us_per_batch": median(more) / SLICE / 1000}


def main(load: str, prefill: str, batches: str, used: str) -> None:
    """One measurement in this process."""
    rest_collector()  # as the daemon does
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as place:
        directory = Path(place)
        if used == "True":
            with (directory / SPARE).open("wb") as old:
                for _ in range(0, MIN_ROTATE, len(_OLD)):
                    old.write(_OLD)
        json.dump(measure_write_path(load, int(prefill), int(batches), directory), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
