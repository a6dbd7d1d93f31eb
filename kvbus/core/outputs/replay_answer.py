"""The answer to one replay request: values that say how far it has come, and what to send next.

Whoever asked takes an answer at its own pace. So the relay decides on a part at a time: on the first when it is pulled
(:class:`~kvbus.core.events.AnswerPulled`), on each other when the one before was sent. A part is bounded, or is made
while it is read; reading one changes nothing of the relay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from msgspec import structs

from kvbus.core.blocks.compaction import SnapshotChunks, StateSnapshot
from kvbus.core.outputs.journal import Run
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import SEQ_BYTES, Framing, ReplayRequest, replay_data, replay_end
from kvbus.core.wire.profiles import encode

MAX_FILLER: Final = 1_000_000
"""Empty batches sent to keep an answer contiguous. More would take longer than a router waits."""


class ReplayAnswer(msgspec.Struct, frozen=True):
    """The answer to a replay from ``start``.

    It is the journal if the journal holds ``start`` and ``start`` is a cursor
    (:mod:`kvbus.core.outputs.incomplete`). Otherwise it is AllBlocksCleared, the live blocks of a snapshot, and then
    the journal. The profile decides how the snapshot is numbered:

    *At its own seqs*, which end at the snapshot's seq: for every start if the profile needs no contiguous answer, and
    for start 0 if the requester takes an answer that begins late. The cost does not depend on the length of the stream.

    *From ``start``*, with empty batches between the live blocks and the journal: for all other requests. The cost
    follows from the number of batches that the router missed. Beyond ``MAX_FILLER`` empty batches the snapshot has its
    own seqs.

    *END alone* is for a router that refuses an answer that begins late (llm-d): a request from 0 gets it if the state
    of a subscription answers the request.

    An answer ends at the batch that was newest when its journal part began. Later batches are on the live stream. If
    the journal trims past a slow requester, the requester gets a newer snapshot.

    Attributes:
        envelope: what each message starts with.
        framing: how messages are put together.
        seq: of the next batch.
        end: one past the last one.
        has_state: a state that a subscription has brought, or will bring, answers the request.
        takes_late: the requester takes an answer from 0 that begins late.
        begun: something of it was decided.
        snapshot: the newest one that it holds, so that whoever asks meanwhile gets the same one.
        outcome: what to count it as once it is over: ``subscription`` for END alone in place of a state, ``compacted``
            if it holds a snapshot, ``late`` if it began later than asked for, ``malformed`` if the request could not be
            read, ``complete`` else.
        over: the next message is its last one.
        state: asked for in place of batches (vllm#50134): all of it at the seq of the batch that comes next.
    """

    envelope: list[bytes]
    framing: Framing
    seq: int
    end: int
    has_state: bool = False
    takes_late: bool = True
    begun: bool = False
    snapshot: StateSnapshot | None = None
    outcome: str = "complete"
    over: bool = False
    state: bool = False

    def refusal(self) -> list[bytes]:
        """END, and nothing before it: nobody waits for ever."""
        return replay_end(self.framing, self.envelope)


class JournalPart(msgspec.Struct, frozen=True):
    """Batches of the journal."""

    answer: ReplayAnswer
    topic: bytes
    publisher_id: bytes
    runs: Sequence[Run]

    def messages(self) -> Iterator[list[bytes]]:
        """One message for each batch."""
        framing, envelope, topic, publisher_id = (
            self.answer.framing,
            self.answer.envelope,
            self.topic,
            self.publisher_id,
        )
        for first, payload, count in self.runs:
            for seq in range(first, first + count):
                yield replay_data(framing, envelope, topic, seq.to_bytes(SEQ_BYTES, "big") + publisher_id, payload)


class StatePart(msgspec.Struct, frozen=True):
    """A snapshot in the seqs from ``first`` on, and empty batches up to ``end``."""

    answer: ReplayAnswer
    topic: bytes
    publisher_id: bytes
    first: int
    end: int
    chunks: SnapshotChunks
    empty: bytes

    def messages(self) -> Iterator[list[bytes]]:
        """One message for each batch, ``[]`` while the next one is being made."""
        framing, envelope, topic, publisher_id = (
            self.answer.framing,
            self.answer.envelope,
            self.topic,
            self.publisher_id,
        )
        chunks = self.chunks.reader()
        for seq in range(self.first, self.end):
            while (payload := chunks.next_payload()) == b"":
                yield []
            frame = seq.to_bytes(SEQ_BYTES, "big") + publisher_id
            yield replay_data(framing, envelope, topic, frame, self.empty if payload is None else payload)


class WholePart(msgspec.Struct, frozen=True):
    """A snapshot, each of its batches at the seq that the live stream goes on with."""

    answer: ReplayAnswer
    topic: bytes
    frame: bytes
    chunks: SnapshotChunks

    def messages(self) -> Iterator[list[bytes]]:
        """One message for each batch, ``[]`` while the next one is being made."""
        chunks = self.chunks.reader()
        while (payload := chunks.next_payload()) is not None:
            if payload:
                yield replay_data(self.answer.framing, self.answer.envelope, self.topic, self.frame, payload)
            else:
                yield []


class EndPart(msgspec.Struct, frozen=True):
    """END."""

    answer: ReplayAnswer

    def messages(self) -> Iterator[list[bytes]]:
        """END alone."""
        yield self.answer.refusal()


Part = JournalPart | StatePart | WholePart | EndPart


def begin(
    stream: OutputStream, request: ReplayRequest, *, has_state: bool = False, rebuilds: bool = False
) -> ReplayAnswer:
    """The answer to a request; nothing is decided yet. See :class:`~kvbus.core.events.ReplayAsked`."""
    return ReplayAnswer(
        request.envelope,
        stream.profile.framing,
        request.start,
        stream.next_seq,
        has_state,
        stream.profile.late_replay or rebuilds,
        outcome="complete" if request.well_formed else "malformed",
        state=request.state,
    )


def whole(answer: ReplayAnswer, stream: OutputStream, snapshot: StateSnapshot) -> WholePart:
    """The state as of the newest batch, which ``snapshot`` has to be; END follows."""
    end = stream.next_seq
    went = structs.replace(answer, seq=end, end=end, begun=True, outcome="compacted", state=False)
    frame = end.to_bytes(SEQ_BYTES, "big") + stream.publisher_id
    return WholePart(went, stream.topic, frame, snapshot.chunks(snapshot.fewest))


def next_part(
    answer: ReplayAnswer, stream: OutputStream, snapshot: Callable[[int], StateSnapshot]
) -> JournalPart | StatePart | EndPart:
    """Decide on what follows; its ``answer`` is how far the answer has come then.

    Args:
        answer: how far it has come.
        stream: the stream asked.
        snapshot: makes (or shares) a snapshot, to be numbered from the seq given; called only if one is needed.
    """
    seq, end = answer.seq, answer.end
    if answer.snapshot is not None and answer.snapshot.seq + 1 == seq < end:
        end = stream.next_seq  # the journal part begins
    if seq >= end:
        return EndPart(structs.replace(answer, snapshot=None, over=True))
    if answer.begun or seq not in stream.incomplete:
        runs = stream.journal.runs(seq, end)
        if runs:
            last, _, count = runs[-1]
            went = structs.replace(answer, seq=last + count, end=end, begun=True)
            return JournalPart(went, stream.topic, stream.publisher_id, runs)
        if answer.has_state and seq == 0 and not answer.takes_late:
            return EndPart(structs.replace(answer, outcome="subscription", over=True))
    return _state_part(answer, stream, snapshot(seq))


def _state_part(answer: ReplayAnswer, stream: OutputStream, snapshot: StateSnapshot) -> StatePart:
    first, end = answer.seq, snapshot.seq + 1
    own_seqs = not answer.begun and (not stream.profile.filled_replay or (first == 0 and answer.takes_late))
    chunks = snapshot.chunks(end - first)
    outcome = "late" if answer.outcome == "late" else "compacted"
    filler = end - first - chunks.count
    if filler > (0 if own_seqs else MAX_FILLER):
        first, outcome = first + filler, "late"
    went = structs.replace(answer, seq=end, end=max(answer.end, end), begun=True, snapshot=snapshot, outcome=outcome)
    empty = encode(stream.wire, [], 0.0, stream.rank)
    return StatePart(went, stream.topic, stream.publisher_id, first, end, chunks, empty)
