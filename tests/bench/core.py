"""The core without sockets: time a block of recorded and of synthetic loads, memory, and what a large index does to the time.

Each measurement is a fresh process that drives one :class:`~kvbus.core.relay.Relay` (validation, index, journal, one
output) with encoded batches. The clock runs in :meth:`Relay.handle` alone; it counts CPU time, so that another process
on the same core costs the measurement little. Beside it runs a fixed loop of plain Python, the yardstick: the ratio
to it compares machines.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, Final

from kvbus.common.compiled import PURE

from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.collector import rest_collector

from .loads import load_named, mixed, stores
from .processes import MEASURED_CORE, rss_bytes, run_child
from .recorded import FAMILIES, plain_cost, shape_of
from .report import Section, Series, Table, Target, ratios
from .turns import alternate

SLICE: Final = 128
"""Batches made, then handled, at a time: only the handling is measured."""

STEPS: Final = 200_000

LIMITS: Final = {
    "8x8": ("multi-block events", 0.8),
    "64x1": ("single-block events", 2.0),
    "1x1": ("one single-block event a batch", 2.5),
}
"""Loads with a bound, in microseconds of CPU a block."""

SCALED: Final = ("2x1", "2x4", "64x1", "8x8")
"""Loads of a full cache: batches about as vLLM's and SGLang's usual ones, and large ones. The last has a bound."""


def yardstick() -> float:
    """Nanoseconds for one turn of a fixed loop of plain Python: the best of five."""
    best = float("inf")
    for _ in range(5):
        table: dict[int, int] = {}
        total = 0
        begin = time.thread_time_ns()
        for i in range(STEPS):
            table[i & 1023] = total
            total = (total * 31 + i) & 0xFFFFFFFF
        best = min(best, (time.thread_time_ns() - begin) / STEPS)
    return best


class Driver:
    """One relay with one source and one output, fed with a stream of batches; ``analytics`` of so many blocks."""

    def __init__(self, batches: Iterator[bytes], *, journal_batches: int = 10_000, analytics: int = 0) -> None:
        source = SourceSpec("engine", 0, Settings(replay=False), Rules(), analytics=analytics)
        output = OutputSpec("routers", PROFILES["vllm"], [None], heartbeat=0, journal_batches=journal_batches)
        self.relay = Relay([source], [output])
        self.handle = self.relay.handle
        self._batches = batches
        self._seq = 0
        self.published = 0
        self.slowest_ns = 0

    @property
    def live(self) -> int:
        """Blocks in the index."""
        return len(self.relay.sources[0].normalizer.index)

    def feed(self, batches: int) -> int:
        """Handle so many batches; the CPU time that took, in nanoseconds."""
        spent = 0
        while batches > 0:
            payloads = list(islice(self._batches, min(SLICE, batches)))
            batches -= len(payloads)
            frames = [[b"", (self._seq + i).to_bytes(8, "big"), payload] for i, payload in enumerate(payloads)]
            del payloads
            self._seq += len(frames)
            spent += self._handle(frames)
        return spent

    def _handle(self, batches: list[list[bytes]]) -> int:
        handle, published = self.handle, 0
        begin = time.thread_time_ns()
        for frames in batches:
            for command in handle(BatchReceived(0, frames), 1.0):
                published += isinstance(command, Publish)
        spent = time.thread_time_ns() - begin
        self.published += published
        self.slowest_ns = max(self.slowest_ns, spent)
        return spent

    def check(self, live: int | None) -> None:
        """Nothing was refused, left out or lost, and what should be live is."""
        stats = self.relay.sources[0].stats
        self.check_recorded()
        assert not +stats.filtered, stats.filtered
        assert self.published == self._seq, (self.published, self._seq)
        assert live is None or self.live == live, (self.live, live)

    def check_recorded(self) -> None:
        """Nothing was refused. Copies and groups without prefixes are left out, and of some batches all of it."""
        stats = self.relay.sources[0].stats
        assert not +stats.rejected, stats.rejected
        assert stats.batches == self._seq, (stats.batches, self._seq)


def measure_cost(load: str, blocks: int) -> dict[str, float]:
    """Microseconds a block, stores alone."""
    named = load_named(load)
    driver = Driver(named.make(0))
    warm = max(blocks // 20 // named.blocks, 1)
    driver.feed(warm)
    before = yardstick()
    batches = blocks // named.blocks
    spent = driver.feed(batches)
    driver.check((warm + batches) * named.blocks)
    turn = min(before, yardstick())
    each = spent / (batches * named.blocks)
    return {"us_per_block": each / 1000, "yardstick_ns": turn, "turns_per_block": each / turn}


def measure_recorded(family: str, blocks: int) -> dict[str, float]:
    """Microseconds a block stored or removed, whole loops of a recording while the cache is full."""
    load = load_named(family)
    shape = shape_of(family)
    loops = max(round(blocks / (load.loop * shape.events * shape.blocks)), 1)
    driver = Driver(load.make(0))
    driver.feed(load.warm)
    live = driver.live
    spent = driver.feed(loops * load.loop)
    driver.check_recorded()
    assert abs(driver.live - live) <= live // 4, (driver.live, live)
    return {"us_per_block": spent / (loops * load.loop * shape.events * shape.blocks) / 1000}


def measure_memory(load: str, blocks: int, *, wide: bool) -> dict[str, float]:
    """Bytes a live block: how much the process grows. Of the journal one batch is kept, it has limits of its own."""
    events, per_event = map(int, load.split("x"))
    driver = Driver(stores(events, per_event, ids="wide" if wide else "narrow"), journal_batches=1)
    warm = 20
    driver.feed(warm)
    gc.collect()
    before = rss_bytes()
    batches = blocks // (events * per_event)
    driver.feed(batches)
    grown = rss_bytes() - before
    driver.check((warm + batches) * events * per_event)
    return {"bytes_per_block": grown / (batches * events * per_event)}


def measure_scale(live: int, operations: int, load: str) -> dict[str, float]:
    """Microseconds for one block stored or removed while the index stays at ``live`` blocks."""
    events, per_event = map(int, load.split("x"))
    per_batch = events * per_event
    driver = Driver(mixed(events, per_event, live))
    filling = driver.feed(live // per_batch)
    reached = driver.live
    driver.slowest_ns = 0
    batches = operations // per_batch
    spent = driver.feed(batches)
    driver.check(None)
    assert abs(driver.live - reached) <= 4096, (reached, driver.live)
    return {
        "live": driver.live,
        "us_per_operation": spent / (batches * per_batch) / 1000,
        "us_per_block_filling": filling / reached / 1000,
        "slowest_slice_ms": driver.slowest_ns / 1e6,
    }


def measure_floor(live: int, operations: int) -> dict[str, float]:
    """Microseconds for one insertion or removal in a plain dictionary of ``live`` numbers: what no index can beat."""
    draw = random.Random(live)
    keys = [draw.getrandbits(64) for _ in range(live + operations)]
    table = dict.fromkeys(keys[:live], True)
    begin = time.thread_time_ns()
    for old, new in zip(keys, keys[live:], strict=False):
        del table[old]
        table[new] = True
    return {"us_per_operation": (time.thread_time_ns() - begin) / operations / 2000}


def run(*, quick: bool, runs: int) -> Section:
    """Time, memory, scale."""
    section = Section("core", "The core, without sockets")
    _recorded(section, 2_000 if quick else 100_000, runs)
    _cost(section, 100_000 if quick else 500_000, runs)
    _memory(section, 200_000 if quick else 1_000_000, runs)
    _scale(section, 1_000_000 if quick else 10_000_000, 500_000 if quick else 1_000_000, runs)
    return section


def child(*arguments: object, pure: bool = False) -> Any:
    """One measurement in a process of its own, see :func:`main`; ``pure`` runs the sources, whatever is compiled."""
    env = {PURE: "1"} if pure else {}
    return run_child("tests.bench.core", *arguments, cores=(MEASURED_CORE,), env=env)


def _recorded(section: Section, blocks: int, runs: int) -> None:
    """Each family beside synthetic loads, run by run."""
    synthetic = ["8x8", "64x1", "1x1"]
    found = alternate(
        "recorded",
        runs,
        [*synthetic, *FAMILIES],
        lambda load: child("recorded" if load in FAMILIES else "cost", load, blocks)["us_per_block"],
    )
    table = Table(
        "CPU time a block stored or removed, recorded traffic with a full cache",
        ["family", "blocks an event", "events a batch", "us a block", "spread", "by 8x8", "by plain stores"],
    )
    for family in FAMILIES:
        shape, each = shape_of(family), Series(found[family], "us")
        plain = [plain_cost(shape, *costs) for costs in zip(*(found[load] for load in synthetic), strict=True)]
        by = [ratios(each.values, costs).median for costs in (found["8x8"], plain)]
        table.add(family, shape.blocks, shape.events, each.median, each.spread, *by)
    section.tables.append(table)
    section.notes.append(
        "*By plain stores*: by what stores of new blocks alone would cost in as many batches, events and blocks, "
        "reckoned from 8x8, 64x1 and 1x1."
    )
    bars = {family: Series(found[family]) for family in FAMILIES}
    section.plot("CPU time a block in the core, recorded traffic", "us", bars)


def _cost(section: Section, blocks: int, runs: int) -> None:
    loads = ["8x8-0.33", "8x8", "1x64", "1x8", "64x1", "1x1"]
    both = alternate(
        "core",
        runs,
        list(product(loads, (False, True))),
        lambda item: child("cost", item[0], blocks, pure=item[1]),
    )
    found = {load: both[load, False] for load in loads}
    table = Table(
        "CPU time a block, synthetic loads",
        ["load (events x blocks)", "us a block", "spread", "yardstick turns a block", "us by the sources", "by this"],
    )
    for load, results in found.items():
        each = Series([result["us_per_block"] for result in results], "us")
        turns = Series([result["turns_per_block"] for result in results])
        pure = [result["us_per_block"] for result in both[load, True]]
        table.add(load, each.median, each.spread, turns.median, Series(pure).median, ratios(pure, each.values).median)
        if load in LIMITS:
            what, limit = LIMITS[load]
            section.targets.append(Target(f"core-{load}", f"core, {what} ({load}), a block", each, limit))
    yardsticks = Series([result["yardstick_ns"] for results in found.values() for result in results], "ns")
    section.tables.append(table)
    bars = {f"kvbus, {load}": Series([one["us_per_block"] for one in results]) for load, results in found.items()}
    section.plot("CPU time a block in the core, synthetic loads", "us", bars)
    section.notes.append(
        f"The yardstick's turn (one dictionary store, one multiplication, in plain Python) took {yardsticks} ns here "
        f"({yardsticks.spread})."
    )


def _memory(section: Section, blocks: int, runs: int) -> None:
    table = Table(
        f"Memory a live block of 16 tokens, tokens included, at {blocks:,} blocks",
        ["load", "token ids", "bytes a block", "spread", "of which tokens as msgpack"],
    )
    for load, wide in (("8x8", False), ("8x8", True), ("1x1", False), ("1x1", True)):
        each = Series([child("memory", load, blocks, int(wide))["bytes_per_block"] for _ in range(runs)], "bytes")
        table.add(load, "above 65,535" if wide else "below 65,536", each.median, each.spread, 80 if wide else 48)
        if not wide:
            section.facts[f"bytes {load}"] = each.median
            kind, limit = ("multi-block", 200) if load == "8x8" else ("single-block", 350)
            what = f"memory a live block, {kind} events ({load}), {blocks:,} blocks"
            section.targets.append(Target(f"memory-{load}", what, each, limit))
    section.tables.append(table)


def _scale(section: Section, large: int, operations: int, runs: int) -> None:
    small = 10_000
    table = Table(
        "A full cache: half of a batch's events store and half remove",
        [
            "a batch's events x blocks",
            "live blocks",
            "us a block stored or removed",
            "spread",
            f"slowest {SLICE} batches, ms",
            "us a block while filling",
            f"by {small:,} live blocks",
            "spread",
        ],
    )
    for load in SCALED:
        found: dict[int, list[dict[str, float]]] = {small: [], large: []}
        for i in range(runs):
            for live in (small, large) if i % 2 == 0 else (large, small):
                found[live].append(child("scale", live, operations, load))
        times = {live: [result["us_per_operation"] for result in results] for live, results in found.items()}
        for live, results in found.items():
            each, ratio = Series(times[live]), ratios(times[live], times[small])
            slowest = Series([result["slowest_slice_ms"] for result in results])
            filling = Series([result["us_per_block_filling"] for result in results])
            table.add(
                load, f"{live:,}", each.median, each.spread, slowest.median, filling.median, ratio.median, ratio.spread
            )
        if load == SCALED[-1]:
            what = f"cost a block at {large:,} live blocks, against {small:,}"
            section.targets.append(Target("scale", what, ratios(times[large], times[small]), 1.25))
    section.tables.append(table)
    floor = {
        live: Series([child("floor", live, operations)["us_per_operation"] for _ in range(runs)])
        for live in (small, large)
    }
    section.notes.append(
        f"A plain dictionary alone, one number out and one in, without anything else: {floor[small].median:.3g} us an "
        f"operation at {small:,} entries, {floor[large].median:.3g} us at {large:,}: caches of the processor."
    )


def main(arguments: list[str]) -> None:
    """One measurement in this process: ``cost``, ``recorded``, ``memory``, ``scale`` or ``floor``, and its numbers."""
    what, *rest = arguments
    rest_collector()  # as the daemon does
    if what == "cost":
        result = measure_cost(rest[0], int(rest[1]))
    elif what == "recorded":
        result = measure_recorded(rest[0], int(rest[1]))
    elif what == "memory":
        result = measure_memory(rest[0], int(rest[1]), wide=rest[2] == "1")
    elif what == "floor":
        result = measure_floor(int(rest[0]), int(rest[1]))
    else:
        result = measure_scale(int(rest[0]), int(rest[1]), rest[2])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
