"""The snapshot protocol (proposed for vLLM, being adopted by llm-d): the live state of a stream as one message.

The request is one frame ``snapshot`` from a REQ or a DEALER. The reply has the empty delimiter only if the request had
one::

    [seq: i64 big-endian, publisher id: 16 bytes, KVEventBatch chunk, ...]

``seq`` is the last batch that the chunks include. -1 means that nothing was published yet, -2 that there is no
snapshot. In both cases there are no chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, SEQ_BYTES

REQUEST: Final = b"snapshot"
NOTHING_YET: Final = -1
UNAVAILABLE: Final = -2

FRAME_BYTES: Final = 64 * 1024
"""Approximate number of bytes of one chunk. That much waits for a requester that does not read."""


class SnapshotRequest(msgspec.Struct):
    """A request for a snapshot. The reply starts with ``envelope``.

    ``valid`` says whether the request was well-formed.
    """

    envelope: list[bytes]
    valid: bool


def parse_snapshot_request(frames: Sequence[bytes]) -> SnapshotRequest | None:
    """Parse ``[identity, "", REQUEST]`` of a REQ or ``[identity, REQUEST]`` of a DEALER; None without an identity."""
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" else [frames[0]]
    return SnapshotRequest(envelope, list(frames[len(envelope) :]) == [REQUEST])


class Snapshot(msgspec.Struct):
    """A publisher's reply. ``chunks`` are batches that build its state as of batch ``seq`` (-1, -2: see above)."""

    seq: int
    publisher_id: bytes
    chunks: list[bytes]


def parse_snapshot(frames: Sequence[bytes]) -> Snapshot | None:
    """Parse a reply at a DEALER, with or without the empty delimiter; None if it is not a snapshot reply."""
    body = list(frames[1:] if frames and frames[0] == b"" else frames)
    if len(body) < 2 or len(body[0]) != SEQ_BYTES or len(body[1]) != PUBLISHER_ID_BYTES:
        return None
    return Snapshot(int.from_bytes(body[0], "big", signed=True), body[1], body[2:])


class Unfinished(list[bytes]):
    """The next frames of a message that has more frames. A receiver gets the message as one."""


def snapshot_head(seq: int, publisher_id: bytes) -> list[bytes]:
    """Return the frames before the chunks of a reply."""
    return [seq.to_bytes(SEQ_BYTES, "big", signed=True), publisher_id]
