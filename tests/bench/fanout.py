"""Many routers, many ranks: what they cost the engine, and what kvbus costs beside it."""

from __future__ import annotations

from typing import Final

from .core import child as core_child
from .processes import rss_bytes
from .recorded import RECORDED
from .report import Section, Series, Table, Target, ratios
from .setups import Between, Setup, running
from .setups import run as run_setup
from .turns import alternate

MANY: Final = 64
RANKS: Final = 8
RATE: Final = 50
RELAYED: Final = {"sglang-map": RECORDED["sglang-map"], "1x8": "batches of one event of 8 blocks"}
"""What eight ranks send, the real traffic first."""

JOURNAL: Final = 10_000
"""Batches that a stream's journal keeps unless told otherwise."""


def run_engine(*, quick: bool, runs: int) -> Section:
    """The engine's CPU time with one router and with many, behind kvbus and directly connected."""
    section = Section("engine", "What routers cost the engine")
    rate, seconds = 200, 2 if quick else 10
    items: list[tuple[Between, int]] = [(between, n) for between in ("kvbus", "direct") for n in (1, MANY)]

    def measure(item: tuple[Between, int]) -> float:
        between, routers = item
        result = run_setup(Setup(between, "8x8", rate * seconds, routers=routers, rate=rate))
        if any(each.batches != result.batches for each in result.heard):
            raise RuntimeError(f"{item}: {result.heard}")
        return result.cpu["engine"] / result.batches * 1e6

    found = alternate("engine", runs, items, measure)
    table = Table(
        f"The engine process at {rate} batches/s of 8 events of 8 blocks", ["", "routers", "CPU us a batch", "spread"]
    )
    for (between, routers), values in found.items():
        cpu = Series(values)
        table.add("behind kvbus" if between == "kvbus" else "direct", routers, cpu.median, cpu.spread)
    section.tables.append(table)
    section.targets.append(
        Target(
            "engine-load",
            f"the engine's CPU with {MANY} routers behind kvbus, against one",
            ratios(found["kvbus", MANY], found["kvbus", 1]),
            1.1,
        )
    )
    section.notes.append(
        f"Without kvbus, {MANY} routers cost the engine "
        f"{ratios(found['direct', MANY], found['direct', 1])} times what one costs."
    )
    section.plot(
        f"The engine's CPU time a batch, 1 and {MANY} routers",
        "us",
        {f"{'direct' if b == 'direct' else 'behind kvbus'}, {n}": Series(v) for (b, n), v in found.items()},
    )
    return section


def run_ranks(*, quick: bool, runs: int) -> Section:
    """One kvbus beside an engine of eight ranks at its usual rate, caches full and journals full."""
    section = Section("ranks", "Beside an engine of eight ranks")
    seconds, prefill = (5, 1000) if quick else (30, 10_500)
    each_block = core_child("memory", "1x8", 200_000, 0)["bytes_per_block"]
    cores: list[float] = []
    besides: list[float] = []
    rss: list[float] = []
    base: list[float] = []
    live = 0
    for _ in range(runs):
        # few under way, so that the memory is not that of queues which such an engine never fills
        setup = Setup("kvbus", "full", prefill + RATE * seconds, ranks=RANKS, rate=RATE, prefill=prefill, window=16)
        with running(setup, before=lambda kvbus: base.append(rss_bytes(kvbus.pid) / 2**20)) as processes:
            result = processes.run()
            processes.check_kvbus()
            live = processes.live_blocks()
        cores.append(result.cpu["relay"] / seconds * 100)
        rss.append(result.rss / 2**20)
        besides.append((result.rss - live * each_block) / 2**20)
    kept = min(prefill + RATE * seconds, JOURNAL)
    journals = "journals full" if kept == JOURNAL else f"{kept:,} batches in each journal"
    section.targets += [
        Target("ranks-cpu", f"{RANKS} ranks x {RATE} batches/s x 8 blocks: share of a core", Series(cores, "%"), 4.0),
        Target("ranks-memory", f"the same: memory besides the blocks, {journals}", Series(besides, "MiB"), 80.0),
    ]
    section.facts |= {"base MiB": Series(base).median, "rank %": Series(cores).median / RANKS}
    table = Table("Memory of the process", ["", "MiB"])
    table.add("started, nothing received", Series(base).median)
    table.add(f"after {prefill + RATE * seconds:,} batches of each rank", Series(rss).median)
    table.add(f"of which {live:,} live blocks, {each_block:.0f} bytes each", live * each_block / 2**20)
    size = sum(each.bytes for each in result.heard) / sum(each.batches for each in result.heard)
    table.add(f"of which {kept:,} batches in each journal, {size:.0f} bytes each", kept * RANKS * size / 2**20)
    table.add("the rest", Series(rss).median - live * each_block / 2**20 - kept * RANKS * size / 2**20)
    section.tables.append(table)
    section.tables += [_beside_other_relays(load, what, seconds, runs) for load, what in RELAYED.items()]
    return section


def _beside_other_relays(load: str, what: str, seconds: int, runs: int) -> Table:
    """What it takes to pass these batches on: at such a rate most of it is being woken up, once a batch."""
    relays: list[Between] = ["proxy", "floor", "blocking", "naive", "kvbus"]

    def measure(between: Between) -> float:
        result = run_setup(Setup(between, load, RATE * seconds + 10, ranks=RANKS, rate=RATE, prefill=10))
        return result.cpu["relay"] / result.seconds * 100

    found = alternate(f"ranks {load}", runs, relays, measure)
    table = Table(
        f"{RANKS} ranks x {RATE} {what} a second, through other relays too, % of a core",
        ["", "%", "spread", "by proxy's"],
    )
    for between, values in found.items():
        table.add(between, Series(values).median, Series(values).spread, ratios(values, found["proxy"]).median)
    return table
