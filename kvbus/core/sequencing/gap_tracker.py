"""The numbers of one epoch: delivered, held and missing batches, and their counts.

Three positions::

    next      the next batch to deliver; every batch before it was delivered or lost
    log_end   one past the highest batch known to exist; missing batches lie in [next, log_end)
    live_end  one past the highest batch of the live stream

Once ``synced``, every hole is accounted for: ``missing == recovered + lost + pending``. The first three are counted at
the events themselves. ``pending`` is never derived from them: it is the count of numbers in [next, log_end) that are
not held.
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
    """Batches that came ahead of their turn, by seq. It knows its lowest and its highest number.

    Args:
        max_batches: maximum number of batches.
        max_bytes: maximum total size of their payloads. A single batch may be larger.
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
        """The numbers, ascending. Numbers before ``_from`` were taken out; they are deleted once they are half of the
        list."""
        self._from = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, seq: int) -> bool:
        return seq in self._payloads

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers, ascending."""
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
        """Return whether another batch fits within the limits."""
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
        """Return batch ``seq``. It must be in the buffer."""
        return self._payloads[seq]

    def replace(self, seq: int, payload: bytes) -> None:
        """Replace the payload of a number in the buffer."""
        self.bytes += len(payload) - len(self._payloads[seq])
        self._payloads[seq] = payload

    def take(self, seq: int) -> bytes | None:
        """Remove batch ``seq`` and return it; None if it is not in the buffer. The buffer must have no lower number."""
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
        """Drop every number below ``seq``. Return how many were dropped."""
        return self._drop(self._from, bisect_left(self._order, seq, lo=self._from))

    def drop_from(self, seq: int) -> int:
        """Drop ``seq`` and every number above it. Return how many were dropped."""
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
    """The positions of one epoch: puts its batches in order. It emits :class:`Deliver` for the next batch.

    Args:
        held: an empty buffer for waiting batches.
        stats: the counters of the source; they span epochs.
        actions: receives the decisions.
    """

    __slots__ = ("_actions", "_stats", "answered_end", "fingerprints", "held", "live_end", "log_end", "next", "synced")

    def __init__(self, held: ReorderBuffer, stats: SourceStats, actions: deque[Action]) -> None:
        # Positions, see the module docstring.
        self.next = 0
        self.log_end = 0
        self.live_end = 0
        self.answered_end = 0
        """One past the highest batch of a compacted answer. Up to there, content says nothing about a live batch."""
        self.synced = False
        """Whether the history was delivered, or cannot be had. From then on every hole counts as missing."""

        # Waiting batches, and fingerprints of delivered ones.
        self.held = held
        self.fingerprints = Fingerprints()

        self._stats = stats
        self._actions = actions

    @property
    def complete(self) -> bool:
        """Whether every known batch is delivered."""
        return not self.held and self.next >= self.log_end

    @property
    def caught_up(self) -> bool:
        """Whether every batch of the live stream is delivered, and there was at least one."""
        return 0 < self.live_end <= self.next and not self.held

    @property
    def pending(self) -> int:
        """Number of missing batches that may still come."""
        return self.log_end - self.next - len(self.held) if self.synced else 0

    def live_in_order(self, seq: int, payload: bytes) -> None:
        """Deliver the next batch of the live stream. No batch may be held."""
        end = seq + 1
        if seq >= self.log_end:
            self.log_end = end
        else:
            self._stats.recovered += 1
        self.live_end = max(self.live_end, end)
        self._deliver(seq, payload)

    def live_later(self, seq: int, payload: bytes) -> None:
        """Keep a live batch that may be ahead of its turn."""
        self._keep(seq, payload, found=False)
        self.live_end = max(self.live_end, seq + 1)

    def replayed(self, seq: int, payload: bytes) -> None:
        """Deliver or keep a batch of a replay that was neither delivered nor held."""
        if seq == self.next and not self.held:
            self._found_next(seq, payload)
        else:
            self._keep(seq, payload, found=True)
            self.drain()

    def compacted(self, seq: int, payload: bytes) -> None:
        """Deliver or keep a batch of an answer that may be compacted. Live batches wait until the answer ends."""
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
        """Deliver held batches that are in order."""
        held = self.held
        while held and (payload := held.take(self.next)) is not None:
            self._deliver(self.next, payload)

    def _deliver(self, seq: int, payload: bytes) -> None:
        fingerprint = self.fingerprints.add(seq, payload)
        self.next = seq + 1
        self._actions.append(Deliver(seq, payload, fingerprint))

    def _keep(self, seq: int, payload: bytes, *, found: bool) -> None:
        """Keep a batch until its turn.

        Over a limit, drop the newest batches: they are missing, and will be requested.
        """
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
            stats.missing += self.synced  # a batch that had arrived is missing again
            if held.last <= seq:
                return
            held.drop_last()
        held.add(seq, payload)

    def _count_found(self, seq: int) -> None:
        """Count a replayed batch as recovered. It is from a gap, or from the end of a silent stream."""
        if seq >= self.log_end:
            self._stats.missing += seq + 1 - self.log_end
        self._stats.recovered += 1

    def contest(self, seq: int, payload: bytes) -> bool:
        """Compare another batch with the batch held under its number. If they differ, a replay has to decide.

        Return whether they differ. If so, the held batch and all held batches after it are dropped.
        """
        if self.held.get(seq) == payload:
            return False
        count = self.held.drop_from(seq)
        if self.synced:
            self._stats.missing += count
        return True

    def drop_far(self, reach: int) -> int:
        """Drop held batches after a hole of ``reach`` numbers or more, and forget the hole.

        Return how many were dropped.
        """
        before = self.next
        for seq in self.held:
            if seq - before >= reach:
                count = self.held.drop_from(seq)
                self.live_end = self.log_end = before
                return count
            before = seq + 1
        return 0

    def begin_at(self, seq: int) -> None:
        """Begin at ``seq``, the first batch of this epoch that the publisher still has."""
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def open(self) -> None:
        """Count every hole as missing from now on, including holes that the first replay did not fill."""
        self.synced = True
        self.log_end = (self.held.last if self.held else self.next - 1) + 1
        self._stats.missing += self.log_end - self.next - len(self.held)

    def give_up(self, reason: LostReason) -> None:
        """Give up the batches before the first held batch, or all known missing ones if none is held. They are lost."""
        first = self.held.first if self.held else self.log_end
        count = first - self.next
        self._stats.lost += count
        self.fingerprints.skip(self.next, first)
        self.next = first
        self._actions.append(Lost(count, reason))
        self.drain()

    def skip_lost(self) -> None:
        """Give up the next batch: it exists and cannot be received."""
        if self.synced:
            self._stats.missing += max(self.next + 1 - self.log_end, 0)
            self._stats.lost += 1
        self.fingerprints.skip(self.next, self.next + 1)
        self.next += 1
        self.log_end = max(self.log_end, self.next)
        self._actions.append(Lost(1))
        self.drain()

    def expose(self, end: int) -> None:
        """Note that batches up to ``end`` exist: count the batches that were unknown so far as missing."""
        if self.synced and end > self.log_end:
            self._stats.missing += end - self.log_end
        self.log_end = max(self.log_end, end)

    def write_off(self) -> None:
        """End the epoch: count pending batches as lost, and held ones as of an old epoch. Positions stay."""
        self._stats.lost += self.pending
        self._stats.filtered[Filtered.OLD_EPOCH] += len(self.held)

    def forget_ahead(self) -> None:
        """Forget everything after the last delivered batch. Call it after :meth:`write_off`."""
        self.held.clear()
        self.live_end = self.log_end = self.next

    def jump(self, seq: int) -> None:
        """Continue at ``seq``: a snapshot covers all earlier batches. The missing ones among them will not come."""
        known = self.held.drop_before(seq)
        self._stats.duplicates += known  # the snapshot includes their effect
        if self.synced:
            self._stats.lost += max(min(seq, self.log_end) - self.next - known, 0)
        self.fingerprints.skip(self.next, seq)
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """Restore a batch from the write-ahead log: it was delivered before a restart of this process."""
        self.synced = True
        self.fingerprints.skip(self.next, seq)
        self.fingerprints.add(seq, payload)
        self.next = self.log_end = seq + 1
