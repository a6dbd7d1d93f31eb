"""Simulate the complete daemon: ``python -m tests.vopr --seed 1 --steps 1000000``, or ``--script FILE``.

The program runs many worlds, each with its own seed. It shortens the plan of the first world that fails, prints it as a
script, and exits with 1. ``--script`` runs such a script again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import zlib
from pathlib import Path

from tests.vopr import plan as plans
from tests.vopr.world import World

WORLDS = 1_000_000
"""Number of consecutive world seeds that belong to one value of ``--seed``."""


def say(line: str) -> None:
    """Print a line of the report immediately, without buffering."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def failed(seed: int, plan: list[plans.Entry], error: Exception, seconds: float) -> str:
    """Return a script that repeats a failed run.

    The plan is the list of the run's faults. For up to ``seconds`` seconds, this function removes faults that are not
    needed for the failure.
    """
    short = plans.shrink(seed, plan, error, seconds) if seconds else plan
    _, again = plans.run(seed, short)
    return f"# {type(again).__name__}: {again}\n{plans.text(seed, short)}"


class Longest:
    """The longest time from a fault until routers were exact again, for all faults together and for each kind of
    fault.

    The time for one kind counts only worlds in which no other kind of fault happened before.
    """

    def __init__(self) -> None:
        self.alone: dict[str, float] = {}
        self.worst = 0.0

    def take(self, world: World) -> None:
        """Add a finished world's times, each from the beginning of faults until all routers were exact again."""
        for seconds, faults in world.times:
            self.worst = max(self.worst, seconds)
            if len(faults) == 1:
                (fault,) = faults
                self.alone[fault] = max(self.alone.get(fault, 0.0), seconds)


def finding(defect: str, first: int, worlds: int) -> list[int]:
    """Return the seeds of those worlds that fail with an old defect of kvbus and succeed without it."""
    module = importlib.import_module(f"tests.vopr.defects.{defect}")
    found = []
    for seed in range(first, first + worlds):
        plan = plans.draw(seed)
        with module.put_back():
            _, error = plans.run(seed, plan)
        if error is not None and plans.run(seed, plan)[1] is None:
            found.append(seed)
    return found


def main() -> int:
    """Run the simulation, a script or the search for a defect. Return the exit code of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--defect", help="module of tests/vopr/defects; find the worlds that notice it")
    parser.add_argument("--worlds", type=int, default=50, help="number of worlds to try, from world SEED on")
    parser.add_argument(
        "--shrink",
        type=float,
        default=plans.SHRINK_SECONDS,
        help="maximum seconds to shrink a failing script; 0 for no shrinking",
    )
    options = parser.parse_args()
    if options.script is not None:
        seed, plan = plans.parse(options.script.read_text())
        world, error = plans.run(seed, plan)
        say(f"{world.schedule.steps:,} steps: {'ok' if error is None else f'{type(error).__name__}: {error}'}")
        return int(error is not None)
    if options.defect is not None:
        say(f"{options.defect}: found in {', '.join(map(str, finding(options.defect, options.seed, options.worlds)))}")
        return 0
    begun, shown = time.process_time(), time.monotonic()
    steps = worlds = digest = 0
    longest = Longest()
    while steps < options.steps:
        seed = options.seed * WORLDS + worlds
        plan = plans.draw(seed)
        world, error = plans.run(seed, plan)
        steps, worlds = steps + world.schedule.steps, worlds + 1
        digest = zlib.crc32(world.schedule.digest.to_bytes(4, "big"), digest)
        longest.take(world)
        if error is not None:
            say(f"after {steps:,} steps, world {worlds}:")
            say(failed(seed, plan, error, options.shrink))
            return 1
        now = time.monotonic()
        if now - shown > 10:
            shown = now
            say(f"{steps:,} steps, {worlds:,} worlds, {steps / (time.process_time() - begun):,.0f} steps a CPU second")
    seconds = time.process_time() - begun
    say(
        f"ok: {steps:,} steps in {worlds:,} worlds, seed {options.seed}, {seconds:.0f} CPU seconds "
        f"({steps / seconds:,.0f} a second), checksum {digest:08x}"
    )
    say(f"seconds from the last fault to exact: {longest.worst:.2f} at most; after one kind of fault alone:")
    for fault, worst in sorted(longest.alone.items()):
        say(f"  {fault}: {worst:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
