"""What the relay tells its shell to do."""

from __future__ import annotations

import msgspec

from kvbus.core.outputs.replay_answer import Part, ReplayAnswer
from kvbus.core.outputs.snapshot import SnapshotAnswer, SnapshotPart
from kvbus.core.outputs.state_transfer import Transfer


class Publish(msgspec.Struct, gc=False):
    """Send ``[topic, seq, payload]`` on one stream of one output. ``events`` is how many it carries.

    The sequence frame is the 8-byte seq and behind it ``publisher_id``, which is empty unless snapshots are offered.
    """

    output: int
    stream: int
    topic: bytes
    seq: int
    payload: bytes
    events: int
    publisher_id: bytes = b""


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask a source's replay from ``start``, on a connection of its own; answers carry ``request``."""

    source: int
    request: int
    start: int


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Ask a source for a snapshot, on a connection of its own; the answer carries ``request``."""

    source: int
    request: int


class CancelReplay(msgspec.Struct, frozen=True):
    """Close that connection."""

    source: int
    request: int


class AnswerReplay(msgspec.Struct, frozen=True):
    """An answer to a router begins: feed :class:`~kvbus.core.events.AnswerPulled` as fast as the router takes it."""

    output: int
    stream: int
    answer: ReplayAnswer


class AnswerSnapshot(msgspec.Struct, frozen=True):
    """As :class:`AnswerReplay`, for what a request for a snapshot gets."""

    output: int
    stream: int
    answer: SnapshotAnswer


class SendPart(msgspec.Struct, frozen=True):
    """What a pull gets: send the messages of ``part``, and pull ``part.answer`` unless that was over with them."""

    output: int
    stream: int
    part: Part | SnapshotPart


class SendState(msgspec.Struct, frozen=True):
    """Send the transfer to these routers alone, and behind it the live stream from ``transfer.end_seq`` on."""

    output: int
    stream: int
    routers: tuple[int, ...]
    transfer: Transfer


Command = (
    Publish | RequestReplay | RequestSnapshot | CancelReplay | AnswerReplay | AnswerSnapshot | SendPart | SendState
)
