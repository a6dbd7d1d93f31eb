"""The actions of a sequencer: deliver the next batch, begin an epoch, report a loss, send a request."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class LostReason(StrEnum):
    """The reason why batches will never arrive."""

    NO_REPLAY = "no_replay"
    """There is neither a replay nor a snapshot to ask for them."""
    NO_ANSWER = "no_answer"
    """The publisher did not answer the replay or snapshot requests in time."""
    UNAVAILABLE = "unavailable"
    """The publisher has no snapshot to give, and there is no replay."""
    TRIMMED = "trimmed"
    """The publisher's replay buffer no longer reaches back that far (engines keep about 10,000 batches)."""
    HOLE = "hole"
    """The publisher answered without them: vLLM uses up a seq when encoding or sending fails."""


class RestartReason(StrEnum):
    """What showed that a new epoch begins."""

    PUBLISHER_ID = "publisher_id"
    """The 16-byte publisher id of a 24-byte sequence frame changed."""
    PAYLOAD = "payload"
    """A known seq came again with another payload."""
    WENT_BACK = "went_back"
    """The publisher's newest batch is older than one it has sent, or no fingerprint is left to compare with."""
    REBUILT = "rebuilt"
    """Not a restart: the publisher has more of the epoch than kvbus knows, or may have. kvbus reads the epoch again."""


class Deliver(msgspec.Struct):
    """Deliver the next batch, in order. ``seq`` 0 opens an epoch. ``fingerprint`` is the payload's."""

    seq: int
    payload: bytes
    fingerprint: int


class NewEpoch(msgspec.Struct):
    """Begin a new epoch: the publisher has restarted, and nothing known about the old epoch is valid any more."""

    reason: RestartReason = RestartReason.WENT_BACK


class Lost(msgspec.Struct):
    """Report ``count`` batches as lost: they will never come. The batches after them follow."""

    count: int
    reason: LostReason = LostReason.HOLE


class Synced(msgspec.Struct):
    """Report that all batches missed before or during the disconnection were delivered. Later batches are live."""


class Ask(msgspec.Struct):
    """Ask the publisher's replay from seq ``start`` on. The answer carries the id ``request``."""

    request: int
    start: int


class AskSnapshot(msgspec.Struct):
    """Ask the publisher for a snapshot of its state. The reply carries the id ``request``."""

    request: int


class Stop(msgspec.Struct):
    """Stop an answer: no more of it is needed."""

    request: int


Action = Deliver | NewEpoch | Lost | Synced | Ask | AskSnapshot | Stop
