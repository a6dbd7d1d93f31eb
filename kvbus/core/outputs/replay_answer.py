"""The answer to one replay request, pulled message by message at the pace of whoever asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvbus.core.blocks.compaction import ChunkReader, StateSnapshot
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import SEQ_BYTES, ReplayRequest, replay_data, replay_end
from kvbus.core.wire.profiles import encode

MAX_FILLER: Final = 1_000_000
"""Empty batches sent to keep an answer contiguous. Where more would be needed, which takes longer than a router waits,
the answer begins later than asked for, as an engine's does whose buffer was trimmed."""


class ReplayAnswer:
    """What a replay from ``start`` gets. Where the journal holds ``start``: the journal. Else one of two answers.

    *END alone*, for a router that has just got the state by its subscription: where ``start`` is 0, and for every start
    if the router's profile needs no contiguous answer. Its cost does not depend on how long the stream is. Run against
    seven routers (docs/decisions/state-on-subscription.md).

    *The state, numbered from ``start``*: AllBlocksCleared and the live blocks of a snapshot, empty batches up to the
    snapshot's seq, then the journal. So it is for everybody else, and for a start that is no cursor
    (:mod:`kvbus.core.outputs.incomplete`). The answer ends at what was newest when the journal part began; what came
    later is on the live stream. A requester so slow that the journal trims past it gets a newer snapshot. One whose seq
    lies more than ``MAX_FILLER`` back gets an answer that begins just before the snapshot's seq.

    Args:
        stream: the stream asked.
        request: what was asked.
        snapshot: makes (or shares) a snapshot, to be numbered from the seq given; called only if one is needed.
        has_state: whether the requester has just got the state by its subscription, or is about to.
    """

    def __init__(
        self,
        stream: OutputStream,
        request: ReplayRequest,
        snapshot: Callable[[int], StateSnapshot],
        *,
        has_state: bool = False,
    ) -> None:
        self._stream = stream
        self.identity = request.envelope[0]
        self._envelope = request.envelope
        self._start = request.start
        self._seq = request.start
        self._end = stream.next_seq
        self._take_snapshot = snapshot
        self._ends_at_once = has_state
        """END alone will do, if the journal does not hold ``start``."""
        self._snapshot: StateSnapshot | None = None
        """Held until the answer is over, so that whoever asks meanwhile gets the same one."""
        self._chunks: ChunkReader | None = None
        self._empty = b""
        self.done = False
        """Its last message was taken."""
        self.outcome = "complete" if request.well_formed else "malformed"
        """What to count it as once it is over: ``subscription`` if END alone sent the router to the state of its
        subscription, ``compacted`` if it holds a snapshot, ``late`` if it had to begin later than asked for."""

    def next_message(self) -> list[bytes] | None:
        """Return the next message, ``[]`` while it is being made (call again), END as the last one, then None."""
        if self.done:
            return None
        while self._seq < self._end:
            payload = self._from_journal() if self._chunks is None else self._from_snapshot(self._chunks)
            if payload is None:
                continue
            if not payload:
                return []
            seq = self._seq
            self._seq += 1
            stream = self._stream
            frame = seq.to_bytes(SEQ_BYTES, "big") + stream.publisher_id
            return replay_data(stream.profile.framing, self._envelope, stream.topic, frame, payload)
        return self.refusal()

    def refusal(self) -> list[bytes]:
        """END, and nothing before it: nobody waits for ever."""
        self.done = True
        self._snapshot = self._chunks = None
        return replay_end(self._stream.profile.framing, self._envelope)

    def _from_journal(self) -> bytes | None:
        stream, seq = self._stream, self._seq
        asked = seq == self._start and self._snapshot is None
        incomplete = asked and seq in stream.incomplete
        if not incomplete:
            entry = stream.journal.at(stream.journal.position(seq))
            if entry is not None and entry.seq <= seq < entry.seq + entry.count:
                return entry.payload
            if asked and self._ends_at_once and (seq == 0 or not stream.profile.filled_replay):
                self._end = seq
                self.outcome = "subscription"
                return None
        self._begin_snapshot()
        return None

    def _begin_snapshot(self) -> None:
        snapshot = self._snapshot = self._take_snapshot(self._seq)
        self._end = max(self._end, snapshot.seq + 1)
        room = snapshot.seq + 1 - self._seq
        chunks = snapshot.chunks(room)
        if room - chunks.count > MAX_FILLER:
            self._seq = snapshot.seq + 1 - chunks.count
            self.outcome = "late"
        elif self.outcome != "late":
            self.outcome = "compacted"
        self._chunks = chunks.reader()
        self._empty = encode(self._stream.profile.wire, [], 0.0, self._stream.rank)

    def _from_snapshot(self, chunks: ChunkReader) -> bytes | None:
        """The next batch of the snapshot, then filler up to its seq; None when it is the journal's turn."""
        if self._snapshot is None or self._seq > self._snapshot.seq:
            self._chunks = None
            self._end = self._stream.next_seq
            return None
        payload = chunks.next_payload()
        return self._empty if payload is None else payload
