"""The requests of the sequence machine, and their outcomes.

`Repair` is the base of `kvbus.client.sequence.Sequence`, which handles the inputs. It decides which request is next,
when a request has failed, which batches are lost, and when a new epoch begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvbus.client.buffers import Recent, Waiting
from kvbus.client.outputs import Ask, AskSnapshot, Deliver, Output, Replace
from kvbus.client.timeouts import BufferLimits, Timing
from kvbus.client.updates import Gap, Lost, LostReason, Restarted, RestartReason, Synced
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer

if TYPE_CHECKING:
    from kvbus.core.outputs.snapshot import Snapshot


@dataclass(slots=True)
class Request:
    """The current request: for a snapshot, or for a replay from ``start``."""

    began: float
    heard: float
    start: int = 0
    snapshot: bool = False
    overlap: bool = False  # we have its first batch already: rule 2 compares the two
    rescue: bool = False  # the replay has failed: without this snapshot, batches are lost
    tail: bool = False  # it follows a snapshot: no batch is known to be missing
    quiet: bool = False  # the caller gets no Synced unless the request brings something
    seen: bool = False
    progress: bool = False


class Repair:
    """The machine's state, its requests and their outcomes.

    Args:
        replay: whether there is a replay endpoint.
        snapshot: whether there is a snapshot endpoint.
        from_start: True rebuilds from seq 0 or a snapshot; False begins with the first live batch.
        timing: timeouts and attempts.
        limits: limits of the buffers.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        snapshot: bool = False,
        from_start: bool = True,
        timing: Timing | None = None,
        limits: BufferLimits | None = None,
    ) -> None:
        # Public counters.
        self.epoch = 0
        self.duplicates = 0
        self.overflowed = 0
        """Batches dropped because the reorder buffer was full; the machine asks for them again."""

        # Settings: which requests are possible, and how long to wait.
        limits = limits or BufferLimits()
        self._replay: Final = replay
        self._snapshot: Final = snapshot
        self._repairs: Final = replay or snapshot
        self._timing: Final = timing or Timing()

        # The stream: the next seq to deliver, and what is missing besides it.
        self._next: int | None = 0 if self._repairs and from_start else None
        self._needs_state = snapshot and from_start  # the state itself is missing, not some batches
        self._snapshot_failed = False  # the last snapshot did not help: ask for a replay next
        self._incomplete = False  # batches were lost for want of an answer: rebuild at the next answer
        self._publisher: bytes | None = None

        # Requests: the current one, the times of the next ones, attempts without progress.
        self._request: Request | None = None
        self._retry_at: float | None = None
        self._unconfirmed = False  # this connection has brought no live batch yet
        self._confirm_at: float | None = None
        self._attempts = 0
        self._ask_again = False  # the connection changed: the current answer may be another epoch's
        self._reconnecting = False  # the connection is lost; the publisher may have restarted

        # Buffers.
        self._held: Final[ReorderBuffer[Waiting]] = ReorderBuffer(limits.held_batches, limits.held_bytes)
        self._overflow = False  # a batch was dropped: ask for it once the request is over
        self._recent: Final = Recent(limits.recent)
        self._settled = float("-inf")
        self._out: list[Output] = []

    @property
    def _due(self) -> int:
        return self._next or 0

    # -- requests

    def _verify(self, now: float, *, quiet: bool = False) -> None:
        """Ask from the last batch, to compare it; without a last batch, ask for the whole state."""
        if self._due == 0 or self._due - 1 in self._recent or (quiet and self._publisher is not None):
            self._ask(now, quiet=quiet)
        elif self._snapshot and not self._snapshot_failed:
            self._ask_snapshot(now)
        else:
            self._restart(RestartReason.WENT_BACK, now, self._publisher)

    def _ask(self, now: float, *, quiet: bool = False, tail: bool = False) -> None:
        if self._snapshot and (not self._replay or (self._needs_state and not self._snapshot_failed)):
            self._ask_snapshot(now)
            return
        overlap = self._due - 1 in self._recent
        start = self._due - 1 if overlap else self._due
        self._begin(Request(now, now, start, overlap=overlap, quiet=quiet, tail=tail), Ask(start))

    def _ask_snapshot(self, now: float, *, rescue: bool = False) -> None:
        self._begin(Request(now, now, snapshot=True, rescue=rescue), AskSnapshot())

    def _begin(self, request: Request, output: Output) -> None:
        self._retry_at = self._confirm_at = None
        self._reconnecting = False
        self._request = request
        self._out.append(output)

    # -- outcomes

    def _replace(self, reply: Snapshot, request: Request, now: float) -> None:
        """Apply a snapshot: it replaces the view, unless the view is of the same epoch and at least as new."""
        known, self._publisher = self._publisher, reply.publisher_id
        if known is not None and known != reply.publisher_id:
            self._begin_epoch(RestartReason.PUBLISHER_ID, reply.publisher_id)
        elif known is None and reply.seq < self._due - 1:
            self._begin_epoch(RestartReason.WENT_BACK, reply.publisher_id)
        if reply.seq >= (self._due if known is not None else 0):
            request.progress = True
            self._recent.clear()
            self._next = reply.seq + 1
            self._out.append(Replace(reply.seq, tuple(reply.chunks)))
        self._needs_state = self._incomplete = False
        self._held.drop_before(self._due)
        self._flush()
        if self._replay:
            # the snapshot may be older than the subscription, and an idle stream would not show the difference
            self._snapshot_failed = request.rescue and not request.progress
            self._attempts = 0
            self._ask(now, tail=True)
        else:
            self._finish(request, now, answered=True)

    def _without_snapshot(self, now: float, reason: LostReason) -> None:
        """Continue without a snapshot: rebuild by the replay, or keep the current view."""
        self._attempts = 0
        if not self._replay:
            self._unanswered(now, reason)
            return
        self._snapshot_failed = True
        if self._due and self._due - 1 not in self._recent:
            self._begin_epoch(RestartReason.WENT_BACK, self._publisher)
            self._snapshot_failed = True
        self._ask(now)

    def _trimmed(self, seq: int, now: float) -> bool:
        """Handle an answer that begins late: the publisher has trimmed the batches before ``seq``.

        The batch that rule 2 compares is then trimmed too.

        Returns:
            Whether to use the answer. If not, the machine has asked for a snapshot.
        """
        if self._snapshot_may_help:
            self._ask_snapshot(now, rescue=True)
            return False
        due = self._due
        self._out.append(Lost(due, seq - 1 if seq > due else None, LostReason.TRIMMED))
        self._recent.clear()
        self._next = seq
        return True

    def _finish(self, request: Request, now: float, *, answered: bool) -> None:
        """Finish a request: deliver the held batches, or ask for those that the answer left out."""
        if request.progress:
            self._attempts = 0
        if answered and self._incomplete:
            self._restart(RestartReason.REBUILT, now, self._publisher)
            return
        if self._ask_again:
            self._ask_again = False
            self._ask(now)
            return
        self._flush()
        while self._held:
            oldest = self._held.first
            self._attempts += answered
            if self._attempts < self._timing.attempts:
                self._retry_at = now + self._timing.retry_s
                return
            self._attempts = 0
            if self._snapshot_may_help:
                self._ask_snapshot(now, rescue=True)
                return
            reason = LostReason.HOLE if request.seen or answered else LostReason.NO_ANSWER
            self._out.append(Lost(self._due, oldest - 1, reason))
            self._next = oldest
            self._flush()
        if self._overflow:
            self._overflow = False
            self._ask(now)
            return
        self._attempts = 0
        self._settled = now
        self._needs_state = self._snapshot_failed = False
        if self._unconfirmed and self._replay:  # without a replay the publisher's heartbeat shows a missed batch
            self._unconfirmed = False
            self._confirm_at = now + self._timing.confirm_s
        if self._incomplete:
            self._confirm_at = now + self._timing.rebuild_s
        if not request.quiet or request.progress:
            self._out.append(Synced(self._due - 1))

    def _unanswered(self, now: float, reason: LostReason) -> None:
        """Give up a request without an answer: report what is lost, and continue with the held batches."""
        self._attempts = 0
        self._ask_again = False
        if self._snapshot_may_help:
            self._ask_snapshot(now, rescue=True)
            return
        self._snapshot_failed = False
        due = self._due
        self._held.drop_before(due)
        oldest = self._held.first if self._held else None
        self._out.append(Lost(due, oldest - 1 if oldest is not None and oldest > due else None, reason))
        self._incomplete = True
        self._confirm_at = now + self._timing.rebuild_s
        self._recent.clear()
        self._next = due if oldest is None else oldest
        self._flush()
        if self._held:
            self._out.append(Gap(self._due, self._held.first - 1))
            self._ask(now)

    @property
    def _snapshot_may_help(self) -> bool:
        """Whether to ask for a snapshot where the replay has failed: no, if the last one did not help."""
        return self._snapshot and self._replay and not self._snapshot_failed

    def _restart(
        self,
        reason: RestartReason,
        now: float,
        publisher: bytes | None,
        batch: tuple[int, Waiting] | None = None,
    ) -> None:
        self._begin_epoch(reason, publisher)
        if self._repairs:
            if batch is not None:
                self._hold(*batch)
            self._ask(now)
        elif batch is not None:
            seq, waiting = batch
            if seq:
                self._out.append(Lost(0, seq - 1, LostReason.NO_REPLAY))
            self._next = seq
            self._deliver(waiting)

    def _begin_epoch(self, reason: RestartReason, publisher: bytes | None) -> None:
        self.epoch += 1
        self._publisher = publisher
        self._recent.clear()
        # the next request's answer has all batches received before it
        self._held.clear()
        self._overflow = False
        self._attempts = 0
        self._ask_again = self._snapshot_failed = self._incomplete = False
        self._needs_state = self._snapshot
        self._next = 0
        self._out.append(Restarted(self.epoch, reason))

    # -- bookkeeping

    def _changed(self, publisher: bytes | None) -> bool:
        if publisher is None or publisher == self._publisher:
            return False
        first = self._publisher is None
        self._publisher = publisher
        return not first

    def _hold(self, seq: int, batch: Waiting) -> None:
        if seq in self._held:
            self.duplicates += 1
        elif self._held.fits(batch):
            self._held.add(seq, batch)
        else:
            self.overflowed += 1
            self._overflow = True

    def _flush(self) -> None:
        self._held.drop_before(self._due)
        while (batch := self._held.take(self._due)) is not None:
            self._deliver(batch)

    def _deliver(self, batch: Waiting) -> None:
        seq = self._due
        self._recent.add(seq, batch)
        self._next = seq + 1
        self._out.append(Deliver(seq, batch.topic, batch.payload, batch.replayed))

    def _take(self) -> list[Output]:
        out, self._out = self._out, []
        return out
