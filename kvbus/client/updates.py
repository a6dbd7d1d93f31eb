"""A subscriber's updates: one frozen record for each kind of event on a stream."""

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
    """A batch, in order. ``seq`` follows the last received or lost batch.

    ``topic`` is empty for replayed batches of the 3-frame framing, which carries none.
    """

    kind: ClassVar[Kind] = "batch"
    seq: int
    topic: bytes
    batch: Batch
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The publisher's complete state as of batch ``seq``, as batches. It replaces the blocks of every rank.

    The next batch has seq + 1. Only subscribers with a snapshot endpoint receive this update.
    """

    kind: ClassVar[Kind] = "snapshot"
    seq: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """An unreadable message or part of a snapshot. ``seq`` is None if the sequence frame is unreadable too."""

    kind: ClassVar[Kind] = "rejected"
    seq: int | None
    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches ``first`` to ``last`` (both included) are missing. Later batches wait until they arrive or are lost."""

    kind: ClassVar[Kind] = "gap"
    first: int
    last: int
    topic: bytes = b""
    """The topic whose stream has the gap. Only subscribers with ``by_topic`` set it, here and in the updates below."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches ``first`` to ``last`` (both included) will never arrive. A view may now be wrong.

    ``last`` is None if it is unknown.
    """

    kind: ClassVar[Kind] = "lost"
    first: int
    last: int | None
    reason: LostReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began a new epoch: drop all blocks of the old one. ``epoch`` counts restarts from 0."""

    kind: ClassVar[Kind] = "restarted"
    epoch: int
    reason: RestartReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Synced:
    """The replay or snapshot is complete, and the held batches are delivered.

    ``seq`` is the last batch's, -1 if there is none.
    """

    kind: ClassVar[Kind] = "synced"
    seq: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Several publishers share one endpoint.

    The subscriber drops their batches for some seconds, then rebuilds the state.
    """

    kind: ClassVar[Kind] = "conflict"
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """There is no live connection. ``why`` is the reason, for people.

    The update is repeated when the reason changes.
    """

    kind: ClassVar[Kind] = "unreachable"
    endpoint: str
    why: str


@dataclass(frozen=True, slots=True)
class Reachable:
    """The live connection is back after `Unreachable`."""

    kind: ClassVar[Kind] = "reachable"
    endpoint: str


Update = Received | Snapshot | Rejected | Gap | Lost | Restarted | Synced | Conflict | Unreachable | Reachable
