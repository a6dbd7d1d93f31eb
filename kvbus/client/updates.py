"""A subscriber's updates: one frozen record for each kind of thing that can happen to a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from kvbus.core.sequencing.actions import LostReason, RestartReason
    from kvbus.core.types import Reason
    from kvbus.core.wire.schema import Batch

Kind = Literal[
    "batch", "snapshot", "gap", "lost", "restarted", "synced", "rejected", "conflict", "unreachable", "reachable"
]


@dataclass(frozen=True, slots=True)
class Received:
    """A batch, in order: ``seq`` is the one after the last received or lost.

    ``topic`` is empty for replayed batches of the 3-frame framing, which carries none.
    """

    kind: ClassVar[Kind] = "batch"
    seq: int
    topic: bytes
    batch: Batch
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The publisher's whole state as of batch ``seq``, as batches. It replaces the blocks of every rank.

    The next batch has the seq after it. Only subscribers with a snapshot endpoint receive it.
    """

    kind: ClassVar[Kind] = "snapshot"
    seq: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """An unreadable message or part of a snapshot. ``seq`` is None if its sequence frame is unreadable too."""

    kind: ClassVar[Kind] = "rejected"
    seq: int | None
    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches ``first`` to ``last`` (both included) are missing. Later batches wait meanwhile."""

    kind: ClassVar[Kind] = "gap"
    first: int
    last: int
    topic: bytes = b""
    """Of this topic alone; only subscribers with ``by_topic`` set it, here and below."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches ``first`` to ``last`` (both included; None: unknown) will never arrive. A view may now be wrong."""

    kind: ClassVar[Kind] = "lost"
    first: int
    last: int | None
    reason: LostReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began a new epoch: drop all blocks of the old one. ``epoch`` counts from 0."""

    kind: ClassVar[Kind] = "restarted"
    epoch: int
    reason: RestartReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Synced:
    """The replay or snapshot is complete, the held batches are delivered. ``seq`` is the last batch's, -1 for none."""

    kind: ClassVar[Kind] = "synced"
    seq: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Several publishers are behind one endpoint. Nothing is taken in for some seconds; then the state is rebuilt."""

    kind: ClassVar[Kind] = "conflict"
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """There is no live connection, and ``why`` says why, for people. It comes again when the reason changes."""

    kind: ClassVar[Kind] = "unreachable"
    endpoint: str
    why: str


@dataclass(frozen=True, slots=True)
class Reachable:
    """The live connection stands again, after `Unreachable`."""

    kind: ClassVar[Kind] = "reachable"
    endpoint: str


Update = Received | Snapshot | Rejected | Gap | Lost | Restarted | Synced | Conflict | Unreachable | Reachable
