"""The frames of a live batch, of a replay request and of a replay answer, and functions that parse and build them.

A live batch is ``[topic, seq, payload]`` in vLLM 0.9 to 0.33 and SGLang 0.4.7 to 0.5.23. Each message of a replay
answer has three frames before vLLM 0.26 and SGLang 0.5.22 (framing 3), and four frames from these versions on (framing
4). Other forms come from llm-d-inference-sim, and from the snapshot proposal for vLLM, whose sequence frames have 24
bytes.
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
    """Limits on one received message. ``max_frame_bytes`` applies to each frame separately, as in libzmq."""

    max_frames: int = 16
    max_frame_bytes: int = 64 * 1024 * 1024
    max_events: int = 65_536


class LiveMessage(msgspec.Struct):
    """One batch of the live stream. ``publisher_id`` is None unless the publisher's sequence frames have 24 bytes."""

    topic: bytes
    seq: int
    payload: bytes
    publisher_id: bytes | None = None


class ReplayMessage(msgspec.Struct):
    """One batch of a replay answer."""

    seq: int
    payload: bytes
    topic: bytes | None = None
    """The topic of the batch.

    It is None if replay answers have three frames (framing 3), which do not include a topic.
    """
    publisher_id: bytes | None = None


class ReplayEnd(msgspec.Struct):
    """The END message, which ends a replay answer."""


def parse_live(frames: Sequence[bytes], limits: FrameLimits) -> LiveMessage | Reason:
    """Parse a live batch ``[topic, seq, payload]``. Return a reason if it is malformed.

    ``seq`` is 8 bytes big-endian. If the frame has 24 bytes, a publisher id follows the seq. Further frames after the
    payload, which a later version of an engine may send, are ignored. If there are any, the third frame must begin with
    the msgpack byte of an array or a map. So it is the payload, because a frame with a seq never begins with such a
    byte.
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
    """Parse one message of a replay answer, as a DEALER receives it. Return a reason if it is malformed.

    Framing 3 is ``["", seq, payload]``. Framing 4 is ``["", topic, seq, payload]``, which llm-d-inference-sim uses,
    too. In both framings, seq is the frame before the last one. END has eight bytes FF as its seq, and an empty
    payload.
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
    """Return the frames of a request for a replay from seq ``start`` on, for a DEALER.

    The first frame is the empty delimiter. Without it, engines silently drop the request.
    """
    return [b"", start.to_bytes(SEQ_BYTES, "big")]


ASKS_REPLAY: Final = b"kvbus:asks-replay"
"""A topic prefix to which a router subscribes to announce that it requests replays itself.

It then gets no state when it subscribes. No topic begins with these bytes, so the subscription matches no batch of
kvbus or of an engine. kvbus's own subscribers send it if they can request a replay.
"""


REBUILDS: Final = b"kvbus:rebuilds:"
"""Prefix of the routing id of a DEALER whose router builds its blocks from the replay answer.

Eight random bytes follow the prefix. If a router gets the state on its live connection, kvbus may answer its request
from seq 0 only with END. kvbus recognizes the router by its address. A DEALER with this prefix gets the blocks in the
answer even if a router at the same address gets the state.
"""


STATE_REQUEST: Final = b"snapshot"
"""The bytes that request the current state. They take the position of the start seq in a replay request (vllm#50134).

Read as a number, they are higher than the seq of any stream.
"""


class ReplayRequest(msgspec.Struct):
    """A router's request for a replay, as a ROUTER socket received it.

    ``envelope`` holds the frames with which every reply must start. A request that is not ``well_formed`` is answered
    only with END. If ``state`` is True, the router requests the current state in place of a replay.
    """

    envelope: list[bytes]
    start: int
    well_formed: bool = True
    state: bool = False


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest | None:
    """Parse a router's request for a replay. Return None if the request has no identity frame.

    The request is ``[identity, "", start]``, or ``[identity, start]`` from a DEALER that sends no delimiter. A request
    whose start is not an 8-byte number is marked as not well-formed. It is answered only with END, so that the
    requester does not wait for ever.
    """
    if len(frames) < 2:
        return None
    envelope = [frames[0], b""] if frames[1] == b"" and len(frames) > 2 else [frames[0]]
    start = frames[-1]
    if len(start) != SEQ_BYTES or len(frames) > 3:
        return ReplayRequest(envelope, 2**64 - 1, well_formed=False)
    return ReplayRequest(envelope, int.from_bytes(start, "big"), state=start == STATE_REQUEST)


def replay_data(framing: Framing, envelope: list[bytes], topic: bytes, seq: bytes, payload: bytes) -> list[bytes]:
    """Return the frames of one batch of a replay answer. ``seq`` is the complete sequence frame of 8 or 24 bytes."""
    head = envelope if framing == "3" else [*envelope, topic]
    return [*head, seq, payload]


def replay_end(framing: Framing, envelope: list[bytes]) -> list[bytes]:
    """Return the frames of the END message, which ends a replay answer.

    Its topic is empty even if the stream has a topic, as in vLLM 0.26.
    """
    head = envelope if framing == "3" else [*envelope, b""]
    return [*head, END_SEQ, b""]
