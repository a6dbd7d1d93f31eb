"""What is known of one epoch of a publisher, and when epochs follow one another too fast.

A new epoch begins with a new :class:`Epoch`. It holds positions, batches that wait, how far back the history reaches,
and what answers have shown. The sequencer decides what follows from it.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final

from kvbus.core.sequencing.actions import Action, LostReason
from kvbus.core.sequencing.gap_tracker import GapTracker, ReorderBuffer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

FAR: Final = 2**32
"""A hole of this many numbers is no gap: no publisher loses as many batches."""

NOTHING: Final = 2**63
"""``History.first`` of an epoch of which nothing is known: no number is as high."""

MAX_BACKOFF: Final = 8

LONGEST_RETRY: Final = 120.0
"""Seconds that TCP waits at most before it tries again (Linux)."""

MAX_STALE: Final = 1024
"""Stale batches that are kept. Beyond it the lowest ones are dropped."""

STALE_PAUSE: Final = 1.0
"""Seconds without questions about stale batches, after the publisher has shown that they were late copies."""

MIN_CONSECUTIVE: Final = 3
"""Consecutive batches that are no accident."""

MAX_EPOCHS: Final = 4
"""Epochs on one connection within :data:`WINDOW` seconds that may be restarts behind a proxy."""

WINDOW: Final = 10.0
FIRST_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0


class History:
    """How far back the history of one epoch is known, and when to ask for more of it.

    Batches are given up when the publisher has none of them any more, and also when it does not answer. Silence proves
    nothing about its replay buffer: a publisher that was stuck for some seconds still has everything. So kvbus asks it
    again, from the beginning, until it answers. If its buffer begins before what is known, kvbus reads the epoch again.

    Args:
        pause: seconds before the next request. It doubles with each, up to :data:`MAX_BACKOFF` times as much.
    """

    __slots__ = ("_after", "_emptied", "_factor", "_pause", "first", "pending", "unanswered")

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._factor = 1
        self._after = -inf
        self._emptied = False
        """The publisher's cache was emptied since: what is missing of the history is not missing of the cache."""
        self.first = 0
        """The number from which on nothing is missing in what was delivered."""
        self.pending = False
        """kvbus gave something up without an answer: the publisher may still have it."""
        self.unanswered = False
        """The last request came to no end."""

    @property
    def partial(self) -> bool:
        """Whether what was delivered may be less than the publisher's cache holds."""
        return self.first > 0 and not self._emptied

    def missing_before(self, first: int, *, pending: bool | None = None) -> None:
        """Note that nothing before ``first`` is known. This alone makes a source ``partial``.

        Args:
            first: the number; :data:`NOTHING` if nothing of the epoch is known.
            pending: whether the publisher may still have what is missing. None: if it has not answered.
        """
        self.first = first
        self._emptied = False
        self.pending = self.pending or (self.unanswered and first > 0) if pending is None else pending

    def nothing_sent(self) -> None:
        """Note that the publisher has sent nothing in this epoch before what is known."""
        self.first = 0

    def emptied(self) -> None:
        """Note that the publisher's cache is empty now. What its replay buffer may have is asked for all the same."""
        self._emptied = True

    @property
    def next_due(self) -> float:
        """When to ask again; infinity for never."""
        return self._after if self.pending else inf

    def due(self, now: float) -> bool:
        """Return whether to ask again now."""
        if not self.pending or now < self._after:
            return False
        self._after = now + self._pause * self._factor
        self._factor = min(2 * self._factor, MAX_BACKOFF)
        return True

    def answered(self, first: int | None) -> bool:
        """The publisher's buffer begins at ``first`` (None: it is empty). Return whether it holds more."""
        self.pending = False
        return first is not None and first < self.first

    def dump(self) -> list[Any]:
        """Return plain data for a restart."""
        return [self.first, self.pending, self._emptied]

    def load(self, data: list[Any]) -> None:
        """Take in what :meth:`dump` has returned."""
        self.first, self.pending, self._emptied = data


class PublisherBuffer:
    """Knows whether the publisher keeps batches, and whether it has trimmed some that are still on their way.

    A publisher answers on one connection and publishes on another. What it has sent on that one comes, in order, for as
    long as it stands, but it may come late: it waits to be read in this process, or TCP holds it back. TCP tries again
    at intervals that double. So what was held up for some time may come as long again after the obstacle has gone.

    Args:
        timeout: how long an answer may take, in seconds.
    """

    __slots__ = ("_empty_at", "_silent", "_stood_until", "_timeout", "_trimmed", "keeps")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.keeps: bool | None = None
        """Whether the publisher keeps a buffer: it has answered with batches, or with none while it publishes.

        None: nobody knows yet. If a publisher with a buffer answers with nothing, it is in another epoch. If one
        without a buffer does, that proves nothing.
        """
        self._empty_at = -1
        """Where the live stream was when an answer was empty that should not have been; -1: there was none."""
        self._silent = (-1, 0.0)
        """The next batch when the publisher was asked about its silence, and since when it was silent; -1: never."""
        self._trimmed = (-1, 0.0)
        """The next batch when an answer began beyond the last one delivered, or was a state, and when; -1: none was."""
        self._stood_until = -inf
        """Batches that were on their way while this process stood still come until then."""

    def answered_with_nothing(self, live_end: int) -> None:
        """Note an empty answer that should not have been. Two with a batch between mean that there is no buffer."""
        if self._empty_at < 0:
            self._empty_at = live_end
        elif self._empty_at < live_end:
            self.keeps = False

    def disconnected(self) -> None:
        """Forget what answers on another connection have shown of being empty."""
        self._empty_at = -1

    def silent(self, following: int, since: float) -> None:
        """Note that the live stream has brought nothing since then; ``following`` is the next batch."""
        if self._silent[0] != following:
            self._silent = following, since

    def unread(self) -> None:
        """Live batches wait to be read: no time has passed without any."""
        self._trimmed = -1, 0.0

    def stood_still(self, seconds: float, now: float) -> None:
        """This process has not run for so long, up to ``now``, which leaves it out."""
        self._stood_until = max(self._stood_until, now + min(seconds, LONGEST_RETRY) + self._timeout)

    def has_lost(self, following: int, now: float) -> bool:
        """Return whether the batch ``following`` will not come any more: an answer that came now lacks it."""
        if self._trimmed[0] != following:
            self._trimmed = following, now
        since = self._trimmed[1]
        silent = since - self._silent[1] if self._silent[0] == following else 0.0
        timeout = max(self._timeout, min(silent, LONGEST_RETRY)) + self._timeout
        return now >= max(since + timeout, self._stood_until)


class UnverifiedBatches:
    """Live batches that do not fit into the epoch known so far.

    A batch is *stale* if its number was delivered before and its fingerprint is not kept any more. It is a very late
    copy, or the first batch of a new epoch. It is kept here until the publisher has shown which. A batch from further
    ahead than any gap is odd. If others follow it, the publisher is in a new epoch.

    Args:
        max_bytes: maximum payload of stale batches.
        stats: where stale batches that are copies, or are dropped, are counted as duplicates.
    """

    __slots__ = ("_ahead", "_ask_after", "_stats", "stale")

    def __init__(self, max_bytes: int, stats: SourceStats) -> None:
        self.stale = ReorderBuffer(MAX_STALE, max_bytes)
        self._stats = stats
        self._ahead: list[tuple[int, bytes]] = []
        """The newest batches from far ahead, while they are consecutive."""
        self._ask_after = -inf

    def keep_stale(self, seq: int, payload: bytes) -> None:
        """Keep a batch from before what was delivered."""
        stale = self.stale
        if seq in stale:
            self._stats.duplicates += 1
            return
        while not stale.fits(payload):
            self._stats.duplicates += stale.drop_before(stale.first + 1)
        stale.add(seq, payload)

    @property
    def consecutive(self) -> bool:
        """Whether the newest stale batches have consecutive numbers, as those of a new epoch do."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(MIN_CONSECUTIVE))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]]:
        """Keep a batch from far ahead. Return the :data:`MIN_CONSECUTIVE` batches that it completes, or none."""
        if self._ahead and self._ahead[-1][0] + 1 != seq:
            self._ahead.clear()
        self._ahead.append((seq, payload))
        return self._ahead if len(self._ahead) == MIN_CONSECUTIVE else []

    def may_ask(self, now: float) -> bool:
        """Return whether stale batches are a reason to ask the publisher."""
        return now >= self._ask_after

    def epoch_confirmed(self, now: float) -> None:
        """The publisher is in the epoch known: the stale batches were late copies."""
        if self.stale:
            self.forget()
            self._ask_after = now + STALE_PAUSE

    def forget(self) -> None:
        """Drop the stale batches and count them as copies: nobody will show what they were."""
        self._stats.duplicates += len(self.stale)
        self.stale.clear()

    def disconnected(self) -> None:
        """Drop every batch: the connection that brought them is gone."""
        self.forget()
        self._ahead.clear()

    def take_stale(self) -> list[tuple[int, bytes]]:
        """Take the stale batches out: they were the first of a new epoch."""
        taken = [(seq, self.stale.get(seq)) for seq in self.stale]
        self.stale.clear()
        return taken


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
        "buffer",
        "gap_attempts",
        "gap_start",
        "grace_ends",
        "history",
        "interrupted",
        "lost_because",
        "probe_factor",
        "tracker",
        "unverified",
    )

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self._spec = spec
        self._stats = stats
        self._actions = actions

        self.tracker: GapTracker
        self.history: History
        self.forget_numbers()
        self.forget_history()
        self.unverified = UnverifiedBatches(spec.max_held_bytes, stats)
        self.buffer = PublisherBuffer(spec.replay_timeout)

        # The gap that is being asked for.
        self.gap_start = -1
        self.gap_attempts = 0
        self.aborted_at = -1
        """Where the request went on after a batch that was too large."""
        self.grace_ends = inf
        """When the gap is given up, where there is no replay."""
        self.lost_because = LostReason.HOLE if spec.asks else LostReason.NO_REPLAY
        """Why the gap is lost, if it is given up now."""
        self.interrupted = False
        """An answer that may have been compacted broke off, and no other one has confirmed where."""
        self.probe_factor = 1
        """Times ``probe_interval`` after which a silent publisher is asked next."""

    def forget_numbers(self) -> None:
        """Begin the numbering anew: nothing was delivered that another epoch could be recognised by."""
        held = ReorderBuffer(self._spec.reorder_batches, self._spec.max_held_bytes)
        self.tracker = GapTracker(held, self._stats, self._actions)

    def forget_history(self) -> None:
        """Begin the history anew: nothing is missing of it."""
        pause = self._spec.backfill_pause
        self.history = History(self._spec.replay_timeout if pause is None else pause)

    def is_far(self, seq: int) -> bool:
        """Return whether a number is too far ahead of what is known to be behind a gap."""
        tracker = self.tracker
        return seq - tracker.log_end >= FAR and (tracker.synced or tracker.next > 0)

    # -- history -----------------------------------------------------------------------------------------------------

    def baseline(self, seq: int) -> None:
        """Begin with ``seq``, the first batch of this epoch that can still be had."""
        self.history.missing_before(seq)
        self.tracker.begin_at(seq)

    def open(self) -> None:
        """Count every hole as missing from here on: the history is in, or cannot be had."""
        if far := self.tracker.drop_far(FAR):
            self._stats.rejected[Reason.SEQ_RANGE] += far
        self.tracker.open()

    def cover(self, seq: int) -> None:
        """Go on after batch ``seq``: a snapshot as of it holds all there is to know."""
        self.forget_history()
        self.interrupted = False
        self.tracker.jump(seq + 1)
        if self._spec.compacted:
            self.tracker.answered_end = seq + 1

    def emptied(self, *, certain: bool) -> None:
        """The publisher's cache was emptied. Ask for what came before only if that is not ``certain``."""
        if certain:
            self.forget_history()
        else:
            self.history.emptied()

    # -- gaps --------------------------------------------------------------------------------------------------------

    def asks_for_gap(self) -> bool:
        """The next batch is missing. Return whether nothing was asked for it so far."""
        if self.gap_start != self.tracker.next:
            self.gap_start = self.tracker.next
            self.gap_attempts = 0
        return not self.gap_attempts

    def give_up(self) -> None:
        """Give up the first gap: its batches are lost."""
        tracker = self.tracker
        self.history.missing_before(tracker.held.first if tracker.held else tracker.log_end)
        tracker.give_up(self.lost_because)

    def trimmed_before(self, seq: int) -> None:
        """Go on at ``seq``: the publisher has nothing from before any more, and what follows counts as a whole."""
        self.history.missing_before(seq)
        self.tracker.expose(seq)
        self.tracker.jump(seq)

    def unconfirmed(self) -> None:
        """Ask for everything again later: nobody has answered whether what was delivered is all there is."""
        self.interrupted = False
        self.lost_because = LostReason.NO_ANSWER
        self.history.missing_before(NOTHING, pending=True)

    def skip_lost(self) -> None:
        """Give up the next batch alone: it exists and cannot be had."""
        self.history.missing_before(self.tracker.next + 1)
        self.tracker.skip_lost()
        self.aborted_at = self.tracker.next

    # -- over a restart of this process ------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return plain data for a restart: how far, how far back, and the fingerprints of the last batches."""
        return {
            "next": self.tracker.next,
            "synced": self.tracker.synced,
            "buffer": self.buffer.keeps,
            "history": self.history.dump(),
            "delivered": self.tracker.fingerprints.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Take in what :meth:`dump` has returned."""
        self.buffer.keeps = data["buffer"]
        self.history.load(data["history"])
        tracker = self.tracker
        tracker.next = tracker.log_end = data["next"]
        tracker.synced = data["synced"]
        tracker.fingerprints.load(data["delivered"])

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """Take in a batch of the log."""
        tracker = self.tracker
        if tracker.next == 0 or seq > tracker.next:
            self.history.missing_before(seq)
        tracker.restore_batch(seq, payload)

    def restore_snapshot(self, seq: int) -> None:
        """Take in a snapshot of the log."""
        self.tracker.synced = True
        self.cover(seq)

    def recovery_finished(self) -> None:
        """All of the log was handled. Nobody knows why history is missing: the log does not say."""
        self.history.pending = self._spec.replay and self.history.first > 0
        if self.tracker.next == 0:
            self.forget_numbers()


class Conflict:
    """Two publishers on one endpoint: epochs that follow one another on a standing connection.

    An engine that restarts drops its connection. If new epochs begin without that, several publishers are behind the
    endpoint, and nothing on the wire tells their batches apart. Each new epoch costs routers a clear and the engine a
    replay of everything. So kvbus takes nothing in for a pause, and then tries again. Times are in seconds.
    """

    __slots__ = ("_begun", "_ended", "_pause", "until")

    def __init__(self) -> None:
        self.until = inf
        """When the pause ends; infinity while there is none."""
        self._begun: deque[float] = deque(maxlen=MAX_EPOCHS)
        self._pause = FIRST_PAUSE
        self._ended = -inf

    def epoch_began(self, now: float) -> bool:
        """Count a new epoch. Return whether there are too many; then a pause has begun."""
        if len(self._begun) == MAX_EPOCHS and now - self._begun[0] < WINDOW:
            if now - self._ended > MAX_PAUSE:
                self._pause = FIRST_PAUSE
            self.until = now + self._pause
            self._pause = min(self._pause * 2, MAX_PAUSE)
            self._begun.clear()
            return True
        self._begun.append(now)
        return False

    def over(self, now: float) -> bool:
        """Return whether a pause ends now, and forget it."""
        if now < self.until:
            return False
        self.until = inf
        self._ended = now
        return True

    def reconnected(self) -> None:
        """Forget the epochs of the old connection."""
        self.until = inf
        self._begun.clear()
