"""The updates of a subscriber. There is an immutable class for each kind of occurrence on a stream."""

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
    """A batch. Batches are delivered in order, so ``seq`` follows that of the last received or lost batch.

    ``topic`` is empty if the batch comes from a replay whose messages have three frames, because they have no topic.
    """

    kind: ClassVar[Kind] = "batch"
    seq: int
    topic: bytes
    batch: Batch
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The complete state of the publisher as of batch ``seq``, as batches. It replaces the blocks of every rank.

    The next batch has the seq ``seq + 1``. Only subscribers with a snapshot endpoint get this update.
    """

    kind: ClassVar[Kind] = "snapshot"
    seq: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message, or a part of a snapshot, that cannot be read.

    ``seq`` is None if the sequence frame cannot be read either.
    """

    kind: ClassVar[Kind] = "rejected"
    seq: int | None
    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Gap:
    """The batches ``first`` to ``last`` (inclusive) are missing.

    Later batches wait until the missing batches arrive or are lost.
    """

    kind: ClassVar[Kind] = "gap"
    first: int
    last: int
    topic: bytes = b""
    """The topic of the stream that has the gap. It is set only by subscribers with ``by_topic``.

    The field has the same meaning in the updates Lost, Restarted and Conflict.
    """


@dataclass(frozen=True, slots=True)
class Lost:
    """The batches ``first`` to ``last`` (inclusive) will never arrive, so a view may be wrong now.

    ``last`` is None if it is not known how many batches are lost.
    """

    kind: ClassVar[Kind] = "lost"
    first: int
    last: int | None
    reason: LostReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher has begun a new epoch, so drop all blocks of the old epoch.

    ``epoch`` is the number of restarts of the stream that the subscriber has noticed, including this one.
    """

    kind: ClassVar[Kind] = "restarted"
    epoch: int
    reason: RestartReason
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Synced:
    """The replay or snapshot is complete, and all batches that waited for it are delivered.

    ``seq`` is the seq of the last delivered batch; -1 if there is none.
    """

    kind: ClassVar[Kind] = "synced"
    seq: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Several publishers share one endpoint.

    The subscriber drops their batches for some seconds, and then rebuilds the state.
    """

    kind: ClassVar[Kind] = "conflict"
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """There is no live connection. ``why`` is the reason, as a text for people.

    The update is repeated when the reason changes.
    """

    kind: ClassVar[Kind] = "unreachable"
    endpoint: str
    why: str


@dataclass(frozen=True, slots=True)
class Reachable:
    """The live connection is back after an `Unreachable`."""

    kind: ClassVar[Kind] = "reachable"
    endpoint: str


Update = Received | Snapshot | Rejected | Gap | Lost | Restarted | Synced | Conflict | Unreachable | Reachable
