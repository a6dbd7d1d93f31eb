"""What a sequencer decides: the next batch, a new epoch, a loss, a request."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class LostReason(StrEnum):
    """Why batches will never arrive."""

    NO_REPLAY = "no_replay"
    """There is neither a replay nor a snapshot to ask for them."""
    NO_ANSWER = "no_answer"
    """Nobody answered the replay or snapshot requests in time."""
    UNAVAILABLE = "unavailable"
    """The publisher has no snapshot to give, and there is no replay."""
    TRIMMED = "trimmed"
    """The publisher's replay buffer no longer reaches back that far (engines keep about 10,000 batches)."""
    HOLE = "hole"
    """The publisher answered without them: vLLM uses up a seq when encoding or sending fails."""


class RestartReason(StrEnum):
    """What has shown that a new epoch begins."""

    PUBLISHER_ID = "publisher_id"
    """The 16-byte publisher id of a 24-byte sequence frame changed."""
    PAYLOAD = "payload"
    """A seq came again with another payload."""
    WENT_BACK = "went_back"
    """The publisher's newest batch is older than one it has sent, or there is no batch left to compare."""
    REBUILT = "rebuilt"
    """No restart: more of the epoch can be had than is known, or nobody knows. It is read from the beginning again."""


class Deliver(msgspec.Struct):
    """The next batch, in order. ``seq`` 0 opens an epoch, ``fingerprint`` is the payload's."""

    seq: int
    payload: bytes
    fingerprint: int


class NewEpoch(msgspec.Struct):
    """The publisher is in a new epoch: nothing of the old one is true any more."""

    reason: RestartReason = RestartReason.WENT_BACK


class Lost(msgspec.Struct):
    """``count`` batches will never come; the ones after them follow."""

    count: int
    reason: LostReason = LostReason.HOLE


class Synced(msgspec.Struct):
    """Everything missed while the connection was away, or before it, was delivered: what follows is live."""


class Ask(msgspec.Struct):
    """Ask the publisher's replay from ``start``; the answer comes back under ``request``."""

    request: int
    start: int


class AskSnapshot(msgspec.Struct):
    """Ask the publisher for a snapshot of its state; the answer comes back under ``request``."""

    request: int


class Stop(msgspec.Struct):
    """No more of this answer is wanted."""

    request: int


Action = Deliver | NewEpoch | Lost | Synced | Ask | AskSnapshot | Stop
