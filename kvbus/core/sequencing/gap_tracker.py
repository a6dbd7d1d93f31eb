"""The numbers of one epoch: what was delivered, what is held back, what is missing, and the account of it.

Three positions::

    next      the batch to be delivered next; everything before it was delivered, or lost
    log_end   one past the highest batch known to exist; what is missing lies in [next, log_end)
    live_end  one past the highest batch the live stream has shown

Once ``synced``, every hole is accounted for: ``missing == recovered + lost + pending``. The first three are counted
where something happens. ``pending`` is never derived from them: it is how many numbers in [next, log_end) are not held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from kvbus.core.sequencing.actions import Action, Deliver, Lost, LostReason
from kvbus.core.sequencing.fingerprints import Fingerprints
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered


class ReorderBuffer:
    """Batches that came before their turn, by seq. It knows its lowest and its highest number.

    Args:
        max_batches: maximum number of batches.
        max_bytes: maximum of their payloads. A single batch may be larger.
    """

    __slots__ = ("_from", "_order", "_payloads", "bytes", "max_batches", "max_bytes")

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Drop every batch."""
        self.bytes = 0
        self._payloads: dict[int, bytes] = {}
        self._order: list[int] = []
        """The numbers, ascending. Those before ``_from`` were taken; they go when they are half of the list."""
        self._from = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, seq: int) -> bool:
        return seq in self._payloads

    def __iter__(self) -> Iterator[int]:
        """The numbers, ascending."""
        return iter(self._order[self._from :])

    @property
    def first(self) -> int:
        """The lowest number. The buffer must not be empty."""
        return self._order[self._from]

    @property
    def last(self) -> int:
        """The highest number. The buffer must not be empty."""
        return self._order[-1]

    def fits(self, payload: bytes) -> bool:
        """Return whether one more batch is within the limits."""
        if not self._payloads:
            return True
        return len(self._payloads) < self.max_batches and self.bytes + len(payload) <= self.max_bytes

    def add(self, seq: int, payload: bytes) -> None:
        """Keep a batch under a new number. Call :meth:`fits` first."""
        if not self._order or seq > self._order[-1]:
            self._order.append(seq)
        else:
            insort(self._order, seq, lo=self._from)
        self._payloads[seq] = payload
        self.bytes += len(payload)

    def get(self, seq: int) -> bytes:
        """Return the batch ``seq``, which must be kept."""
        return self._payloads[seq]

    def replace(self, seq: int, payload: bytes) -> None:
        """Keep another payload under a number that is kept."""
        self.bytes += len(payload) - len(self._payloads[seq])
        self._payloads[seq] = payload

    def take(self, seq: int) -> bytes | None:
        """Take the batch ``seq`` out if it is kept. No lower number may be kept then."""
        payload = self._payloads.pop(seq, None)
        if payload is None:
            return None
        self.bytes -= len(payload)
        self._from += 1
        if not self._payloads:
            self.clear()
        elif self._from * 2 > len(self._order):
            del self._order[: self._from]
            self._from = 0
        return payload

    def drop_last(self) -> None:
        """Drop the highest number."""
        self._drop(len(self._order) - 1, len(self._order))

    def drop_before(self, seq: int) -> int:
        """Drop every number below ``seq``. Return how many there were."""
        return self._drop(self._from, bisect_left(self._order, seq, lo=self._from))

    def drop_from(self, seq: int) -> int:
        """Drop ``seq`` and every number above it. Return how many there were."""
        return self._drop(bisect_left(self._order, seq, lo=self._from), len(self._order))

    def _drop(self, start: int, end: int) -> int:
        gone = self._order[start:end]
        for seq in gone:
            self.bytes -= len(self._payloads.pop(seq))
        del self._order[start:end]
        if not self._payloads:
            self.clear()
        return len(gone)


class GapTracker:
    """Puts one epoch's batches in order. The next batch leaves as :class:`Deliver`.

    Args:
        held: where batches wait, empty.
        stats: where the account is kept; it goes on over epochs.
        actions: where decisions go.
    """

    __slots__ = ("_actions", "_stats", "answered_end", "fingerprints", "held", "live_end", "log_end", "next", "synced")

    def __init__(self, held: ReorderBuffer, stats: SourceStats, actions: deque[Action]) -> None:
        # Positions, see above.
        self.next = 0
        self.log_end = 0
        self.live_end = 0
        self.answered_end = 0
        """One past the highest batch that a compacted answer has brought: it proves nothing about a live one."""
        self.synced = False
        """The history was delivered (or cannot be had): from here on every hole is missing."""

        # Batches that wait, and what is known of those delivered.
        self.held = held
        self.fingerprints = Fingerprints()

        self._stats = stats
        self._actions = actions

    @property
    def complete(self) -> bool:
        """Everything known of is delivered."""
        return not self.held and self.next >= self.log_end

    @property
    def caught_up(self) -> bool:
        """Everything the live stream has shown is delivered, and it has shown something."""
        return 0 < self.live_end <= self.next and not self.held

    @property
    def pending(self) -> int:
        """How many batches are missing whose fate is open."""
        return self.log_end - self.next - len(self.held) if self.synced else 0

    def live_in_order(self, seq: int, payload: bytes) -> None:
        """Take the next batch of the live stream, with nothing held."""
        end = seq + 1
        if seq >= self.log_end:
            self.log_end = end
        else:
            self._stats.recovered += 1
        self.live_end = max(self.live_end, end)
        self._deliver(seq, payload)

    def live_later(self, seq: int, payload: bytes) -> None:
        """Take a batch of the live stream whose turn may not have come."""
        self._keep(seq, payload, found=False)
        self.live_end = max(self.live_end, seq + 1)

    def replayed(self, seq: int, payload: bytes) -> None:
        """Take a batch of a replay, neither delivered nor held so far."""
        if seq == self.next and not self.held:
            self._found_next(seq, payload)
        else:
            self._keep(seq, payload, found=True)
            self.drain()

    def compacted(self, seq: int, payload: bytes) -> None:
        """Take a batch of an answer that may be compacted: what the live stream has brought waits until its end."""
        held = self.held
        self.answered_end = max(self.answered_end, seq + 1)
        if seq in held:
            held.replace(seq, payload)
            if seq == self.next:
                held.take(seq)
                self._deliver(seq, payload)
        elif seq == self.next:
            self._found_next(seq, payload)
        else:
            self._keep(seq, payload, found=True)

    def _found_next(self, seq: int, payload: bytes) -> None:
        """Deliver the next batch, which a replay has brought."""
        if self.synced:
            self._count_found(seq)
        self.log_end = max(self.log_end, seq + 1)
        self._deliver(seq, payload)

    def drain(self) -> None:
        """Deliver what is held and in order."""
        held = self.held
        while held and (payload := held.take(self.next)) is not None:
            self._deliver(self.next, payload)

    def _deliver(self, seq: int, payload: bytes) -> None:
        fingerprint = self.fingerprints.add(seq, payload)
        self.next = seq + 1
        self._actions.append(Deliver(seq, payload, fingerprint))

    def _keep(self, seq: int, payload: bytes, *, found: bool) -> None:
        """Keep a batch until its turn. Over a limit drop the newest ones: they are missing, and are asked for."""
        stats, held = self._stats, self.held
        if self.synced:
            if found:
                self._count_found(seq)
            elif seq >= self.log_end:
                stats.missing += seq - self.log_end
            else:
                stats.recovered += 1
        self.log_end = max(self.log_end, seq + 1)
        while seq != self.next and not held.fits(payload):
            stats.held_overflow += 1
            stats.missing += self.synced  # one that had arrived is missing again
            if held.last <= seq:
                return
            held.drop_last()
        held.add(seq, payload)

    def _count_found(self, seq: int) -> None:
        """Count a replayed batch as recovered: one of a gap, or one from the tail of an idle stream."""
        if seq >= self.log_end:
            self._stats.missing += seq + 1 - self.log_end
        self._stats.recovered += 1

    def contest(self, seq: int, payload: bytes) -> bool:
        """Another batch has come under a number that is held. If its content differs, a replay has to decide.

        Returns whether it differs; then everything held from there on was dropped.
        """
        if self.held.get(seq) == payload:
            return False
        count = self.held.drop_from(seq)
        if self.synced:
            self._stats.missing += count
        return True

    def drop_far(self, reach: int) -> int:
        """Drop what waits behind a hole of ``reach`` numbers or more, and forget the hole; how many batches."""
        before = self.next
        for seq in self.held:
            if seq - before >= reach:
                count = self.held.drop_from(seq)
                self.live_end = self.log_end = before
                return count
            before = seq + 1
        return 0

    def begin_at(self, seq: int) -> None:
        """``seq`` is the first batch of this epoch that can still be had."""
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def open(self) -> None:
        """Count every hole as missing from here on, also those that the first replay has left."""
        self.synced = True
        self.log_end = (self.held.last if self.held else self.next - 1) + 1
        self._stats.missing += self.log_end - self.next - len(self.held)

    def give_up(self, reason: LostReason) -> None:
        """Give up the batches before the first one held, or all that are known of if none is held: they are lost."""
        first = self.held.first if self.held else self.log_end
        count = first - self.next
        self._stats.lost += count
        self.fingerprints.skip(self.next, first)
        self.next = first
        self._actions.append(Lost(count, reason))
        self.drain()

    def skip_lost(self) -> None:
        """Give up the next batch: it exists and cannot be had."""
        if self.synced:
            self._stats.missing += max(self.next + 1 - self.log_end, 0)
            self._stats.lost += 1
        self.fingerprints.skip(self.next, self.next + 1)
        self.next += 1
        self.log_end = max(self.log_end, self.next)
        self._actions.append(Lost(1))
        self.drain()

    def expose(self, end: int) -> None:
        """Batches up to ``end`` exist: count those as missing that nothing has shown so far."""
        if self.synced and end > self.log_end:
            self._stats.missing += end - self.log_end
        self.log_end = max(self.log_end, end)

    def write_off(self) -> None:
        """The epoch is over: count what is pending as lost, and what is held as of an old epoch; positions stay."""
        self._stats.lost += self.pending
        self._stats.filtered[Filtered.OLD_EPOCH] += len(self.held)

    def forget_ahead(self) -> None:
        """Nothing is known of what follows the last batch delivered. Call it after :meth:`write_off`."""
        self.held.clear()
        self.live_end = self.log_end = self.next

    def jump(self, seq: int) -> None:
        """Go on at ``seq``: a snapshot holds the outcome of all before it. Batches missing there will not come."""
        known = self.held.drop_before(seq)
        self._stats.duplicates += known  # what they say has come with the snapshot
        if self.synced:
            self._stats.lost += max(min(seq, self.log_end) - self.next - known, 0)
        self.fingerprints.skip(self.next, seq)
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """Take a batch of the write-ahead log: it was delivered before a restart of this process."""
        self.synced = True
        self.fingerprints.skip(self.next, seq)
        self.fingerprints.add(seq, payload)
        self.next = self.log_end = seq + 1
