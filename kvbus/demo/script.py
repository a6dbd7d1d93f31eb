"""What happens in the demo and when: a plan that depends on nothing but its length and its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

LAP_S: Final = 24.0
"""Seconds of one lap; a shorter demo has the first lap in less time, a longer one goes on with others."""

_REST_S: Final = 1.0  # nothing begins so shortly before the end


class Kind(Enum):
    """Something that goes wrong, or somebody who comes and goes."""

    LOSE = auto()
    """Live batches of one rank are lost on the way to the bus."""
    JUMBLE = auto()
    """Batches of one rank overtake each other, and some arrive twice."""
    CRASH = auto()
    """An engine dies and comes back: empty cache, sequence numbers from 0."""
    JOIN = auto()
    """The late router joins; if it is there already it restarts, with nothing in its view."""


@dataclass(frozen=True, slots=True)
class Act:
    """One entry of the plan.

    Attributes:
        at: seconds after the start at the earliest; acts never overlap.
        kind: what happens.
        target: label of a rank (``vllm/0``), name of an engine (CRASH), empty for JOIN.
        count: batches, where they are counted.
    """

    at: float
    kind: Kind
    target: str = ""
    count: int = 0


def plan(ranks: Sequence[str], seconds: float | None, seed: int) -> Iterator[Act]:
    """Yield what happens, in order; without end if ``seconds`` is None.

    Args:
        ranks: labels of all ranks, ``engine/rank``, at least two engines.
        seconds: length of the demo.
        seed: the same seed, the same plan.
    """
    rng = random.Random(f"kvbus/demo/{seed}")  # noqa: S311 - repeatable, not secret
    engines = list(dict.fromkeys(rank.partition("/")[0] for rank in ranks))
    first = LAP_S if seconds is None else min(LAP_S, seconds)
    end = float("inf") if seconds is None else seconds - min(_REST_S, seconds / 6)
    yield Act(first * 0.15, Kind.LOSE, ranks[0], rng.randint(3, 6))
    yield Act(first * 0.32, Kind.JOIN)
    yield Act(first * 0.50, Kind.CRASH, engines[-1])
    yield Act(first * 0.72, Kind.JUMBLE, ranks[1], rng.randint(2, 3))
    start = first
    lap = 1
    while start < end:
        crash = engines[(lap - 1) % len(engines)]
        acts = (
            Act(start + LAP_S * 0.10, Kind.LOSE, rng.choice(ranks), rng.randint(4, 12)),
            Act(start + LAP_S * 0.35, Kind.CRASH, crash),
            Act(start + LAP_S * 0.60, Kind.JUMBLE, rng.choice(ranks), rng.randint(2, 4)),
            Act(start + LAP_S * 0.80, Kind.JOIN),
        )
        for act in acts:
            if act.at >= end:
                return
            yield act
        start += LAP_S
        lap += 1
