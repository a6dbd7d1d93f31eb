"""The snapshot protocol: a request for the current state of a stream, which is answered with one message.

The protocol was proposed for vLLM, and llm-d is adopting it. The request is one frame ``snapshot`` from a REQ or a
DEALER. The reply has the empty delimiter only if the request had one::

    [seq: i64 big-endian, publisher id: 16 bytes, KVEventBatch chunk, ...]

``seq`` is the newest batch that the chunks include. -1 means that the publisher has not published anything yet. -2
means that there is no snapshot. With -1 or -2 the reply has no chunks.
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
"""Approximate size in bytes of one frame (chunk) of a snapshot reply.

kvbus keeps one such frame in memory for each router that does not read.
"""


class SnapshotRequest(msgspec.Struct):
    """A router's request for a snapshot.

    ``envelope`` holds the frames with which the reply must start. ``valid`` is False if the request is malformed.
    """

    envelope: list[bytes]
    valid: bool


def parse_snapshot_request(frames: Sequence[bytes]) -> SnapshotRequest | None:
    """Parse a router's request for a snapshot; return None if the request has no identity frame.

    A REQ sends ``[identity, "", REQUEST]``. A DEALER may leave out the delimiter: ``[identity, REQUEST]``.
    """
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" else [frames[0]]
    return SnapshotRequest(envelope, list(frames[len(envelope) :]) == [REQUEST])


class Snapshot(msgspec.Struct):
    """A publisher's reply to a snapshot request.

    ``chunks`` are batches that build the publisher's state as of batch ``seq``. A ``seq`` of -1 means that the
    publisher has not published anything yet, and -2 that it has no snapshot.
    """

    seq: int
    publisher_id: bytes
    chunks: list[bytes]


def parse_snapshot(frames: Sequence[bytes]) -> Snapshot | None:
    """Parse the reply to a snapshot request, as a DEALER receives it; return None if it is not such a reply.

    The reply may begin with an empty delimiter.
    """
    body = list(frames[1:] if frames and frames[0] == b"" else frames)
    if len(body) < 2 or len(body[0]) != SEQ_BYTES or len(body[1]) != PUBLISHER_ID_BYTES:
        return None
    return Snapshot(int.from_bytes(body[0], "big", signed=True), body[1], body[2:])


class Unfinished(list[bytes]):
    """The first frames of a message whose further frames follow later.

    The receiver gets all frames as one message.
    """


def snapshot_head(seq: int, publisher_id: bytes) -> list[bytes]:
    """Return the two frames with which a snapshot reply begins: the seq and the publisher id."""
    return [seq.to_bytes(SEQ_BYTES, "big", signed=True), publisher_id]
