"""How long a batch of one block takes from engine to router through kvbus, beside libzmq's own proxy.

Each is about a hundred microseconds, on a machine that others share: one quotient says little. So there are three times
as many pairs as runs of other measurements, and what is between the two of a pair is seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .latency import RATE, SHARES, paced
from .report import Section, Series, Table, Target, ratios
from .setups import Between, Setup, percentile, with_a_cache
from .turns import alternate

PAIRS: Final = 3
"""For each run that is asked for."""

BOUNDS: Final = {"p50": 1.3, "p99": 1.5}

WHO: Final[tuple[Between, ...]] = ("proxy", "kvbus")


def run(*, quick: bool, runs: int) -> Section:
    """The pairs, one after the other."""
    pairs = PAIRS * runs
    section = Section("end-to-end", f"From engine to router at {RATE:,} batches/s of one block, {pairs} pairs")
    setup = with_a_cache(Setup("proxy", "1x1", RATE * (2 if quick else 6), rate=RATE))
    found = alternate("end-to-end", pairs, WHO, lambda who: paced(replace(setup, between=who)))
    times = {
        name: {who: [percentile(each.latencies, share) * 1e6 for each in found[who]] for who in WHO}
        for name, share in SHARES.items()
    }
    table = Table("All of the way", ["", "p50, us", "spread", "p99, us", "spread"])
    for who in WHO:
        p50, p99 = (Series(times[name][who]) for name in SHARES)
        table.add(who, p50.median, p50.spread, p99.median, p99.spread)
    section.tables.append(table)
    for name, bound in BOUNDS.items():
        quotients = ratios(times[name]["kvbus"], times[name]["proxy"])
        what = f"latency from engine to router at {RATE:,} batches/s, {name}, against zmq.proxy's"
        section.targets.append(Target(f"end-to-end-{name}", what, quotients, bound, surely=True))
    return section
