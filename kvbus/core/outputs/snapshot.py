"""The snapshot protocol (proposed for vLLM, being adopted by llm-d): the live state of a stream as one message.

Request: one frame ``snapshot`` from a REQ or a DEALER. Reply, with the delimiter only where the request had one::

    [seq: i64 big-endian, publisher id: 16 bytes, KVEventBatch chunk, ...]

``seq`` names the last batch the chunks include; -1: nothing was published yet, -2: not available; both without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvbus.core.blocks.compaction import ChunkReader, StateSnapshot
from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, SEQ_BYTES

REQUEST: Final = b"snapshot"
NOTHING_YET: Final = -1
UNAVAILABLE: Final = -2
_ROOM: Final = 2**62


class SnapshotRequest(msgspec.Struct):
    """``envelope`` is what the reply starts with; ``valid`` whether the request was one."""

    envelope: list[bytes]
    valid: bool


def parse_snapshot_request(frames: Sequence[bytes]) -> SnapshotRequest | None:
    """``[identity, "", "snapshot"]`` from a REQ, ``[identity, "snapshot"]`` from a DEALER; None without an identity."""
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" else [frames[0]]
    return SnapshotRequest(envelope, list(frames[len(envelope) :]) == [REQUEST])


class Snapshot(msgspec.Struct):
    """A publisher's reply: ``chunks`` are batches that build its state as of batch ``seq`` (-1, -2: see above)."""

    seq: int
    publisher_id: bytes
    chunks: list[bytes]


def parse_snapshot(frames: Sequence[bytes]) -> Snapshot | None:
    """A reply at a DEALER, with or without the empty delimiter; None if it is none."""
    body = list(frames[1:] if frames and frames[0] == b"" else frames)
    if len(body) < 2 or len(body[0]) != SEQ_BYTES or len(body[1]) != PUBLISHER_ID_BYTES:
        return None
    return Snapshot(int.from_bytes(body[0], "big", signed=True), body[1], body[2:])


class SnapshotAnswer:
    """One reply, built slice by slice: ``next_message`` returns ``[]`` as long as there is work to do.

    Args:
        request: what was asked.
        publisher_id: 16 bytes, one for each epoch of the stream's numbering.
        snapshot: makes (or shares) a state snapshot; None where nothing was published yet.
    """

    def __init__(
        self, request: SnapshotRequest, publisher_id: bytes, snapshot: Callable[[], StateSnapshot] | None
    ) -> None:
        self.identity = request.envelope[0]
        self._frames = [*request.envelope]
        self._envelope_frames = len(request.envelope)
        self._publisher_id = publisher_id
        self.outcome = "compacted" if request.valid else "malformed"
        self._valid = request.valid
        self._snapshot = snapshot
        self._chunks: ChunkReader | None = None
        self.done = False
        """The reply was taken."""

    def refusal(self) -> list[bytes]:
        """Not now: the reply that there is no snapshot."""
        self.done = True
        return [*self._frames[: self._envelope_frames], _i64(UNAVAILABLE), self._publisher_id]

    def next_message(self) -> list[bytes] | None:
        """The reply when it is complete, ``[]`` while it is being built, None after it was handed out."""
        if self.done:
            return None
        if not self._valid or self._snapshot is None:
            self.done = True
            return [*self._frames, _i64(NOTHING_YET if self._valid else UNAVAILABLE), self._publisher_id]
        if self._chunks is None:
            snapshot = self._snapshot()
            self._chunks = snapshot.chunks(_ROOM).reader()
            self._frames += [_i64(snapshot.seq), self._publisher_id]
        payload = self._chunks.next_payload()
        if payload is None:
            self.done = True
            return self._frames
        if payload:
            self._frames.append(payload)
        return []


def _i64(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)
