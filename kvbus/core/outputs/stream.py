"""One numbered stream of an output: dense seqs, the journal, heartbeats, and the seqs whose state was cut off."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from kvbus.core.outputs.journal import Journal
from kvbus.core.wire.profiles import Profile

MAX_RANGES: Final = 1000
"""Maximum number of ranges. At the limit the two oldest ranges are joined, so a router that asks for a seq between them
gets a state in place of a few batches of the journal."""


class IncompleteSeqs:
    """The seqs of a stream at which a router may hold part of a state, as disjoint ranges in ascending order.

    A state snapshot leaves in several batches, and each has a seq. A router whose connection breaks between two of them
    asks for a replay from the next seq on. The journal has an empty batch there, because the snapshot was for that
    router alone. So the journal's answer would leave the router with part of the state for ever. It gets the whole
    state again (docs/decisions/state-on-subscription.md).
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
    """The seq of a stream never goes back and never skips: what is not sent live is still in the journal."""

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
        """16 bytes after the seq in every sequence frame where snapshots are offered, else nothing. Each epoch of the
        numbering has a new one."""
        self.topic = topic or b""
        self.first_seq = first_seq
        """What the numbering of this process began with."""
        self.next_seq = first_seq
        self.changed_seq = first_seq - 1
        """The newest batch that is not empty: a state as of this one is still the state."""
        self.incomplete = IncompleteSeqs()
        self.closed = False
        """Its source is gone; the numbering is kept for the next one in its place."""
        self.idle_since: float | None = None
        self.numbered = numbered
        """Its numbers are those of a log (:mod:`kvbus.core.numbered`): none is taken for anything else."""
        self.outgrown = 0
        """Times that a log's state, and what came behind it, had no room in the journal."""
        self._state: Journal | None = None
        """The beginning of a state that routers have."""

    def resume_at(self, seq: int) -> None:
        """Go on at a later seq, with an empty journal."""
        self.next_seq = self.first_seq = seq
        self.changed_seq = seq - 1
        self.journal = self._new_journal()
        self.incomplete = IncompleteSeqs()

    def take(
        self, seq: int, payload: bytes, empty: bytes, now: float, *, begins: bool, ends: bool, known: bool
    ) -> bytes:
        """Keep what comes next of a log's numbers, the journal from the newest whole state on; return what routers get.

        Those that have everything so far get empty batches in place of a state that says what they have. So does the
        journal, until that state is whole: of half a state, and empty batches behind it, nobody would become right.
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
        self.append(live, now, empty=live is empty)
        if self._state is not None:
            self._state.append(seq, payload)
            if ends:
                self.journal, self._state = self._state, None
        if whole and not self.whole:
            self.outgrown += 1
        return live

    @property
    def whole(self) -> bool:
        """Of a log's numbers: the journal goes back to a state. Behind one that has outgrown it it does not."""
        return not self.journal.trimmed

    def _new_journal(self) -> Journal:
        return Journal(self.journal.max_batches, self.journal.max_bytes)

    def append(self, payload: bytes, now: float, *, empty: bool = False) -> int:
        """Number one batch and keep it for replay; its seq."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self.journal.append(seq, payload, empty=empty)
        if not empty:
            self.changed_seq = seq
        self.idle_since = now
        return seq

    def heartbeat_due(self, now: float) -> bool:
        """Whether the stream has been silent for ``heartbeat`` seconds (0: never)."""
        if not self.heartbeat or self.closed or self.numbered:
            return False
        if self.idle_since is None:
            self.idle_since = now
        return now - self.idle_since >= self.heartbeat
