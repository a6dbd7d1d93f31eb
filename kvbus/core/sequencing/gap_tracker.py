"""The numbers of one life: what was delivered, what is held back, what is missing, and the account of it.

Three marks::

    next      the batch to be delivered next; everything before it was delivered, or lost
    log_end   one past the highest batch known to exist; what is missing lies in [next, log_end)
    live_end  one past the highest batch the live stream has shown

Once ``synced``, every hole is accounted for: ``missing == recovered + lost + pending``, and ``pending`` is how many
numbers in [next, log_end) are not held.
"""

from __future__ import annotations

from collections import deque

from kvbus.core.sequencing.actions import Action, Deliver, Lost
from kvbus.core.sequencing.fingerprints import Fingerprints
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.stats import SourceStats


class GapTracker:
    """Puts one life's batches in order; what is next leaves as :class:`Deliver`.

    Args:
        held: where batches wait, empty.
        stats: where the account is kept; it goes on over lives.
        actions: where decisions go.
    """

    __slots__ = ("_actions", "_stats", "fingerprints", "held", "live_end", "log_end", "next", "synced")

    def __init__(self, held: ReorderBuffer, stats: SourceStats, actions: deque[Action]) -> None:
        self.next = 0
        self.log_end = 0
        self.live_end = 0
        self.synced = False
        """The history is in (or cannot be had): from here on every hole is missing."""
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

    def accept_next(self, seq: int, payload: bytes) -> int:
        """The next batch, by the live stream, with nothing known to be missing; whoever calls delivers it. Its mark."""
        self.next = self.log_end = self.live_end = seq + 1
        return self.fingerprints.add(seq, payload)

    def live_in_order(self, seq: int, payload: bytes) -> None:
        """The next batch, by the live stream, with nothing held."""
        end = seq + 1
        if seq >= self.log_end:
            self.log_end = end
        else:
            self._stats.recovered += 1
        self.live_end = max(self.live_end, end)
        self._deliver(seq, payload)

    def live_later(self, seq: int, payload: bytes) -> None:
        """A batch of the live stream whose turn may not have come."""
        self._keep(seq, payload, found=False)
        self.live_end = max(self.live_end, seq + 1)

    def replayed(self, seq: int, payload: bytes) -> None:
        """A batch of a replay, neither delivered nor held so far."""
        if seq == self.next and not self.held:
            if self.synced:
                self._count_found(seq)
            self.log_end = max(self.log_end, seq + 1)
            self._deliver(seq, payload)
        else:
            self._keep(seq, payload, found=True)
            self.drain()

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
        """Keep a batch until its turn. Over a limit the newest are let go: they are missing, and will be asked for."""
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
        """A replayed batch was missing: known to be (a gap), or only now (the tail of an idle stream)."""
        if seq >= self.log_end:
            self._stats.missing += seq + 1 - self.log_end
        self._stats.recovered += 1

    def contest(self, seq: int, payload: bytes) -> bool:
        """Another batch has come under a number that is held: if it says something else, a replay has to decide.

        True: it does, and what is held from there on was let go.
        """
        if self.held.get(seq) == payload:
            return False
        count = self.held.drop_from(seq)
        if self.synced:
            self._stats.missing += count
        return True

    def drop_far(self, reach: int) -> int:
        """Let go of what waits behind a hole of ``reach`` numbers or more, and forget that it was there."""
        before = self.next
        for seq in self.held:
            if seq - before >= reach:
                count = self.held.drop_from(seq)
                self.live_end = self.log_end = before
                return count
            before = seq + 1
        return 0

    def begin_at(self, seq: int) -> None:
        """The first batch of this life that can still be had."""
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def open(self) -> None:
        """From here on every hole counts as missing, those the first replay left among them."""
        self.synced = True
        self.log_end = (self.held.last if self.held else self.next - 1) + 1
        self._stats.missing += self.log_end - self.next - len(self.held)

    def give_up(self) -> None:
        """The batches before the first one held are lost (all that are known of, if none is)."""
        first = self.held.first if self.held else self.log_end
        count = first - self.next
        self._stats.lost += count
        self.fingerprints.skip(self.next, first)
        self.next = first
        self._actions.append(Lost(count))
        self.drain()

    def skip_lost(self) -> None:
        """The next batch exists and cannot be had."""
        if self.synced:
            self._stats.missing += max(self.next + 1 - self.log_end, 0)
            self._stats.lost += 1
        self.fingerprints.skip(self.next, self.next + 1)
        self.next += 1
        self.log_end = max(self.log_end, self.next)
        self._actions.append(Lost(1))
        self.drain()

    def expose(self, end: int) -> None:
        """Batches up to ``end`` exist: those that nobody had shown so far are missing."""
        if self.synced and end > self.log_end:
            self._stats.missing += end - self.log_end
        self.log_end = max(self.log_end, end)

    def write_off(self) -> int:
        """All that is pending is lost; how much that was. Not yet a new beginning."""
        count = self._stats.pending
        self._stats.lost += count
        return count

    def jump(self, seq: int) -> None:
        """A snapshot said all there is to say before ``seq``: what was missing there will not come."""
        known = self.held.drop_before(seq)
        if self.synced:
            self._stats.lost += max(min(seq, self.log_end) - self.next - known, 0)
        self.fingerprints.skip(self.next, seq)
        self.next = seq
        self.log_end = max(self.log_end, seq)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """A batch that was delivered before a restart of this process."""
        self.synced = True
        self.fingerprints.skip(self.next, seq)
        self.fingerprints.add(seq, payload)
        self.next = self.log_end = seq + 1
