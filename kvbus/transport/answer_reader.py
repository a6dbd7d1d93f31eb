"""One answer of the relay, read message by message at the pace of whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbus.core.commands import AnswerReplay, AnswerSnapshot, SendPart
from kvbus.core.events import AnswerPulled
from kvbus.core.outputs.snapshot import Unfinished

Pull = Callable[[AnswerPulled], SendPart]
"""Hands the event to the relay, carries out what else follows, and returns the part."""


class AnswerReader:
    """Read an answer; the relay is asked for each of its parts.

    Args:
        command: the answer begins.
        pull: asks the relay.

    Attributes:
        identity: the first frame of every message.
        done: the last message was taken.
    """

    def __init__(self, command: AnswerReplay | AnswerSnapshot, pull: Pull) -> None:
        self._output, self._stream, self._answer = command.output, command.stream, command.answer
        self._pull = pull
        self._messages: Iterator[list[bytes]] = iter(())
        self.identity = command.answer.envelope[0]
        self.done = False

    @property
    def outcome(self) -> str:
        """What to count the answer as once it is over."""
        return self._answer.outcome

    def next_message(self) -> list[bytes] | None:
        """Return the next message, or an :class:`~kvbus.core.outputs.snapshot.Unfinished` piece of it.

        It is ``[]`` while it is being made (call again), and None past the last.
        """
        if self.done:
            return None
        while (message := next(self._messages, None)) is None:
            part = self._pull(AnswerPulled(self._output, self._stream, self._answer)).part
            self._answer, self._messages = part.answer, part.messages()
        if message and self._answer.over and not isinstance(message, Unfinished):
            self._end()
        return message

    def refusal(self) -> list[bytes]:
        """Return the message that ends the answer at once."""
        self._end()
        return self._answer.refusal()

    def _end(self) -> None:
        self.done = True
        self._messages = iter(())
