"""Commands of the relay to its shell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from kvbus.core.outputs.stream import Transfer


class Publish(msgspec.Struct, gc=False):
    """Send ``[topic, seq, payload]`` on one stream of one output. ``events`` is the number of events in the payload.

    The sequence frame is the 8-byte seq followed by ``publisher_id``, which is empty unless snapshots are offered.
    """

    output: int
    stream: int
    topic: bytes
    seq: int
    payload: bytes
    events: int
    publisher_id: bytes = b""


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask a source's replay from ``start`` on, on a separate connection. The answer carries ``request``."""

    source: int
    request: int
    start: int


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Ask a source for a snapshot, on a separate connection. The answer carries ``request``."""

    source: int
    request: int


class CancelReplay(msgspec.Struct, frozen=True):
    """Close the connection of a replay or snapshot request."""

    source: int
    request: int


class Answer(Protocol):
    """The answer to one request of a router.

    Attributes:
        envelope: the frames that each message starts with; the first one is the router's identity.
        outcome: how to count the answer when it is complete.
        over: whether the last message was read.
    """

    envelope: list[bytes]
    outcome: str
    over: bool

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the messages. Ask for the next one only when the router can receive it.

        A message is ``[]`` while the next one is being built, and an :class:`~kvbus.core.outputs.snapshot.Unfinished`
        part if more of its frames follow. Reading a message may change the relay: carry out the commands of
        :meth:`~kvbus.core.relay.Relay.take_commands` before you send it.
        """

    def refusal(self) -> list[bytes]:
        """Return the single message that answers a refused request."""


class AnswerReplay(msgspec.Struct, frozen=True):
    """Send the answer to a replay request to the router that asked, at the router's pace."""

    output: int
    stream: int
    answer: Answer


class AnswerSnapshot(msgspec.Struct, frozen=True):
    """Send the answer to a snapshot request to the router that asked, at the router's pace."""

    output: int
    stream: int
    answer: Answer


class SendState(msgspec.Struct, frozen=True):
    """Send the transfer only to these routers, followed by the live stream from ``transfer.end_seq`` on."""

    output: int
    stream: int
    routers: tuple[int, ...]
    transfer: Transfer


Command = Publish | RequestReplay | RequestSnapshot | CancelReplay | AnswerReplay | AnswerSnapshot | SendState
