"""Readers of answers, message by message, from a relay or from a stream without a relay."""

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
    """A router's position in a state transfer."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._batches = transfer.batches()
        self._next = transfer.first_seq

    @property
    def done(self) -> bool:
        """Return whether every batch was read."""
        return self._next == self.transfer.end_seq

    def next_batch(self) -> tuple[int, bytes] | None:
        """Return the next batch as seq and payload, or None while the batch is being made."""
        batch = next(self._batches)
        if batch is not None:
            self._next = batch[0] + 1
        return batch


def joined(pieces: Iterable[list[bytes]]) -> list[bytes]:
    """Join the pieces of a reply to one message. Each piece begins with the router's identity."""
    first, *others = [piece for piece in pieces if piece]
    return [*first, *(frame for piece in others for frame in piece[1:])]


class AnswerReader:
    """A router's position in an answer.

    Args:
        answer: the answer.
        after: called after each message is read, before the message is returned.
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
        """Return whether the last message was read."""
        return self._answer.over

    def next_message(self) -> list[bytes] | None:
        """Return the next message, or None after the last one."""
        message = next(self._messages, None)
        self._after()
        return message


def reading(
    relay: Relay,
    command: AnswerReplay | AnswerSnapshot,
    carry_out: Callable[[list[Command]], object] = lambda _commands: None,
) -> AnswerReader:
    """Return a reader of a relay's answer. ``carry_out`` gets the relay's commands before each message is returned."""
    return AnswerReader(command.answer, lambda: carry_out(relay.take_commands()))


class StreamAlone:
    """A stand-in for a stream's state in tests without a relay. ``ending_after`` makes the snapshots."""

    def __init__(self, stream: OutputStream, ending_after: Callable[[int], StateSnapshot]) -> None:
        self.stream = stream
        self.ending_after = ending_after

    def mark_incomplete(self, first: int, end: int) -> None:
        """Do nothing: no test asks for a replay from these seqs."""

    def mark_refused(self, *, refused: bool) -> None:
        """Do nothing: there is no source to be informed."""


def answer_of(
    stream: OutputStream,
    request: ReplayRequest,
    snapshot: Callable[[int], StateSnapshot],
    **options: bool,
) -> ReplayAnswer:
    """Return a stream's answer to a replay request, without a relay."""
    return ReplayAnswer(cast("StreamState", StreamAlone(stream, snapshot)), request, **options)
