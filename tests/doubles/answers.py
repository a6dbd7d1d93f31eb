"""Readers that read kvbus's replay answers and states on subscription message by message.

The messages come from a relay or from a single stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from kvbus.core.answering import ReplayAnswer, StreamState
from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.commands import Answer, AnswerReplay, AnswerSnapshot, Command
from kvbus.core.outputs.stream import OutputStream, Transfer
from kvbus.core.relay import Relay
from kvbus.core.wire.frames import ReplayRequest


class StateReader:
    """A router's reader of one state on subscription, and how far it has read."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._batches = transfer.batches()
        self._next = transfer.first_seq

    @property
    def done(self) -> bool:
        """Whether the reader has read every batch of the state transfer."""
        return self._next == self.transfer.end_seq

    def next_batch(self) -> tuple[int, bytes] | None:
        """Return the next batch of the state as a tuple of seq and payload.

        Return None while kvbus is still building the batch.
        """
        batch = next(self._batches)
        if batch is not None:
            self._next = batch[0] + 1
        return batch


def joined(pieces: Iterable[list[bytes]]) -> list[bytes]:
    """Join the parts of a multipart reply to one message. Each part begins with the router's identity frame."""
    first, *others = [piece for piece in pieces if piece]
    return [*first, *(frame for piece in others for frame in piece[1:])]


class AnswerReader:
    """A router's reader of one replay answer, and how far it has read.

    Args:
        answer: the answer to read.
        after: called after the reader has read a message, before it returns the message.
    """

    def __init__(self, answer: Answer, after: Callable[[], object] = lambda: None) -> None:
        self._answer = answer
        self._messages = answer.messages()
        self._after = after

    @property
    def outcome(self) -> str:
        return self._answer.outcome

    @property
    def done(self) -> bool:
        """Whether the reader has read the last message of the answer."""
        return self._answer.finished

    def next_message(self) -> list[bytes] | None:
        """Return the next message of the answer, or None after the last message."""
        message = next(self._messages, None)
        self._after()
        return message


def reading(
    relay: Relay,
    command: AnswerReplay | AnswerSnapshot,
    carry_out: Callable[[list[Command]], object] = lambda _commands: None,
) -> AnswerReader:
    """Return a reader of the replay answer that a command of a relay starts.

    Before the reader returns a message, it calls ``carry_out`` with the relay's new commands.
    """
    return AnswerReader(command.answer, lambda: carry_out(relay.take_commands()))


class StreamAlone:
    """A substitute for `StreamState` in tests of an output stream without a relay.

    ``ending_after`` returns the state snapshot of the stream that is sent in place of batches that left the journal.
    """

    def __init__(self, stream: OutputStream, ending_after: Callable[[int], StateSnapshot]) -> None:
        self.stream = stream
        self.ending_after = ending_after

    def mark_incomplete(self, first: int, end: int) -> None:
        """Do nothing, because no test asks for a replay from a seq inside a state."""

    def mark_refused(self, *, refused: bool) -> None:
        """Do nothing, because kvbus records refused answers in a stream's sources, and this stream has none."""


def answer_of(
    stream: OutputStream,
    request: ReplayRequest,
    snapshot: Callable[[int], StateSnapshot],
    **options: bool,
) -> ReplayAnswer:
    """Return the answer of an output stream to a replay request, in a test without a relay."""
    return ReplayAnswer(cast("StreamState", StreamAlone(stream, snapshot)), request, **options)
