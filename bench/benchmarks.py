"""The benchmarks of kvbus. Each runs kvbus and the relays that it is compared with in turn, and returns a result."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import Final, TypeVar

from .loads import churn, stores
from .process import Kind, relay
from .report import Bound, Result, Table, number, ratios, told
from .traffic import Late, Traffic, ask_from_zero, traffic
from .traffic import Result as Run

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


def ranks(*, quick: bool, runs: int) -> Result:
    """Measure kvbus's CPU time for an engine with eight ranks at a typical rate, with full caches."""
    ranks, rate, seconds = 8, 50, 4 if quick else 15
    warm = 4096 // 8

    def measure(kind: Kind) -> float:
        with traffic(kind, ranks) as through:
            loads = [churn(1, 8, 4096, rank) for rank in range(ranks)]
            through.saturate(*loads, batches=warm)
            return through.pace(*(list(islice(load, rate * seconds)) for load in loads), rate=rate).cpu_share

    found = alternate(RELAYS, runs, measure)
    rows = [[kind, told(found[kind], "%"), told(ratios(found[kind], found["proxy"]))] for kind in RELAYS]
    return Result(
        "CPU time beside an engine of 8 ranks, each with 50 batches a second of 8 stored and 8 removed blocks",
        [Bound("kvbus's share of one core beside 8 ranks x 50 batches/s", 8, "%", found["kvbus"])],
        Table(["relay", "share of one core", "the share divided by the proxy's"], rows),
    )


def saturation(*, quick: bool, runs: int) -> Result:
    """Measure the CPU time of each relay per batch, at the maximum rate that the routers read."""
    shapes = {
        "1 block": (1, 1, 20_000 if quick else 200_000),
        "8 events of 8 blocks": (8, 8, 4_000 if quick else 30_000),
    }
    rows = []
    for name, (events, blocks, batches) in shapes.items():
        load = list(islice(stores(events, blocks), batches))

        def measure(kind: Kind, load: list[bytes] = load) -> Run:
            with traffic(kind) as through:
                return through.saturate(load, batches=len(load))

        found = alternate(RELAYS, runs, measure)
        cpu = {kind: [run.cpu_us for run in found[kind]] for kind in RELAYS}
        for kind in RELAYS:
            rate = statistics.median(run.batches / run.seconds for run in found[kind])
            row = [name, kind, told(cpu[kind], "us"), told(ratios(cpu[kind], cpu["naive"])), number(rate)]
            rows.append(row)
    return Result(
        "CPU time of a batch, at the maximum rate",
        [],
        Table(["a batch has", "relay", "CPU time of a batch", "the time divided by naive's", "batches/s"], rows),
    )


def latency(*, quick: bool, runs: int) -> Result:
    """Measure the time of a batch from engine to router, in paired runs of kvbus and libzmq's proxy."""
    rate, seconds = 2000, 2 if quick else 6
    load = list(islice(stores(1, 1), rate * seconds))

    def measure(kind: Kind) -> Run:
        with traffic(kind) as through:
            return through.pace(load, rate=rate)

    kinds: tuple[Kind, ...] = ("kvbus", "proxy")
    found = alternate(kinds, 3 * runs, measure)
    times = {kind: [[run.percentile(share) for run in found[kind]] for share in (0.5, 0.99)] for kind in kinds}
    bounds = [
        Bound(f"latency at 2,000 batches/s, {name}: kvbus's divided by the proxy's", limit, "x", ratios(kvbus, proxy))
        for name, limit, kvbus, proxy in zip(("p50", "p99"), (1.3, 1.5), *times.values(), strict=True)
    ]
    rows = [[kind, *(told(each, "us") for each in times[kind])] for kind in kinds]
    return Result(
        f"Latency from engine to router at 2,000 batches/s of one block, {3 * runs} pairs of runs",
        bounds,
        Table(["relay", "latency, p50", "latency, p99"], rows),
    )


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


def routers(*, quick: bool, runs: int) -> Result:
    """Measure the CPU time of kvbus and of libzmq's proxy with one router and with many."""
    rate, seconds = 1000, 2 if quick else 10
    load = list(islice(stores(1, 1), rate * seconds))
    counts = (1, 16, 64)
    kinds: tuple[Kind, ...] = ("kvbus", "proxy")

    def measure(item: tuple[int, Kind]) -> float:
        many, kind = item
        with traffic(kind, routers=many) as through:
            return through.pace(load, rate=rate).cpu_share

    found = alternate([(many, kind) for many in counts for kind in kinds], runs, measure)
    by_proxy = {many: ratios(found[many, "kvbus"], found[many, "proxy"]) for many in counts}
    rows = [[str(many), *(told(found[many, kind], "%") for kind in kinds), told(by_proxy[many])] for many in counts]
    return Result(
        "CPU time at 1,000 batches/s of one block, for several numbers of routers",
        [
            Bound(f"CPU time with {many} routers: kvbus's divided by the proxy's", 1, "x", by_proxy[many])
            for many in counts[1:]
        ],
        Table(
            ["routers", "kvbus: share of one core", "proxy: share of one core", "kvbus's share divided by the proxy's"],
            rows,
        ),
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


def state(*, quick: bool, runs: int) -> Result:
    """Measure the cost of keeping kvbus's state on disk (``state_dir``) at the maximum rate, with a full cache."""
    live, batches = 65_536, 5_000 if quick else 60_000
    load = list(islice(churn(8, 8, live), live // 64 + batches))
    warm, rest = load[: live // 64], load[live // 64 :]

    def measure(kept: bool) -> Run:
        with traffic("kvbus", state=kept) as through:
            through.saturate(warm, batches=len(warm))
            return through.saturate(rest, batches=len(rest))

    found = alternate([False, True], runs, measure)
    cpu = {kept: [run.cpu_us for run in found[kept]] for kept in found}
    rows = [
        [
            "with `state_dir`" if kept else "without `state_dir`",
            told(cpu[kept], "us"),
            told(ratios(cpu[kept], cpu[False])),
        ]
        for kept in found
    ]
    return Result(
        "What `state_dir` costs: batches of 4 stores and 4 removals of 8 blocks, at the maximum rate",
        [],
        Table(["kvbus", "CPU time of a batch", "the time divided by the time without `state_dir`"], rows),
    )
