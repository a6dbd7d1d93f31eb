"""The actions that a sequencer decides, such as: deliver the next batch, begin an epoch, report losses."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class LostReason(StrEnum):
    """The reason why kvbus gives missing batches up and counts them as lost."""

    NO_REPLAY = "no_replay"
    """The source has neither a replay nor a snapshot endpoint, so kvbus cannot ask the publisher for the batches."""
    NO_ANSWER = "no_answer"
    """The publisher did not answer the replay or snapshot requests in time."""
    UNAVAILABLE = "unavailable"
    """The publisher answered that it has no snapshot, and the source has no replay endpoint."""
    TRIMMED = "trimmed"
    """The publisher's replay buffer does not have the batches any more. Engines keep about 10,000 batches."""
    HOLE = "hole"
    """The publisher's replay answer lacks the batches, so they do not exist.

    vLLM uses a seq up when it fails to encode or send a batch.
    """


class RestartReason(StrEnum):
    """The observation which shows that the publisher has begun a new epoch."""

    PUBLISHER_ID = "publisher_id"
    """The publisher id changed, so another process publishes.

    The 16-byte id follows the seq in a 24-byte sequence frame.
    """
    PAYLOAD = "payload"
    """A seq that kvbus has delivered came again with another payload."""
    WENT_BACK = "went_back"
    """The publisher's numbers went back, or kvbus cannot show that the epoch is the same.

    In the first case, the newest batch is older than one that the publisher sent before. In the second case, kvbus has
    no fingerprint to compare a batch with.
    """
    REBUILT = "rebuilt"
    """Not a restart: the publisher has, or may have, batches of the epoch that kvbus lacks.

    kvbus reads the epoch again from the beginning.
    """
    OTHER_PUBLISHER = "other_publisher"
    """Not a restart: the replay answers come from another publisher than the live stream.

    kvbus drops the blocks of the answers, and begins again with the next live batch.
    """


class Deliver(msgspec.Struct):
    """Deliver batch ``seq``, the next batch in order. Seq 0 is the first batch of an epoch.

    ``fingerprint`` is the fingerprint of the payload.
    """

    seq: int
    payload: bytes
    fingerprint: int


class NewEpoch(msgspec.Struct):
    """Begin a new epoch of the publisher. The blocks of the old epoch are not valid any more."""

    reason: RestartReason = RestartReason.WENT_BACK


class Lost(msgspec.Struct):
    """Report that ``count`` batches are lost, because kvbus has given them up.

    The batches after them are delivered next.
    """

    count: int
    reason: LostReason = LostReason.HOLE


class Synced(msgspec.Struct):
    """Report that kvbus has delivered or given up all batches that were sent before or during a disconnection."""


class Ask(msgspec.Struct):
    """Request a replay from the publisher, from seq ``start`` on. The answer carries the id ``request``."""

    request: int
    start: int


class AskSnapshot(msgspec.Struct):
    """Request a snapshot of the publisher's state. The reply carries the id ``request``."""

    request: int


class Stop(msgspec.Struct):
    """Close the request with the id ``request``, because the sequencer does not need the rest of its answer."""

    request: int


Action = Deliver | NewEpoch | Lost | Synced | Ask | AskSnapshot | Stop
