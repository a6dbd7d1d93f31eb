"""Blocks a second: through kvbus and into a router, beside the rate at which the real Dynamo indexer takes them in.

The loads are recorded batches of vLLM 0.33, 8x8 as that engine would send it, and the plain one, as fast as they are
taken. kvbus's clock runs from the first batch that leaves the engine to the end's arrival at the router, the indexer's
until its metrics say that every event is dealt with. Both are measured on one core of their own, and with both cores
free for everyone.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from tests.doubles.router import events_of
from tests.interop.dynamo import PYTHON_ENV, DynamoIndexer
from tests.ports import ports_in_a_row

from . import engine
from .counters import Counters
from .loads import load_named, tally
from .processes import LOAD_CORE, MEASURED_CORE, ROOT, fine_cpu_seconds, pin, started, wait_until, waited_seconds
from .recorded import FAMILIES
from .report import Section, Series, Table, Target, ratios
from .setups import BETWEEN, Between, Child, Setup, check_batches
from .setups import run as run_setup
from .turns import alternate

LOADS: Final = {"vllm-map": 2.0, "8x8-0.33": 1.0, "8x8": 1.0}
"""What is taken in, the recorded load first: and how many times as many batches as of the others."""
NO_PARENT: Final = ("stored", "parent_block_not_found")
"""What the indexer says of stores behind a block of which an earlier copy was removed."""
MOST_ORPHANS: Final = 0.05
"""Share of a recording's events that may be such stores."""
_APPLIED: Final = re.compile(
    r'^dynamo_kvrouter_kv_cache_events_applied\{event_type="(\w+)",status="(\w+)"\} (\d+)', re.MULTILINE
)


@dataclass(frozen=True)
class Rate:
    """Of one run."""

    blocks_per_second: float
    cpu_us_per_block: float
    waited: float
    """Share of the time that its threads were ready to run, and had no core."""


@dataclass(frozen=True)
class Amount:
    """How much of a load there is: ``blocks`` stored and removed, and those ``live`` at the end."""

    batches: int
    events: int
    blocks: int
    live: int

    @classmethod
    def of(cls, load: str, batches: int) -> Amount:
        """Counted, by decoding all of it."""
        payloads = load_named(load).take(batches, 0)
        stored, removed, live = tally(payloads)
        return cls(batches, sum(len(events_of(payload)) for payload in payloads), stored + removed, len(live))


@dataclass(frozen=True)
class Competitor:
    """Who takes the load in, on one core or on all."""

    load: str
    who: Between | str
    pinned: bool

    def __str__(self) -> str:
        return f"{self.load}, {self.who}{'' if self.pinned else ', all cores'}"


def run(*, quick: bool, runs: int) -> Section:
    """Rates, and kvbus's against the indexer's."""
    batches = 4000 if quick else 30_000
    amounts = {load: Amount.of(load, round(batches * more)) for load, more in LOADS.items()}
    section = Section("ingest", "Blocks a second through kvbus, and into the Dynamo indexer")
    python = dynamo_python()
    who: list[tuple[str, bool]] = [*((between, True) for between in BETWEEN), ("kvbus", False)]
    if python is None:
        section.notes.append("The Dynamo indexer was not installed: nothing was compared with it.")
    else:
        os.environ[PYTHON_ENV] = python
        who += [("dynamo", pinned) for pinned in (True, False)]
    competitors = [Competitor(load, *each) for load in LOADS for each in who]
    found = alternate("ingest", runs, competitors, lambda competitor: _measure(competitor, amounts[competitor.load]))
    table = Table(
        "Blocks stored and removed a second, as fast as they are taken",
        [
            "load",
            "",
            "blocks/s",
            "spread",
            "CPU us a block",
            "waited for a core",
            "kvbus's rate by this one's",
            "spread",
        ],
    )
    bars = {}
    for competitor, rates in found.items():
        rate = Series([each.blocks_per_second for each in rates], "blocks/s")
        bars[str(competitor)] = rate
        ours = found[replace(competitor, who="kvbus")]
        ratio = ratios([each.blocks_per_second for each in ours], rate.values)
        cpu = Series([each.cpu_us_per_block for each in rates])
        waited = Series([each.waited for each in rates]).median
        told = ("", "") if rates is ours else (ratio.median, ratio.spread)
        first = competitor.load if (competitor.who, competitor.pinned) == who[0] else ""
        cores = "" if competitor.pinned else ", all cores"
        table.add(first, f"{competitor.who}{cores}", rate.median, rate.spread, cpu.median, f"{waited:.0%}", *told)
    section.tables.append(table)
    section.plot("Blocks stored and removed a second", "blocks/s", bars)
    section.notes.append(
        "There were "
        + "; ".join(f"of {load} {each.blocks:,} blocks in {each.batches:,} batches" for load, each in amounts.items())
        + ". The recorded load begins with an empty cache here, which fills."
    )
    section.notes.append(
        "*Waited for a core*: the share of the time that its threads were ready to run while something else had the "
        "core, added up over the threads. Where kvbus's is more than a few percent, the machine was busy, and its rates "
        "say nothing: whoever sleeps between two batches is let in before whoever always has work."
    )
    if python is not None:
        for load, pinned in product(LOADS, (True, False)):
            kvbus, dynamo = (
                [each.blocks_per_second for each in found[Competitor(load, who, pinned)]] for who in ("kvbus", "dynamo")
            )
            cores = "one core each" if pinned else "all cores"
            section.targets.append(
                Target(
                    f"ingest-{load}-{'one-core' if pinned else 'all-cores'}",
                    f"blocks/s through kvbus against the Dynamo indexer's ingest, {load}, {cores}",
                    ratios(kvbus, dynamo),
                    1.5 if pinned else 1.0,
                    ">=",
                )
            )
    return section


def _measure(competitor: Competitor, amount: Amount) -> Rate:
    if competitor.who == "dynamo":
        return ingest_dynamo(competitor.load, amount, pinned=competitor.pinned)
    verify = competitor.who == "kvbus"
    setup = Setup(competitor.who, competitor.load, amount.batches, verify=verify, pinned=competitor.pinned)  # type: ignore[arg-type]
    result = run_setup(setup)
    check_batches(setup, result)
    if verify and result.heard[0].live != amount.live:
        raise RuntimeError(f"{competitor}: of {amount} there came {result.heard[0]}")
    cpu = result.cpu.get("relay", 0.0)
    return Rate(amount.blocks / result.seconds, cpu / amount.blocks * 1e6, result.waited / result.seconds)


def dynamo_python() -> str | None:
    """The interpreter of the environment that has the indexer, if there is one."""
    default = ROOT / ".venv" / "dynamo" / "bin" / "python"
    return os.environ.get(PYTHON_ENV) or (str(default) if default.exists() else None)


def ingest_dynamo(load: str, amount: Amount, *, pinned: bool) -> Rate:
    """Send the load to the indexer, and wait until it says that it has dealt with all of it."""
    port = ports_in_a_row(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    events = amount.events + 1  # and the end
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-bench-")))
        with _confined(*((MEASURED_CORE,) if pinned else ())):
            indexer = stack.enter_context(DynamoIndexer(directory / "dynamo.log"))
        Counters(directory / "counters", 1)
        spec = engine.Spec([(endpoint, None)], load, amount.batches, str(directory / "counters"), [])
        sender = Child(
            stack.enter_context(
                started(
                    [sys.executable, "-m", "tests.bench.engine", msgspec.json.encode(spec).decode()],
                    cores=(LOAD_CORE,) if pinned else (),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            ),
            directory / "dynamo.log",
        )
        sender.expect("ready")
        indexer.register("bench", endpoint, None, 16)
        sender.ask("subscribed")
        pid = indexer.pid
        before, waited = fine_cpu_seconds(pid), waited_seconds(pid)
        sender.tell("run")
        wait_until(lambda: sum(_applied(indexer).values()) >= events, "the indexer has applied all", 300, every=0.02)
        done, cpu, waited = time.monotonic(), fine_cpu_seconds(pid) - before, waited_seconds(pid) - waited
        ran = msgspec.convert(sender.answer(), engine.Ran)
        refused = {key: count for key, count in _applied(indexer).items() if count and key[1] != "ok"}
        orphans = refused.pop(NO_PARENT, 0) if load in FAMILIES else 0
        if refused or orphans > amount.events * MOST_ORPHANS:
            raise RuntimeError(f"the indexer did not take everything: {refused}, {orphans} without a parent")
        if load not in FAMILIES and amount.batches <= 4000 and len(indexer.blocks("bench")) != amount.live + 1:
            raise RuntimeError(f"the indexer holds {len(indexer.blocks('bench'))} blocks of {amount.live + 1}")
        blocks = amount.blocks
        return Rate(blocks / (done - ran.first), cpu / blocks * 1e6, waited / (done - ran.first))


def _applied(indexer: DynamoIndexer) -> dict[tuple[str, str], int]:
    """Events by type and status."""
    return {(kind, status): int(count) for kind, status, count in _APPLIED.findall(indexer.metrics())}


@contextlib.contextmanager
def _confined(*cores: int) -> Iterator[None]:
    """What is started within inherits these cores."""
    pin(*cores)
    try:
        yield
    finally:
        pin()
