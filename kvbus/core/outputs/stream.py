"""One numbered stream of an output: dense seqs, the journal, heartbeats, and the transfer of its state.

Only routers that have just subscribed or have lost batches get the state. It has the seqs after the stream's newest
one. All other routers get an empty batch for each of these seqs, so that the numbering is dense for every router.
AllBlocksCleared comes first, because a router may hold blocks that are gone. The live stream of the receiving routers
continues after the transfer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.outputs.journal import Journal
from kvbus.core.wire.profiles import Profile

MAX_RANGES: Final = 1000
"""Maximum number of ranges. At the limit, the two oldest ranges are joined.

A router that asks for a seq between them then gets a state in place of a few batches of the journal.
"""


class IncompleteSeqs:
    """The seqs of a stream at which a router may hold part of a state, as disjoint ranges in ascending order.

    A state snapshot is sent in several batches, each with its own seq. If a router's connection breaks between two of
    them, the router asks for a replay from the next seq on. The journal has empty batches there, because the snapshot
    was only for that router. So the journal's answer would leave the router with part of the state for ever. It gets
    the complete state again (docs/decisions/state-on-subscription.md).
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._firsts, seq) - 1
        return at >= 0 and seq < self._ends[at]

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, first: int, end: int) -> None:
        """Add ``[first, end)``; an empty range adds nothing."""
        if first >= end:
            return
        low = bisect_right(self._ends, first - 1)
        high = bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]
        if len(self._firsts) > MAX_RANGES:
            del self._firsts[1], self._ends[0]


class OutputStream:
    """A stream whose seq never goes back and never skips: batches that are not sent live are still in the journal."""

    def __init__(
        self,
        topic: bytes | None,
        profile: Profile,
        journal: Journal,
        *,
        heartbeat: float,
        rank: int,
        publisher_id: bytes = b"",
        first_seq: int = 0,
        numbered: bool = False,
    ) -> None:
        self.keeps_topic = topic is None
        self.profile = profile
        self.wire = profile.wire
        self.journal = journal
        self.heartbeat = heartbeat
        self.rank = rank
        self.publisher_id = publisher_id
        """The 16 bytes after the seq in every sequence frame if snapshots are offered, otherwise empty.

        Each epoch of the numbering has a new id.
        """
        self.topic = topic or b""
        self.first_seq = first_seq
        """The first seq of the numbering in this process."""
        self.next_seq = first_seq
        self.changed_seq = first_seq - 1
        """The seq of the newest batch that is not empty: a state as of this batch is still current."""
        self.incomplete = IncompleteSeqs()
        self.closed = False
        """Whether its source is gone. The numbering is kept for the next source in its slot."""
        self.idle_since: float | None = None
        self.numbered = numbered
        """Whether its numbers are those of a log (:mod:`kvbus.core.numbered`). Then they are used for nothing else."""
        self.outgrown = 0
        """How often a log's state, and the batches after it, outgrew the journal."""
        self._state: Journal | None = None
        """The beginning of a state that routers already have."""

    def resume_at(self, seq: int) -> None:
        """Continue at a later seq, with an empty journal."""
        self.next_seq = self.first_seq = seq
        self.changed_seq = seq - 1
        self.journal = self._new_journal()
        self.incomplete = IncompleteSeqs()

    def take(
        self, seq: int, payload: bytes, empty: bytes, now: float, *, begins: bool, ends: bool, known: bool
    ) -> bytes:
        """Keep the next record of a log; return the payload that routers get.

        The journal starts at the newest complete state. Routers that have every record so far get empty batches in
        place of a state whose content they have. The journal keeps the same empty batches until that state is complete:
        a replay of half a state followed by empty batches would leave a router with wrong blocks.
        """
        if seq != self.next_seq or (begins and not known):
            self.resume_at(seq)
            self._state = None
        elif not known:
            self._state = None
        elif begins:
            self._state = self._new_journal()
        whole = self.whole
        live = empty if known else payload
        self._keep(live, now, empty=live is empty)
        if self._state is not None:
            self._state.append(seq, payload)
            if ends:
                self.journal, self._state = self._state, None
        if whole and not self.whole:
            self.outgrown += 1
        return live

    @property
    def whole(self) -> bool:
        """Whether the journal goes back to a state; False once the journal has been trimmed.

        Only for a log's numbers.
        """
        return not self.journal.trimmed

    def _new_journal(self) -> Journal:
        return Journal(self.journal.max_batches, self.journal.max_bytes)

    def append(self, payload: bytes, now: float, *, empty: bool = False) -> int:
        """Number one batch and keep it for replay; return its seq.

        Raises:
            AssertionError: the numbers are those of a log, so none is free.
        """
        if self.numbered:
            raise AssertionError("a log's numbers are used for its records alone")
        return self._keep(payload, now, empty=empty)

    def _keep(self, payload: bytes, now: float, *, empty: bool) -> int:
        seq = self.next_seq
        self.next_seq = seq + 1
        self.journal.append(seq, payload, empty=empty)
        if not empty:
            self.changed_seq = seq
        self.idle_since = now
        return seq

    def heartbeat_due(self, now: float) -> bool:
        """Return whether the stream has been silent for ``heartbeat`` seconds (0: never)."""
        if not self.heartbeat or self.closed or self.numbered:
            return False
        if self.idle_since is None:
            self.idle_since = now
        return now - self.idle_since >= self.heartbeat


class StateTransfer:
    """A frozen, numbered state. Several routers share it; each iterates over its own :meth:`batches`.

    Args:
        snapshot: the state.
        first_seq: seq of the first batch.
        topic: the stream's topic.
        publisher_id: the bytes after the seq in each sequence frame; empty unless the output offers snapshots.
    """

    def __init__(self, snapshot: StateSnapshot, first_seq: int, topic: bytes, publisher_id: bytes) -> None:
        self.first_seq = first_seq
        self.topic = topic
        self.publisher_id = publisher_id
        self._snapshot = snapshot
        self._chunks = snapshot.chunks(snapshot.fewest)
        self.end_seq = first_seq + self._chunks.count
        """The seq of the first live batch after it."""

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield each batch as seq and payload; None while the next batch is being built."""
        chunks = self._chunks.reader()
        for seq in range(self.first_seq, self.end_seq):
            while not (payload := chunks.next_payload()):
                if payload is None:
                    raise LookupError(f"the state ends before seq {seq}, and {self.end_seq} is next")
                yield None
            yield seq, payload


class JournalTransfer:
    """The state of a stream with a log's numbers: its current journal, which begins with a state.

    All other routers have had these batches under these seqs. The transfer holds the batches themselves: a slow router
    gets all of them even if the journal drops them.
    """

    def __init__(self, stream: OutputStream) -> None:
        self.topic = stream.topic
        self.publisher_id = stream.publisher_id
        self.end_seq = stream.next_seq
        first = stream.journal.first_seq
        self.first_seq = self.end_seq if first is None else first
        self._entries = stream.journal.entries()

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield each batch as seq and payload."""
        for entry in self._entries:
            for seq in range(entry.seq, entry.seq + entry.batches):
                yield seq, entry.payload


Transfer = StateTransfer | JournalTransfer
