"""The known facts about one epoch of a publisher, and the detection of epochs that follow each other too fast.

A new epoch begins with a new :class:`Epoch`. It holds positions, waiting batches, how far back the history reaches, and
what answers have shown. The sequencer acts on these facts.
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
"""Minimum size of a hole that is not a gap: no publisher loses that many batches."""

NOTHING: Final = 2**63
"""``History.first`` of an epoch about which nothing is known: no number is as high."""

MAX_BACKOFF: Final = 8

LONGEST_RETRY: Final = 120.0
"""Maximum time in seconds until TCP retransmits (Linux)."""

MAX_STALE: Final = 1024
"""Maximum number of stale batches that are kept. Over it, the lowest ones are dropped."""

STALE_PAUSE: Final = 1.0
"""Seconds without requests about stale batches, after the publisher has shown that they were late copies."""

MIN_CONSECUTIVE: Final = 3
"""Number of consecutive batches that proves a new epoch: fewer may be an accident."""

MAX_EPOCHS: Final = 4
"""Maximum number of epochs on one connection within :data:`WINDOW` seconds that may be restarts behind a proxy."""

WINDOW: Final = 10.0
FIRST_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0


class History:
    """How far back the history of one epoch is known, and when to ask for more of it.

    kvbus gives batches up when the publisher does not have them any more, and also when it does not answer. Silence
    proves nothing about its replay buffer: a publisher that was stuck for some seconds still has everything. So kvbus
    asks it again, from the beginning, until it answers. If its buffer begins before the known batches, kvbus reads the
    epoch again.

    Args:
        pause: seconds before the next request. It doubles with each request, up to a factor of :data:`MAX_BACKOFF`.
    """

    __slots__ = ("_after", "_emptied", "_factor", "_pause", "first", "pending", "unanswered")

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._factor = 1
        self._after = -inf
        self._emptied = False
        """Whether the publisher's cache was emptied since: then missing history is no loss for the cache."""
        self.first = 0
        """The number from which on no batch is missing in the delivered ones."""
        self.pending = False
        """Whether kvbus gave batches up without an answer, which the publisher may still have."""
        self.unanswered = False
        """Whether the last request got no complete answer."""

    @property
    def partial(self) -> bool:
        """Whether the delivered batches may describe less than the publisher's cache holds."""
        return self.first > 0 and not self._emptied

    def missing_before(self, first: int, *, pending: bool | None = None) -> None:
        """Note that nothing before ``first`` is known. That makes the source ``partial``.

        Args:
            first: the number; :data:`NOTHING` if nothing of the epoch is known.
            pending: whether the publisher may still have the missing batches. None: decide by whether it has answered.
        """
        self.first = first
        self._emptied = False
        self.pending = self.pending or (self.unanswered and first > 0) if pending is None else pending

    def nothing_sent(self) -> None:
        """Note that the publisher has sent no batch in this epoch before the known ones."""
        self.first = 0

    def emptied(self) -> None:
        """Note that the publisher's cache is empty now. kvbus still asks for the batches in its replay buffer."""
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
        """Record that the publisher's buffer begins at ``first`` (None: it is empty). Return whether it holds more."""
        self.pending = False
        return first is not None and first < self.first

    def dump(self) -> list[Any]:
        """Return plain data for a restart."""
        return [self.first, self.pending, self._emptied]

    def load(self, data: list[Any]) -> None:
        """Restore the result of :meth:`dump`."""
        self.first, self.pending, self._emptied = data


class PublisherBuffer:
    """The known facts about a publisher's replay buffer: whether there is one, and whether a trimmed batch is lost.

    A publisher answers on one connection and publishes on another. Batches sent on the publishing connection arrive in
    order, as long as the connection exists, but they may arrive late: they wait to be read in this process, or TCP
    delays them. TCP retransmits at intervals that double. So batches that were delayed for some time may take as long
    again after the obstacle is gone.

    Args:
        timeout: maximum duration of an answer, in seconds.
    """

    __slots__ = ("_empty_at", "_silent", "_stood_until", "_timeout", "_trimmed", "keeps")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.keeps: bool | None = None
        """Whether the publisher keeps a buffer. It has answered with batches, or with none although it publishes.

        None: unknown so far. If a publisher with a buffer answers without batches, it is in another epoch. If a
        publisher without a buffer does so, that proves nothing.
        """
        self._empty_at = -1
        """The live end at an answer that was unexpectedly empty; -1: there was no such answer."""
        self._silent = (-1, 0.0)
        """The next batch when kvbus probed the silent publisher, and when the silence began; -1: kvbus never probed
        it."""
        self._trimmed = (-1, 0.0)
        """The next batch when an answer began beyond the last delivered one or was a state, and when; -1: never."""
        self._stood_until = -inf
        """Time by which batches arrive that were in transit while this process was suspended."""

    def answered_with_nothing(self, live_end: int) -> None:
        """Note an unexpectedly empty answer.

        Two empty answers with a live batch between them mean that the publisher keeps no buffer.
        """
        if self._empty_at < 0:
            self._empty_at = live_end
        elif self._empty_at < live_end:
            self.keeps = False

    def disconnected(self) -> None:
        """Forget the empty answers of the old connection."""
        self._empty_at = -1

    def silent(self, following: int, since: float) -> None:
        """Note that the live stream has been silent since ``since``, before the batch ``following``."""
        if self._silent[0] != following:
            self._silent = following, since

    def unread(self) -> None:
        """Note that live batches wait to be read. The wait for a batch that an answer lacked begins again."""
        self._trimmed = -1, 0.0

    def stood_still(self, seconds: float, now: float) -> None:
        """Note that this process did not run for ``seconds``, which ``now`` does not include."""
        self._stood_until = max(self._stood_until, now + min(seconds, LONGEST_RETRY) + self._timeout)

    def has_lost(self, following: int, now: float) -> bool:
        """Return whether batch ``following``, which an answer lacks now, is lost.

        The batch is lost if enough time has passed for it to arrive on the live stream.
        """
        if self._trimmed[0] != following:
            self._trimmed = following, now
        since = self._trimmed[1]
        silent = since - self._silent[1] if self._silent[0] == following else 0.0
        timeout = max(self._timeout, min(silent, LONGEST_RETRY)) + self._timeout
        return now >= max(since + timeout, self._stood_until)


class UnverifiedBatches:
    """Live batches that do not fit into the known epoch.

    A batch is *stale* if its number was delivered before and its fingerprint is not kept any more. It is a very late
    copy, or the first batch of a new epoch. It is kept here until the publisher has shown which of the two. A batch
    that is too far ahead for a gap is odd. If other batches follow it, the publisher is in a new epoch.

    Args:
        max_bytes: maximum total size of stale batches' payloads.
        stats: counts stale batches that are copies, or are dropped, as duplicates.
    """

    __slots__ = ("_ahead", "_ask_after", "_stats", "stale")

    def __init__(self, max_bytes: int, stats: SourceStats) -> None:
        self.stale = ReorderBuffer(MAX_STALE, max_bytes)
        self._stats = stats
        self._ahead: list[tuple[int, bytes]] = []
        """The newest far-ahead batches, as long as they are consecutive."""
        self._ask_after = -inf

    def keep_stale(self, seq: int, payload: bytes) -> None:
        """Keep a stale batch."""
        stale = self.stale
        if seq in stale:
            self._stats.duplicates += 1
            return
        while not stale.fits(payload):
            self._stats.duplicates += stale.drop_before(stale.first + 1)
        stale.add(seq, payload)

    @property
    def consecutive(self) -> bool:
        """Whether the newest stale batches have consecutive numbers, like the batches of a new epoch."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(MIN_CONSECUTIVE))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]]:
        """Keep a far-ahead batch.

        Return the last :data:`MIN_CONSECUTIVE` batches if they are consecutive, otherwise none.
        """
        if self._ahead and self._ahead[-1][0] + 1 != seq:
            self._ahead.clear()
        self._ahead.append((seq, payload))
        return self._ahead if len(self._ahead) == MIN_CONSECUTIVE else []

    def may_ask(self, now: float) -> bool:
        """Return whether kvbus may ask the publisher about stale batches now."""
        return now >= self._ask_after

    def epoch_confirmed(self, now: float) -> None:
        """Note that the publisher is in the known epoch: the stale batches were late copies."""
        if self.stale:
            self.forget()
            self._ask_after = now + STALE_PAUSE

    def forget(self) -> None:
        """Drop the stale batches and count them as copies: nothing will show what they were."""
        self._stats.duplicates += len(self.stale)
        self.stale.clear()

    def disconnected(self) -> None:
        """Drop every batch: the connection that delivered them is gone."""
        self.forget()
        self._ahead.clear()

    def take_stale(self) -> list[tuple[int, bytes]]:
        """Remove and return the stale batches: they were the first of a new epoch."""
        taken = [(seq, self.stale.get(seq)) for seq in self.stale]
        self.stale.clear()
        return taken


class Epoch:
    """Positions, history and unverified batches of one epoch.

    Args:
        spec: the limits of waiting batches.
        stats: the counters of the source; they span epochs.
        actions: receives the decisions.
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

        # The gap that kvbus asks for.
        self.gap_start = -1
        self.gap_attempts = 0
        self.aborted_at = -1
        """Where the request continued after an oversized batch."""
        self.grace_ends = inf
        """When the gap is given up, if there is no replay."""
        self.lost_because = LostReason.HOLE if spec.asks else LostReason.NO_REPLAY
        """The reason for the loss, if the gap is given up now."""
        self.interrupted = False
        """Whether an answer that may have been compacted broke off, and no other answer has confirmed its position."""
        self.probe_factor = 1
        """Factor of ``probe_interval`` after which a silent publisher is probed next."""

    def forget_numbers(self) -> None:
        """Reset the numbering. No batch was delivered by which another epoch could be recognized."""
        held = ReorderBuffer(self._spec.reorder_batches, self._spec.max_held_bytes)
        self.tracker = GapTracker(held, self._stats, self._actions)

    def forget_history(self) -> None:
        """Reset the history: none of it is missing."""
        pause = self._spec.backfill_pause
        self.history = History(self._spec.replay_timeout if pause is None else pause)

    def is_far(self, seq: int) -> bool:
        """Return whether a number is too far ahead of the known batches to be after a gap."""
        tracker = self.tracker
        return seq - tracker.log_end >= FAR and (tracker.synced or tracker.next > 0)

    # -- history -----------------------------------------------------------------------------------------------------

    def baseline(self, seq: int) -> None:
        """Begin with ``seq``, the first batch of this epoch that the publisher still has."""
        self.history.missing_before(seq)
        self.tracker.begin_at(seq)

    def open(self) -> None:
        """Count every hole as missing from now on: the history is complete, or cannot be had."""
        if far := self.tracker.drop_far(FAR):
            self._stats.rejected[Reason.SEQ_RANGE] += far
        self.tracker.open()

    def cover(self, seq: int) -> None:
        """Continue after batch ``seq``: a snapshot as of it covers all earlier batches."""
        self.forget_history()
        self.interrupted = False
        self.tracker.jump(seq + 1)
        if self._spec.compacted:
            self.tracker.answered_end = seq + 1

    def emptied(self, *, certain: bool) -> None:
        """Note that the publisher's cache was emptied. Ask for older batches only if that is not ``certain``."""
        if certain:
            self.forget_history()
        else:
            self.history.emptied()

    # -- gaps --------------------------------------------------------------------------------------------------------

    def asks_for_gap(self) -> bool:
        """Start or continue a gap: the next batch is missing. Return whether kvbus has not asked for it yet."""
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
        """Continue at ``seq``: the publisher has no earlier batches any more, and the following answer is a unit."""
        self.history.missing_before(seq)
        self.tracker.expose(seq)
        self.tracker.jump(seq)

    def unconfirmed(self) -> None:
        """Ask for everything again later: no answer has confirmed that the delivered batches are all there are."""
        self.interrupted = False
        self.lost_because = LostReason.NO_ANSWER
        self.history.missing_before(NOTHING, pending=True)

    def skip_lost(self) -> None:
        """Give up only the next batch: it exists and cannot be received."""
        self.history.missing_before(self.tracker.next + 1)
        self.tracker.skip_lost()
        self.aborted_at = self.tracker.next

    # -- restart of this process ---------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return plain data for a restart: position, history, and the fingerprints of the last batches."""
        return {
            "next": self.tracker.next,
            "synced": self.tracker.synced,
            "buffer": self.buffer.keeps,
            "history": self.history.dump(),
            "delivered": self.tracker.fingerprints.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Restore the result of :meth:`dump`."""
        self.buffer.keeps = data["buffer"]
        self.history.load(data["history"])
        tracker = self.tracker
        tracker.next = tracker.log_end = data["next"]
        tracker.synced = data["synced"]
        tracker.fingerprints.load(data["delivered"])

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """Restore a batch from the write-ahead log."""
        tracker = self.tracker
        if tracker.next == 0 or seq > tracker.next:
            self.history.missing_before(seq)
        tracker.restore_batch(seq, payload)

    def restore_snapshot(self, seq: int) -> None:
        """Restore a snapshot from the write-ahead log."""
        self.tracker.synced = True
        self.cover(seq)

    def recovery_finished(self) -> None:
        """Finish the recovery. The write-ahead log does not say why history is missing, so kvbus asks for it again."""
        self.history.pending = self._spec.replay and self.history.first > 0
        if self.tracker.next == 0:
            self.forget_numbers()


class Conflict:
    """The detector of two publishers on one endpoint: epochs follow each other without a reconnection.

    An engine that restarts drops its connection. If new epochs begin without that, several publishers are behind the
    endpoint, and nothing in the messages distinguishes their batches. Each new epoch costs routers a clear and the
    engine a full replay. So kvbus ignores all batches for a pause, and then tries again. Times are in seconds.
    """

    __slots__ = ("_begun", "_ended", "_pause", "until")

    def __init__(self) -> None:
        self.until = inf
        """When the pause ends; infinity if there is none."""
        self._begun: deque[float] = deque(maxlen=MAX_EPOCHS)
        self._pause = FIRST_PAUSE
        self._ended = -inf

    def epoch_began(self, now: float) -> bool:
        """Count a new epoch. Return whether there are too many; then a pause begins."""
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
        """Return whether a pause ends now. If so, reset it."""
        if now < self.until:
            return False
        self.until = inf
        self._ended = now
        return True

    def reconnected(self) -> None:
        """Forget the epochs of the old connection."""
        self.until = inf
        self._begun.clear()
