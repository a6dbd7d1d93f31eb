"""The words in which a case says what the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvbus.tools.conform.router.views import Held, canonical
from kvbus.tools.conform.vectors import Frames, pack
from kvbus.tools.conform.verdict import Level


class Batch(NamedTuple):
    """The next batch; each rank's are counted from 0. ``lost``: it can be replayed, and no subscriber receives it."""

    events: Sequence[Any] = ()
    lost: bool = False
    rank: int = 0


class Message(NamedTuple):
    """A message as it is; a number in it counts from the beginning of the case."""

    frames: Frames
    lost: bool = False


class Again(NamedTuple):
    """A batch that was sent or lost before, once more: as a duplicate, or late."""

    batch: int
    rank: int = 0


class Restart(NamedTuple):
    """A new epoch, with an empty replay buffer. ``connected``: a proxy keeps the connection."""

    rank: int = 0
    connected: bool = False


class Seen(NamedTuple):
    """Wait until the router has read all that was sent; without this there is nothing to go wrong."""


class Pause(NamedTuple):
    """Silence."""

    seconds: float


class Join(NamedTuple):
    """The router starts here, and not before the first step."""


class Trimmed(NamedTuple):
    """From here on answers begin with this batch, or a later one."""

    first: int


class Late(NamedTuple):
    """Answers come so much later from here on."""

    seconds: float


class BrokenOff(NamedTuple):
    """The next answer ends behind so many batches, without END."""

    keep: int


Step = Batch | Message | Again | Restart | Seen | Pause | Join | Trimmed | Late | BrokenOff


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What an engine does, and what a router holds behind it.

    Attributes:
        name: unique.
        clauses: the numbers of those that it tries.
        title: what happens.
        steps: what the engine does.
        cache: what it has behind the last one.
        level: how strongly the clauses ask for it.
        marker: whether a block that is stored behind all shows that the router has read on; it would give a loss away.
        framing: of replay answers.
        heartbeats: whether the publisher sends PING, and cuts off whoever does not answer.
        maps: whether it is about events as maps, which stay so for a router that gets arrays otherwise.
        arrays: events are sent as arrays, but for those that stay maps.
        first: whether it is only right as the first thing that a publisher ever sends.
        timeouts: how many times the time to settle it may take.
    """

    name: str
    clauses: tuple[str, ...]
    title: str
    steps: tuple[Step, ...]
    cache: frozenset[Held]
    level: Level = Level.MUST
    marker: bool = True
    framing: str = "4"
    heartbeats: bool = False
    maps: bool = False
    arrays: bool = False
    first: bool = False
    timeouts: float = 1.0

    @property
    def ranks(self) -> int:
        """How many publishers it takes."""
        return 1 + max(getattr(step, "rank", 0) for step in self.steps)

    @property
    def joins(self) -> bool:
        """Whether the router starts in its course."""
        return any(isinstance(step, Join) for step in self.steps)


def device(*hashes: int, rank: int = 0) -> frozenset[Held]:
    """Blocks on the device of a rank."""
    return frozenset(Held(canonical(block), "GPU", None, rank) for block in hashes)


class Churn:
    """A cache of 24 blocks in chains of 8 that stores one and evicts one with each batch."""

    def __init__(self, event: Any, removal: Any, *, first: int = 100) -> None:
        self._stored = event
        self._removed = removal
        self._first = first

    def batches(self, start: int, stop: int, rank: int = 0) -> Iterator[Batch]:
        """Return the batches from one number to before another."""
        for at in range(start, stop):
            block = self._first + at
            events = [self._stored(block, parent=block - 1 if at % 8 else None)]
            if at >= 24:
                events.insert(0, self._removed(self._evicted(at)))
            yield Batch(events, rank=rank)

    def live(self, count: int, rank: int = 0) -> frozenset[Held]:
        """Return what is live behind so many batches."""
        gone = {self._evicted(at) for at in range(24, count)}
        return device(*({self._first + at for at in range(count)} - gone), rank=rank)

    def _evicted(self, at: int) -> int:
        """Leaves first: the chain three before, from its end."""
        return self._first + 8 * (at // 8 - 3) + 7 - at % 8


def changed(step: Step, change: Callable[[Any], Any]) -> Step:
    """Return a step with each of its events changed."""
    if isinstance(step, Batch):
        return step._replace(events=[change(event) for event in step.events])
    if not isinstance(step, Message):
        return step
    try:
        batch = msgspec.msgpack.decode(step.frames[-1])
        payload = pack([batch[0], [change(event) for event in batch[1]], *batch[2:]])
    except (msgspec.DecodeError, TypeError, ValueError):  # no batch, and sent as it is
        return step
    return step._replace(frames=[*step.frames[:-1], payload])
