"""The snapshot protocol (proposed for vLLM, being adopted by llm-d): the live state of a stream as one message.

Request: one frame ``snapshot`` from a REQ or a DEALER. Reply, with the delimiter only where the request had one::

    [seq: i64 big-endian, publisher id: 16 bytes, KVEventBatch chunk, ...]

``seq`` names the last batch the chunks include; -1: nothing was published yet, -2: not available; both without chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from msgspec import structs

from kvbus.core.blocks.compaction import SnapshotChunks, StateSnapshot
from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, SEQ_BYTES

REQUEST: Final = b"snapshot"
NOTHING_YET: Final = -1
UNAVAILABLE: Final = -2
_ROOM: Final = 2**62

FRAME_BYTES: Final = 64 * 1024
"""Bytes of one chunk, about: as much as waits for a requester that does not read."""


class SnapshotRequest(msgspec.Struct):
    """``envelope`` is what the reply starts with; ``valid`` whether the request was one."""

    envelope: list[bytes]
    valid: bool


def parse_snapshot_request(frames: Sequence[bytes]) -> SnapshotRequest | None:
    """Parse ``[identity, "", REQUEST]`` of a REQ or ``[identity, REQUEST]`` of a DEALER; None without an identity."""
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


class SnapshotAnswer(msgspec.Struct, frozen=True):
    """The answer to a snapshot request, as :class:`~kvbus.core.outputs.replay_answer.ReplayAnswer` is to a replay's.

    Attributes:
        envelope: what the reply starts with.
        publisher_id: 16 bytes, one for each epoch of the stream's numbering.
        valid: whether the request was one.
        published: whether anything was published yet.
        over: the next message is the reply.
    """

    envelope: list[bytes]
    publisher_id: bytes
    valid: bool
    published: bool
    over: bool = False

    @property
    def outcome(self) -> str:
        """What to count it as once it is over."""
        return "compacted" if self.valid else "malformed"

    def refusal(self) -> list[bytes]:
        """Not now: the reply that there is no snapshot."""
        return [*self.envelope, _i64(UNAVAILABLE), self.publisher_id]


class Unfinished(list[bytes]):
    """The next frames of a message, of which more frames follow: a receiver gets the message as one."""


class SnapshotPart(msgspec.Struct, frozen=True):
    """The reply: a state as of batch ``seq``, or none.

    A state may be large, so its reply is given frame by frame. Requesters that do not read share the state, and nobody
    keeps a whole reply for any of them.
    """

    answer: SnapshotAnswer
    seq: int
    chunks: SnapshotChunks | None = None
    snapshot: StateSnapshot | None = None
    """The state of the chunks. Whoever asks meanwhile gets the same one."""

    def messages(self) -> Iterator[list[bytes]]:
        """Give the reply, an :class:`Unfinished` piece of it for each frame but the last; ``[]`` while one is made."""
        frames = [*self.answer.envelope, _i64(self.seq), self.answer.publisher_id]
        left = 0 if self.chunks is None else self.chunks.count
        if self.chunks is None or not left:
            yield frames
            return
        yield Unfinished(frames)
        chunks = self.chunks.reader()
        while left:
            payload = chunks.next_payload()
            if payload is None:
                raise LookupError(f"the state ends {left} batches before its reply")
            if not payload:
                yield []
                continue
            left -= 1
            piece = [self.answer.envelope[0], payload]
            yield Unfinished(piece) if left else piece


def reply(answer: SnapshotAnswer, seq: int, snapshot: Callable[[], StateSnapshot]) -> SnapshotPart:
    """Decide on the reply. ``snapshot`` makes (or shares) the state as of batch ``seq``; called only if it is needed.

    It may have been made before: the batches since then were empty, and the requester has not got them.
    """
    over = structs.replace(answer, over=True)
    if not answer.valid or not answer.published:
        return SnapshotPart(over, NOTHING_YET if answer.valid else UNAVAILABLE)
    state = snapshot()
    return SnapshotPart(over, seq, state.chunks(_ROOM, FRAME_BYTES), state)


def _i64(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)
