"""Where the core's time goes: ``make profile``, or ``python -m tests.bench.hotspots 8x8 1x1``.

cProfile over a fixed stream of batches. Call counts are the same in every run; times are for finding, not for comparing
(the profiler makes a call dearer than it is). ``build/profile/LOAD.prof`` opens in any viewer of pstats files. On Python
3.12 and later ``perf record -g python -X perf -m tests.bench.core cost 8x8 1000000`` shows the C side as well.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from pathlib import Path
from typing import Final

from .core import Driver
from .loads import load_named
from .processes import ROOT

BLOCKS: Final = 64_000
OUT: Final = ROOT / "build" / "profile"


def profiled(load: str) -> Path:
    """Profile the relay alone on one load; the file with the result."""
    named = load_named(load)
    batches = named.loop or (BLOCKS if load == "1x1" else BLOCKS // 64)
    driver = Driver(named.make(0))
    driver.feed(named.warm or max(1024, batches // 10))
    profiler = cProfile.Profile()
    handle = driver.handle
    driver.handle = lambda *arguments: profiler.runcall(handle, *arguments)
    driver.feed(batches)
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{load}.prof"
    profiler.dump_stats(path)
    return path


def main(loads: list[str]) -> None:
    """Profile each load and print the dearest functions."""
    for load in loads or ["8x8", "1x1"]:
        path = profiled(load)
        sys.stdout.write(f"{load}: {path.relative_to(ROOT)}\n")
        pstats.Stats(str(path)).strip_dirs().sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main(sys.argv[1:])
