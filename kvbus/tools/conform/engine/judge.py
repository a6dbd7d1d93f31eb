"""The judge of one endpoint: what came on its sockets, in order, and the verdicts that follow. It has no socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbus.tools.conform.engine.answers import Answer, AnswerJudge
from kvbus.tools.conform.engine.events import Payload
from kvbus.tools.conform.engine.ledger import Ledger
from kvbus.tools.conform.engine.stream import Message, Silence, Stream, parse
from kvbus.tools.conform.verdict import Evidence, Level, Verdict

_HEARTBEATS: Final = 20_000
"""Numbers of empty batches that are remembered."""


class EngineJudge:
    """Judges a publisher by what is seen of it.

    Args:
        rank: of the publisher; None for the one that its first batch has.

    Attributes:
        ledger: what was seen of each clause; probes note there what they find.
        batches: messages that came live.
        events: events in them.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self.ledger = Ledger()
        self.batches = 0
        self.events = 0
        self.silence = Silence(self.ledger)
        self._answers = AnswerJudge(self.ledger)
        self._streams: dict[bytes, Stream] = {}
        self._newest: Stream | None = None
        self._heartbeats: dict[int, None] = {}
        self._welcomes: list[bool] = []
        """For each subscription, whether the first that came on it began with AllBlocksCleared."""

    @property
    def stream(self) -> Stream:
        """The stream that was heard last."""
        if self._newest is None:
            self._newest = Stream(self.ledger, self._rank)
        return self._newest

    @property
    def restarts(self) -> int:
        """Epochs that have begun since the first batch of a stream."""
        return sum(each.epochs for each in {id(each): each for each in self._streams.values()}.values())

    def clears_first(self, message: Message) -> bool:
        """Whether a batch begins with a clear of everything."""
        return self._answers.clears(message)

    def parse(self, frames: Sequence[bytes]) -> Message | None:
        """Judge the frames of a live message."""
        self.batches += 1
        return parse(frames, self.ledger)

    def gap_before(self, message: Message) -> int | None:
        """Return the first number that is missing before a message."""
        stream = self._known(message)
        return None if stream is None else stream.gap_before(message)

    def welcome(self, message: Message) -> None:
        """Note the first message of a subscription, before it is taken."""
        self._welcomes.append(self.clears_first(message))

    def take(self, message: Message, *, connected: bool = False) -> Payload | None:
        """Judge a live batch, once what is missing before it was asked for."""
        payload = self._stream_of(message).take(message, connected=connected)
        self.events += len(payload.events) if payload is not None else 0
        self.silence.ended(payload)
        if payload is not None and payload.empty:
            self._heartbeats[message.seq] = None
            if len(self._heartbeats) > _HEARTBEATS:
                del self._heartbeats[next(iter(self._heartbeats))]
        return payload

    def answer(self, answer: Answer) -> None:
        """Judge an answer, and leave what it says of the stream."""
        self._answers.judge(answer, frozenset(self._heartbeats))

    def begin(self, answer: Answer) -> None:
        """Take the history that an answer to a replay from 0 brings, before the first live batch or behind others."""
        batches = answer.batches
        if len({each.topic for each in batches}) > 1:
            return  # of several publishers, which nobody can tell apart without their live streams
        for message in batches:
            if self.stream.expected is None or message.seq >= self.stream.expected:
                self.stream.take(message)
        if batches:
            self.stream.overlaps(state=self.clears_first(batches[0]))

    def reconnected(self, answer: Answer | None) -> None:
        """The connection was away and is back. ``answer``: what a replay from 0 brought; None where there is none."""
        stream = self.stream
        self.silence.restart()
        if answer is None or not answer.batches or stream.expected is None:
            stream.rejoin()
            return
        batches = answer.batches
        back = batches[-1].seq < stream.expected - 1
        if back or any(stream.contradicts(each) for each in batches if batches[0].seq == 0):
            if batches[0].seq == 0:
                self.ledger.kept("3.3")
            stream.new_epoch()
            stream.expected = None
        self.begin(answer)

    def fill(self, message: Message, answer: Answer) -> None:
        """Take what an answer has of the numbers that are missing before a live message."""
        stream = self._known(message)
        if stream is None:
            return
        there = {each.seq: each for each in answer.batches}
        for number in range(stream.expected or 0, message.seq):
            found = there.get(number)
            if found is not None:
                stream.take(found)
            elif there and answer.ended and min(there) < number < max(there):
                stream.skipped(number, Evidence(f"payload of batch {message.seq}", message.payload))
                stream.expected = number + 1

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each clause that is watched."""
        streams = {id(each): each for each in self._streams.values()}.values()
        self._cleared([each for stream in streams for each in stream.uncleared])
        missing = sum(each.missing for each in streams)
        if missing:
            self.ledger.unseen("3.1", f"{missing} numbers are missing, and no replay says whether they were sent")
        return self.ledger.verdicts()

    def _cleared(self, uncleared: list[Evidence]) -> None:
        """Judge 11.3: where each subscription begins with a clear, the numbering need not.

        One that begins so may be an engine that was just reset, unless batch 0 or a late subscriber shows more.
        """
        if all(self._welcomes or [False]) and (uncleared or self.ledger.is_kept("5.1")):
            self.ledger.kept("11.3", len(self._welcomes))
        elif uncleared:
            self.ledger.broken("11.3", "batch 0 does not begin with AllBlocksCleared", uncleared[0])

    def _known(self, message: Message) -> Stream | None:
        """The stream of a message, if it is one of those before, or goes on with the history."""
        return self._streams.get(message.topic) or (None if self._streams else self._newest)

    def _stream_of(self, message: Message) -> Stream:
        stream = self._known(message)
        if stream is None or message.topic not in self._streams:
            known = self._newest
            if stream is None:
                stream = Stream(self.ledger, self._rank)
            if self._streams and known is not None and known.expected == message.seq and message.seq > 0:
                text = f"batch {message.seq} goes on with the numbers under another topic"
                shown = Evidence("topic", message.topic)
                self.ledger.broken("2.3", text, shown, level=Level.SHOULD)
                stream = known
            self._streams[message.topic] = stream
        elif stream.expected is not None:
            self.ledger.kept("2.3")
        self._newest = stream
        return stream
