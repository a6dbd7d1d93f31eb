"""What kvbus knows about one epoch of a publisher, and the detection of epochs that follow each other too fast.

Each new epoch of a publisher gets a new :class:`Epoch` object. It holds the seqs of delivered and missing batches, the
received batches that wait for a missing one, how far back kvbus knows the epoch's history, and what the publisher's
answers have shown about the epoch. The sequencer makes decisions from it.
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

MAX_GAP_BATCHES: Final = 2**32
"""Number of seemingly missing batches from which on kvbus assumes no gap, because no publisher loses that many batches.

The cause may be a damaged seq or another epoch.
"""

NOTHING: Final = 2**63
"""Value of ``History.first`` while nothing of the epoch's history is known. It is higher than any seq."""

MAX_BACKOFF: Final = 8

MAX_PROBE_BACKOFF: Final = 32
"""Maximum interval between probes of an idle publisher, in multiples of ``probe_interval``."""

LONGEST_RETRY: Final = 120.0
"""Maximum time in seconds between two attempts of TCP to send the same data (Linux).

When the network works again after a failure, data may still arrive this much later.
"""

MAX_STALE: Final = 1024
"""Maximum number of stale batches (old seqs without a known fingerprint) that are kept for one source.

If there are more, the batches with the lowest seqs are dropped.
"""

STALE_PAUSE: Final = 1.0
"""Seconds for which kvbus sends no request about stale batches, after an answer has shown that earlier stale batches
were only repeated.

A stale batch has an old seq whose fingerprint is not known any more.
"""

MIN_CONSECUTIVE: Final = 3
"""Number of unexpected batches with consecutive seqs that proves a new epoch. Fewer batches may have another cause."""

MAX_EPOCHS: Final = 4
"""Maximum number of epochs on one connection within :data:`WINDOW` seconds.

More epochs mean that several publishers send to the endpoint. Fewer epochs may also be restarts of an engine behind a
proxy.
"""

WINDOW: Final = 10.0
FIRST_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0


class History:
    """The seq from which on kvbus knows one epoch completely, and the plan of requests for older batches.

    kvbus gives batches up when the publisher does not have them any more, and also when the publisher does not answer.
    A missing answer says nothing about the replay buffer: a publisher that hung for some seconds still has all batches.
    So kvbus requests the history from the beginning again until the publisher answers. If the publisher's buffer begins
    before the known batches, kvbus reads the epoch again.

    Args:
        pause: seconds until the request is repeated. The interval doubles with each request, up to :data:`MAX_BACKOFF`
            times ``pause``.
    """

    __slots__ = ("_after", "_emptied", "_factor", "_pause", "first", "pending", "unanswered")

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._factor = 1
        self._after = -inf
        self._emptied = False
        """Whether the publisher has emptied its cache after the missing batches.

        Then the missing batches do not make the source partial.
        """
        self.first = 0
        """The seq from which on all batches are known: kvbus has delivered each of them."""
        self.pending = False
        """Whether the publisher may still have batches that kvbus gave up because the publisher did not answer."""
        self.unanswered = False
        """Whether the last request to the publisher got no complete answer."""

    @property
    def partial(self) -> bool:
        """Whether the publisher's cache may hold blocks that the delivered batches do not describe."""
        return self.first > 0 and not self._emptied

    def missing_before(self, first: int, *, pending: bool | None = None) -> None:
        """Record that the epoch's batches before ``first`` are missing. This makes the source ``partial``.

        Args:
            first: the seq from which on all batches are known; :data:`NOTHING` if no batch of the epoch is known.
            pending: whether the publisher may still have the missing batches. If it is None, :attr:`pending` becomes
                true if the last request got no complete answer and ``first`` is above 0, and is otherwise unchanged.
        """
        self.first = first
        self._emptied = False
        self.pending = self.pending or (self.unanswered and first > 0) if pending is None else pending

    def nothing_sent(self) -> None:
        """Record that no batch of this epoch is missing: the publisher sent none before the known batches."""
        self.first = 0

    def emptied(self) -> None:
        """Record that the publisher's cache is empty now, so that missing batches do not make the source partial.

        kvbus continues to request the older batches that the publisher may have.
        """
        self._emptied = True

    @property
    def next_due(self) -> float:
        """The time of the next request for missing history; infinity if no request is planned."""
        return self._after if self.pending else inf

    def due(self, now: float) -> bool:
        """Return whether to request the missing history now. If so, plan the next request."""
        if not self.pending or now < self._after:
            return False
        self._after = now + self._pause * self._factor
        self._factor = min(2 * self._factor, MAX_BACKOFF)
        return True

    def answered(self, first: int | None) -> bool:
        """Record that the publisher's replay buffer begins with batch ``first`` (None: it is empty).

        Return whether the buffer has batches that kvbus lacks.
        """
        self.pending = False
        return first is not None and first < self.first

    def dump(self) -> list[Any]:
        """Return the history's facts as plain data, which a new process can load after a restart."""
        return [self.first, self.pending, self._emptied]

    def load(self, data: list[Any]) -> None:
        """Restore the history's facts from the result of :meth:`dump`."""
        self.first, self.pending, self._emptied = data


class PublisherBuffer:
    """What kvbus knows about a publisher's replay buffer: whether it exists, and whether a batch missing in it is lost.

    A publisher answers on one connection and publishes on another. The batches on the publishing connection arrive in
    order while the connection exists. They may arrive late, because they wait in this process or because TCP delays
    them. TCP retransmits at intervals that double. So after a delay has ended, the delayed batches may need the same
    time again.

    Args:
        timeout: maximum duration of an answer, in seconds.
    """

    __slots__ = ("_empty_at", "_silent", "_stood_until", "_timeout", "_trimmed", "keeps")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.keeps: bool | None = None
        """Whether the publisher keeps a replay buffer; None if unknown.

        It is True after an answer with batches, and False after answers without batches although the publisher sends
        batches. An empty answer from a publisher with a buffer proves that the publisher is in another epoch. An empty
        answer from a publisher without a buffer proves nothing.
        """
        self._empty_at = -1
        """The live end (one past the highest live batch) at the first unexpectedly empty answer; -1 before that."""
        self._silent = (-1, 0.0)
        """The seq of the next batch to deliver when kvbus last probed the silent publisher, and the time when the
        silence began.

        The seq is -1 if kvbus has never probed this publisher.
        """
        self._trimmed = (-1, 0.0)
        """The seq of the next batch to deliver, if a replay answer lacked this batch, and the time of that answer.

        The answer lacked it because it began at a later seq, or because it was a state. The seq is -1 if there was no
        such answer.
        """
        self._stood_until = -inf
        """Until this time, kvbus expects batches that were in transit while this process was suspended."""

    def answered_with_nothing(self, live_end: int) -> None:
        """Record an unexpectedly empty replay answer. ``live_end`` is one past the highest batch of the live stream.

        After two empty answers with a live batch between them, kvbus knows that the publisher keeps no buffer.
        """
        if self._empty_at < 0:
            self._empty_at = live_end
        elif self._empty_at < live_end:
            self.keeps = False

    def disconnected(self) -> None:
        """Forget that a replay answer was unexpectedly empty, because the connection during which it came has ended."""
        self._empty_at = -1

    def silent(self, following: int, since: float) -> None:
        """Record that the live stream has been silent since the time ``since``.

        ``following`` is the seq of the next batch to deliver.
        """
        if self._silent[0] != following:
            self._silent = following, since

    def unread(self) -> None:
        """Record that live batches wait in this process.

        So :meth:`has_lost` has to wait again before a batch counts as lost.
        """
        self._trimmed = -1, 0.0

    def stood_still(self, seconds: float, now: float) -> None:
        """Record that this process was suspended for ``seconds``, so that batches may arrive late.

        ``now``, the relay's time, does not include these seconds.
        """
        self._stood_until = max(self._stood_until, now + min(seconds, LONGEST_RETRY) + self._timeout)

    def has_lost(self, following: int, now: float) -> bool:
        """Return whether batch ``following`` is lost. The newest answer of the publisher lacked it.

        It is lost if the live stream has had enough time to bring it.
        """
        if self._trimmed[0] != following:
            self._trimmed = following, now
        since = self._trimmed[1]
        silent = since - self._silent[1] if self._silent[0] == following else 0.0
        timeout = max(self._timeout, min(silent, LONGEST_RETRY)) + self._timeout
        return now >= max(since + timeout, self._stood_until)


class UnverifiedBatches:
    """Live batches that do not fit into the known epoch. They are kept until it is clear which epoch they belong to.

    A *stale* batch has a seq that kvbus delivered before and whose fingerprint is not kept any more. It is a very late
    copy, or one of the first batches of a new epoch. It is kept until an answer of the publisher shows which of the two
    it is. A *far-ahead* batch has a seq too high for a gap. If batches with the next seqs follow, the publisher is in a
    new epoch.

    Args:
        max_bytes: maximum total size of the payloads of stale batches.
        stats: the counters of the source. Stale batches that are copies or are dropped count as duplicates.
    """

    __slots__ = ("_ahead", "_ask_after", "_stats", "stale")

    def __init__(self, max_bytes: int, stats: SourceStats) -> None:
        self.stale = ReorderBuffer(MAX_STALE, max_bytes)
        self._stats = stats
        self._ahead: list[tuple[int, bytes]] = []
        """The newest far-ahead batches. Their seqs are consecutive, but too high for a gap in the present epoch."""
        self._ask_after = -inf

    def keep_stale(self, seq: int, payload: bytes) -> None:
        """Keep a stale batch until an answer of the publisher shows which epoch it belongs to.

        A stale batch has an old seq whose fingerprint is not known any more.
        """
        stale = self.stale
        if seq in stale:
            self._stats.duplicates += 1
            return
        while not stale.fits(payload):
            self._stats.duplicates += stale.drop_before(stale.first + 1)
        stale.add(seq, payload)

    @property
    def consecutive(self) -> bool:
        """Whether the stale batches with the highest seqs are consecutive, like the first batches of a new epoch."""
        last = self.stale.last if self.stale else 0
        return all(last - back in self.stale for back in range(MIN_CONSECUTIVE))

    def ahead(self, seq: int, payload: bytes) -> list[tuple[int, bytes]]:
        """Keep a live batch whose seq is so high that kvbus does not take the absent batches before it for a gap.

        :meth:`Epoch.is_far` decides this. Return the last :data:`MIN_CONSECUTIVE` such batches if their seqs are
        consecutive, otherwise an empty list.
        """
        if self._ahead and self._ahead[-1][0] + 1 != seq:
            self._ahead.clear()
        self._ahead.append((seq, payload))
        return self._ahead if len(self._ahead) == MIN_CONSECUTIVE else []

    def may_ask(self, now: float) -> bool:
        """Return whether kvbus may send a request about stale batches now."""
        return now >= self._ask_after

    def epoch_confirmed(self, now: float) -> None:
        """Record that the publisher is still in the known epoch.

        So the stale batches were late copies of batches of this epoch, and are dropped.
        """
        if self.stale:
            self.forget()
            self._ask_after = now + STALE_PAUSE

    def forget(self) -> None:
        """Drop the stale batches, because no answer will show which epoch they belong to.

        They count as repeated batches.
        """
        self._stats.duplicates += len(self.stale)
        self.stale.clear()

    def disconnected(self) -> None:
        """Drop all unverified batches, because the connection that brought them has ended."""
        self.forget()
        self._ahead.clear()

    def take_stale(self) -> list[tuple[int, bytes]]:
        """Remove and return the stale batches, because they turned out to be the first batches of a new epoch."""
        taken = [(seq, self.stale.get(seq)) for seq in self.stale]
        self.stale.clear()
        return taken


class Epoch:
    """What kvbus knows about one epoch of a publisher: its seqs, its history and its unverified batches.

    Args:
        spec: the limits of the batches that wait for earlier ones, and the capabilities of the publisher.
        stats: the counters of the source, which span all its epochs.
        actions: the queue that receives the sequencer's decisions.
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
        "took_state",
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

        # First seq of the gap whose missing batches kvbus requests or waits for (-1: there was no gap), and the number
        # of requests for it.
        self.gap_start = -1
        self.gap_attempts = 0
        self.aborted_at = -1
        """First seq of the replay request that kvbus sent to continue after an oversized batch; -1 if it sent none."""
        self.grace_ends = inf
        """The time at which kvbus gives up the missing batches of a gap; infinity if there is no such time.

        It is set only if kvbus cannot request the batches from the publisher.
        """
        self.lost_because = LostReason.HOLE if spec.requests_replay else LostReason.NO_REPLAY
        """The reason that kvbus reports if it gives up the missing batches of the gap now."""
        self.interrupted = False
        """Whether kvbus may have delivered only a part of a state, because the answer with the state ended early.

        It becomes False when a later answer completes the state.
        """
        self.took_state = False
        """Whether an answer may have been a state. The publisher may repeat its seqs with other content."""
        self.probe_factor = 1
        """Silence of the live stream after which kvbus probes the publisher, in multiples of ``probe_interval``."""

    def forget_numbers(self) -> None:
        """Forget which seqs were delivered or are missing, and drop the held batches.

        Call it if no batch was delivered: then nothing shows whether the held batches are of the current epoch.
        """
        buffer = ReorderBuffer(self._spec.reorder_batches, self._spec.max_held_bytes)
        self.tracker = GapTracker(buffer, self._stats, self._actions)

    def forget_history(self) -> None:
        """Forget which batches before the first known batch are missing. From now on, none of them is missing."""
        pause = self._spec.backfill_pause
        self.history = History(self._spec.replay_timeout if pause is None else pause)

    @property
    def live_end(self) -> int:
        """One past the highest batch that the live stream has shown, including batches whose epoch is not verified."""
        stale = self.unverified.stale
        return max(self.tracker.live_end, stale.last + 1 if stale else 0)

    def is_far(self, seq: int) -> bool:
        """Return whether a seq is too high for a gap.

        Too many batches then lie between the highest known batch and batch ``seq``.
        """
        tracker = self.tracker
        return seq - tracker.log_end >= MAX_GAP_BATCHES and (tracker.synced or tracker.next > 0)

    # -- history -----------------------------------------------------------------------------------------------------

    def baseline(self, seq: int) -> None:
        """Begin the epoch with batch ``seq``, the oldest batch that is available. Earlier batches are missing."""
        self.history.missing_before(seq)
        self.tracker.begin_at(seq)

    def open(self) -> None:
        """End the reading of the history: it is complete or not available.

        From now on, each absent batch counts as missing.
        """
        if far := self.tracker.drop_far(MAX_GAP_BATCHES):
            self._stats.rejected[Reason.SEQ_RANGE] += far
        self.tracker.open()

    def cover(self, seq: int) -> None:
        """Continue after batch ``seq``, because a snapshot includes all batches up to it."""
        self.forget_history()
        self.interrupted = False
        self.tracker.jump(seq + 1)
        if self._spec.compacted:
            self.tracker.answered_end = seq + 1

    def emptied(self, *, certain: bool) -> None:
        """Record that the publisher's cache was emptied, so that missing history does not matter.

        If it is not ``certain`` that the cache is empty, kvbus continues to request the older batches that it lacks.
        """
        if certain:
            self.forget_history()
        else:
            self.history.emptied()

    # -- gaps --------------------------------------------------------------------------------------------------------

    def asks_for_gap(self) -> bool:
        """Record that the next batch is missing. Return whether kvbus has not requested it yet."""
        if self.gap_start != self.tracker.next:
            self.gap_start = self.tracker.next
            self.gap_attempts = 0
        return not self.gap_attempts

    def give_up(self) -> None:
        """Give up the missing batches before the first batch in the reorder buffer: they count as lost."""
        tracker = self.tracker
        self.history.missing_before(tracker.buffer.first if tracker.buffer else tracker.log_end)
        tracker.give_up(self.lost_because)

    def trimmed_before(self, seq: int) -> None:
        """Continue at batch ``seq``, because the publisher's answer begins there.

        The publisher has dropped the earlier batches from its buffer, and sends a state in place of them.
        """
        self.history.missing_before(seq)
        self.tracker.expose(seq)
        self.tracker.jump(seq)

    def unconfirmed(self) -> None:
        """Plan to request older batches again: no answer has confirmed that the delivered batches are complete."""
        self.interrupted = False
        self.lost_because = LostReason.NO_ANSWER
        self.history.missing_before(NOTHING, pending=True)

    def skip_lost(self) -> None:
        """Give up only the next batch, because it is too large to receive."""
        self.history.missing_before(self.tracker.next + 1)
        self.tracker.skip_lost()
        self.aborted_at = self.tracker.next

    # -- restart of this process ---------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return the epoch's next seq, history and last fingerprints as plain data, which a new process can load."""
        return {
            "next": self.tracker.next,
            "synced": self.tracker.synced,
            "buffer": self.buffer.keeps,
            "history": self.history.dump(),
            "delivered": self.tracker.fingerprints.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Restore the epoch from the result of :meth:`dump`."""
        self.buffer.keeps = data["buffer"]
        self.history.load(data["history"])
        tracker = self.tracker
        tracker.next = tracker.log_end = data["next"]
        tracker.synced = data["synced"]
        tracker.fingerprints.load(data["delivered"])

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """When kvbus restarts, continue after batch ``seq``, which the write-ahead log records as delivered."""
        tracker = self.tracker
        if tracker.next == 0 or seq > tracker.next:
            self.history.missing_before(seq)
        tracker.restore_batch(seq, payload)

    def restore_loss(self, count: int) -> None:
        """When kvbus restarts, continue after ``count`` lost batches, which the write-ahead log records."""
        self.history.missing_before(self.tracker.next + count)

    def restore_snapshot(self, seq: int) -> None:
        """When kvbus restarts, continue after batch ``seq``, up to which the write-ahead log records a snapshot."""
        self.tracker.synced = True
        self.cover(seq)

    def recovery_finished(self) -> None:
        """Finish the recovery from the saved state.

        The write-ahead log does not say why older batches are missing, so kvbus requests them again.
        """
        self.history.pending = self._spec.replay and self.history.first > 0
        if self.tracker.next == 0:
            self.forget_numbers()


class Conflict:
    """The detector of two publishers on one endpoint.

    An engine that restarts closes its connection. If new epochs begin without a disconnection, several publishers send
    to the endpoint, and nothing in the messages distinguishes their batches. Each new epoch makes routers clear their
    blocks, and makes the engine send a full replay. So kvbus ignores all batches during a pause, and then tries again.
    Times are in seconds.
    """

    __slots__ = ("_begun", "_ended", "_pause", "until")

    def __init__(self) -> None:
        self.until = inf
        """The time at which kvbus stops ignoring the source's batches; infinity while it does not ignore them."""
        self._begun: deque[float] = deque(maxlen=MAX_EPOCHS)
        self._pause = FIRST_PAUSE
        self._ended = -inf

    def epoch_began(self, now: float) -> bool:
        """Count a new epoch, and begin a pause if there were too many of them within :data:`WINDOW` seconds.

        Return whether a pause begins.
        """
        if len(self._begun) == MAX_EPOCHS and now - self._begun[0] < WINDOW:
            if now - self._ended > MAX_PAUSE:
                self._pause = FIRST_PAUSE
            self.until = now + self._pause
            self._pause = min(self._pause * 2, MAX_PAUSE)
            self._begun.clear()
            return True
        self._begun.append(now)
        return False

    def ended(self, now: float) -> bool:
        """Return whether the time of the pause is over, and end the pause if it is.

        During the pause, kvbus ignores all batches of the source.
        """
        if now < self.until:
            return False
        self.until = inf
        self._ended = now
        return True

    def reconnected(self) -> None:
        """End the pause in which kvbus ignores all batches, and forget the epochs of the old connection."""
        self.until = inf
        self._begun.clear()
