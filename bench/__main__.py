"""Measure time, memory and many sources of kvbus on this machine: ``python -m bench``."""

from __future__ import annotations

from . import benchmarks, report
from .program import program

main = program(
    "bench",
    report.RESULTS,
    {each.__name__: each for each in (benchmarks.late, benchmarks.sources, benchmarks.memory, benchmarks.start)},
)

if __name__ == "__main__":
    main()
