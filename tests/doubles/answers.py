"""Answers read message by message: with a relay behind them, or with a stream alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, SendPart
from kvbus.core.events import AnswerPulled
from kvbus.core.outputs import replay_answer
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import ReplayRequest
from kvbus.transport.answer_reader import AnswerReader


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
