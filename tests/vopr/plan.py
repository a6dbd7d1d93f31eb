"""Plans of faults for a simulated world.

A plan is chosen by a seed, printed or read as a script, run, and shortened if it fails.
"""

from __future__ import annotations

import ast
import random

from tests.shrinking import location_of, shorten
from tests.vopr.schedule import Schedule
from tests.vopr.world import Entry, World

SHRINK_SECONDS = 120.0


def _faults(chance: random.Random, kinds: int, count: int) -> list[list[Entry]]:
    """Choose ``count`` random faults of at most ``kinds`` kinds, each as a list of steps."""
    weights = [weight for weight, _ in _makers(chance)]
    allowed = chance.choices(range(len(weights)), weights, k=kinds)
    return [_makers(chance)[chance.choice(allowed)][1] for _ in range(count)]


def _makers(chance: random.Random) -> list[tuple[int, list[Entry]]]:
    """Return all kinds of faults, each as its weight and its steps. The last step of a fault ends it.

    A step has the seconds since the start of the fault, the name of a `World` method, and the arguments.
    """
    n, m = chance.randrange(8), chance.randrange(64)
    kind = chance.choice(["unreadable", "a damaged slice"])
    later = chance.choice([0.05, 0.5, 2.0, 8.0])
    makers: list[tuple[int, list[Entry]]] = [
        (4, [(0, "engine_stops", (n,)), (later, "engine_starts", (n,))]),
        (2, [(0, "engine_rate", (n, chance.choice([0.0, 1.0, 100.0]))), (later, "engine_rate", (n, 10.0))]),
        (3, [(0, "engine_bursts", (n, chance.choice([5, 50, 200])))]),
        (2, [(0, "engine_skips_a_number", (n,))]),
        (2, [(0, "engine_repeats", (n,))]),
        (1, [(0, "engine_trims", (n, chance.randint(1, 5)))]),
        (4, [(0, "engine_link_breaks", (n,))]),
        (3, [(0, "engine_is_out_of_reach", (n,)), (later, "engine_is_in_reach", (n,))]),
        (3, [(0, "engine_link_stalls", (n, True)), (later, "engine_link_stalls", (n, False))]),
        (3, [(0, "answer_breaks_off", (n, chance.choice([0, 1, 2, 10]))), (0.01, "engine_link_breaks", (n,))]),
        (3, [(0, "answer_lacks", (n, chance.randrange(40))), (0.01, "engine_link_breaks", (n,))]),
        (1, [(0, "answers_are_slow", (n, chance.choice([0.05, 0.5])))]),
        (3, [(0, "bus_is_killed", ()), (later, "start", ())]),
        (1, [(0, "second_process", (n % 2 == 0,))]),
        (1, [(0, "bus_has_descriptors", (chance.choice([3, 8]),)), (later, "bus_has_descriptors", (10**6,))]),
        (2, [(0, "replay_is_of_another", (n, m)), (2 * later, "replays_are_corrected", ())]),
        (1, [(0, "engine_moves", (n,)), (later, "old_engines_stop", ())]),
        (1, [(0, "power_is_cut", ()), (later, "start", ())]),
        (2, [(0, "bus_is_killed_in_a_commit", (1 + m % 7,)), (later, "start", ())]),
        (1, [(0, "bus_is_killed", ()), (later / 2, "state_is_damaged", (kind,)), (later, "start", ())]),
        (1, [(0, "disk_fails", (1 + m % 3,))]),
        (1, [(0, "disk_is_slow", (chance.choice([0.001, 0.02]),)), (later, "disk_is_slow", (0.0,))]),
        (1, [(0, "disk_has_room_for", (chance.choice([0, 1, 100, 3000]),)), (later, "disk_has_room_for", (None,))]),
        (1, [(0, "bus_stops", ()), (later + 3, "start", ())]),
        (4, [(0, "bus_pauses", (chance.choice([0.3, 3.0, 10.0]),))]),
        (2, [(0, "bus_is_slow", (chance.choice([0.001, 0.01]),)), (later, "bus_is_slow", (0.00002,))]),
        (1, [(0, "bus_reloads", ((n,),)), (later, "bus_reloads", ((0, 1, 2),))]),
        (1, [(0, "clock_steps", (chance.choice([-3600.0, 3600.0, 0.5]),))]),
        (5, [(0, "join", (chance.choice(["trusting", "checking", "asking", "client"]), n, chance.choice([n, 9])))]),
        (3, [(0, "router_leaves", (m,))]),
        (4, [(0, "router_reads", (m, False)), (later, "router_reads", (m, True))]),
        (4, [(0, "router_link_breaks", (m,))]),
        (3, [(0, "router_link_holds", (m, False)), (later, "router_link_holds", (m, True))]),
        (1, [(0, "router_asks_again", (m,))]),
        (2, [(0, "router_asks_again", (m,)), (chance.choice([0.003, 0.01, 0.03]), "router_answer_breaks", (m,))]),
        (2, [(0, "join", ("asking", n, n)), (chance.choice([0.003, 0.01, 0.03]), "router_answer_breaks", (-1,))]),
        (2, [(0, "join", ("asking", n, n)), (chance.uniform(0.05, 0.2), "router_link_breaks", (-1,))]),
        (1, [(0, "router_reads_answers", (m, False)), (later, "router_reads_answers", (m, True))]),
    ]
    return makers


def draw(seed: int, rounds: int = 4) -> list[Entry]:
    """Return the plan of faults that a seed determines."""
    chance = Schedule(seed).chance("plan")
    plan: list[Entry] = [(0.0, "start", ())]
    for number, kind in enumerate(["trusting", "checking", "asking", "client"] * 2):
        plan.append((chance.uniform(0, 3), "join", (kind, number, number)))
    begin = 0.0
    for _ in range(rounds):
        length = chance.choice([3.0, 10.0, 20.0])
        kinds = chance.choice([1, 2, 4, 100])  # many kinds of faults at a time can hide a defect that few kinds reveal
        for entries in _faults(chance, kinds, chance.randint(1, 14)):
            at = begin + chance.uniform(0, length)
            plan += [(at + after, name, args) for after, name, args in entries]
        begin += length
        plan.append((begin, "settle", (chance.choice([0.0, 2.0]),)))
    plan.sort(key=lambda entry: entry[0])
    last = max(at for at, name, _ in plan if name == "settle")
    return [entry for entry in plan if entry[0] <= last]


def text(seed: int, plan: list[Entry]) -> str:
    """Format a plan of faults as a script, which `parse` reads."""
    lines = [f"seed {seed}"]
    lines += [f"{at:.3f} {name}({', '.join(map(repr, args))})" for at, name, args in plan]
    return "\n".join(lines) + "\n"


def parse(script: str) -> tuple[int, list[Entry]]:
    """Return the seed and the plan of faults that a script contains."""
    first, *lines = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    plan: list[Entry] = []
    for line in lines:
        at, _, call = line.partition(" ")
        parsed = ast.parse(call, mode="eval").body
        assert isinstance(parsed, ast.Call)
        assert isinstance(parsed.func, ast.Name)
        plan.append((float(at), parsed.func.id, tuple(ast.literal_eval(arg) for arg in parsed.args)))
    return int(first.split()[1]), plan


def run(seed: int, plan: list[Entry]) -> tuple[World, Exception | None]:
    """Run a plan. Return the world at its end, and the failure or None."""
    world = World(seed)
    try:
        world.run(plan)
    except Exception as error:  # noqa: BLE001 - every failure is turned into a script
        return world, error
    return world, None


def what_failed(error: Exception) -> str:
    """Return a text by which two runs with the same failure can be recognized.

    It consists of the place that raised the error and of the letters of the error's text. The place alone is not
    enough, because one check can raise different errors.
    """
    return f"{location_of(error)}:{''.join(letter for letter in str(error)[:60] if letter.isalpha())}"


def shrink(seed: int, plan: list[Entry], error: Exception, seconds: float = SHRINK_SECONDS) -> list[Entry]:
    """Return a shorter plan that still causes the same failure."""

    def fails(fewer: list[Entry]) -> bool:
        _, again = run(seed, fewer)
        return again is not None and what_failed(again) == what_failed(error)

    return shorten(plan, fails, seconds)
