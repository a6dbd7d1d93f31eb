"""Multipart layouts: the frames of a live batch, a replay request and a replay answer.

Sources: vLLM 0.9 to 0.33 and SGLang 0.4.7 to 0.5.23 (``[topic, seq, payload]``; replay framing 3 before vLLM 0.26 and
SGLang 0.5.22, framing 4 from these versions on), llm-d-inference-sim, the snapshot proposal (24-byte sequence frames).
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
    """Limits of one message. ``max_frame_bytes`` applies to each frame, as in libzmq."""

    max_frames: int = 16
    max_frame_bytes: int = 64 * 1024 * 1024
    max_events: int = 65_536


class LiveMessage(msgspec.Struct):
    """One batch as published. ``publisher_id`` is set only if sequence frames are 24 bytes."""

    topic: bytes
    seq: int
    payload: bytes
    publisher_id: bytes | None = None


class ReplayMessage(msgspec.Struct):
    """One batch of a replay answer."""

    seq: int
    payload: bytes
    topic: bytes | None = None
    """The topic, which only framing 4 carries."""
    publisher_id: bytes | None = None


class ReplayEnd(msgspec.Struct):
    """The END marker of a replay answer."""


def parse_live(frames: Sequence[bytes], limits: FrameLimits) -> LiveMessage | Reason:
    """Parse ``[topic, seq, payload]``; seq is 8 bytes big-endian, or 24 bytes including a publisher id after it.

    Frames after the payload belong to a later version and are ignored. A payload begins with the msgpack byte of an
    array or a map; a seq never begins with such a byte.
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
    """Parse one message of a replay answer, as a DEALER receives it. In both framings, seq is the last frame but one.

    Framing 3 is ``["", seq, payload]``, framing 4 (also the simulator's) is ``["", topic, seq, payload]``. END has ``FF
    x 8`` as its seq and an empty payload.
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
    """Return the request that a DEALER sends. Engines silently drop a request without the empty delimiter."""
    return [b"", start.to_bytes(SEQ_BYTES, "big")]


ASKS_REPLAY: Final = b"kvbus:asks-replay"
"""Subscription of a router that rebuilds its state by replays and wants no state on subscription.

No topic begins like this, so it matches nothing, at a kvbus or at an engine. kvbus's own subscribers send it if they
can replay.
"""


REBUILDS: Final = b"kvbus:rebuilds:"
"""Prefix of the routing id of a DEALER that rebuilds its state only from the replay.

END alone does not help such a DEALER, even if a router at the same address has just got the state. Eight random bytes
follow the prefix.
"""


STATE_REQUEST: Final = b"snapshot"
"""A request for the live state, sent in place of a start (vllm#50134). No stream has so high a seq."""


class ReplayRequest(msgspec.Struct):
    """A router's request as a ROUTER received it. Every reply starts with ``envelope``.

    A request that is not ``well_formed`` is answered only with END. A request for the ``state`` is answered with the
    state.
    """

    envelope: list[bytes]
    start: int
    well_formed: bool = True
    state: bool = False


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest | None:
    """Parse ``[identity, "", start]``, or ``[identity, start]`` from a DEALER that forgot the delimiter.

    The reply repeats the envelope. Return None if there is no identity. A request whose start is not an 8-byte number
    is answered only with END, so that no requester hangs.
    """
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" and len(frames) > 2 else [frames[0]]
    start = frames[-1]
    if len(start) != SEQ_BYTES or len(frames) > 3:
        return ReplayRequest(envelope, 2**64 - 1, well_formed=False)
    return ReplayRequest(envelope, int.from_bytes(start, "big"), state=start == STATE_REQUEST)


def replay_data(framing: Framing, envelope: list[bytes], topic: bytes, seq: bytes, payload: bytes) -> list[bytes]:
    """Return one data message of an answer; ``seq`` is the complete sequence frame, 8 or 24 bytes."""
    head = envelope if framing == "3" else [*envelope, topic]
    return [*head, seq, payload]


def replay_end(framing: Framing, envelope: list[bytes]) -> list[bytes]:
    """Return the END marker. Its topic is empty even on a stream that has a topic (vLLM 0.26)."""
    head = envelope if framing == "3" else [*envelope, b""]
    return [*head, END_SEQ, b""]
