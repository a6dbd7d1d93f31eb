"""A breadth-first search over all orders of actions of the model.

It visits each state once, checks it, and then lets all messages arrive without faults, to see whether routers are
exact.

A relay cannot be copied while an answer is being read. Therefore the search stores a state as the path of actions that
leads to it, and rebuilds the state by executing the path. A step takes 25 microseconds; a deep copy would take 480.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import pytest

from tests.doubles.stage import cut_states
from tests.exhaustive.model import Model

Path = tuple[str, ...]

FIRST: Final = ("connects", "publishes", "arrives")
FED: Final = (*FIRST, *["publishes", "arrives"] * 3)
READING: Final = (*FED, "trusting_subscribes", "checking_subscribes", "checking_asks", "checking_reads")

SCENES: Final[Mapping[str, Path]] = MappingProxyType(
    {
        "start": (),
        "first": FIRST,
        "fed": FED,
        "again": (*FED, "cut", "connects"),
        "reading": READING,
        "running": (*READING, *["checking_reads"] * 2),
    }
)
"""Starting points of a search, each given as a path of actions.

In this order: nothing has happened; the first batch has been delivered; four batches have been delivered, three of
which the engine's buffer still has; the same after a reconnection; a router is reading an answer; both routers are
exact.
"""

FAULTS: Final = frozenset(
    {
        "breaks_off", "checking_breaks_off", "checking_leaves", "checking_loses", "checking_stalls", "cut", "doubles",
        "kill", "kill_after_checkpoint", "loses", "overtakes", "pause", "restarts", "trusting_leaves",
    }
)  # fmt: skip

NO_FAULT: Final = "no fault"

DEADLINES: Final = 4.0

EXACT_WITHIN: Final[Mapping[str, float]] = MappingProxyType(
    {"restarts": 2.0, "kill": 2.0, "kill_after_checkpoint": 2.0}
)
"""Maximum seconds from the last fault, by its kind, until both routers are exact, if all messages then arrive
immediately.

After other faults, and if batches have waited without a fault, the maximum is DEADLINES.

kvbus's deadlines take this time: 2 s for an answer, and 2 s until it requests history again (``replay_timeout``), 1 s
of silence before a probe, 2 s before the next probe (``probe_interval``), and 1 s between two heartbeats.
"""


@dataclass(frozen=True)
class Limits:
    """Limits of a search. The actions of the scene, after which the search begins, do not count."""

    depth: int
    faults: int = 3
    batches: int = 3
    """Maximum number of batches that the engine publishes in addition to those of the scene."""
    ticks: int = 3


@dataclass
class Found:
    """The size of a search (states, transitions, seconds), and how fast routers became exact in it."""

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    """CPU seconds that the search has used."""
    levels: list[int] = field(default_factory=list)
    """Number of new states of the model that the search found at each depth."""
    exact_after: dict[str, float] = field(default_factory=dict)
    """Maximum seconds until both routers are exact, by the last fault. NO_FAULT stands for paths without a fault."""


class CounterExampleError(AssertionError):
    """An error: an invariant fails at the end of this path of actions. No shorter path makes an invariant fail."""

    def __init__(self, scene: str, path: Path, error: Exception) -> None:
        self.path = path
        steps = "\n".join(f"  {number:2}. {getattr(Model, name).__doc__}" for number, name in enumerate(path, 1))
        super().__init__(f"scene {scene!r}:\n{steps}\n{type(error).__name__}: {error}\n\nas a path: {' '.join(path)}")


class Search:
    """The search of all orders of actions from one scene."""

    def __init__(self, scene: str, limits: Limits) -> None:
        self._scene, self._limits = scene, limits
        self.found = Found()
        self._seen: dict[bytes, int] = {}
        """Lowest number of faults on a path to each state, by digest.

        The search does not follow another path to the same state unless it has fewer faults.
        """

    def at(self, path: Path) -> Model:
        """Return the model in the state at the end of a path, by executing the path's actions."""
        model = Model(self._limits.batches + SCENES[self._scene].count("publishes"), self._limits.ticks)
        for name in (*SCENES[self._scene], *path):
            getattr(model, name)()
        return model

    def levels(self) -> Iterator[Found]:
        """Search depth by depth, and yield the counters after each depth.

        Raises:
            CounterExampleError: an invariant does not hold.
        """
        began = time.process_time()
        frontier: list[tuple[Path, int, Path]] = []
        with one_block_a_batch():
            self._visit((), 0, frontier)
        for _ in range(self._limits.depth):
            before, frontier = frontier, []
            with one_block_a_batch():
                for path, faults, possible in before:
                    for name in possible:
                        self._visit((*path, name), faults + (name in FAULTS), frontier)
            self.found.levels.append(len(frontier))
            self.found.seconds = time.process_time() - began
            yield self.found

    def _visit(self, path: Path, faults: int, frontier: list[tuple[Path, int, Path]]) -> None:
        self.found.transitions += 1
        try:
            model = self.at(path)
            model.check()
            name = model.digest()
            before = self._seen.get(name)
            if before is not None and before <= faults:
                return
            self._seen[name] = faults
            self.found.states += before is None
            possible = tuple(action.__name__ for action in model.enabled(faults=faults < self._limits.faults))
            frontier.append((path, faults, possible))
            self._finish(model, path[-1] if path and path[-1] in FAULTS else NO_FAULT)
        except Exception as error:
            raise CounterExampleError(self._scene, path, error) from error

    def _finish(self, model: Model, last: str) -> None:
        seconds = model.finish()
        bound = EXACT_WITHIN.get(last, DEADLINES)
        assert seconds <= bound, f"exact after {seconds} s, {bound} s are promised"
        self.found.exact_after[last] = max(self.found.exact_after.get(last, 0.0), seconds)


@contextmanager
def one_block_a_batch() -> Iterator[None]:
    """Make kvbus send each state in batches of one block, so that a fault can interrupt the state."""
    with pytest.MonkeyPatch.context() as patch:
        cut_states(patch, 1, 1)
        yield
