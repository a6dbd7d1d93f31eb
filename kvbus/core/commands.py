"""What the relay tells its shell to do."""

from __future__ import annotations

import msgspec

from kvbus.core.outputs.replay_answer import ReplayAnswer
from kvbus.core.outputs.snapshot import SnapshotAnswer
from kvbus.core.outputs.state_transfer import StateTransfer


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


class AnswerReplay(msgspec.Struct):
    """Send these messages to a router as fast as it takes them, until :meth:`ReplayAnswer.next_message` is None."""

    output: int
    stream: int
    answer: ReplayAnswer


class AnswerSnapshot(msgspec.Struct):
    """Send the one message of this answer; ``next_message`` gives ``[]`` while it is being built."""

    output: int
    stream: int
    answer: SnapshotAnswer


class SendState(msgspec.Struct):
    """Send the transfer to these routers alone, and behind it the live stream from ``transfer.end_seq`` on."""

    output: int
    stream: int
    routers: tuple[int, ...]
    transfer: StateTransfer


Command = Publish | RequestReplay | RequestSnapshot | CancelReplay | AnswerReplay | AnswerSnapshot | SendState
