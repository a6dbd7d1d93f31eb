"""One stream of an output, with its journal and heartbeats, and the transfers that bring its state to routers.

The seqs of a stream have no gaps. Only routers that have just subscribed or have lost batches get the state. The
batches of the state have the seqs after the stream's newest batch. All other routers get an empty batch for each of
these seqs, so that no router sees a gap. The state begins with AllBlocksCleared, because a router may hold blocks that
the engine has dropped. After the state, its receivers get the live stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.outputs.journal import Journal
from kvbus.core.wire.profiles import Profile

MAX_RANGES: Final = 1000
"""Maximum number of ranges of seqs in :class:`IncompleteSeqs`. If there are more, the two oldest ranges are joined.

A router that requests a replay from a seq between the joined ranges then gets a state although the journal has the few
batches that it needs.
"""


class IncompleteSeqs:
    """The seqs of a stream at which a router may hold only part of a state, as disjoint ranges in ascending order.

    A state is sent in several batches, each with its own seq. If a router's connection breaks between two of these
    batches, the router requests a replay from the next seq on. The journal has only empty batches at these seqs,
    because the state was sent only to that router. If the router continued with them, it would keep part of the state
    for ever. So kvbus answers such a request with the complete state (docs/decisions/state-on-subscription.md).
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
        """Add the seqs from ``first`` up to, but not including, ``end``. Ignore an empty range."""
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
    """One numbered stream of an output.

    Its seq never goes back and never skips a number. The journal keeps every batch, even a batch that is not sent live.
    """

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
        """The 16 bytes after the seq in every sequence frame; empty if the output does not offer snapshots.

        A new id is chosen whenever the stream's numbering begins again.
        """
        self.topic = topic or b""
        self.first_seq = first_seq
        """The first seq that this process of kvbus uses on the stream."""
        self.next_seq = first_seq
        self.changed_seq = first_seq - 1
        """The seq of the newest batch that is not empty.

        A state snapshot as of this batch or a later one is up to date.
        """
        self.incomplete = IncompleteSeqs()
        self.closed = False
        """Whether the stream's source has left.

        The stream stays, with its numbering, for the next source in the same slot.
        """
        self.idle_since: float | None = None
        self.beat_ts = 0.0
        """The ``ts`` of the newest empty batch."""
        self.numbered = numbered
        """Whether the stream repeats the records of a log under the log's numbers.

        kvbus then sends no batches of its own on the stream. See :mod:`kvbus.core.log_relay`.
        """
        self.outgrown = 0
        """How often the state of a log and the batches after it were too large for the journal.

        The journal then does not contain a complete state.
        """
        self._state: Journal | None = None
        """The records of a state that the log is repeating for new readers, as far as they were received.

        It is None if no such state is being received.
        """

    def resume_at(self, seq: int) -> None:
        """Continue the stream at ``seq``, which is higher than every seq used before, with an empty journal."""
        self.next_seq = self.first_seq = seq
        self.changed_seq = seq - 1
        self.journal = self._new_journal()
        self.incomplete = IncompleteSeqs()

    def take(
        self, seq: int, payload: bytes, empty: bytes, now: float, *, begins: bool, ends: bool, known: bool
    ) -> bytes:
        """Add the next record of a log to the stream. Return the payload that routers get on the live stream.

        The journal begins with the newest complete state of the log. If the log repeats a state whose content routers
        already have, these routers get empty batches in its place. The journal also keeps these empty batches until the
        repeated state is complete. Otherwise a replay could contain the first half of the state and then empty batches,
        which would leave a router with wrong blocks.

        Args:
            seq: the record's number in the log.
            payload: the payload of the record.
            empty: the payload of an empty batch.
            now: the time of the relay's event.
            begins: whether the record is the first of a state.
            ends: whether the record is the last of a state.
            known: whether routers that have every earlier record already have the content of this record.
        """
        if seq != self.next_seq or (begins and not known):
            self.resume_at(seq)
            self._state = None
        elif not known:
            self._state = None
        elif begins:
            self._state = self._new_journal()
        held_state = self.holds_state
        live = empty if known else payload
        self.append(live, now, empty=live is empty)
        if self._state is not None:
            self._state.append(seq, payload)
            if ends:
                self.journal, self._state = self._state, None
        if held_state and not self.holds_state:
            self.outgrown += 1
        return live

    @property
    def holds_state(self) -> bool:
        """Whether the journal of a stream that is read from a log contains a complete state.

        It is False once the journal has dropped an entry because of a limit.
        """
        return not self.journal.trimmed

    def _new_journal(self) -> Journal:
        return Journal(self.journal.max_batches, self.journal.max_bytes)

    def append(self, payload: bytes, now: float, *, empty: bool = False) -> int:
        """Give a batch the next seq, and keep it for replays. Return the seq."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self.journal.append(seq, payload, empty=empty)
        if not empty:
            self.changed_seq = seq
        self.idle_since = now
        return seq

    def heartbeat_due(self, now: float) -> bool:
        """Return whether the stream should send an empty batch, because it was silent for ``heartbeat`` seconds.

        A stream sends no heartbeats if it is closed, if its batches come from a log, or if ``heartbeat`` is 0.
        """
        if not self.heartbeat or self.closed or self.numbered:
            return False
        if self.idle_since is None:
            self.idle_since = now
        return now - self.idle_since >= self.heartbeat


class StateTransfer:
    """A state with the seqs of its batches, as it is sent to one or more routers.

    Each router iterates over its own :meth:`batches`.

    Args:
        snapshot: the state.
        first_seq: seq of the first batch of the state.
        topic: the topic of the stream.
        publisher_id: the bytes after the seq in each sequence frame; empty if the output does not offer snapshots.
    """

    def __init__(self, snapshot: StateSnapshot, first_seq: int, topic: bytes, publisher_id: bytes) -> None:
        self.first_seq = first_seq
        self.topic = topic
        self.publisher_id = publisher_id
        self._snapshot = snapshot
        self._chunks = snapshot.chunks(snapshot.fewest)
        self.end_seq = first_seq + self._chunks.count
        """The seq of the first live batch after the state."""

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield the seq and the payload of each batch of the state. Yield None if the next batch is not built yet."""
        chunks = self._chunks.reader()
        for seq in range(self.first_seq, self.end_seq):
            while not (payload := chunks.next_payload()):
                if payload is None:
                    raise LookupError(f"the state ends before seq {seq} instead of before {self.end_seq}")
                yield None
            yield seq, payload


class JournalTransfer:
    """The state of a stream that is read from a log: the current content of its journal, which begins with a state.

    Routers that kept up with the stream have already received these batches, under the same seqs. The transfer keeps
    the batches itself, so a slow router gets all of them even if the journal drops some before the router has read
    them.
    """

    def __init__(self, stream: OutputStream) -> None:
        self.topic = stream.topic
        self.publisher_id = stream.publisher_id
        self.end_seq = stream.next_seq
        first = stream.journal.first_seq
        self.first_seq = self.end_seq if first is None else first
        self._entries = stream.journal.entries()

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield the seq and the payload of each batch of the state.

        It never yields None, because all batches of the journal are already built.
        """
        for entry in self._entries:
            for seq in range(entry.seq, entry.seq + entry.batches):
                yield seq, entry.payload


Transfer = StateTransfer | JournalTransfer
