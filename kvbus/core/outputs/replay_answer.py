"""The answer to one replay request, pulled message by message at the pace of whoever asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvbus.core.blocks.compaction import SnapshotChunks, StateSnapshot
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.wire.frames import SEQ_BYTES, ReplayRequest, replay_data, replay_end
from kvbus.core.wire.profiles import encode

MAX_FILLER: Final = 1_000_000
"""Empty batches sent to keep an answer contiguous. Where more would be needed, which takes longer than a router waits,
the answer begins later than asked for, as an engine's does whose buffer was trimmed."""


class ReplayAnswer:
    """Contiguous from the seq asked for: the live state at a cut if the journal does not reach back, then the journal.

    ``start`` is answered by the journal where it holds it. Otherwise the answer tells the state as of the cut's seq,
    numbered from ``start``, fills up with empty batches to the cut, and goes on from the journal. It ends at what was
    newest when the journal part began; what came later is on the live stream. A requester so slow that the journal
    trims past it is told a newer cut. One whose seq lies more than ``MAX_FILLER`` back is answered from just before the
    cut: its first batch is not the one it asked for, and says AllBlocksCleared.

    Args:
        stream: the stream asked.
        request: what was asked.
        cut: makes (or shares) a cut of the stream's state, to be told from the seq given; called only if one is needed.
    """

    def __init__(self, stream: OutputStream, request: ReplayRequest, cut: Callable[[int], StateSnapshot]) -> None:
        self._stream = stream
        self.identity = request.envelope[0]
        self._envelope = request.envelope
        self._seq = request.start
        self._end = stream.next_seq
        self._make_cut = cut
        self._cut: StateSnapshot | None = None
        """Held until the answer is over, so that whoever asks meanwhile is told the same one."""
        self._chunks: SnapshotChunks | None = None
        self._told = 0
        self._empty = b""
        self.done = False
        """Its last message was taken."""
        self.outcome = "complete" if request.well_formed else "malformed"
        """What to count it as once it is over; ``compacted`` if it reached behind the journal, ``late`` if it had to
        begin later than asked for."""

    def next_message(self) -> list[bytes] | None:
        """The next message, END as the last one, then None."""
        if self.done:
            return None
        while self._seq < self._end:
            payload = self._from_journal() if self._chunks is None else self._from_cut(self._chunks)
            if payload is None:
                continue
            seq = self._seq
            self._seq += 1
            stream = self._stream
            frame = seq.to_bytes(SEQ_BYTES, "big") + stream.publisher_id
            return replay_data(stream.profile.framing, self._envelope, stream.topic, frame, payload)
        return self.refusal()

    def refusal(self) -> list[bytes]:
        """END, and nothing before it: nobody waits for ever."""
        self.done = True
        self._cut = None
        return replay_end(self._stream.profile.framing, self._envelope)

    def _from_journal(self) -> bytes | None:
        journal = self._stream.journal
        entry = journal.at(journal.position(self._seq))
        if entry is not None and entry.seq <= self._seq < entry.seq + entry.count:
            return entry.payload
        self._begin_cut()
        return None

    def _begin_cut(self) -> None:
        cut = self._cut = self._make_cut(self._seq)
        self._end = max(self._end, cut.seq + 1)
        room = cut.seq + 1 - self._seq
        self._chunks = cut.chunks(room)
        if room - self._chunks.count > MAX_FILLER:
            self._seq = cut.seq + 1 - self._chunks.count
            self.outcome = "late"
        elif self.outcome != "late":
            self.outcome = "compacted"
        self._told = 0
        self._empty = encode(self._stream.profile.wire, [], 0.0, self._stream.rank)

    def _from_cut(self, telling: SnapshotChunks) -> bytes | None:
        """The next batch of the cut, then filler up to its seq; None when it is the journal's turn."""
        if self._cut is None or self._seq > self._cut.seq:
            self._chunks = None
            self._end = self._stream.next_seq
            return None
        payload = telling.get(self._told)
        if payload is None:
            return self._empty
        self._told += 1
        return payload
