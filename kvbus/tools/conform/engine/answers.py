"""Answers to replay requests: their frames, their END, and what is between (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from kvbus.core.wire.frames import END_SEQ
from kvbus.tools.conform.engine.events import EventReader
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.engine.stream import SEQ_END, Message
from kvbus.tools.conform.verdict import Evidence, Level

LONG: Final = 1_000
"""Messages of an answer that show whether it is filled, or whether a slow requester loses some."""


@dataclass(slots=True)
class Answer:
    """What came for one request.

    Attributes:
        start: the number that was asked for.
        messages: all that came, frame by frame, as a DEALER receives them.
        ended: END has come.
        delimited: the request had the empty frame; its answer then has it, too.
        slow: it was read slowly on purpose.
    """

    start: int
    messages: list[list[bytes]] = field(default_factory=list)
    ended: bool = False
    delimited: bool = True
    slow: bool = False

    def add(self, frames: list[bytes]) -> bool:
        """Take a message; return whether the answer is over."""
        self.messages.append(frames)
        self.ended = any(frame[:8] == END_SEQ for frame in frames[-2:])
        return self.ended

    @property
    def batches(self) -> list[Message]:
        """The batches in it that can be read, whichever framing it has."""
        found = []
        for frames in self.messages:
            if len(frames) < 2 or len(frames[-2]) not in {8, 24}:
                continue
            number = int.from_bytes(frames[-2][:8], "big")
            if number < SEQ_END:
                topic = frames[-3] if len(frames) > 2 + self.delimited else b""
                found.append(Message(topic, number, frames[-1], frames[-2][8:]))
        return found


class AnswerJudge:
    """Judges answers one by one."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def judge(self, answer: Answer, heartbeats: frozenset[int] = frozenset()) -> None:
        """Judge an answer. ``heartbeats``: numbers that were empty batches in the live stream, too."""
        self._frames(answer)
        self._end(answer)
        batches = answer.batches
        self._numbers(answer, batches)
        empty = sum(self._is_empty(each) and each.seq not in heartbeats for each in batches)
        if len(batches) >= LONG:
            if empty * 2 > len(batches):
                self._ledger.broken("4.6", f"{empty} of {len(batches)} messages of an answer are empty batches")
            else:
                self._ledger.kept("4.6")

    def _frames(self, answer: Answer) -> None:
        ledger = self._ledger
        wanted = 3 + answer.delimited
        for frames in answer.messages:
            shown = [Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:5])]
            is_end = any(frame[:8] == END_SEQ for frame in frames[-2:])
            if len(frames) != wanted or (answer.delimited and frames[0] != b""):
                what = "END" if is_end else "a batch of an answer"
                ledger.broken("4.2", f"{what} has {len(frames)} frames at a DEALER, and not {wanted}", *shown)
            elif is_end and frames[-3:] != [b"", END_SEQ, b""]:
                ledger.broken("4.2", "END is not [empty, 8 bytes FF, empty]", *shown)
            elif not is_end and len(frames[-2]) not in {8, 24}:
                ledger.broken("4.2", f"the sequence frame of an answer has {len(frames[-2])} bytes", *shown)
            else:
                ledger.kept("4.2")

    def _end(self, answer: Answer) -> None:
        if answer.ended:
            self._ledger.kept("4.3")
            return
        count = len(answer.messages)
        text = f"a replay from {answer.start} got {count} messages and no END" if count else "a replay got no answer"
        shown = [Evidence("the last message's payload", answer.messages[-1][-1])] if count else []
        self._ledger.broken("4.3", text, *shown)

    def _numbers(self, answer: Answer, batches: Sequence[Message]) -> None:
        ledger = self._ledger
        if not batches:
            ledger.not_yet("4.4", "no answer had a batch")
            return
        for one, other in pairwise(batches):
            if other.seq == one.seq + 1:
                continue
            shown = (Evidence(f"payload of batch {other.seq}", other.payload),)
            if other.seq <= one.seq:
                ledger.broken("4.2", f"an answer has {other.seq} behind {one.seq}", *shown)
            elif answer.slow:
                ledger.broken("4.3", f"{other.seq} came behind {one.seq} at a slow requester", *shown)
            else:
                ledger.broken("4.4", f"an answer has {other.seq} behind {one.seq}", *shown)
            return
        first = batches[0]
        if first.seq < answer.start:
            shown = (Evidence(f"payload of batch {first.seq}", first.payload),)
            ledger.broken("4.2", f"a replay from {answer.start} began with {first.seq}", *shown)
        elif first.seq > answer.start and not self.clears(first):
            text = f"a replay from {answer.start} began with {first.seq}, and without AllBlocksCleared"
            evidence = Evidence(f"payload of batch {first.seq}", first.payload)
            ledger.broken("4.4", text, evidence, level=Level.SHOULD)
        else:
            ledger.kept("4.4")

    @staticmethod
    def clears(message: Message) -> bool:
        """Whether a batch begins with a clear of everything."""
        payload = EventReader(Ledger()).read(message.payload, message.seq)
        return payload is not None and payload.clears_first

    @staticmethod
    def _is_empty(message: Message) -> bool:
        return len(message.payload) < 16 and (message.payload[10:11] == b"\x90" or message.payload[6:7] == b"\x90")
