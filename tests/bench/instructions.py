"""Machine instructions that a block costs the core: ``python -m tests.bench.instructions vllm-map 8x8``.

Counted by callgrind (package valgrind) in :meth:`Relay.handle` and all it calls, C included, with a full cache. Unlike a
clock, the number is the same whatever else runs, within some tenths of a percent: so two versions of the code can be
compared on a busy machine, and compiled code with its sources (``--pure``; ``--only compiled`` of the benchmarks has the
table). ``--tree DIR`` counts the core of another checkout: what a block cost before a change, or long ago. ``--out DIR``
keeps callgrind's files, for ``callgrind_annotate`` and KCachegrind.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from kvbus.common.compiled import PURE, core

from .counted import LIVE
from .loads import LOADS, Load, load_named, recorded, tally
from .processes import CORES, ROOT, environment
from .recorded import FAMILIES, plain_cost, shape_of
from .report import Section, Series, Table, Target

WATCHED: Final = ROOT / "tests" / "bench" / "watched.py"

BLOCKS: Final = 4_000
"""Blocks of a synthetic load that are counted."""

SYNTHETIC: Final = ("8x8", "64x1", "1x1")

DEFAULT: Final = (*SYNTHETIC, *FAMILIES)

BEFORE: Final = ROOT / "docs" / "bench" / "before.json"
"""The sources' instructions when the bounds were set, counted by ``--tree``, and which share of batches was on the fast
path then."""

LEAST: Final = {"8x8": 1.4, "1x1": 2.0}
SLOW: Final = 2.0
"""How many times fewer instructions compiled code is to take than those sources: of what was slow then, too."""

_ALL: Final = 0.99
"""The share from which on nearly each batch was on the fast path."""

_TOTAL: Final = re.compile(r"^totals: (\d+)", re.MULTILINE)


def prepared(name: str) -> tuple[Load, int]:
    """A load with a small cache, and how many of its batches are counted."""
    if name in FAMILIES:
        load = recorded(name, LIVE)
        return load, load.loop
    load = LOADS[name] if name in LOADS else load_named(name)
    return load, load.loop or BLOCKS // (load.blocks or 64)


def instructions(name: str, out: Path, analytics: int = 0, *, pure: bool = False, tree: Path = ROOT) -> float:
    """Of one block that is stored or removed.

    Args:
        name: of the load.
        out: where callgrind's file is written.
        analytics: follow so many blocks.
        pure: run the sources, whatever is compiled.
        tree: the checkout that is counted, of any age; the load is this one's.
    """
    load, batches = prepared(name)
    payloads = load.take((load.warm or batches // 4) + batches)
    file, made = out / f"callgrind.{name}", out / f"payloads.{name}"
    made.write_bytes(msgspec.msgpack.encode(payloads))
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={file}"),
        *(sys.executable, "-P", str(WATCHED), str(made), str(batches), *([str(analytics)] if analytics else [])),
    ]
    env = environment(**{PURE: "1"} if pure else {}, PYTHONPATH=str(tree))
    subprocess.run(command, cwd=tree, env=env, check=True, stderr=subprocess.PIPE)
    made.unlink()
    found = _TOTAL.search(file.read_text())
    assert found is not None, file
    return int(found[1]) / sum(tally(payloads[-batches:])[:2])


def lacking() -> str:
    """What :func:`run` needs and is not there; empty if all is."""
    if shutil.which("callgrind_control") is None:
        return "callgrind is not installed (package valgrind)"
    return "" if core() == "compiled" else "the core is not compiled (make compiled)"


def run(*, quick: bool, runs: int) -> Section:
    """Compiled code beside its sources, family by family. One run: a count does not spread."""
    del runs
    loads = (*SYNTHETIC, "vllm-map", "sglang-map") if quick else DEFAULT
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        out = Path(directory)
        (out / "pure").mkdir()
        with ThreadPoolExecutor(len(CORES)) as pool:  # counts, and no times: they may be taken beside each other
            compiled = [pool.submit(instructions, load, out) for load in loads]
            pure = [pool.submit(instructions, load, out / "pure", pure=True) for load in loads]
            found = {
                load: (one.result(), other.result()) for load, one, other in zip(loads, pure, compiled, strict=True)
            }
    return told(found)


def told(found: dict[str, tuple[float, float]]) -> Section:
    """The section, of each load's instructions a block: pure, compiled."""
    section = Section("compiled", "The compiled core beside its sources, in counted instructions")
    table = Table(
        "Instructions a block stored or removed, with a full cache",
        [
            *("load", "before", "pure", "compiled", "pure by compiled", "before by compiled", "bound", ""),
            *("by 8x8", "by 64x1", "by plain stores"),
        ],
    )
    compiled = [found[load][1] for load in SYNTHETIC]
    before = json.loads(BEFORE.read_text())
    then = {load: each["instructions"] for load, each in before["loads"].items()}
    bounds = LEAST | {load: SLOW for load, each in before["loads"].items() if each["fast_path"] < _ALL}
    for load, (pure, each) in found.items():
        least, times = bounds.get(load), then[load] / each
        met = "" if least is None else "met" if times >= least else "**not met**"
        shape = shape_of(load) if load in FAMILIES else None
        plain = "" if shape is None else each / plain_cost(shape, *compiled)
        bound = "" if least is None else f"≥ {least:.1f} x"
        counts = (f"{count:,.0f}" for count in (then[load], pure, each))
        table.add(load, *counts, pure / each, times, bound, met, each / compiled[0], each / compiled[1], plain)
    section.tables.append(table)
    section.notes.append(
        f"*Before*: the sources of {before['date']} ({before['commit']}), from before what engines send was made fast. Where "
        "nearly each batch was on the fast path then, there is no bound."
    )
    section.notes.append(
        "*By 8x8* and what follows: compiled code alone, by the same of a block of that load, and by what stores of new "
        "blocks would cost in as many batches, events and blocks, reckoned from 8x8, 64x1 and 1x1."
    )
    for load, least in LEAST.items():
        gain = Series([then[load] / found[load][1]], "x")
        what = f"instructions of the sources before, by the compiled core's now, {load}"
        section.targets.append(Target(f"compiled-{load}", what, gain, least, ">="))
    gains = Series([then[load] / found[load][1] for load in found if load in FAMILIES and load in bounds], "x")
    what = f"the same, recorded traffic that was slow then, the middle of {len(gains.values)} families"
    section.targets.append(Target("compiled-recorded", what, gains, SLOW, ">="))
    return section


def main() -> int:
    """Count each load, and print it beside the first."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.instructions", description=__doc__)
    parser.add_argument(
        "loads", nargs="*", default=DEFAULT, help=f"of {', '.join(DEFAULT)}, or a capture (default: all)"
    )
    parser.add_argument("--out", type=Path, help="keep callgrind's files in this directory")
    parser.add_argument("--analytics", type=int, default=0, metavar="BLOCKS", help="follow so many blocks (default: 0)")
    parser.add_argument("--pure", action="store_true", help="run the sources, whatever is compiled")
    parser.add_argument("--tree", type=Path, default=ROOT, help="count another checkout's core, with the same loads")
    arguments = parser.parse_args()
    if shutil.which("callgrind_control") is None:
        sys.stderr.write("callgrind is not installed (package valgrind)\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        out: Path = arguments.out or Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        first = 0.0
        for name in arguments.loads:
            each = instructions(name, out, arguments.analytics, pure=arguments.pure, tree=arguments.tree)
            first = first or each
            sys.stdout.write(
                f"{name:22} {each:10,.0f} instructions a block, {each / first:6.2f} x {arguments.loads[0]}\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
