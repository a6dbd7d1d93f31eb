"""Answers read message by message: with a relay behind them, or with a stream alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, SendPart
from kvbus.core.events import AnswerPulled
from kvbus.core.outputs import replay_answer
from kvbus.core.outputs.state_transfer import Transfer
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import ReplayRequest
from kvbus.transport.answer_reader import AnswerReader


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


def reading(handle: Callable[[Any], list[Any]], command: AnswerReplay | AnswerSnapshot) -> AnswerReader:
    """What reads an answer; ``handle`` hands each pull to the relay, and gives back at least the last command."""

    def pull(event: AnswerPulled) -> SendPart:
        part = handle(event)[-1]
        assert isinstance(part, SendPart)
        return part

    return AnswerReader(command, pull)


def answer_of(
    stream: OutputStream,
    request: ReplayRequest,
    snapshot: Callable[[int], StateSnapshot],
    **options: bool,
) -> AnswerReader:
    """What reads the answer of a stream without a relay."""

    def pull(event: AnswerPulled) -> SendPart:
        assert isinstance(event.answer, replay_answer.ReplayAnswer)
        return SendPart(0, 0, replay_answer.next_part(event.answer, stream, snapshot))

    return AnswerReader(AnswerReplay(0, 0, replay_answer.begin(stream, request, **options)), pull)
