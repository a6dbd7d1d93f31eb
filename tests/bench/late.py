"""Late routers: how fast they get everything, and what the live stream notices of it."""

from __future__ import annotations

import os
import signal
import time
from typing import Final, NamedTuple

import msgspec

from .processes import peak_rss_bytes, reset_peak, rss_bytes
from .reader import Answered, Spec
from .report import Section, Series, Table, Target
from .setups import Running, Setup, percentile, running

LIVE_RATE: Final = 1000
"""Batches of 8 blocks a second: more than twice what an engine of eight ranks sends."""

REQUESTERS: Final = 4

STOPPED: Final = 3

STOP: Final = 0.15
"""Seconds: some 10 MB of an answer, beside what the kernel holds."""


def run(*, quick: bool, runs: int) -> Section:
    """One late router alone; then several at once beside a live stream."""
    blocks = 200_000 if quick else 1_000_000
    section = Section("late", f"Late routers at {blocks:,} live blocks")
    _alone(section, blocks, runs)
    _beside_live(section, blocks, seconds=12 if quick else 20, runs=runs)
    return section


def _alone(section: Section, blocks: int, runs: int) -> None:
    found: dict[str, list[float]] = {"dealer": [], "client": []}
    size = []
    with running(_filled(blocks, 0)) as processes:
        for turn in range(runs):
            for kind in found if turn % 2 == 0 else reversed(found):
                answered = _answered(processes, kind)
                _check(answered, blocks)
                found[kind].append(answered.ended - answered.asked)
                if kind == "dealer":
                    size.append(answered.bytes / 1e6)
    dealer, client = Series(found["dealer"], "s"), Series(found["client"], "s")
    section.targets.append(Target("late", f"{blocks:,} live blocks to a late router", dealer, 2.0))
    table = Table("A replay from 0, from the request to its end", ["", "seconds", "spread"])
    table.add(f"received ({Series(size)} MB)", dealer.median, dealer.spread)
    table.add("received and built into a `BlockView` by `kvbus.client`", client.median, client.spread)
    section.tables.append(table)


def _beside_live(section: Section, blocks: int, *, seconds: int, runs: int) -> None:
    table = Table(
        f"Live latency at {LIVE_RATE:,} batches/s of 8 blocks, ms",
        ["", "p50", "spread", "p99", "spread", "max", "spread"],
    )
    stopping = f"{STOPPED} of them stop for {STOP:g} s, one after the other"
    together = Beside([], [], [], [])
    apart = Beside([], [], [], [])
    for _ in range(runs):
        _measure(together, blocks, seconds, stopped=0)
        _measure(apart, blocks, seconds, stopped=STOPPED)
    for title, found in (
        ("before", together.before),
        (f"while {REQUESTERS} late routers are answered", together.during),
        (f"the same, and {stopping}", apart.during),
    ):
        each = [Series([percentile(latencies, share) * 1000 for latencies in found]) for share in (0.5, 0.99, 1.0)]
        table.add(title, *[cell for series in each for cell in (series.median, series.spread)])
    section.tables.append(table)
    late = Series([percentile(latencies, 0.99) * 1000 for latencies in together.during], "ms")
    what = f"p99 of live latency while {REQUESTERS} late routers get {blocks:,} blocks each"
    section.targets.append(Target("late-live", what, late, 20.0))
    for beside, more in ((together, ""), (apart, f" where {stopping}")):
        took, grown = Series(beside.took), Series(beside.grown)
        section.notes.append(
            f"The answers to all {REQUESTERS} took {took} s ({took.spread}) and {grown} MiB ({grown.spread}) at most "
            f"beside what was there{more}."
        )


class Beside(NamedTuple):
    """Of each run the live latencies in seconds, sorted, the seconds until all were answered, and the MiB it took."""

    before: list[list[float]]
    during: list[list[float]]
    took: list[float]
    grown: list[float]


def _measure(found: Beside, blocks: int, seconds: int, *, stopped: int) -> None:
    with running(_filled(blocks, seconds)) as processes:
        assert processes.relay is not None
        # readers are polite: what is to be seen is kvbus, not who of the routers' processes has the core
        readers = [processes.reader(_spec(processes, "dealer", nice=19)) for _ in range(REQUESTERS)]
        processes.begin()
        time.sleep(seconds / 4)
        base = rss_bytes(processes.relay.pid)
        reset_peak(processes.relay.pid)
        for reader in readers:
            reader.tell("ask")
        for reader in readers[:stopped]:
            time.sleep(STOP)
            os.kill(reader.pid, signal.SIGSTOP)
            time.sleep(STOP)
            os.kill(reader.pid, signal.SIGCONT)
        answers = [msgspec.convert(reader.answer(), Answered) for reader in readers]
        peak = peak_rss_bytes(processes.relay.pid)
        result = processes.end()
        processes.check_kvbus()
    for answered in answers:
        _check(answered, blocks)
    asked, ended = min(each.asked for each in answers), max(each.ended for each in answers)
    arrivals = list(zip(result.times[0::2], result.times[1::2], strict=True))
    if arrivals[-1][0] < ended:
        raise RuntimeError(f"the live stream ended {ended - arrivals[-1][0]:.1f} s before the answers did")
    found.before.append(sorted(latency for at, latency in arrivals if at < asked))
    found.during.append(sorted(latency for at, latency in arrivals if asked <= at <= ended))
    found.took.append(ended - asked)
    found.grown.append((peak - base) / 2**20)


def _filled(blocks: int, seconds: int) -> Setup:
    batches = blocks // 64
    rate = LIVE_RATE if seconds else 0
    return Setup("kvbus", f"filled:{batches}", batches + rate * seconds, prefill=batches, rate=rate)


def _spec(processes: Running, kind: str, nice: int = 0) -> Spec:
    return Spec(processes.out[0], processes.out_replay[0], kind, nice)  # type: ignore[arg-type]


def _answered(processes: Running, kind: str) -> Answered:
    reader = processes.reader(_spec(processes, kind))
    reader.tell("ask")
    return msgspec.convert(reader.answer(), Answered)


def _check(answered: Answered, blocks: int) -> None:
    """At least what was there before; with a live stream beside it more."""
    if answered.blocks < blocks // 64 * 64:
        raise RuntimeError(f"of {blocks} blocks there came {answered}")
