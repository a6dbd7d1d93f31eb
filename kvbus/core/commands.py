"""Commands of the relay to its daemon: instructions to send batches, requests and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from kvbus.core.outputs.stream import Transfer


class Publish(msgspec.Struct, gc=False):
    """Send the batch ``[topic, seq, payload]`` on one stream of one output.

    ``events`` is the number of events in the payload. The sequence frame consists of the 8-byte seq and
    ``publisher_id``. The id is empty unless the output offers snapshots.
    """

    output: int
    stream: int
    topic: bytes
    seq: int
    payload: bytes
    events: int
    publisher_id: bytes = b""


class RequestReplay(msgspec.Struct, frozen=True):
    """Request a replay from a source's engine, from seq ``start`` on, on a separate connection.

    The events that report the engine's answer carry the id ``request``.
    """

    source: int
    request: int
    start: int


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Request a snapshot from a source's engine, on a separate connection.

    The event that reports the engine's reply carries the id ``request``.
    """

    source: int
    request: int


class CancelReplay(msgspec.Struct, frozen=True):
    """Close the connection on which a replay or a snapshot was requested from an engine."""

    source: int
    request: int


class Answer(Protocol):
    """The answer to one request of a router.

    Attributes:
        envelope: the frames that each message starts with. The first of them is the identity of the router's
            connection.
        outcome: the label under which metrics count the answer when it is complete.
        finished: whether the last message was read from :meth:`messages`.
    """

    envelope: list[bytes]
    outcome: str
    finished: bool

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the messages of the answer. The caller reads the next one only when the router can receive it.

        A yielded ``[]`` is not a message: the next message is being built. A yielded
        :class:`~kvbus.core.outputs.snapshot.Unfinished` is a part of a message, and further frames of it follow. The
        building of a message may change the relay. So the caller carries out the commands of
        :meth:`~kvbus.core.relay.Relay.take_commands` before it sends the message.
        """

    def refusal(self) -> list[bytes]:
        """Return the message that replaces the answer if kvbus refuses the request, for example at a limit."""


class AnswerReplay(msgspec.Struct, frozen=True):
    """Send the answer to a replay request, message by message, as fast as the router that sent the request reads.

    The routers in ``again`` need the state on their live connections, after the batches that are queued for them. A
    router that still waits for a state does not need another one.
    """

    output: int
    stream: int
    answer: Answer
    again: tuple[int, ...] = ()


class AnswerSnapshot(msgspec.Struct, frozen=True):
    """Send the answer to a snapshot request, part by part, as fast as the router that sent the request reads."""

    output: int
    stream: int
    answer: Answer


class SendState(msgspec.Struct, frozen=True):
    """Send a state only to the listed routers. Then send them the live stream from seq ``transfer.end_seq`` on."""

    output: int
    stream: int
    routers: tuple[int, ...]
    transfer: Transfer


Command = Publish | RequestReplay | RequestSnapshot | CancelReplay | AnswerReplay | AnswerSnapshot | SendState
