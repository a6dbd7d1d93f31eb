"""What delivery costs the whole process: by routers, by sources, and what a late router waits by how high the numbers are.

``fan-out``: 1,000 messages a second to 1, 16 and 64 routers, beside ``zmq_proxy`` and the floor.
``aggregator``: many sources in one process. ``numbers``: a router that comes when a stream has numbered 10,000 to
100,000,000 batches. Nobody publishes that many: a reservation of an earlier process lets the numbering begin there, as
it does after a restart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, NamedTuple

import msgspec

from .core import child as core_child
from .processes import many_descriptors
from .reader import Answered, Spec
from .recorded import RECORDED
from .report import Section, Series, Table, Target, ratios
from .setups import Between, Result, Setup, running, with_a_cache
from .setups import run as run_setup
from .turns import alternate

ROUTERS: Final = (1, 16, 64)
RATE: Final = 1000
ASKED: Final = 24
"""Descriptors of one source with its stream while it is asked for a replay; 8 when it is not."""

FANNED: Final = {"sglang-map": RECORDED["sglang-map"], "1x1": "batches of one block"}
"""What many routers get, the real traffic first."""

NUMBERS: Final = (10_000, 1_000_000, 100_000_000)


def run_fan_out(*, quick: bool, runs: int) -> Section:
    """One stream, many routers."""
    section = Section("fan-out", "Fan-out to many routers")
    for load, what in FANNED.items():
        setup = with_a_cache(Setup("direct", load, RATE * (1 if quick else 10), rate=RATE))
        _fan_out(section, setup, what, runs)
    return section


def _fan_out(section: Section, setup: Setup, load: str, runs: int) -> None:
    items: list[tuple[int, Between]] = [(n, between) for n in ROUTERS for between in ("proxy", "floor", "kvbus")]

    def measure(item: tuple[int, Between]) -> Result:
        routers, between = item
        return run_setup(replace(setup, between=between, routers=routers))

    found = alternate(f"fan-out {setup.load}", runs, items, measure)
    table = Table(
        f"The relay's process at {RATE:,} {load} a second",
        ["routers", "", "us a message", "% of a core", "spread", "by proxy's", "MiB", "MiB more than with one router"],
    )
    for (routers, between), results in found.items():
        cpu = Series(_percent(results))
        by = ratios(cpu.values, _percent(found[routers, "proxy"]))
        if between == "kvbus" and routers > 1:
            what = f"CPU of the process with {routers} routers, {load}, against zmq.proxy's"
            section.targets.append(Target(f"fan-out-{setup.load}-{routers}", what, by, 1.0))
        each_us = Series([each.cpu["relay"] / each.batches * 1e6 for each in results]).median
        rss = Series([each.rss / 2**20 for each in results]).median
        more = rss - Series([each.rss / 2**20 for each in found[1, between]]).median
        row = (between, each_us, cpu.median, cpu.spread, by.median, rss, more)
        table.add(routers if between == "proxy" else "", *row)
    section.tables.append(table)
    least, most = (Series(_percent(found[n, "kvbus"])).median for n in (ROUTERS[0], ROUTERS[-1]))
    section.facts["router %"] = (most - least) / (ROUTERS[-1] - ROUTERS[0])


def _percent(results: list[Result]) -> list[float]:
    return [each.cpu["relay"] / each.seconds * 100 for each in results]


class Case(NamedTuple):
    """Sources, batches a second of each, routers."""

    sources: int
    rate: int
    routers: int


def run_aggregator(*, quick: bool, runs: int) -> Section:
    """Many sources in one process, a stream each, and one million blocks of all of them to one late router."""
    descriptors = many_descriptors()
    section = Section("aggregator", "Many sources")
    seconds = 5 if quick else 20
    cases = [Case(1, 50, 1), Case(100, 50, 1), Case(100, 50, 16)]
    if descriptors >= ASKED * 1000:
        cases += [] if quick else [Case(1000, 10, 1)]
    else:
        section.notes.append(
            f"1,000 sources take {ASKED * 1000:,} descriptors while all are asked; here are {descriptors:,}."
        )
    each_block = core_child("memory", "1x8", 200_000, 0)["bytes_per_block"]
    found = alternate("aggregator", runs, cases, lambda case: _aggregate(case, seconds, each_block))
    table = Table(
        "Batches of 8 blocks, everything delivered",
        ["sources", "batches/s each", "routers", "% of a core", "spread", "MiB beside blocks and journals", "spread"],
    )
    for case, results in found.items():
        cpu, rest = (Series([result[at] for result in results]) for at in (0, 1))
        table.add(*case, cpu.median, cpu.spread, rest.median, rest.spread)
    section.tables.append(table)
    medians = {case: [Series([result[at] for result in found[case]]).median for at in (0, 1)] for case in cases}
    one, many, routers = cases[:3]
    section.facts |= {
        "source %": (medians[many][0] - medians[one][0]) / (many.sources - one.sources),
        "source MiB": (medians[many][1] - medians[one][1]) / (many.sources - one.sources),
        "connection %": (medians[routers][0] - medians[many][0]) / (many.sources * (routers.routers - 1)),
        "connection MiB": (medians[routers][1] - medians[many][1]) / (many.sources * (routers.routers - 1)),
    }
    section.tables.append(_late(sources=100, blocks=1_000_000, runs=runs))
    return section


def _aggregate(case: Case, seconds: int, each_block: float) -> tuple[float, float]:
    """Percent of a core, and MiB beside live blocks and journals."""
    setup = Setup("kvbus", "1x8", case.rate * seconds, routers=case.routers, ranks=case.sources, rate=case.rate)
    with running(setup) as processes:
        result = processes.run()
        processes.check_kvbus(joined_late=True)
        if any(heard.batches != setup.batches for heard in result.heard):
            raise RuntimeError(f"{case}: batches are missing: {result.heard}")
        kept = sum(heard.bytes for heard in result.heard) / case.routers
        rest = result.rss - processes.live_blocks() * each_block - kept
    return result.cpu["relay"] / result.seconds * 100, rest / 2**20


def _late(*, sources: int, blocks: int, runs: int) -> Table:
    """All of the sources' blocks to a router that comes late and asks for each stream in turn."""
    batches = blocks // sources // 64
    took: list[float] = []
    with running(Setup("kvbus", "8x8", batches, ranks=sources)) as processes:
        processes.run()
        for _ in range(runs):
            total = 0.0
            for endpoint, replay in zip(processes.out, processes.out_replay, strict=True):
                reader = processes.reader(Spec(endpoint, replay, "dealer"))
                answered = msgspec.convert(reader.ask("ask"), Answered)
                if answered.blocks < batches * 64:
                    raise RuntimeError(f"of {batches * 64} blocks there came {answered}")
                total += answered.ended - answered.asked
            took.append(total)
    table = Table(
        f"{batches * 64 * sources:,} blocks of {sources} sources to one late router", ["", "seconds", "spread"]
    )
    table.add("a replay from 0 of each stream, one after the other", Series(took).median, Series(took).spread)
    return table


def run_numbers(*, quick: bool, runs: int) -> Section:
    """A late router's way to the whole state, by how far the numbering has come."""
    blocks = 12_800
    section = Section("numbers", "A late router, by how high the numbers are")
    kinds: tuple[Literal["subscriber", "client", "dealer"], ...] = ("subscriber", "client", "dealer")
    del quick
    items = [(number, kind) for number in NUMBERS for kind in kinds]
    found: dict[tuple[int, str], list[float]] = {item: [] for item in items}
    for _ in range(runs):
        for number in NUMBERS:
            with running(Setup("kvbus", "8x8", blocks // 64, first_seq=number)) as processes:
                processes.run()
                live = processes.live_blocks()
                for kind in kinds:
                    reader = processes.reader(Spec(processes.out[0], processes.out_replay[0], kind, blocks=live))
                    answered = msgspec.convert(reader.ask("ask"), Answered)
                    if answered.blocks != live or answered.first < number * (kind == "subscriber"):
                        raise RuntimeError(f"{number}, {kind}: {answered}")
                    found[number, kind].append((answered.ended - answered.asked) * 1000)
    table = Table(
        f"Milliseconds until a late router has all {blocks:,} blocks",
        ["numbers", "subscribes", "spread", "`kvbus.client`", "spread", "asks from 0, unsubscribed", "spread"],
    )
    for number in NUMBERS:
        cells = [Series(found[number, kind]) for kind in kinds]
        table.add(f"{number:,}", *(cell for each in cells for cell in (each.median, each.spread)))
    section.tables.append(table)
    few, many = NUMBERS[0], NUMBERS[-1]
    for kind, how in zip(kinds, ("subscribes", "uses `kvbus.client`", "asks from 0, unsubscribed"), strict=True):
        what = f"a late router that {how}: time at {many:,} numbers, against {few:,}"
        section.targets.append(Target(f"numbers-{kind}", what, ratios(found[many, kind], found[few, kind]), 2.0))
    return section
