"""The random world of `test_sequence_properties` for a long time: ``python -m tests.client.walk --steps 1000000``.

Each world is drawn from a seed of its own. Those that fail are printed with their seeds; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.client.test_sequence_properties import Subscription

LENGTH = 60

RULES = {
    "publish": 6,
    "skip": 1,
    "restart": 1,
    "break": 1,
    "connect": 2,
    "arrive": 6,
    "serve": 3,
    "answer": 8,
    "wait": 3,
}


class World(Subscription):
    """A world that is led from outside."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.steps = 0
        self.begin(
            mode=chance.choice(["replay", "replay", "snapshot", "stale", "fresh"]),
            compacting=chance.random() < 0.6,
            ids=chance.random() < 0.3,
            held=chance.randint(1, 6),
            journal=chance.choice([1, 2, 5, 1000]),
            before=chance.choice([0, 0, 12, 30]),
        )

    def step(self, rule: str) -> None:
        """Follow a rule, if it can be followed now."""
        chance = self.chance
        if rule == "publish":
            kind = chance.choice(["store", "store", "store", "remove", "clear", "nothing"])
            self.publish((kind, chance.randint(0, 9)), chance.random() < 0.3)
        elif rule == "skip" and self.mode in ("snapshot", "fresh"):
            self.skip()
        elif rule == "restart" and self.up:
            self.restart(chance.randint(0, 2))
        elif rule == "break" and self.up:
            self.break_connection(chance.randint(0, 2), chance.random() < 0.5)
        elif rule == "connect" and not self.up:
            self.connect()
        elif rule == "arrive" and self.flying:
            self.arrive(chance.randint(0, 3), chance.random() < 0.3)
        elif rule == "serve" and self.asked is not None and self.up:
            self.serve(chance.randint(0, 3), chance.random() < 0.8, chance.randint(0, 6))
        elif rule == "answer" and self.answer:
            self.answer_arrives(chance.random() < 0.15)
        elif rule == "wait":
            self.wait(chance.choice([0.05, 0.5, 3.0]))
        else:
            return
        self.steps += 1

    def run(self) -> None:
        """Live to the end."""
        rules = self.chance.choices([*RULES], [*RULES.values()], k=self.chance.randint(5, LENGTH))
        for rule in rules:
            self.step(rule)
            self.in_step()
        self.teardown()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began, steps, seed, failed = time.process_time(), 0, options.seed, 0
    while steps < options.steps:
        world = World(seed)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it has a seed
            failed += 1
            sys.stdout.write(f"seed {seed}: {error!r:.200}\n")
        steps += world.steps
        seed += 1
    seconds = time.process_time() - began
    sys.stdout.write(f"{steps} steps in {seed - options.seed} worlds, {failed} failed, {seconds:.0f} s of CPU\n")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
