"""The demo's plan of events. It depends only on its length and its seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

LAP_S: Final = 24.0
"""Seconds of one lap. A shorter demo plays the first lap faster, a longer one adds laps."""

_REST_S: Final = 1.0  # nothing begins in the last seconds


class Kind(Enum):
    """The kinds of events."""

    LOSE = auto()
    """The bus loses live batches of one rank on the way."""
    JUMBLE = auto()
    """Batches of one rank overtake each other, and some arrive twice."""
    CRASH = auto()
    """An engine crashes and restarts: empty cache, sequence numbers from 0."""
    JOIN = auto()
    """The late router joins; if it runs already it restarts with an empty view."""


@dataclass(frozen=True, slots=True)
class Act:
    """One entry of the plan.

    Attributes:
        at: earliest start in seconds; acts never overlap.
        kind: the event.
        target: label of a rank (``vllm/0``), name of an engine (CRASH), empty for JOIN.
        count: number of batches; 0 where the event has none.
    """

    at: float
    kind: Kind
    target: str = ""
    count: int = 0


def plan(ranks: Sequence[str], seconds: float | None, seed: int) -> Iterator[Act]:
    """Yield the events in order, without end if ``seconds`` is None.

    Args:
        ranks: labels of all ranks, ``engine/rank``, at least two engines.
        seconds: length of the demo.
        seed: seed of the plan.
    """
    rng = random.Random(f"kvbus/demo/{seed}")  # noqa: S311 - repeatable, not secret
    engines = list(dict.fromkeys(rank.partition("/")[0] for rank in ranks))
    first = LAP_S if seconds is None else min(LAP_S, seconds)
    end = float("inf") if seconds is None else seconds - min(_REST_S, seconds / 6)
    # the loss at one engine and the crash of the other: a crash would hide what the direct router has lost
    lossy = next(rank for rank in ranks if rank.partition("/")[0] == engines[-1])
    yield Act(first * 0.15, Kind.LOSE, lossy, rng.randint(3, 6))
    yield Act(first * 0.32, Kind.JOIN)
    yield Act(first * 0.50, Kind.CRASH, engines[0])
    yield Act(first * 0.72, Kind.JUMBLE, ranks[1], rng.randint(2, 3))
    start = first
    lap = 1
    while start < end:
        crash = engines[lap % len(engines)]
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
