"""The core's work, counted instead of timed: the same number in every run, on every machine, under any load.

For a fixed stream of batches: bytecode instructions run, calls made (of Python and of C functions), memory allocations
kept and bytes kept, each per block. The bounds are in ``counted.json``, by Python version, because each version compiles
to other bytecode. Work inside a C function shows only by its call and what it keeps: for that there is ``--only core``.

    python -m tests.bench.counted             what it is now
    python -m tests.bench.counted vllm-map    the same of one load
    python -m tests.bench.counted --record    that becomes the bound (of all loads, or of those named)

Recorded loads are counted when their caches are full, a loop for each of the three; the table at the end sets them beside
the synthetic ones with as many blocks in an event.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Final

from kvbus.common.compiled import PURE, core

from .core import Driver
from .loads import load_named, recorded, tally
from .processes import run_child
from .recorded import FAMILIES, plain_cost, shape_of

BOUNDS: Final = Path(__file__).with_name("counted.json")
TOLERANCE: Final = 0.03
"""By how much of itself a count may exceed its bound, and :data:`SLACK` on top, for counts near zero."""

SLACK: Final = 0.1

SYNTHETIC: Final = {"8x8": 64, "64x1": 64, "1x1": 2000, "mix": 64, "sim": 200}
"""Batches of each load that are counted."""

LIVE: Final = 1000
"""Blocks that are live while a recorded load is counted."""

VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


def count(load: str) -> dict[str, float]:
    """What one load costs the core per block stored or removed, in this process (use a fresh one).

    Raises:
        RuntimeError: the core is compiled, and has no bytecode.
    """
    if core() != "pure":
        raise RuntimeError(f"a compiled core runs no bytecode: {PURE}=1")
    counted = _recorded(load) if load in FAMILIES else _synthetic(load)
    return {name: round(value, 3) for name, value in counted.items()}


def _synthetic(load: str) -> dict[str, float]:
    named, batches = load_named(load), SYNTHETIC[load]
    warm = named.warm or batches
    payloads = named.take(warm + 3 * batches)
    blocks = _blocks(payloads[warm:], batches)
    driver = Driver(iter(payloads))
    driver.feed(warm)
    return {
        "instructions": _instructions(driver, batches) / blocks[0],
        "calls": _calls(driver, batches) / blocks[1],
        **{name: kept / blocks[2] for name, kept in _kept(driver, batches).items()},
    }


def _recorded(family: str) -> dict[str, float]:
    """A loop each. What is kept is that of a live block: it shows while the cache fills, with a journal of one batch."""
    load = recorded(family, LIVE)
    payloads = load.take(load.warm + 2 * load.loop)
    Driver(iter(payloads)).feed(load.loop)  # what a process keeps when something comes for the first time
    driver = Driver(iter(payloads), journal_batches=1)
    kept = {name: value / driver.live for name, value in _kept(driver, load.warm).items()}
    blocks = _blocks(payloads[load.warm :], load.loop)
    counted = {
        "instructions": _instructions(driver, load.loop) / blocks[0],
        "calls": _calls(driver, load.loop) / blocks[1],
    }
    driver.check_recorded()
    return counted | kept


def _blocks(payloads: list[bytes], batches: int) -> list[int]:
    """Blocks stored or removed in each so many batches."""
    return [sum(tally(payloads[at : at + batches])[:2]) for at in range(0, len(payloads), batches)]


def _instructions(driver: Driver, batches: int) -> int:
    counted = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    _watched(driver, batches, sys.settrace, trace)
    return counted


def _calls(driver: Driver, batches: int) -> int:
    counted = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    _watched(driver, batches, sys.setprofile, profile)
    return counted


def _watched(driver: Driver, batches: int, install: Any, watcher: Any) -> None:
    """Let ``watcher`` see the relay's own frames, and not those that make the batches."""
    handle = driver.handle

    def watched(*arguments: Any) -> Any:
        install(watcher)
        try:
            return handle(*arguments)
        finally:
            install(None)

    driver.handle = watched  # type: ignore[assignment]
    driver.feed(batches)
    driver.handle = handle


def _kept(driver: Driver, batches: int) -> dict[str, int]:
    """Allocations and bytes that outlive the handling, the journal's included (the payloads were there before)."""
    gc.collect()
    tracemalloc.start()
    blocks, size = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
    driver.feed(batches)
    gc.collect()
    kept = {
        "allocations": sys.getallocatedblocks() - blocks,
        "bytes": tracemalloc.get_traced_memory()[0] - size,
    }
    tracemalloc.stop()
    return kept


def measured(*loads: str) -> dict[str, dict[str, float]]:
    """:func:`count` in a process of its own, with fixed hashes; one process for all of these."""
    return run_child("tests.bench.counted", "--json", *loads, env={PURE: "1"})


def all_measured() -> dict[str, dict[str, float]]:
    """Every load: the synthetic ones in a process each, the recorded ones in one."""
    return {name: each for load in SYNTHETIC for name, each in measured(load).items()} | measured(*FAMILIES)


def bounds() -> dict[str, dict[str, float]] | None:
    """What was recorded for this Python version."""
    return json.loads(BOUNDS.read_text()).get(VERSION) if BOUNDS.exists() else None


def record(counted: dict[str, dict[str, float]]) -> None:
    """Write down these counts as the bounds of this Python version."""
    known = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    known[VERSION] = counted
    BOUNDS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def table(counted: dict[str, dict[str, float]]) -> list[str]:
    """Recorded loads by synthetic ones, in instructions; ``plain`` is :func:`plain_cost`."""
    synthetic = [counted[load]["instructions"] for load in ("8x8", "64x1", "1x1")]
    lines = [f"{'load':22} blocks/event events/batch instructions calls  by 8x8  by 64x1  by plain"]
    for family in (name for name in FAMILIES if name in counted):
        shape, each = shape_of(family), counted[family]["instructions"]
        lines.append(
            f"{family:22} {shape.blocks:12.2f} {shape.events:12.2f} {each:12.1f} {counted[family]['calls']:5.1f}"
            f" {each / synthetic[0]:7.2f} {each / synthetic[1]:8.2f} {each / plain_cost(shape, *synthetic):9.2f}"
        )
    return lines


def main(arguments: list[str]) -> None:
    """Print what the loads named cost, or all of them, beside their bounds; ``--record`` writes all down."""
    if arguments[:1] == ["--json"]:
        json.dump({load: count(load) for load in arguments[1:]}, sys.stdout)
        return
    loads = [argument for argument in arguments if argument != "--record"]
    counted = measured(*loads) if loads else all_measured()
    if "--record" in arguments:
        record((bounds() or {}) | counted)
    known = bounds() or {}
    for load, counts in counted.items():
        for name, value in counts.items():
            bound = known.get(load, {}).get(name)
            sys.stdout.write(f"{load:22} {name:13} {value:10.3f} a block, bound {bound}\n")
    if not loads:
        sys.stdout.write("\n" + "\n".join(table(counted)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
