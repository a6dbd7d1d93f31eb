"""What a subscriber tells its caller: one small frozen record per thing that can happen to a stream."""

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
    """The subscriber was given neither a replay endpoint nor a snapshot endpoint."""
    NO_ANSWER = "no_answer"
    """Nobody answered the replay request, or the snapshot request, in time, however often it was asked."""
    UNAVAILABLE = "unavailable"
    """The publisher has no snapshot to give, and there is no replay endpoint."""
    TRIMMED = "trimmed"
    """The publisher's replay buffer no longer reaches back that far (engines keep about 10,000 batches)."""
    HOLE = "hole"
    """The publisher answered and does not have them: vLLM uses up a seq when encoding or sending fails."""


class RestartReason(StrEnum):
    """How a new life of the publisher was noticed."""

    PUBLISHER_ID = "publisher_id"
    """The 16-byte publisher id of a 24-byte sequence frame changed."""
    PAYLOAD = "payload"
    """A sequence number came again with another batch behind it."""
    WENT_BACK = "went_back"
    """The publisher's newest batch is older than ones it has sent, or nothing is left to recognise it by."""
    REBUILT = "rebuilt"
    """Nobody answered, batches were lost for it, and now somebody does: the state is told from its beginning."""


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
    """The publisher's whole state as of batch ``seq``, as batches: it replaces all known before, of every rank.

    The next batch received is the one after ``seq``. Only with a snapshot endpoint.
    """

    kind: ClassVar[Kind] = "snapshot"
    seq: int
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message, or a snapshot's part, that cannot be read. ``seq`` is None if even its sequence frame could not be."""

    kind: ClassVar[Kind] = "rejected"
    seq: int | None
    topic: bytes
    reason: Reason


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches ``first`` to ``last`` (both included) are missing; what follows is held meanwhile."""

    kind: ClassVar[Kind] = "gap"
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches ``first`` to ``last`` (both included; None: unknown) will not come. A view may now be wrong."""

    kind: ClassVar[Kind] = "lost"
    first: int
    last: int | None
    reason: LostReason


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began a new life: all known of the old one is void. ``epoch`` counts lives from 0."""

    kind: ClassVar[Kind] = "restarted"
    epoch: int
    reason: RestartReason


@dataclass(frozen=True, slots=True)
class Synced:
    """Replay or snapshot complete, held batches delivered; ``seq`` is the last batch, -1 if there is none."""

    kind: ClassVar[Kind] = "synced"
    seq: int


Update = Received | Snapshot | Rejected | Gap | Lost | Restarted | Synced
