"""Track the seqs of one epoch: delivered, held and missing batches, and their counts.

Three seqs divide the batches of the epoch::

    next      the batch to be delivered next; every earlier batch was delivered or is lost
    log_end   one past the highest batch known to exist; missing batches lie in [next, log_end)
    live_end  one past the highest batch that the live stream has shown

Once the history is ``synced``, every absent batch is counted: ``missing == recovered + lost + pending``. The first
three counters are incremented when a batch is found missing, arrives, or is given up. ``pending`` is computed
independently of them, as the number of seqs in [next, log_end) that are not held. So the equation is a check.
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
    """The batches that arrived while an earlier batch was missing, by seq.

    It has fast access to the lowest and the highest seq.

    Args:
        max_batches: maximum number of batches.
        max_bytes: maximum total size of their payloads in bytes. If the buffer is empty, one larger batch is accepted.
    """

    __slots__ = ("_from", "_order", "bytes", "max_batches", "max_bytes", "payloads")

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Drop all batches of the buffer."""
        self.bytes = 0
        self.payloads: dict[int, bytes] = {}
        self._order: list[int] = []
        """The seqs in ascending order.

        The seqs before index ``_from`` are not in the buffer any more. They are deleted once they are half of the list.
        """
        self._from = 0

    def __len__(self) -> int:
        return len(self.payloads)

    def __contains__(self, seq: int) -> bool:
        return seq in self.payloads

    def __iter__(self) -> Iterator[int]:
        """Iterate over the seqs in the buffer, in ascending order."""
        return iter(self._order[self._from :])

    @property
    def first(self) -> int:
        """The lowest seq in the buffer. The buffer must not be empty."""
        return self._order[self._from]

    @property
    def last(self) -> int:
        """The highest seq in the buffer. The buffer must not be empty."""
        return self._order[-1]

    def fits(self, payload: bytes) -> bool:
        """Return whether a batch with this payload can be added without exceeding the limits of the buffer."""
        if not self.payloads:
            return True
        return len(self.payloads) < self.max_batches and self.bytes + len(payload) <= self.max_bytes

    def add(self, seq: int, payload: bytes) -> None:
        """Add a batch whose seq is not in the buffer. Call :meth:`fits` first."""
        if not self._order or seq > self._order[-1]:
            self._order.append(seq)
        else:
            insort(self._order, seq, lo=self._from)
        self.payloads[seq] = payload
        self.bytes += len(payload)

    def get(self, seq: int) -> bytes:
        """Return the payload of batch ``seq``, which must be in the buffer."""
        return self.payloads[seq]

    def replace(self, seq: int, payload: bytes) -> None:
        """Replace the payload of batch ``seq``, which must be in the buffer."""
        self.bytes += len(payload) - len(self.payloads[seq])
        self.payloads[seq] = payload

    def take(self, seq: int) -> bytes | None:
        """Remove batch ``seq``, which must be the lowest one, and return its payload.

        Return None if it is not in the buffer.
        """
        payload = self.payloads.pop(seq, None)
        if payload is None:
            return None
        self.bytes -= len(payload)
        self._from += 1
        if not self.payloads:
            self.clear()
        elif self._from * 2 > len(self._order):
            del self._order[: self._from]
            self._from = 0
        return payload

    def drop_last(self) -> None:
        """Drop the batch with the highest seq."""
        self._drop(len(self._order) - 1, len(self._order))

    def drop_before(self, seq: int) -> int:
        """Drop every batch with a seq below ``seq``. Return the number of dropped batches."""
        return self._drop(self._from, bisect_left(self._order, seq, lo=self._from))

    def drop_from(self, seq: int) -> int:
        """Drop batch ``seq`` and every batch with a higher seq. Return the number of dropped batches."""
        return self._drop(bisect_left(self._order, seq, lo=self._from), len(self._order))

    def _drop(self, start: int, end: int) -> int:
        gone = self._order[start:end]
        for seq in gone:
            self.bytes -= len(self.payloads.pop(seq))
        del self._order[start:end]
        if not self.payloads:
            self.clear()
        return len(gone)


class GapTracker:
    """The delivered, held and missing seqs of one epoch.

    It puts the batches of the epoch in order, and appends a :class:`Deliver` to the actions for each next batch.

    Args:
        buffer: an empty buffer for batches that wait for an earlier one.
        stats: the counters of the source, which span all its epochs.
        actions: the queue that receives the sequencer's decisions.
    """

    __slots__ = (
        "_actions",
        "_only_live",
        "_stats",
        "answered_end",
        "buffer",
        "fingerprints",
        "live_end",
        "live_from",
        "log_end",
        "next",
        "synced",
    )

    def __init__(self, buffer: ReorderBuffer, stats: SourceStats, actions: deque[Action]) -> None:
        # Three seqs that divide the epoch's batches. The module's docstring explains them.
        self.next = 0
        self.log_end = 0
        self.live_end = 0
        self.live_from = 0
        """First seq of the newest delivered batches that all came on the live stream of the present connection.

        It equals ``next`` if the newest delivered batch came, or may have come, by replay or before the connection.
        """
        self._only_live = True
        """Whether no batch of a replay answer was added in this epoch, so that all held batches came live."""
        self.answered_end = 0
        """One past the highest batch of a replay answer that may have been a state; 0 if there was no such answer.

        The batches of a state have other content than the live batches with the same seqs. So a live batch below this
        seq that differs from the known batch does not prove a new epoch.
        """
        self.synced = False
        """Whether kvbus has read the epoch's history, or knows that it is not available.

        From then on, every absent batch counts as missing.
        """

        # The batches that wait for a missing one, and the fingerprints of delivered batches.
        self.buffer = buffer
        self.fingerprints = Fingerprints()

        self._stats = stats
        self._actions = actions

    @property
    def complete(self) -> bool:
        """Whether every batch that is known to exist is either delivered or given up."""
        return not self.buffer and self.next >= self.log_end

    @property
    def caught_up(self) -> bool:
        """Whether the live stream has brought at least one batch, and all its batches are delivered."""
        return 0 < self.live_end <= self.next and not self.buffer

    @property
    def pending(self) -> int:
        """Number of missing batches that may still arrive."""
        return self.log_end - self.next - len(self.buffer) if self.synced else 0

    def take_next(self, seq: int, payload: bytes) -> int | None:
        """Count a live batch as delivered, and return its fingerprint.

        Return None if the batch is not the next one in order, or if an earlier batch is missing.
        """
        if seq != self.next or self.buffer.payloads or not self.synced:
            return None
        self.next = end = seq + 1
        if seq >= self.log_end:
            self.log_end = end
        else:
            self._stats.recovered += 1
        self.live_end = max(self.live_end, end)
        return self.fingerprints.add(seq, payload)

    def live_in_order(self, seq: int, payload: bytes) -> bool:
        """Deliver a live batch if it is the next one in order. Return whether it is."""
        known = self.take_next(seq, payload)
        if known is not None:
            self._actions.append(Deliver(seq, payload, known))
        return known is not None

    def live_later(self, seq: int, payload: bytes) -> None:
        """Keep a live batch in the reorder buffer, because an earlier batch may not have been delivered yet."""
        self._keep(seq, payload, found=False)
        self.live_end = max(self.live_end, seq + 1)

    def replayed(self, seq: int, payload: bytes) -> None:
        """Deliver a batch of a replay answer, or keep it in the reorder buffer.

        Call it only for a batch that was not delivered and is not in the buffer.
        """
        self._only_live = False
        if seq == self.next and not self.buffer:
            self._found_next(seq, payload)
        else:
            self._keep(seq, payload, found=True)
            self.drain()

    def replaced(self, seq: int, payload: bytes) -> None:
        """Replace the held batch ``seq`` by the batch of a replay answer, and deliver the batches that are next."""
        self._only_live = False
        self.buffer.replace(seq, payload)
        self.drain()

    def compacted(self, seq: int, payload: bytes) -> None:
        """Deliver or hold a batch of a replay answer that may be a state.

        Held live batches stay held until the answer ends, because a state is valid only when it is complete.
        """
        buffer = self.buffer
        self._only_live = False
        self.answered_end = max(self.answered_end, seq + 1)
        if seq in buffer:
            buffer.replace(seq, payload)
            if seq == self.next:
                buffer.take(seq)
                self._deliver(seq, payload)
                self.live_from = self.next
        elif seq == self.next:
            self._found_next(seq, payload)
        else:
            self._keep(seq, payload, found=True)

    def _found_next(self, seq: int, payload: bytes) -> None:
        """Deliver the next batch in order, which has come by replay."""
        if self.synced:
            self._count_found(seq)
        self.log_end = max(self.log_end, seq + 1)
        self._deliver(seq, payload)
        self.live_from = self.next

    def drain(self) -> None:
        """Deliver the batches in the reorder buffer that follow the last delivered batch without a gap."""
        buffer = self.buffer
        while buffer and (payload := buffer.take(self.next)) is not None:
            self._deliver(self.next, payload)
            if not self._only_live:
                self.live_from = self.next

    def _deliver(self, seq: int, payload: bytes) -> None:
        fingerprint = self.fingerprints.add(seq, payload)
        self.next = seq + 1
        self._actions.append(Deliver(seq, payload, fingerprint))

    def _keep(self, seq: int, payload: bytes, *, found: bool) -> None:
        """Keep a batch in the reorder buffer until all earlier batches are delivered.

        If the buffer is full, drop the batches with the highest seqs. They are missing again, and kvbus requests them.

        ``found`` says that the batch has come by replay.
        """
        stats, buffer = self._stats, self.buffer
        if self.synced:
            if found:
                self._count_found(seq)
            elif seq >= self.log_end:
                stats.missing += seq - self.log_end
            else:
                stats.recovered += 1
        self.log_end = max(self.log_end, seq + 1)
        while seq != self.next and not buffer.fits(payload):
            stats.held_overflow += 1
            # Either this batch or the last one in the buffer is dropped, and is missing again. Before the end of the
            # first replay (`synced`), nothing counts as missing.
            stats.missing += self.synced
            if buffer.last <= seq:
                return
            buffer.drop_last()
        buffer.add(seq, payload)

    def _count_found(self, seq: int) -> None:
        """Count a replayed batch as recovered.

        If kvbus did not know that the batch existed, because it was lost at the end of the live stream, count it as
        missing, too.
        """
        if seq >= self.log_end:
            self._stats.missing += seq + 1 - self.log_end
        self._stats.recovered += 1

    def contest(self, seq: int, payload: bytes) -> bool:
        """Compare a live batch with the batch of the same seq in the reorder buffer. Return whether they differ.

        If they differ, drop that batch and all later batches from the buffer, so that kvbus requests them by replay.
        """
        if self.buffer.get(seq) == payload:
            return False
        count = self.buffer.drop_from(seq)
        if self.synced:
            self._stats.missing += count
        return True

    def drop_far(self, reach: int) -> int:
        """Drop the batches in the reorder buffer that follow a hole of at least ``reach`` batches. Return their number.

        A publisher does not lose a number of batches as large as ``reach``. So the hole is not a gap, but a seq is
        damaged or of another epoch. The batches of the hole do not count as missing.
        """
        before = self.next
        for seq in self.buffer:
            if seq - before >= reach:
                count = self.buffer.drop_from(seq)
                self.live_end = self.log_end = before
                return count
            before = seq + 1
        return 0

    def begin_at(self, seq: int) -> None:
        """Begin with batch ``seq``, the oldest batch of the epoch that is available."""
        self.next = self.live_from = seq
        self.log_end = max(self.log_end, seq)

    def open(self) -> None:
        """From now on, count every batch that has not arrived as missing (:attr:`synced`).

        Before, such batches are not counted, because kvbus may still read them in the replay of the epoch's history.
        """
        self.synced = True
        self.log_end = (self.buffer.last if self.buffer else self.next - 1) + 1
        self._stats.missing += self.log_end - self.next - len(self.buffer)

    def give_up(self, reason: LostReason) -> None:
        """Give up the missing batches before the first batch in the reorder buffer.

        If the buffer is empty, give up all missing batches.
        """
        first = self.buffer.first if self.buffer else self.log_end
        count = first - self.next
        self._stats.lost += count
        self.fingerprints.skip(self.next, first)
        self.next = self.live_from = first
        self._actions.append(Lost(count, reason))
        self.drain()

    def skip_lost(self) -> None:
        """Give up the next batch in order, because it is too large to receive."""
        if self.synced:
            self._stats.missing += max(self.next + 1 - self.log_end, 0)
            self._stats.lost += 1
        self.fingerprints.skip(self.next, self.next + 1)
        self.next = self.live_from = self.next + 1
        self.log_end = max(self.log_end, self.next)
        self._actions.append(Lost(1))
        self.drain()

    def expose(self, end: int) -> None:
        """Record that all batches before ``end`` exist.

        If the history is ``synced``, count as missing each of these batches that kvbus did not know of until now.
        """
        if self.synced and end > self.log_end:
            self._stats.missing += end - self.log_end
        self.log_end = max(self.log_end, end)

    def write_off(self) -> None:
        """Count the pending batches as lost, and the batches in the reorder buffer as old, because the epoch ends.

        The attributes ``next``, ``log_end`` and ``live_end`` stay unchanged.
        """
        self._stats.lost += self.pending
        self._stats.filtered[Filtered.OLD_EPOCH] += len(self.buffer)

    def forget_ahead(self) -> None:
        """Drop the batches in the reorder buffer, and forget that batches after the last delivered one exist.

        Call :meth:`write_off` before.
        """
        self.buffer.clear()
        self.live_end = self.log_end = self.next

    def jump(self, seq: int) -> None:
        """Continue at batch ``seq``, because a snapshot includes all earlier batches.

        Count the missing batches before ``seq`` as lost. If the snapshot lacks delivered batches, they are missing
        again.
        """
        known = self.buffer.drop_before(seq)
        # Count the batches dropped from the reorder buffer as duplicates, because the snapshot includes them.
        self._stats.duplicates += known
        if self.synced:
            self._stats.missing += max(self.next - seq, 0)
            self._stats.lost += max(min(seq, self.log_end) - self.next - known, 0)
        self.fingerprints.skip(min(self.next, seq), max(self.next, seq))
        self.next = self.live_from = seq
        self.log_end = max(self.log_end, seq)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """When kvbus restarts, continue after batch ``seq``, which the write-ahead log records as delivered."""
        self.synced = True
        self.fingerprints.skip(self.next, seq)
        self.fingerprints.add(seq, payload)
        self.next = self.log_end = seq + 1
