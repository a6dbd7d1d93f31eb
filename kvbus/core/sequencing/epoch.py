"""What is known of one epoch of a publisher. A new epoch begins with a new one of these.

It holds positions, batches that wait, how far back the history reaches, and what answers have shown. It counts what
was asked and notes what was given up; whether to do either is decided by the machine.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from kvbus.core.sequencing.actions import Action, LostReason
from kvbus.core.sequencing.backfill import Backfill
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.publisher_buffer import PublisherBuffer
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.sequencing.unverified import UnverifiedBatches
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Reason

FAR: Final = 2**32
"""A batch so many numbers ahead is not behind a gap: no publisher loses as many."""


class Epoch:
    """Positions, history and unverified batches of one epoch.

    Args:
        spec: how much may wait.
        stats: where the account is kept; it goes on over epochs.
        actions: where decisions go.
    """

    __slots__ = (
        "_actions",
        "_spec",
        "_stats",
        "aborted_at",
        "backfill",
        "buffer",
        "gap_attempts",
        "gap_start",
        "grace_ends",
        "interrupted",
        "lost_because",
        "tracker",
        "unverified",
    )

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self._spec = spec
        self._stats = stats
        self._actions = actions

        self.tracker: GapTracker
        self.forget_numbers()
        self.backfill = self._history()
        self.unverified = UnverifiedBatches(spec.max_held_bytes, stats)
        self.buffer = PublisherBuffer(spec.replay_timeout)

        # The gap that is being asked for.
        self.gap_start = -1
        self.gap_attempts = 0
        self.aborted_at = -1
        """Where the request went on after a batch that was too large."""
        self.grace_ends: float | None = None
        """When the gap is given up, where there is no replay."""
        self.lost_because = LostReason.HOLE if spec.asks else LostReason.NO_REPLAY
        """Why the gap is lost, if it is given up now."""
        self.interrupted = False
        """An answer that may have been compacted broke off, and no other one has confirmed where."""

    def _history(self) -> Backfill:
        pause = self._spec.backfill_pause
        return Backfill(self._spec.replay_timeout if pause is None else pause)

    def forget_numbers(self) -> None:
        """Begin the numbering anew: nothing was delivered that another epoch could be recognised by."""
        spec = self._spec
        self.tracker = GapTracker(ReorderBuffer(spec.reorder_batches, spec.max_held_bytes), self._stats, self._actions)

    def is_far(self, seq: int) -> bool:
        """Whether a number is too far ahead of what is known to be behind a gap."""
        tracker = self.tracker
        return seq - tracker.log_end >= FAR and (tracker.synced or tracker.next > 0)

    # -- history -----------------------------------------------------------------------------------------------------

    def baseline(self, seq: int) -> None:
        """``seq`` is the first batch of this epoch that can still be had. kvbus never saw what came before it."""
        self.backfill.begins(seq)
        self.tracker.begin_at(seq)

    def open(self) -> None:
        """The history is in, or cannot be had: from here on every hole is missing."""
        if far := self.tracker.drop_far(FAR):
            self._stats.rejected[Reason.SEQ_RANGE] += far
        self.tracker.open()

    def cover(self, seq: int) -> None:
        """A snapshot as of batch ``seq`` holds all there is to know."""
        self.backfill = self._history()
        self.interrupted = False
        self.tracker.jump(seq + 1)
        if self._spec.compacted:
            self.tracker.answered_end = seq + 1

    def emptied(self, *, certain: bool) -> None:
        """The publisher's cache was emptied; what came before is asked for only if that is not ``certain``."""
        if certain:
            self.backfill = self._history()
        else:
            self.backfill.emptied()

    # -- gaps --------------------------------------------------------------------------------------------------------

    def asks_for_gap(self) -> bool:
        """The next batch is missing. Returns whether nothing was asked for it so far."""
        if self.gap_start != self.tracker.next:
            self.gap_start = self.tracker.next
            self.gap_attempts = 0
        return not self.gap_attempts

    def give_up(self) -> None:
        """Give up the first gap: its batches are lost."""
        tracker = self.tracker
        self.backfill.begins(tracker.held.first if tracker.held else tracker.log_end)
        tracker.give_up(self.lost_because)

    def trimmed_before(self, seq: int) -> None:
        """The publisher has nothing from before ``seq`` any more, and what it has from there on counts as a whole."""
        self.backfill.begins(seq)
        self.tracker.expose(seq)
        self.tracker.jump(seq)

    def unconfirmed(self) -> None:
        """Nobody has answered whether what was delivered is all there is: it has to be had again from the beginning."""
        self.interrupted = False
        self.lost_because = LostReason.NO_ANSWER
        self.backfill.nothing_known()

    def skip_lost(self) -> None:
        """Give up the next batch alone: it exists and cannot be had."""
        self.backfill.begins(self.tracker.next + 1)
        self.tracker.skip_lost()
        self.aborted_at = self.tracker.next

    # -- over a restart of this process ------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain data for a restart: how far, how far back, and the fingerprints of the last batches."""
        return {
            "next": self.tracker.next,
            "synced": self.tracker.synced,
            "buffer": self.buffer.keeps,
            "history": self.backfill.dump(),
            "delivered": self.tracker.fingerprints.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """The reverse of :meth:`dump`."""
        self.buffer.keeps = data["buffer"]
        self.backfill.load(data["history"])
        tracker = self.tracker
        tracker.next = tracker.log_end = data["next"]
        tracker.synced = data["synced"]
        tracker.fingerprints.load(data["delivered"])

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """A batch of the log."""
        tracker = self.tracker
        if tracker.next == 0 or seq > tracker.next:
            self.backfill.begins(seq)
        tracker.restore_batch(seq, payload)

    def restore_snapshot(self, seq: int) -> None:
        """A snapshot of the log."""
        self.tracker.synced = True
        self.cover(seq)

    def recovery_finished(self) -> None:
        """All of the log was handled. Nobody knows why history is missing: the log does not say."""
        self.backfill.pending = self._spec.replay and self.backfill.first > 0
        if self.tracker.next == 0:
            self.forget_numbers()
