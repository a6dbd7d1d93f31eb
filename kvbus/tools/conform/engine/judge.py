"""The judge of one publisher.

It is given the publisher's messages in order, and collects observations about the clauses.

The messages are live batches, replay answers, and the messages of a late subscriber. The judge has no socket and no
clock, so it judges a recording and a running engine in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from kvbus.core.wire.frames import END_SEQ
from kvbus.tools.capture.format import Message as Recorded
from kvbus.tools.conform.engine.clauses import Ledger
from kvbus.tools.conform.engine.events import EventReader, Hash, Payload, TableKey
from kvbus.tools.conform.engine.stream import SEQ_END, Message, Silence, Stream, parse
from kvbus.tools.conform.report import Evidence, Level, Report, Verdict

LONG_ANSWER: Final = 1_000
"""Minimum number of messages in a replay answer by which two clauses can be judged.

They are the clauses 4.6 and 4.3. A shorter answer does not show whether the publisher fills answers with empty batches
(4.6), or whether it drops batches for a requester that reads slowly (4.3).
"""


@dataclass(slots=True)
class Answer:
    """The messages with which a publisher answers one replay request.

    Attributes:
        start: first requested seq.
        messages: frames of all messages, as a DEALER socket receives them.
        ended: whether END has come.
        delimited: whether the request has the empty delimiter frame. The messages of the answer must then have it, too.
        slow: whether the kit read the answer slowly on purpose.
    """

    start: int
    messages: list[list[bytes]] = field(default_factory=list)
    ended: bool = False
    delimited: bool = True
    slow: bool = False

    def add(self, frames: list[bytes]) -> bool:
        """Add a message to the answer. Return whether the message is END, the last message of an answer."""
        self.messages.append(frames)
        self.ended = _is_end(frames)
        return self.ended

    @property
    def batches(self) -> list[Message]:
        """The batches of the answer that have a valid seq, with or without a topic frame."""
        found = []
        for frames in self.messages:
            if len(frames) < 2 or len(frames[-2]) not in {8, 24}:
                continue
            number = int.from_bytes(frames[-2][:8], "big")
            if number < SEQ_END:
                topic = frames[-3] if len(frames) > 2 + self.delimited else b""
                found.append(Message(topic, number, frames[-1], frames[-2][8:]))
        return found


def judge_answer(ledger: Ledger, answer: Answer, heartbeats: frozenset[int] = frozenset()) -> None:
    """Judge a replay answer by section 4 of docs/spec.

    ``heartbeats`` has the seqs of the empty batches in the live stream. The answer may have them, too.
    """
    _judge_frames(ledger, answer)
    if answer.ended:
        ledger.kept("4.3")
    else:
        count = len(answer.messages)
        text = f"a replay from {answer.start} got {count} messages and no END" if count else "a replay got no answer"
        last = answer.messages[-1:]
        ledger.broken("4.3", text, *(Evidence("the last message's payload", frames[-1]) for frames in last))
    batches = answer.batches
    _judge_numbers(ledger, answer, batches)
    if len(batches) >= LONG_ANSWER:
        empty = sum(_is_empty(each) and each.seq not in heartbeats for each in batches)
        filled = f"{empty} of {len(batches)} messages of an answer are empty batches"
        ledger.judge("4.6", filled if empty * 2 > len(batches) else "")


def _judge_frames(ledger: Ledger, answer: Answer) -> None:
    wanted = 3 + answer.delimited
    for frames in answer.messages:
        is_end = _is_end(frames)
        wrong = ""
        if len(frames) != wanted or (answer.delimited and frames[0] != b""):
            what = "END" if is_end else "a batch of an answer"
            wrong = f"{what} has {len(frames)} frames at a DEALER, instead of {wanted}"
        elif is_end and frames[-3:] != [b"", END_SEQ, b""]:
            wrong = "END is not [empty, 8 bytes FF, empty]"
        elif not is_end and len(frames[-2]) not in {8, 24}:
            wrong = f"the sequence frame of an answer has {len(frames[-2])} bytes"
        ledger.judge("4.2", wrong, *(Evidence(f"frame {at}", frame) for at, frame in enumerate(frames[:5])))


def _judge_numbers(ledger: Ledger, answer: Answer, batches: Sequence[Message]) -> None:
    if not batches:
        return
    for one, other in pairwise(batches):
        if other.seq <= one.seq:
            ledger.broken("4.2", f"an answer has batch {other.seq} after batch {one.seq}", other.evidence)
        elif other.seq > one.seq + 1 and answer.slow:
            ledger.broken("4.3", f"a slow requester got batch {other.seq} after batch {one.seq}", other.evidence)
        elif other.seq > one.seq + 1:
            ledger.broken("4.4", f"an answer has batch {other.seq} after batch {one.seq}", other.evidence)
        else:
            continue
        return
    first, text = batches[0], f"a replay from {answer.start} began with {batches[0].seq}"
    if first.seq < answer.start:
        ledger.broken("4.2", text, first.evidence)
    elif first.seq > answer.start and not first.clears_first:
        ledger.broken("4.4", f"{text}, and without AllBlocksCleared", first.evidence, level=Level.SHOULD)
    else:
        ledger.kept("4.4")


def _is_empty(message: Message) -> bool:
    return len(message.payload) < 16 and (message.payload[10:11] == b"\x90" or message.payload[6:7] == b"\x90")


def _is_end(frames: Sequence[bytes]) -> bool:
    return any(frame[:8] == END_SEQ for frame in frames[-2:])


STATE_EVENTS: Final = 4096
STATE_BYTES: Final = 4 * 1024 * 1024

View = set[tuple[TableKey, Hash]]


def judge_late(ledger: Ledger, joined: Sequence[Message], others: Mapping[int, bytes], live: View | None) -> int:
    """Judge the messages that a late subscriber received.

    They should begin with the state, which is the live blocks at the moment of the subscription.

    Args:
        ledger: records the observations.
        joined: the late subscriber's messages, in order.
        others: payloads that an earlier subscriber received at the same time, by seq.
        live: the live blocks after the late subscriber's last batch; None if unknown.

    Returns:
        The number of batches of the state.
    """
    if not joined:
        ledger.broken("5.1", "a second subscriber got nothing, while blocks were live")
        return 0
    first = joined[0]
    if not first.clears_first:
        ledger.broken("5.1", f"a second subscriber got batch {first.seq}, without AllBlocksCleared", first.evidence)
        return 0
    own = Stream(Ledger())
    for message in joined:
        own.take(message)
    view = own.blocks.live
    if live is None:
        ledger.unseen("5.1", "the stream was too busy to compare a second subscriber's blocks")
    else:
        missing, dead = len(live - view), len(view - live)
        wrong = f"a second subscriber got {len(view)} blocks: {missing} are missing, {dead} are dead"
        ledger.judge("5.1", "" if view == live else wrong, first.evidence)
    state = 0
    for message in joined:
        other = others.get(message.seq)
        if other == message.payload or other is None:
            break
        state += 1
        _batch_of_state(ledger, message, other)
    return state


def _batch_of_state(ledger: Ledger, message: Message, other: bytes) -> None:
    reader = EventReader(Ledger())
    meanwhile, own = reader.read(other, message.seq), EventReader(Ledger()).read(message.payload, message.seq)
    wrong = f"batch {message.seq} is part of a state, but other subscribers got events under this number"
    ledger.judge(
        "5.2", "" if meanwhile is not None and meanwhile.empty else wrong, Evidence("payload at others", other)
    )
    if own is not None:
        size = f"batch {message.seq} of a state has {len(own.events):,} events in {own.size:,} bytes"
        ledger.judge("5.4", size if len(own.events) > STATE_EVENTS or own.size >= STATE_BYTES else "")


_HEARTBEATS: Final = 20_000
"""Maximum number of heartbeats (empty live batches) whose seqs the judge remembers.

A replay answer may contain these empty batches. Other empty batches in it may break a clause.
"""


class EngineJudge:
    """The judge of one publisher. Its caller passes it the messages from the publisher's sockets.

    Args:
        rank: rank of the publisher; None for the rank that its first batch names.

    Attributes:
        ledger: observations about each clause. Probes record their observations there, too.
        stream: the stream of the newest message. Before the first live message, it is the stream of the replay from seq
            0.
        batches: number of live messages.
        events: number of events in the live messages.
    """

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank
        self.ledger = Ledger()
        self.batches = 0
        self.events = 0
        self.silence = Silence(self.ledger)
        self.stream = Stream(self.ledger, rank)
        self._streams: dict[bytes, Stream] = {}
        self._heartbeats: deque[int] = deque(maxlen=_HEARTBEATS)
        self._welcomes: list[bool] = []
        """One value for each subscription: whether its first message began with AllBlocksCleared."""

    @property
    def restarts(self) -> int:
        """Number of restarts of the publisher, which are the epochs after the first epoch of each stream."""
        return sum(each.epochs for each in set(self._streams.values()))

    def parse(self, frames: Sequence[bytes]) -> Message | None:
        """Judge the frames of a live message, and decode them. Return None if the message is unusable."""
        self.batches += 1
        return parse(frames, self.ledger)

    def gap_before(self, message: Message) -> int | None:
        """Return the first missing seq if batches are missing before a live message; otherwise None."""
        stream = self._known(message)
        return None if stream is None else stream.gap_before(message)

    def welcome(self, message: Message) -> None:
        """Record whether a subscription begins with AllBlocksCleared. ``message`` is its first message.

        Call this method before `take`.
        """
        self._welcomes.append(message.clears_first)

    def take(self, message: Message, *, connected: bool = False) -> Payload | None:
        """Judge a live batch, and return its decoded payload.

        If batches are missing before it, the caller first has to request them and to call `fill`. ``connected`` says
        whether the connection has been up since the last batch.
        """
        payload = self._stream_of(message).take(message, connected=connected)
        self.events += len(payload.events) if payload is not None else 0
        self.silence.ended(payload)
        if payload is not None and payload.empty:
            self._heartbeats.append(message.seq)
        return payload

    def answer(self, answer: Answer) -> None:
        """Judge the form of a replay answer. Its batches are not judged as a part of the stream."""
        judge_answer(self.ledger, answer, frozenset(self._heartbeats))

    def begin(self, answer: Answer) -> None:
        """Judge the batches of a replay from seq 0 as the beginning of the stream.

        Leave out batches that were judged before.

        Call it before the first live batch, or after a lost connection.
        """
        batches = answer.batches
        if len({each.topic for each in batches}) > 1:
            # Do not judge batches of several topics. Only the live stream shows which topics are of one publisher.
            return
        for message in batches:
            if self.stream.expected is None or message.seq >= self.stream.expected:
                self.stream.take(message)
        if batches:
            self.stream.overlaps(state=batches[0].clears_first)

    def reconnected(self, answer: Answer | None) -> None:
        """Continue after a new connection. The replay shows whether the publisher has restarted.

        ``answer`` is the answer to a replay from seq 0; None without a replay endpoint.
        """
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
        """Judge the batches that are missing before a live message, from a replay answer that has them."""
        stream = self._known(message)
        if stream is None:
            return
        batches = {each.seq: each for each in answer.batches}
        for number in range(stream.expected or 0, message.seq):
            found = batches.get(number)
            if found is not None:
                stream.take(found)
            elif batches and answer.ended and min(batches) < number < max(batches):
                text = f"number {number} was never sent, and a replay does not have it"
                self.ledger.broken("3.1", text, message.evidence)
                stream.expected = number + 1

    def verdicts(self) -> list[Verdict]:
        """Return a verdict on each clause that the kit judges."""
        streams = set(self._streams.values())
        self._cleared([each for stream in streams for each in stream.uncleared])
        missing = sum(each.missing for each in streams)
        if missing:
            self.ledger.unseen("3.1", f"{missing} numbers are missing, and no replay says whether they were sent")
        return self.ledger.verdicts()

    def _cleared(self, uncleared: list[Evidence]) -> None:
        """Judge clause 11.3: each epoch or each subscription must begin with AllBlocksCleared.

        ``uncleared`` has each batch 0 that does not begin with AllBlocksCleared.

        If every subscription began with a clear, this may be a coincidence, because the engine's cache may have been
        reset just before. So these clears prove that the clause is kept in two cases only: a batch 0 had no clear, or a
        late subscriber got the state.
        """
        if all(self._welcomes or [False]) and (uncleared or self.ledger.is_kept("5.1")):
            self.ledger.kept("11.3", len(self._welcomes))
        elif uncleared:
            self.ledger.broken("11.3", "batch 0 does not begin with AllBlocksCleared", uncleared[0])

    def _known(self, message: Message) -> Stream | None:
        """Return the stream to which a message belongs; None if no earlier message had its topic.

        Before the first live message, no topic is known. The first live message belongs to the stream that was read by
        the replay from seq 0.
        """
        return self._streams.get(message.topic) or (None if self._streams else self.stream)

    def _stream_of(self, message: Message) -> Stream:
        known = self._streams.get(message.topic)
        if known is None:
            known = self._known(message) or Stream(self.ledger, self._rank)
            if self._streams and self.stream.expected == message.seq > 0:
                text = f"batch {message.seq} continues the numbers under another topic"
                self.ledger.broken("2.3", text, Evidence("topic", message.topic), level=Level.SHOULD)
                known = self.stream
            self._streams[message.topic] = known
        elif known.expected is not None:
            self.ledger.kept("2.3")
        self.stream = known
        return known


_NOTE: Final = "a recording has no sockets, no replay and no publisher id, so it does not show the clauses about them"


def judge_recording(subject: str, messages: Iterable[Recorded]) -> Report:
    """Judge the messages of a recording, and return the report.

    Raises:
        CaptureError: the file of the recording cannot be read.
    """
    judge = EngineJudge()
    before: Recorded | None = None
    for recorded in messages:
        # Count the time between two messages as silence, except before a seq that goes back. There the publisher
        # restarted.
        if before is not None and recorded.seq > before.seq:
            judge.silence.passed(max(0.0, recorded.t - before.t))
        before = recorded
        message = judge.parse([recorded.topic, recorded.seq.to_bytes(8, "big"), recorded.payload])
        if message is not None:
            judge.take(message)
    return Report(
        "engine", subject, judge.verdicts(), f"{judge.batches:,} batches", tried=judge.batches > 0, notes=[_NOTE]
    )
