"""What a publisher is asked, and what its answer says about its epoch.

A request that continues an epoch reaches back over the last batches delivered (:data:`OVERLAP`). So the content of the
answer shows whether it is of the same epoch. A publisher in the same epoch has the last batch delivered, unless its
buffer was trimmed beyond it.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from math import inf
from typing import Final

import msgspec

from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, Stop
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.source_spec import SNAPSHOT_TIMEOUTS, SourceSpec
from kvbus.core.source_stats import SourceStats

OVERLAP: Final = 8
"""Batches delivered that a request asks for again: a single one may be of a new epoch that nobody had noticed yet."""


class Purpose(StrEnum):
    """Why a publisher was asked."""

    SYNC = "sync"
    SNAPSHOT = "snapshot"
    GAP = "gap"
    PROBE = "probe"
    VERIFY = "verify"
    HISTORY = "history"


class OpenRequest(msgspec.Struct):
    """The open request, and what its answer has brought so far."""

    # What was asked, and what was known then.
    id: int
    purpose: Purpose
    start: int
    last_delivered: int
    """The newest batch delivered whose content is known, -1 if none is or if it does not matter."""
    expects_batches: bool
    """A batch from ``start`` on was known to exist: an empty answer says something."""
    following: int
    """The batch to be delivered next."""
    log_end: int
    """One past the highest batch known to exist."""

    waits: bool = False
    """It has been handed out and has not left the process."""

    # How long it may take; set when the request is sent (:meth:`ReplayClient.sent`).
    deadline: float = inf
    """When it is given up; each batch that is progress sets it anew."""
    hard_deadline: float = inf
    """When it is given up in any case."""

    # What the answer has brought.
    items: int = 0
    first: int = -1
    last: int = -1
    saw_last_delivered: bool = False
    is_state: bool = False
    """It is a state in place of batches: only where it ends is looked at."""

    def take(self, seq: int) -> bool:
        """Count one batch of the answer; whether it is progress."""
        if not self.items:
            self.first = seq
        self.items += 1
        if seq == self.last_delivered:
            self.saw_last_delivered = True
        if seq <= self.last:
            return False
        self.last = seq
        return True

    def contradicts(self, seq: int, payload: bytes, tracker: GapTracker) -> bool:
        """Whether this batch of the answer cannot belong to the epoch known so far. Call before :meth:`take`."""
        if tracker.fingerprints.matches(seq, payload, tracker.next) is False:
            return True
        if self.purpose is Purpose.SYNC and self.last_delivered < 0:
            return False
        if self.last_delivered < 0:
            return self.purpose is Purpose.VERIFY  # no fingerprint is left to recognise the epoch by
        if self.saw_last_delivered:
            return False
        if seq <= self.last_delivered:
            # every batch from the start to the last delivered one was delivered: if the publisher leaves one out,
            # that one was not its own
            return self.items > 0 and seq > self.last + 1
        if self.items:
            return self.first <= self.last_delivered  # it has batches from before the last delivered one, and not that
        return False

    def begins_beyond(self, seq: int) -> bool:
        """Whether an answer that begins with ``seq`` leaves its epoch open: it begins beyond the last batch delivered.

        For a gap that is expected: what lies between is known to be missing, and was trimmed.
        """
        return self.purpose in (Purpose.PROBE, Purpose.VERIFY) and not self.items and 0 <= self.last_delivered < seq

    @property
    def lacks_last_delivered(self) -> bool:
        """The answer, over now, had batches from before the last delivered one, and not that one."""
        return (
            self.last_delivered >= 0
            and self.items > 0
            and not self.saw_last_delivered
            and self.first <= self.last_delivered
        )

    @property
    def ends_early(self) -> bool:
        """The answer, over now, lacks batches that were sent before the question: they were another epoch's.

        Both epochs may begin alike: a bus without its numbers sends an engine's history once more.
        """
        return self.purpose is Purpose.VERIFY and self.items > 0 and self.last + 1 < self.log_end


def start_of(purpose: Purpose, tracker: GapTracker, *, compacted: bool = False) -> tuple[int, int]:
    """Where a request begins, and the last batch delivered that its answer has to contain (-1: none)."""
    if purpose is Purpose.HISTORY:
        return 0, -1
    if purpose is Purpose.SNAPSHOT or (purpose is Purpose.SYNC and not compacted):
        return tracker.next, -1
    last_delivered = tracker.fingerprints.newest(tracker.next)
    continues = compacted or purpose is Purpose.GAP
    if last_delivered < 0 or (continues and last_delivered != tracker.next - 1):
        return (tracker.next if continues else max(tracker.next - 1, 0)), -1
    # never back over a lost batch: it may be too large to be taken, and the answer would break off at it
    # a compacted answer begins where its publisher's journal does not reach: one batch back is enough to see that
    return tracker.fingerprints.run_to(last_delivered, 1 if compacted else OVERLAP), last_delivered


class ReplayClient:
    """Has at most one request open. Each has an id of its own, so that answers to an old one cannot mix in.

    Args:
        spec: how long an answer may take.
        stats: where requests, late answers and missing answers are counted.
        actions: where decisions go.
    """

    __slots__ = ("_actions", "_last_id", "_spec", "_stats", "open")

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self.open: OpenRequest | None = None
        self._last_id = 0
        self._spec = spec
        self._stats = stats
        self._actions = actions

    def ask(self, purpose: Purpose, tracker: GapTracker) -> None:
        """Ask. A request that is open is closed first."""
        self.stop()
        self._last_id += 1
        start, last_delivered = start_of(purpose, tracker, compacted=self._spec.compacted)
        self.open = OpenRequest(
            self._last_id,
            purpose,
            start,
            last_delivered,
            start < max(tracker.next, tracker.live_end),
            tracker.next,
            tracker.log_end,
        )
        self._stats.replays += 1
        asks_snapshot = purpose is Purpose.SNAPSHOT or not self._spec.replay
        self._actions.append(AskSnapshot(self._last_id) if asks_snapshot else Ask(self._last_id, start))

    def sent(self, request: int, now: float) -> None:
        """The request has left the process, behind a backlog long after :meth:`ask`. From now on its time runs."""
        asked = self.open
        if asked is not None and asked.id == request:
            spec = self._spec
            asked.waits = now == inf
            asked.deadline = now + spec.replay_timeout
            if asked.purpose is Purpose.SNAPSHOT or not spec.replay:
                asked.deadline = now + (spec.snapshot_timeout or SNAPSHOT_TIMEOUTS * spec.replay_timeout)
            asked.hard_deadline = now + self._spec.replay_total_timeout

    def unread(self, request: int, now: float) -> None:
        """Messages of its answer wait to be read: the publisher is not late before they are."""
        asked = self.open
        if asked is not None and asked.id == request:
            until = now + self._spec.replay_timeout
            asked.deadline = max(asked.deadline, until)
            asked.hard_deadline = max(asked.hard_deadline, until)

    def stop(self) -> None:
        """Close the open request, if there is one."""
        if self.open is not None:
            self._actions.append(Stop(self.open.id))
            self.open = None

    def match(self, request: int) -> OpenRequest | None:
        """The request with this id; None, and counted, if it is not open any more."""
        if self.open is None or self.open.id != request:
            self._stats.stale_replies += 1
            return None
        return self.open

    def timed_out(self, now: float) -> OpenRequest | None:
        """The request whose time is over, closed and counted; None if there is none."""
        asked = self.open
        if asked is None or (now < asked.deadline and now < asked.hard_deadline):
            return None
        self._stats.replay_timeouts += 1
        self.stop()
        return asked
