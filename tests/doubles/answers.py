"""Answers read message by message: with a relay behind them, or with a stream alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from kvbus.core.answering import ReplayAnswer
from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.commands import Answer, AnswerReplay, AnswerSnapshot, Command
from kvbus.core.outputs.state_transfer import Transfer
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.relay import Relay
from kvbus.core.stream_state import StreamState
from kvbus.core.wire.frames import ReplayRequest


class StateReader:
    """One router's way through a state."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._batches = transfer.batches()
        self._next = transfer.first_seq

    @property
    def done(self) -> bool:
        """Every batch was taken."""
        return self._next == self.transfer.end_seq

    def next_batch(self) -> tuple[int, bytes] | None:
        """Take the next batch as seq and payload; None while it is being made."""
        batch = next(self._batches)
        if batch is not None:
            self._next = batch[0] + 1
        return batch


def joined(pieces: Iterable[list[bytes]]) -> list[bytes]:
    """The whole message of a reply that is read in pieces. Each piece begins with the router's identity."""
    first, *others = [piece for piece in pieces if piece]
    return [*first, *(frame for piece in others for frame in piece[1:])]


class AnswerReader:
    """One router's way through an answer.

    Args:
        answer: the answer.
        after: called when a message was read, before it is given.
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
        """The last message was taken."""
        return self._answer.over

    def next_message(self) -> list[bytes] | None:
        """Take the next message; None past the last one."""
        message = next(self._messages, None)
        self._after()
        return message


def reading(
    relay: Relay,
    command: AnswerReplay | AnswerSnapshot,
    carry_out: Callable[[list[Command]], object] = lambda _commands: None,
) -> AnswerReader:
    """What reads an answer of a relay; ``carry_out`` gets the commands of each message before the message is given."""
    return AnswerReader(command.answer, lambda: carry_out(relay.take_commands()))


class StreamAlone:
    """A stream without a relay; ``ending_after`` makes its states."""

    def __init__(self, stream: OutputStream, ending_after: Callable[[int], StateSnapshot]) -> None:
        self.stream = stream
        self.ending_after = ending_after

    def mark_incomplete(self, first: int, end: int) -> None:
        """Nobody asks for what is no cursor."""

    def mark_refused(self, *, refused: bool) -> None:
        """No source looks at it."""


def answer_of(
    stream: OutputStream,
    request: ReplayRequest,
    snapshot: Callable[[int], StateSnapshot],
    **options: bool,
) -> ReplayAnswer:
    """The answer of a stream without a relay."""
    return ReplayAnswer(cast("StreamState", StreamAlone(stream, snapshot)), request, **options)
