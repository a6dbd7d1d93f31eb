"""``make explore DEPTH=6``: search all orders of events from every starting point (scene) to a depth, and print a
report.

Exit with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import sys

from tests.exhaustive.search import FAULTS, SCENES, CounterExampleError, Found, Limits, Search


def say(text: str) -> None:
    """Print a line of the report immediately, without buffering."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def line(scene: str, found: Found) -> str:
    rate = found.transitions / max(found.seconds, 1e-9)
    return (
        f"{scene:8} depth {len(found.levels):2}: {found.states:,} states, {found.transitions:,} transitions,"
        f" {found.seconds:.0f} s of CPU, {rate:,.0f} transitions/s"
    )


def main() -> int:
    """Run the search. Return the exit code of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=5, help="maximum number of actions after the scene")
    parser.add_argument("--faults", type=int, default=3, help="maximum number of faults on a path")
    parser.add_argument(
        "--batches", type=int, default=3, help="maximum number of batches of an epoch after the scene's own"
    )
    parser.add_argument("--ticks", type=int, default=3, help="maximum seconds on a path, without pauses")
    parser.add_argument("--scene", choices=SCENES, action="append", help="scene to begin with; by default all scenes")
    options = parser.parse_args()
    limits = Limits(options.depth, options.faults, options.batches, options.ticks)
    exact_after: dict[str, float] = {}
    for scene in options.scene or SCENES:
        try:
            for found in Search(scene, limits).levels():
                say(line(scene, found))
        except CounterExampleError as broken:
            say(str(broken))
            return 1
        for last, seconds in found.exact_after.items():
            exact_after[last] = max(exact_after.get(last, 0.0), seconds)
    for last in sorted(exact_after, key=lambda last: (last not in FAULTS, last)):
        say(f"{last:22} exact after {exact_after[last]:.0f} s at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
