"""What a publisher is asked, and what its answer says about the life it is in.

A request that continues a life reaches back over the last batches delivered (:data:`OVERLAP`), so that its answer can
be told from one of another life by content. The newest of them is the *tip*: a publisher in the same life has it,
unless its buffer was trimmed beyond.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from math import inf
from typing import Final

import msgspec

from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, Stop
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.settings import Settings
from kvbus.core.stats import SourceStats

ATTEMPTS: Final = 2
"""Replay requests made for one gap before it is lost: the first, and one retry."""

OVERLAP: Final = 8
"""Batches delivered that a request asks for again: one alone may be the new life's, delivered before anyone knew."""


class Purpose(StrEnum):
    """Why a publisher was asked."""

    SYNC = "sync"
    SNAPSHOT = "snapshot"
    GAP = "gap"
    PROBE = "probe"
    VERIFY = "verify"
    HISTORY = "history"


INTERRUPTIBLE: Final = (Purpose.PROBE, Purpose.HISTORY)
"""Questions nothing waits for: a more urgent one takes their place."""


class OpenRequest(msgspec.Struct):
    """The open request."""

    id: int
    purpose: Purpose
    start: int
    last_delivered: int
    """The newest batch delivered whose content is known, -1 if none is or if it does not matter."""
    expects_batches: bool
    """A batch from ``start`` on was known to exist when it was asked: an empty answer says something."""
    log_end: int
    """One past the highest batch known to exist when it was asked."""
    deadline: float = inf
    """When it is given up without progress, from the moment it is sent (:meth:`ReplayClient.sent`)."""
    hard_deadline: float = inf
    items: int = 0
    first: int = -1
    last: int = -1
    saw_last_delivered: bool = False

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
        """Whether this batch of the answer cannot belong to the life known so far. To be asked before :meth:`take`."""
        if tracker.fingerprints.matches(seq, payload, tracker.next) is False:
            return True
        if self.purpose is Purpose.SYNC:
            return False
        if self.last_delivered < 0:
            return self.purpose is Purpose.VERIFY  # there is nothing left to know it by
        if self.saw_last_delivered:
            return False
        if seq <= self.last_delivered:
            # every batch from the start to the tip was delivered: one that the publisher has left out was not its own
            return self.items > 0 and seq > self.last + 1
        if self.items:
            return self.first <= self.last_delivered  # it has what came before the last_delivered, and not the tip
        return False

    def begins_beyond(self, seq: int) -> bool:
        """Whether an answer that begins with ``seq`` leaves open which epoch it is of: it was trimmed beyond the tip.

        For a gap that is expected: what lies between is known to be missing, and was trimmed.
        """
        return self.purpose in (Purpose.PROBE, Purpose.VERIFY) and not self.items and 0 <= self.last_delivered < seq

    @property
    def lacks_last_delivered(self) -> bool:
        """The answer, over now, had batches from before the tip and not the tip."""
        return (
            self.last_delivered >= 0
            and self.items > 0
            and not self.saw_last_delivered
            and self.first <= self.last_delivered
        )


def start_of(purpose: Purpose, tracker: GapTracker) -> tuple[int, int]:
    """Where a question begins, and its tip."""
    if purpose is Purpose.HISTORY:
        return 0, -1
    if purpose in (Purpose.SYNC, Purpose.SNAPSHOT):
        return tracker.next, -1
    last_delivered = tracker.fingerprints.newest(tracker.next)
    if last_delivered < 0 or (purpose is Purpose.GAP and last_delivered != tracker.next - 1):
        return (tracker.next if purpose is Purpose.GAP else max(tracker.next - 1, 0)), -1
    # not back over a batch that was lost: an answer may break off at it, for it may be too large to be taken
    return tracker.fingerprints.run_to(last_delivered, OVERLAP), last_delivered


class ReplayClient:
    """The open question, if there is one. Each has an id of its own, so that answers to an old one cannot mix in.

    Args:
        settings: how long an answer may take.
        stats: where questions, answers that are late and answers that do not come are counted.
        actions: where decisions go.
    """

    __slots__ = ("_actions", "_last_id", "_settings", "_stats", "open")

    def __init__(self, settings: Settings, stats: SourceStats, actions: deque[Action]) -> None:
        self.open: OpenRequest | None = None
        self._last_id = 0
        self._settings = settings
        self._stats = stats
        self._actions = actions

    def ask(self, purpose: Purpose, tracker: GapTracker) -> None:
        """Ask; a question that is open is expired."""
        self.stop()
        self._last_id += 1
        start, last_delivered = start_of(purpose, tracker)
        self.open = OpenRequest(
            self._last_id,
            purpose,
            start,
            last_delivered,
            start < max(tracker.next, tracker.live_end),
            tracker.log_end,
        )
        self._stats.replays += 1
        asks_snapshot = purpose is Purpose.SNAPSHOT
        self._actions.append(AskSnapshot(self._last_id) if asks_snapshot else Ask(self._last_id, start))

    def sent(self, request: int, now: float) -> None:
        """The question has left; behind a backlog that is long after it was asked. From now on its time runs."""
        asked = self.open
        if asked is not None and asked.id == request:
            asked.deadline = now + self._settings.replay_timeout
            asked.hard_deadline = now + self._settings.replay_total_timeout

    def stop(self) -> None:
        """No answer is waited for any more."""
        if self.open is not None:
            self._actions.append(Stop(self.open.id))
            self.open = None

    def match(self, request: int) -> OpenRequest | None:
        """The question that something with this id answers; None, and counted, if it is not open any more."""
        if self.open is None or self.open.id != request:
            self._stats.stale_replies += 1
            return None
        return self.open

    def timed_out(self, now: float) -> OpenRequest | None:
        """The question whose answer does not come, withdrawn and counted; None if there is none such."""
        asked = self.open
        if asked is None or (now < asked.deadline and now < asked.hard_deadline):
            return None
        self._stats.replay_timeouts += 1
        self.stop()
        return asked

    @property
    def interruptible(self) -> bool:
        """Whether another question may be asked now."""
        return self.open is None or self.open.purpose in INTERRUPTIBLE
