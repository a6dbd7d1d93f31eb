"""What a relay adds to the way from engine to router, and the CPU time it spends on a small message.

At 2,000 batches a second each batch carries the time it left; routers and engine read one clock. Recorded loads come
first, with a full cache. What is added is a percentile with a relay between, less the same percentile of the direct
connection. CPU time is that of all threads of the relay's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from .core import child as core_child
from .recorded import FAMILIES, RECORDED
from .report import Section, Series, Table, Target, ratios
from .setups import BETWEEN, Between, Result, Setup, check_batches, percentile, with_a_cache
from .setups import run as run_setup
from .turns import alternate

RATE: Final = 2000
FLOOR: Final = 1.0
"""Microseconds: a relay adds at least this; less is a disturbed run of the direct connection."""

SHARES: Final = {"p50": 0.5, "p99": 0.99}

LOADS: Final = {
    **RECORDED,
    "1x1": "200-byte batches of one block",
    "8x8": "4.5 kB batches of 64 blocks",
}

FEWER: Final[tuple[Between, ...]] = ("direct", "proxy", "floor", "kvbus")


def run(*, quick: bool, runs: int) -> Section:
    """Paced, then at saturation."""
    section = Section("latency", "Added latency, and CPU time a message")
    seconds = 2 if quick else 10
    for load, size in LOADS.items():
        between = FEWER if load in FAMILIES else BETWEEN
        setup = with_a_cache(Setup("direct", load, RATE * seconds, rate=RATE))
        found = alternate(f"latency {load}", runs, between, lambda who, setup=setup: paced(replace(setup, between=who)))
        _added(section, found, load, size)
    batches = 20_000 if quick else 200_000
    saturated = alternate(
        "cpu",
        runs,
        [between for between in BETWEEN if between != "direct"],
        lambda between: _saturating(between, batches),
    )
    _saturated(section, {between: [result for result, _ in each] for between, each in saturated.items()})
    kvbus, floor = ([each.cpu_us for each, _ in saturated[between]] for between in ("kvbus", "floor"))
    _around(section, kvbus, floor, [core for _, core in saturated["kvbus"]])
    return section


def _saturating(between: Between, batches: int) -> tuple[Result, float]:
    """A run, and beside kvbus's what its core alone costs a block, in microseconds."""
    core = core_child("cost", "1x1", batches)["us_per_block"] if between == "kvbus" else 0.0
    return run_setup(Setup(between, "1x1", batches)), core


def _around(section: Section, kvbus: list[float], floor: list[float], core: list[float]) -> None:
    """What is around the core: the target is by the least a relay in Python costs, and the core alone."""
    least = [a + b for a, b in zip(floor, core, strict=True)]
    what = f"CPU a 200-byte message at saturation, against the floor's and the core's ({Series(core)} us)"
    section.targets.append(Target("cpu-saturated", what, ratios(kvbus, least), 1.3))


def paced(setup: Setup) -> Result:
    """One run of a load at a rate, of which everything came."""
    result = run_setup(setup)
    check_batches(setup, result)
    return result


def _added(section: Section, found: Mapping[Any, list[Result]], load: str, size: str) -> None:
    direct = {name: [percentile(each.latencies, at) * 1e6 for each in found["direct"]] for name, at in SHARES.items()}
    table = Table(
        f"At {RATE:,} batches/s, {size}: latency through a relay, less that of the direct connection",
        ["", "added p50, us", "spread", "added p99, us", "spread", "CPU us a batch", "spread"],
    )
    table.add("direct (not less itself)", *_told(direct["p50"]), *_told(direct["p99"]), "", "")
    added: dict[str, dict[str, list[float]]] = {}
    cpu: dict[str, list[float]] = {}
    for between, results in found.items():
        if between == "direct":
            continue
        added[between] = {
            name: [
                percentile(each.latencies, at) * 1e6 - less for each, less in zip(results, direct[name], strict=True)
            ]
            for name, at in SHARES.items()
        }
        cpu[between] = [each.cpu_us for each in results]
        table.add(between, *_told(added[between]["p50"]), *_told(added[between]["p99"]), *_told(cpu[between]))
    section.tables.append(table)
    every = [each for results in found.values() for each in results]
    section.notes.append(
        f"Of all {sum(each.batches for each in every):,} batches of load {load} the engine sent "
        f"{sum(each.late for each in every):,} more than an interval behind their time."
    )
    if load != "1x1":
        return
    for name, limit in (("p50", 2.0), ("p99", 3.0)):
        section.targets.append(
            Target(
                f"latency-{name}",
                f"of it what is added to the direct connection's, {name}, against zmq.proxy's",
                ratios(added["kvbus"][name], added["proxy"][name], floor=FLOOR),
                limit,
            )
        )
        bars = {between: Series(values[name]) for between, values in added.items()}
        section.plot(f"Added latency at {RATE:,} batches/s, {name}", "us", bars)
    section.targets.append(
        Target(
            "cpu-paced",
            f"CPU a 200-byte message at {RATE:,}/s, against zmq.proxy's",
            ratios(cpu["kvbus"], cpu["proxy"]),
            1.5,
        )
    )


def _saturated(section: Section, found: Mapping[Any, list[Result]]) -> None:
    table = Table(
        "200-byte batches of one block, as fast as they are taken",
        [
            "",
            "CPU us a message",
            "spread",
            "by proxy's",
            "by floor's",
            "messages/s",
            "relay's core busy",
            "engine and router's core busy",
        ],
    )
    cpu = {between: [each.cpu_us for each in results] for between, results in found.items()}
    for between, results in found.items():
        table.add(
            between,
            *_told(cpu[between]),
            ratios(cpu[between], cpu["proxy"]).median,
            ratios(cpu[between], cpu["floor"]).median,
            Series([each.batches / each.seconds for each in results]).median,
            f"{Series([each.cpu['relay'] / each.seconds for each in results]).median:.0%}",
            f"{Series([(each.cpu['engine'] + each.cpu['routers']) / each.seconds for each in results]).median:.0%}",
        )
    section.tables.append(table)
    section.plot("CPU time a 200-byte message, as fast as they are taken", "us", {k: Series(v) for k, v in cpu.items()})


def _told(values: list[float]) -> tuple[float, str]:
    series = Series(values)
    return series.median, series.spread
