"""Multipart layouts: what the frames of a live batch, a replay request and a replay answer mean.

Sources: vLLM 0.9 to 0.33 and SGLang 0.4.7 to 0.5.23 (``[topic, seq, payload]``; replay framing 3 before vLLM 0.26 and
SGLang 0.5.22, framing 4 from them on), llm-d-inference-sim, the snapshot proposal (24-byte sequence frames).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvbus.core.types import Reason

END_SEQ: Final = b"\xff" * 8
SEQ_BYTES: Final = 8
PUBLISHER_ID_BYTES: Final = 16
LONG_SEQ_BYTES: Final = SEQ_BYTES + PUBLISHER_ID_BYTES

Framing = Literal["3", "4"]


class FrameLimits(msgspec.Struct, frozen=True):
    """What one message may be. ``max_frame_bytes`` is per frame, as libzmq counts it."""

    max_frames: int = 16
    max_frame_bytes: int = 64 * 1024 * 1024
    max_events: int = 65_536


class LiveMessage(msgspec.Struct):
    """One batch as published: ``publisher_id`` is set only where sequence frames are 24 bytes."""

    topic: bytes
    seq: int
    payload: bytes
    publisher_id: bytes | None = None


class ReplayMessage(msgspec.Struct):
    """One batch of a replay answer."""

    seq: int
    payload: bytes
    topic: bytes | None = None
    """As framing 4 carries it; framing 3 does not."""
    publisher_id: bytes | None = None


class ReplayEnd(msgspec.Struct):
    """The END marker of a replay answer."""


def parse_live(frames: Sequence[bytes], limits: FrameLimits) -> LiveMessage | Reason:
    """``[topic, seq, payload]``; seq is 8 bytes big-endian, or 24 with a publisher id behind it.

    What comes behind a payload (it begins as an array or a map does, and no seq can) is of a later version and ignored.
    """
    if len(frames) != 3 and not (3 < len(frames) <= limits.max_frames and frames[2][:1] >= b"\x80"):
        return Reason.FRAME_COUNT
    topic, seq, payload = frames[:3]
    if len(payload) > limits.max_frame_bytes or len(topic) > limits.max_frame_bytes:
        return Reason.FRAME_SIZE
    if len(seq) == SEQ_BYTES:
        number = int.from_bytes(seq, "big")
        return LiveMessage(topic, number, payload) if number < 2**63 else Reason.SEQ_RANGE
    if len(seq) == LONG_SEQ_BYTES:
        number = int.from_bytes(seq[:SEQ_BYTES], "big")
        return LiveMessage(topic, number, payload, bytes(seq[SEQ_BYTES:])) if number < 2**63 else Reason.SEQ_RANGE
    return Reason.SEQ_WIDTH


def parse_replay(frames: Sequence[bytes], limits: FrameLimits) -> ReplayMessage | ReplayEnd | Reason:
    """One message of a replay answer at a DEALER, whichever framing: seq is always the last frame but one.

    Framing 3 ``["", seq, payload]``, framing 4 and the simulator's ``["", topic, seq, payload]``; END carries
    ``FF x 8`` as its seq and an empty payload.
    """
    if not 1 <= len(frames) <= 4:
        return Reason.FRAME_COUNT
    if any(frame[:SEQ_BYTES] == END_SEQ for frame in frames[-2:]):
        return ReplayEnd()
    if len(frames) < 2:
        return Reason.FRAME_COUNT
    seq, payload = frames[-2], frames[-1]
    if len(payload) > limits.max_frame_bytes:
        return Reason.FRAME_SIZE
    if len(seq) not in (SEQ_BYTES, LONG_SEQ_BYTES):
        return Reason.SEQ_WIDTH
    number = int.from_bytes(seq[:SEQ_BYTES], "big")
    if number >= 2**63:
        return Reason.SEQ_RANGE
    topic = frames[1] if len(frames) == 4 else None
    return ReplayMessage(number, payload, topic, bytes(seq[SEQ_BYTES:]) or None)


def replay_request(start: int) -> list[bytes]:
    """The request a DEALER sends: without the empty delimiter engines drop it in silence."""
    return [b"", start.to_bytes(SEQ_BYTES, "big")]


ASKS_REPLAY: Final = b"kvbus:asks-replay"
"""A subscription that says: this router rebuilds itself by replays, and wants no state by its subscription. No topic
begins so, hence it matches nothing, at a kvbus as at an engine. kvbus's own subscribers send it, if they can replay."""


REBUILDS: Final = b"kvbus:rebuilds:"
"""How the routing id of a DEALER begins that rebuilds its state by the replay alone: END alone does not help it, even
where a router at the same address has just got the state. Eight random bytes follow."""


STATE_REQUEST: Final = b"snapshot"
"""In place of a start: the live state (vllm#50134). It has as many bytes as a seq, and no stream has one so high."""


class ReplayRequest(msgspec.Struct):
    """A router's request as a ROUTER received it. ``envelope`` is what every reply starts with.

    One that is not ``well_formed`` is answered with END alone, and one for the ``state`` with that.
    """

    envelope: list[bytes]
    start: int
    well_formed: bool = True
    state: bool = False


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest | None:
    """``[identity, "", start]``, or ``[identity, start]`` from a DEALER that forgot the delimiter.

    The reply mirrors the envelope. None where there is not even an identity; a start that is no 8-byte number is
    answered with END alone, so that no requester hangs.
    """
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" and len(frames) > 2 else [frames[0]]
    start = frames[-1]
    if len(start) != SEQ_BYTES or len(frames) > 3:
        return ReplayRequest(envelope, 2**64 - 1, well_formed=False)
    return ReplayRequest(envelope, int.from_bytes(start, "big"), state=start == STATE_REQUEST)


def replay_data(framing: Framing, envelope: list[bytes], topic: bytes, seq: bytes, payload: bytes) -> list[bytes]:
    """One data message of an answer; ``seq`` is the whole sequence frame, 8 or 24 bytes."""
    head = envelope if framing == "3" else [*envelope, topic]
    return [*head, seq, payload]


def replay_end(framing: Framing, envelope: list[bytes]) -> list[bytes]:
    """The END marker: its topic is empty even on a stream that has one (vLLM 0.26)."""
    head = envelope if framing == "3" else [*envelope, b""]
    return [*head, END_SEQ, b""]
