"""The core's work, counted instead of timed: the same number in every run, on every machine, under any load.

For a fixed stream of batches: bytecode instructions run, calls made (of Python and of C functions), memory allocations
kept and bytes kept, each per block. The bounds are in ``counted.json``, by Python version, because each version compiles
to other bytecode. Work inside a C function shows only by its call and what it keeps: for that there is ``--only core``.

    python -m tests.bench.counted             what it is now
    python -m tests.bench.counted --record    that becomes the bound
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Final

from kvbus.compiled import PURE, core

from .core import Driver
from .loads import load_named, tally
from .processes import run_child

BOUNDS: Final = Path(__file__).with_name("counted.json")
TOLERANCE: Final = 0.03
"""By how much of itself a count may exceed its bound, and :data:`SLACK` on top, for counts near zero."""

SLACK: Final = 0.1

COUNTED: Final = {"8x8": 64, "1x1": 2000, "mix": 64, "sim": 200}
"""Batches of each load that are counted."""

VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"


def count(load: str) -> dict[str, float]:
    """What one load costs the core per block stored or removed, in this process (use a fresh one).

    Raises:
        RuntimeError: the core is compiled, and has no bytecode.
    """
    if core() != "pure":
        raise RuntimeError(f"a compiled core runs no bytecode: {PURE}=1")
    batches = COUNTED[load]
    # of a mixed load, what comes when the cache is full
    warm = 65_536 // 64 + 64 if load == "mix" else batches
    payloads = load_named(load).take(warm + 3 * batches)
    blocks = [sum(tally(payloads[at : at + batches])[:2]) for at in range(warm, len(payloads), batches)]
    driver = Driver(iter(payloads))
    driver.feed(warm)
    return {
        "instructions": round(_instructions(driver, batches) / blocks[0], 3),
        "calls": round(_calls(driver, batches) / blocks[1], 3),
        **{name: round(kept / blocks[2], 3) for name, kept in _kept(driver, batches).items()},
    }


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
    tracemalloc.start()
    blocks, size = sys.getallocatedblocks(), tracemalloc.get_traced_memory()[0]
    driver.feed(batches)
    kept = {
        "allocations": sys.getallocatedblocks() - blocks,
        "bytes": tracemalloc.get_traced_memory()[0] - size,
    }
    tracemalloc.stop()
    return kept


def measured(load: str) -> dict[str, float]:
    """:func:`count` in a process of its own, with fixed hashes."""
    return run_child("tests.bench.counted", load, env={PURE: "1"})


def bounds() -> dict[str, dict[str, float]] | None:
    """What was recorded for this Python version."""
    return json.loads(BOUNDS.read_text()).get(VERSION) if BOUNDS.exists() else None


def record() -> None:
    """Write down the present counts as the bounds of this Python version."""
    known = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    known[VERSION] = {load: measured(load) for load in COUNTED}
    BOUNDS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")


def main(arguments: list[str]) -> None:
    """``LOAD`` counts in this process; ``--record`` writes all down; nothing prints all beside their bounds."""
    if arguments == ["--record"]:
        record()
    elif arguments:
        json.dump(count(arguments[0]), sys.stdout)
        return
    known = bounds() or {}
    for load in COUNTED:
        for name, value in measured(load).items():
            bound = known.get(load, {}).get(name)
            sys.stdout.write(f"{load:4} {name:13} {value:10.3f} a block, bound {bound}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
