"""A subscriber's updates: one frozen record for each kind of thing that can happen to a stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from kvbus.core.types import Reason
    from kvbus.core.wire.codec import Batch

Kind = Literal["batch", "snapshot", "gap", "lost", "restarted", "synced", "rejected"]


class LostReason(StrEnum):
    """Why batches will never arrive."""

    NO_REPLAY = "no_replay"
    """The subscriber has no replay endpoint and no snapshot endpoint."""
    NO_ANSWER = "no_answer"
    """Nobody answered the replay or snapshot requests in time."""
    UNAVAILABLE = "unavailable"
    """The publisher has no snapshot to give, and there is no replay endpoint."""
    TRIMMED = "trimmed"
    """The publisher's replay buffer no longer reaches back that far (engines keep about 10,000 batches)."""
    HOLE = "hole"
    """The publisher answered without them: vLLM uses up a seq when encoding or sending fails."""


class RestartReason(StrEnum):
    """How the subscriber noticed a new epoch of the publisher."""

    PUBLISHER_ID = "publisher_id"
    """The 16-byte publisher id of a 24-byte sequence frame changed."""
    PAYLOAD = "payload"
    """A seq came again with another payload."""
    WENT_BACK = "went_back"
    """The publisher's newest batch is older than one it has sent, or there is no batch left to compare."""
    REBUILT = "rebuilt"
    """Batches were lost because nobody answered, and now the publisher answers: the state follows from seq 0."""


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


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches ``first`` to ``last`` (both included; None: unknown) will never arrive. A view may now be wrong."""

    kind: ClassVar[Kind] = "lost"
    first: int
    last: int | None
    reason: LostReason


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began a new epoch: drop all blocks of the old one. ``epoch`` counts from 0."""

    kind: ClassVar[Kind] = "restarted"
    epoch: int
    reason: RestartReason


@dataclass(frozen=True, slots=True)
class Synced:
    """The replay or snapshot is complete, the held batches are delivered. ``seq`` is the last batch's, -1 for none."""

    kind: ClassVar[Kind] = "synced"
    seq: int


Update = Received | Snapshot | Rejected | Gap | Lost | Restarted | Synced
