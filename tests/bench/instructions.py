"""Machine instructions that a block costs the core: ``python -m tests.bench.instructions vllm-map 8x8``.

Counted by callgrind (package valgrind) in :meth:`Relay.handle` and all it calls, C included, with a full cache. Unlike a
clock, the number is the same whatever else runs, within some tenths of a percent: so two versions of the code can be
compared on a busy machine. ``--out DIR`` keeps callgrind's files, for ``callgrind_annotate`` and KCachegrind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from kvbus.core.events import BatchReceived

from .core import Driver
from .counted import LIVE
from .loads import LOADS, Load, load_named, recorded, tally
from .processes import ROOT, environment
from .recorded import FAMILIES

BLOCKS: Final = 20_000
"""Blocks of a synthetic load that are counted."""

DEFAULT: Final = ("8x8", "64x1", "1x1", *FAMILIES)

_TOTAL: Final = re.compile(r"^totals: (\d+)", re.MULTILINE)


def prepared(name: str) -> tuple[Load, int]:
    """A load with a small cache, and how many of its batches are counted."""
    if name in FAMILIES:
        load = recorded(name, LIVE)
        return load, load.loop
    load = LOADS[name] if name in LOADS else load_named(name)
    return load, load.loop or BLOCKS // (load.blocks or 64)


def watched(name: str, analytics: int) -> None:
    """Under callgrind: fill the cache uncounted, then count one loop."""
    load, batches = prepared(name)
    warm = load.warm or batches // 4
    payloads = load.take(warm + batches)
    driver = Driver(iter(payloads), analytics=analytics)
    driver.feed(warm)
    frames = [[b"", (warm + i).to_bytes(8, "big"), payload] for i, payload in enumerate(payloads[warm:])]
    handle, pid = driver.handle, str(os.getpid())
    subprocess.run(["callgrind_control", "-i", "on", pid], check=True, stdout=subprocess.DEVNULL)
    for each in frames:
        handle(BatchReceived(0, each), 1.0)
    subprocess.run(["callgrind_control", "-i", "off", pid], check=True, stdout=subprocess.DEVNULL)
    driver.check_recorded(len(frames))


def instructions(name: str, out: Path, analytics: int = 0) -> float:
    """Of one block that is stored or removed."""
    load, batches = prepared(name)
    file = out / f"callgrind.{name}"
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={file}"),
        *(sys.executable, "-m", "tests.bench.instructions", "--watched", f"--analytics={analytics}", name),
    ]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stderr=subprocess.PIPE)
    found = _TOTAL.search(file.read_text())
    assert found is not None, file
    warm = load.warm or batches // 4
    blocks = sum(tally(load.take(warm + batches)[warm:])[:2])
    return int(found[1]) / blocks


def main() -> int:
    """Count each load, and print it beside the first."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.instructions", description=__doc__)
    parser.add_argument(
        "loads", nargs="*", default=DEFAULT, help=f"of {', '.join(DEFAULT)}, or a capture (default: all)"
    )
    parser.add_argument("--out", type=Path, help="keep callgrind's files in this directory")
    parser.add_argument("--analytics", type=int, default=0, metavar="BLOCKS", help="follow so many blocks (default: 0)")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watched:
        watched(arguments.loads[0], arguments.analytics)
        return 0
    if shutil.which("callgrind_control") is None:
        sys.stderr.write("callgrind is not installed (package valgrind)\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvbus-bench-") as directory:
        out: Path = arguments.out or Path(directory)
        out.mkdir(parents=True, exist_ok=True)
        first = 0.0
        for name in arguments.loads:
            each = instructions(name, out, arguments.analytics)
            first = first or each
            sys.stdout.write(
                f"{name:22} {each:10,.0f} instructions a block, {each / first:6.2f} x {arguments.loads[0]}\n"
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
