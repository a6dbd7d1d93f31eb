"""Run random worlds of the relay for a long time: ``python -m tests.properties.soak --steps 1000000 --seed 1``.

The seed determines the worlds. Each world has 60 steps, and several processes share the worlds. The program shortens
the first world that fails: it removes steps while the same failure remains. It prints the remaining steps as a test,
and exits with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from tests.properties.world import Setup, World
from tests.shrinking import location_of, shorten

STEPS = 60
"""Number of random steps in a world. The check of all routers (`World.quiescence`) follows as the last step."""

SHRINK_SECONDS = 60.0

Step = tuple[str, tuple[Any, ...]]


def draw_setup(rng: random.Random) -> Setup:
    kinds = ["replay", "replay", "replay", "deaf", "snapshot"]
    return Setup(
        engines=tuple(rng.choice(kinds) for _ in range(rng.choice([1, 1, 2, 3]))),
        outputs=rng.choice(
            [
                ("vllm",),
                ("merged:vllm",),
                ("dynamo", "aibrix"),
                ("llm-d", "merged:dynamo"),
                ("sglang", "aibrix", "merged:llm-d"),
                ("merged:aibrix",),
            ]
        ),
        buffer_steps=rng.choice([3, 10, 1000]),
        bytes_hashes=rng.random() < 0.5,
        duplicates=rng.choice(["count", "last", "ignore"]),
        orphans=rng.choice(["pass", "pass", "drop"]),
        on_lost=rng.choice(["clear", "clear", "keep"]),
        timeout=rng.choice([5.0, 1e9]),
        reorder_batches=rng.choice([4, 1000]),
        reorder_bytes=rng.choice([300, 10**9]),
        journal_batches=rng.choice([1, 3, 10_000]),
        journal_bytes=rng.choice([500, 10**9]),
        max_blocks=rng.choice([5, 10**6, 10**6]),
        block_size=rng.choice([None, 2]),
        blocks_per_batch=rng.choice([None, 1, 3]),
        host=rng.random() < 0.7,
        ranks=rng.choice(["fixed", "late", "changing"]),
    )


def draw_changes(rng: random.Random) -> list[Any]:
    changes: list[Any] = []
    for _ in range(rng.randint(1, 4)):
        medium = rng.choice(["GPU", "GPU", "CPU"])
        what = rng.choice(["store", "store", "chain", "chain", "remove", "remove", "remove", "tail", "untail", "clear"])
        if what == "clear":
            changes.append(rng.choice([("clear",), ("clear", None, "GPU"), ("clear", None, "CPU")]))
        else:
            changes.append((what, rng.randint(2 if what == "chain" else 1, 7), medium))
    return changes


def draw_step(rng: random.Random) -> Step:
    source, place = rng.randrange(4), rng.randrange(8)
    return rng.choices(
        [
            ("publish", (source, draw_changes(rng), rng.randint(1, 5))),
            ("skip_a_number", (source,)),
            ("restart_engine", (source,)),
            ("restart_behind_a_proxy", (source,)),
            ("stranger", (source, rng.choice([0, 1, 2, 5, 9, 2**40, 2**62]), rng.randint(1, 7))),
            ("connect", (source,)),
            ("disconnect", (source,)),
            ("live_batch", (source, rng.choice([0, 0, 0, 1, 2, 5]), rng.choice(["once", "once", "twice", "lost"]))),
            ("all_live_batches", (source,)),
            ("answer", (source, rng.randint(1, 20))),
            ("answers_are_lost", (source,)),
            ("a_reply_to_nothing", (source, rng.randrange(50), rng.randrange(20))),
            ("time_passes", (rng.choice([0.1, 1.0, 3.0]),)),
            ("checkpoint_begins", ()),
            ("kvbus_is_killed", (rng.random() < 0.5,)),
            ("kvbus_is_killed_without_state", ()),
            ("router_link", (place, rng.random() < 0.5)),
            ("router_restarts", (place,)),
            ("late_router_asks", (place,)),
            ("late_router_reads", (place, rng.randint(1, 4))),
            ("router_asks_for_a_snapshot", (place,)),
            ("subscriber_connects", (place, rng.randrange(4))),
            ("subscriber_resumes", (place,)),
            ("subscriber_reads", (place, rng.randint(1, 3))),
            ("subscriber_is_cut", (place,)),
            ("quiescence", ()),
        ],
        weights=[20, 2, 3, 1, 1, 6, 3, 12, 5, 10, 2, 1, 6, 2, 2, 1, 3, 2, 2, 4, 1, 4, 2, 4, 3, 1],
    )[0]


def draw(seed: int) -> tuple[Setup, list[Step]]:
    """Return the setup and the steps of the world of a seed."""
    rng = random.Random(seed)
    setup = draw_setup(rng)
    # The first event of each engine has two blocks, because a store of two blocks proves the engine's block size.
    first: list[Step] = [
        ("publish", (source, [("chain", 2, "GPU"), ("remove", 1, "GPU"), ("remove", 2, "GPU")], 1))
        for source in range(len(setup.engines))
    ]
    return setup, [*first, *(draw_step(rng) for _ in range(STEPS)), ("quiescence", ())]


def run(setup: Setup, steps: list[Step]) -> tuple[World, Exception | None]:
    """Execute steps until one fails. Return the world, and the failure or None."""
    world = World(setup)
    for name, args in steps:
        try:
            getattr(world, name)(*args)
        except Exception as error:  # noqa: BLE001 - after any failure, the script is needed to repeat it
            return world, error
    return world, None


def shortened(setup: Setup, steps: list[Step], error: Exception) -> list[Step]:
    """Return fewer of the steps, which still cause the same failure."""

    def fails(fewer: list[Step]) -> bool:
        _, again = run(setup, fewer)
        return again is not None and location_of(again) == location_of(error)

    return shorten(steps, fails, SHRINK_SECONDS)


def soak(seed: int, steps: int) -> tuple[int, int, str | None]:
    """Run worlds from a seed until they have executed ``steps`` steps, or one has failed.

    Return the number of steps, the number of worlds, and a test that repeats the failure (or None).
    """
    World.steps = worlds = 0
    while World.steps < steps:
        setup, script = draw(seed * 10_000_000 + worlds)
        worlds += 1
        _, error = run(setup, script)
        if error is not None:
            done = World.steps
            short = shortened(setup, script, error)
            world, again = run(setup, short)
            text = "\n".join(world.lines_of_script())
            return done, worlds, f"seed {seed}, world {worlds - 1}: {type(again).__name__}: {again}\n\n{text}\n"
    return World.steps, worlds, None


def say(text: str) -> None:
    """Print a line immediately, without buffering."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run worlds in several processes. Return the exit code of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began = time.monotonic()
    done = worlds = 0
    part = 20_000
    failure = None
    with ProcessPoolExecutor(options.processes) as pool:
        count = -(-options.steps // part)
        runs = [pool.submit(soak, options.seed * 1000 + n, part) for n in range(count)]
        for number, future in enumerate(as_completed(runs), 1):
            steps, some, failure = future.result()
            done, worlds = done + steps, worlds + some
            if failure is not None:
                for other in runs:
                    other.cancel()
                break
            if number % 5 == 0 or number == count:
                say(f"{done:,} steps, {worlds:,} worlds, {time.monotonic() - began:.0f} s")
    if failure is not None:
        say(failure)
        return 1
    say(f"ok: {done:,} steps in {worlds:,} worlds, seed {options.seed}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
