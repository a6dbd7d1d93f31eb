"""The benchmarks of kvbus. Each runs kvbus and the relays that it is compared with in turn, and returns a result."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Final, TypeVar

from .loads import churn, stores
from .process import Kind, relay
from .report import Bound, Result, Table, ratios, told
from .traffic import Late, Traffic, ask_from_zero, traffic

Item = TypeVar("Item", bound=Hashable)
Found = TypeVar("Found")

RELAYS: Final[tuple[Kind, ...]] = ("kvbus", "naive", "proxy")


def alternate(items: Sequence[Item], runs: int, measure: Callable[[Item], Found]) -> dict[Item, list[Found]]:
    """Measure every item ``runs`` times, in alternating order, so that slow changes of the machine affect all items."""
    found: dict[Item, list[Found]] = {item: [] for item in items}
    for run in range(runs):
        for item in items if run % 2 == 0 else reversed(items):
            began = time.monotonic()
            found[item].append(measure(item))
            sys.stderr.write(f"  run {run + 1} of {runs}: {item} ({time.monotonic() - began:.0f} s)\n")
    return found


def late(*, quick: bool, runs: int) -> Result:
    """Measure the time until a router that joins late has all blocks.

    It is measured twice: before and after all blocks have been replaced by others.
    """
    blocks = 200_000 if quick else 1_000_000

    def asked(through: Traffic) -> Late:
        answer = ask_from_zero(through.relay)
        if answer.blocks != (live := through.relay.live_blocks()):
            raise RuntimeError(f"{answer.blocks} blocks came of {live}")
        return answer

    with traffic("kvbus") as through:
        load = churn(8, 8, blocks)
        through.saturate(load, batches=blocks // 64)
        early = [asked(through) for _ in range(runs)]
        through.saturate(load, batches=blocks // 32)
        later = [asked(through) for _ in range(runs)]
    rows = [
        [
            what,
            f"{answers[0].bytes / 1e6:.0f} MB",
            told([each.seconds for each in answers], "s"),
            told([each.cpu_seconds for each in answers], "s"),
        ]
        for what, answers in (
            ("has just been filled", early),
            ("has other blocks: each block was replaced since", later),
        )
    ]
    by_uptime = ratios([each.seconds for each in later], [each.seconds for each in early])
    bounds = [
        Bound(
            "time until a late router has all blocks: with all blocks replaced, divided by that with the first blocks",
            1.5,
            "x",
            by_uptime,
        )
    ]
    if not quick:
        bounds.insert(
            0, Bound("time until a late router has 1,000,000 blocks", 3, "s", [each.seconds for each in early])
        )
    return Result(
        f"A late router gets {blocks:,} live blocks by a replay from 0",
        bounds,
        Table(["the cache", "size of the answer", "time until the router has all blocks", "CPU time of kvbus"], rows),
    )


def sources(*, quick: bool, runs: int) -> Result:
    """Measure kvbus with 1,000 sources in one process. A run that loses a batch fails."""
    count, rate, seconds = 1000, 10, 3 if quick else 10
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def measure(_: str) -> tuple[float, float]:
        with traffic("kvbus", count) as through:
            loads = [list(islice(stores(1, 8, rank), rate * seconds)) for rank in range(count)]
            share = through.pace(*loads, rate=rate).cpu_share
            return share, through.relay.resident_bytes() / 2**20

    found = alternate(["1,000 sources"], 1 if quick else runs, measure)["1,000 sources"]
    rows = [[f"{count:,} x {rate}", *(told([run[at] for run in found], unit) for at, unit in ((0, "%"), (1, "MiB")))]]
    return Result(
        "1,000 sources in one process, batches of 8 blocks, all delivered",
        [],
        Table(["sources x batches/s", "share of one core", "memory"], rows),
    )


def memory(*, quick: bool, runs: int) -> Result:
    """Measure kvbus's resident memory at rest, and its growth per live block."""
    blocks = 100_000 if quick else 1_000_000
    shapes = {"8 events of 8 blocks": (8, 8), "1 event of 1 block": (1, 1)}
    idle: list[float] = []

    def measure(shape: str) -> float:
        events, each = shapes[shape]
        warm = 20
        with traffic("kvbus", output={"journal_batches": 1}) as through:
            idle.append(through.relay.resident_bytes() / 2**20)
            load = stores(events, each)
            through.saturate(load, batches=warm)
            before = through.relay.resident_bytes()
            batches = blocks // (events * each)
            through.saturate(load, batches=batches)
            return (through.relay.resident_bytes() - before) / (batches * events * each)

    found = alternate(list(shapes), runs, measure)
    rows = [["kvbus before the first batch", told(idle, "MiB")]]
    rows += [
        [f"a live block of 16 tokens, stored in batches of {shape}", told(found[shape], "bytes")] for shape in shapes
    ]
    return Result(
        f"Resident memory with {blocks:,} blocks and a journal of one batch",
        [
            Bound(f"memory of a live block, stored in batches of {shape}", 350, "bytes", found[shape])
            for shape in shapes
        ],
        Table(["what is measured", "memory"], rows),
    )


def start(*, quick: bool, runs: int) -> Result:
    """Measure the time from the start of the process until kvbus is ready."""

    def measure(_: str) -> float:
        with relay("kvbus") as started:
            return started.started_in

    starts = 3 if quick else 3 * runs
    found = alternate(["kvbus run"], starts, measure)["kvbus run"]
    rows = [["`kvbus run`, one source", told(found, "s")]]
    return Result(f"From start to ready, {starts} starts", [], Table(["command", "time"], rows))
