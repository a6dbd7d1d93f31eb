"""What a publisher is asked, and what its answers show.

A request that continues an epoch reaches back over the last batches delivered (:data:`OVERLAP`). So the content of the
answer shows whether it is of the same epoch. A publisher in the same epoch has the last batch delivered, unless its
buffer was trimmed beyond it.

The handlers that :data:`~kvbus.core.sequencing.phases.PHASES` names take an answer in. Each returns what the answer
shows: an input of the table, a :class:`Restart`, or None if the phase stays.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

import msgspec

from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, LostReason, RestartReason, Stop
from kvbus.core.sequencing.epoch import NOTHING, Epoch
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.phases import ASKS, PHASES, Input, Phase, Purpose
from kvbus.core.source_spec import SNAPSHOT_TIMEOUTS, SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

OVERLAP: Final = 8
"""Batches delivered that a request asks for again: a single one may be of a new epoch that nobody had noticed yet."""

MAX_PATIENT_PROBE: Final = 8
"""Times ``probe_interval`` after which a publisher is asked again while batches are on their way."""


class Restart(NamedTuple):
    """A new epoch begins.

    Attributes:
        reason: what has shown it. ``REBUILT`` says that nothing proves a restart of the publisher.
        proven: whether it counts for a conflict. A compacted answer with another content proves no restart: it may be
            a state, and says nothing about another publisher on the endpoint.
        pending: None if the publisher will say how far back the new epoch reaches. Else nothing is known of the epoch,
            and ``pending`` says whether the publisher may still have it.
    """

    reason: RestartReason = RestartReason.WENT_BACK
    proven: bool = True
    pending: bool | None = None


REBUILT: Final = Restart(RestartReason.REBUILT)

Finding = Input | Restart | None


class OpenRequest(msgspec.Struct):
    """The open request, and what its answer has brought so far."""

    # What was asked, and what was known then.
    id: int
    phase: Phase
    """The phase that waits for the answer."""
    purpose: Purpose
    epoch: Epoch
    once_more: bool
    """It may be made again if nobody answers."""
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

    # How long it may take; set when the request is sent (:meth:`Requests.sent`).
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

    def take(self, seq: int, deadline: float) -> None:
        """Count one batch of the answer. If it is progress, ``deadline`` is the new one."""
        if not self.items:
            self.first = seq
        self.items += 1
        if seq == self.last_delivered:
            self.saw_last_delivered = True
        if seq > self.last:
            self.last = seq
            self.deadline = deadline

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether this batch of the answer cannot be of the epoch known so far. Call before :meth:`take`."""
        tracker = self.epoch.tracker
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
        """Return whether an answer that begins with ``seq`` leaves its epoch open, beyond the last batch delivered.

        For a gap that is expected: what lies between is known to be missing, and was trimmed.
        """
        return self.purpose in (Purpose.PROBE, Purpose.VERIFY) and not self.items and 0 <= self.last_delivered < seq

    def shows_other_epoch(self) -> bool:
        """Return whether the answer, over now, cannot be of the epoch known so far.

        It lacks the last batch delivered, though it had batches from before. Or it lacks batches that were sent before
        the question, which were another epoch's then. (Both epochs may begin alike: a bus without its numbers sends an
        engine's history once more.) Or it is empty, and the publisher keeps a buffer.
        """
        if not self.items:
            return self.epoch.buffer.keeps is True and self.last_delivered >= 0
        if not self.saw_last_delivered and 0 <= self.first <= self.last_delivered:
            return True
        return self.purpose is Purpose.VERIFY and self.last + 1 < self.log_end


def start_of(purpose: Purpose, tracker: GapTracker, *, compacted: bool = False) -> tuple[int, int]:
    """Return where a request begins, and the last batch delivered that its answer has to contain (-1: none)."""
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


class Requests:
    """Asks the publisher, and takes in what it answers. At most one request is open.

    Each has an id of its own, so that answers to an old one cannot mix in.

    Args:
        spec: how long an answer may take.
        stats: where requests, late answers, missing answers and refused batches are counted.
        actions: where decisions go.
    """

    __slots__ = ("_actions", "_last_id", "_spec", "_stats", "open")

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self.open: OpenRequest | None = None
        self._last_id = 0
        self._spec = spec
        self._stats = stats
        self._actions = actions

    def ask(self, phase: Phase, epoch: Epoch, *, once_more: bool) -> None:
        """Ask what ``phase`` waits for. A request that is open is closed first."""
        self.stop()
        self._last_id += 1
        purpose, tracker = ASKS[phase], epoch.tracker
        start, last_delivered = start_of(purpose, tracker, compacted=self._spec.compacted)
        self.open = OpenRequest(
            id=self._last_id,
            phase=phase,
            purpose=purpose,
            epoch=epoch,
            once_more=once_more,
            start=start,
            last_delivered=last_delivered,
            expects_batches=start < max(tracker.next, tracker.live_end),
            following=tracker.next,
            log_end=tracker.log_end,
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

    @property
    def caught_up(self) -> Finding:
        """An answer that has caught up with the live stream is over, whether or not it ever ENDs."""
        asked = self.open
        if asked is None or asked.phase not in (Phase.SYNC, Phase.GAP, Phase.GAP_SNAPSHOT):
            return None
        return Input.CAUGHT_UP if asked.epoch.tracker.caught_up else None

    # -- a batch of an answer ----------------------------------------------------------------------------------------

    def batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, *, whole: bool) -> Finding:
        """Take in one batch of an answer. ``whole``: it begins as a state does."""
        finding: Finding = getattr(self, PHASES[asked.phase].batch)(asked, seq, payload, now, whole)
        return finding

    def _take_first_of_history(self, asked: OpenRequest, seq: int, payload: bytes, _now: float, whole: bool) -> Finding:
        """The first batch of the history shows how far back the publisher's buffer reaches."""
        tracker, history = asked.epoch.tracker, asked.epoch.history
        more = history.answered(seq) or (whole and not tracker.fingerprints.matches(seq, payload, tracker.next))
        return REBUILT if more else Input.ANSWERED

    def _take_batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, whole: bool) -> Finding:
        """Take in a batch, unless it shows another epoch, or that the batches before it are still on their way."""
        epoch, tracker = asked.epoch, asked.epoch.tracker
        shown = None if asked.is_state else self._shown_by_batch(asked, seq, payload, now, whole)
        if shown is not None:
            return shown
        asked.take(seq, now + self._spec.replay_timeout)
        if asked.is_state:
            return None
        epoch.buffer.keeps = True
        epoch.history.unanswered = False
        if asked.saw_last_delivered and asked.phase is Phase.VERIFY:
            return Input.CONFIRMED
        if seq < tracker.next:
            if asked.last_delivered < 0 or asked.saw_last_delivered:
                tracker.fingerprints.learn(seq, payload, tracker.next)
            return None
        if epoch.is_far(seq):
            self._stats.rejected[Reason.SEQ_RANGE] += 1
            return None
        if self._spec.compacted:
            return self._take_compacted(asked, seq, payload)
        if asked.phase is Phase.SYNC and asked.items == 1 and tracker.next == 0:
            epoch.baseline(min(seq, tracker.held.first) if tracker.held else seq)
        if seq in tracker.held:
            tracker.held.replace(seq, payload)  # what the publisher answers is its own
            tracker.drain()
        else:
            tracker.replayed(seq, payload)
        return self.caught_up

    def _take_compacted(self, asked: OpenRequest, seq: int, payload: bytes) -> Finding:
        """Take in a batch of an answer that counts as a whole."""
        epoch = asked.epoch
        if seq > epoch.tracker.next and asked.items == 1 and asked.purpose in (Purpose.SYNC, Purpose.GAP):
            if self._spec.snapshot and asked.purpose is Purpose.GAP:
                epoch.gap_attempts = self._spec.attempts
                epoch.lost_because = LostReason.TRIMMED
                return Input.ANSWERED
            epoch.trimmed_before(seq)
        epoch.tracker.compacted(seq, payload)
        return None

    def _shown_by_batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, whole: bool) -> Finding:
        """Return what a batch of an answer shows, None if it may be taken in.

        A state under a number delivered proves no other epoch: the publisher has trimmed what was asked for. After an
        absence, or after a gap, batches are missing, and the state is read from the beginning; also where it was
        trimmed while it answered. A silent stream may have lost nothing: where a state that is the whole answer ends
        shows that (:meth:`_shown_by_state`). Batch 0 is left out, because that of a restarted SGLang begins with a
        clear, too.
        """
        contradicts = asked.contradicts(seq, payload)
        # after a snapshot nothing is known by which a batch under the last number could be told from a state
        unknown = asked.phase is Phase.PROBE and not asked.items and asked.last_delivered < 0
        if whole and seq > 0 and (contradicts or unknown) and asked.phase is not Phase.RECHECK:
            asked.is_state = asked.phase is Phase.PROBE and not asked.items
            return None if asked.is_state else REBUILT
        if contradicts:
            return Restart(RestartReason.PAYLOAD, proven=not self._spec.compacted)
        return self._shown_by_start(asked, seq, now) if asked.begins_beyond(seq) else None

    def _shown_by_start(self, asked: OpenRequest, seq: int, now: float) -> Finding:
        """Return what an answer shows that begins beyond the last batch delivered, None if it may be taken in.

        That proves neither epoch. The publisher has trimmed its buffer. While the connection stood, the batches between
        were sent on it, in order. After a pause of this process or of the network, or behind a backlog, they are still
        on their way. So kvbus waits for the live stream, for as long as that may take
        (:class:`~kvbus.core.sequencing.epoch.PublisherBuffer`).
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is Phase.VERIFY:
            # what lies between was sent while the connection was away, and is gone whichever epoch it was of
            if epoch.is_far(seq):
                return Restart()
            tracker.expose(seq)
            return REBUILT
        if asked.phase is Phase.RECHECK:
            # the publisher numbers far beyond the stale batches: they are not the newest ones of another epoch
            epoch.unverified.epoch_confirmed(now)
        elif seq <= tracker.next or epoch.buffer.has_lost(tracker.next, now):
            return None
        epoch.probe_factor = min(epoch.probe_factor, MAX_PATIENT_PROBE)
        return Input.ANSWERED

    # -- the end of an answer, or its absence ------------------------------------------------------------------------

    def over(self, asked: OpenRequest, now: float, *, answered: bool) -> Finding:
        """An answer is over: return what it brought, and what it shows by that. ``answered``: it had an end."""
        epoch = asked.epoch
        if not answered and self._spec.compacted and self._goes_on(asked):
            return Input.ABORTED
        if answered:
            epoch.interrupted = False
        if answered or asked.phase is not Phase.BACKFILL:
            epoch.history.unanswered = not answered
        if answered and asked.is_state:
            return self._shown_by_state(asked, now)
        if answered and asked.shows_other_epoch():
            return Restart()
        finding: Finding = getattr(self, PHASES[asked.phase].over)(asked, now, answered)
        return finding

    def aborted(self, asked: OpenRequest, now: float) -> Finding:
        """The answer broke off at a batch that is too large to be taken.

        If the answer was in order so far, it is known which batch that was. Otherwise the answer counts as timed out.
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is not Phase.VERIFY:
            tracker.drain()  # what the live stream has brought is not the batch that is too large
        same_batch = asked.items == 0 and epoch.aborted_at == asked.start
        in_order = max(asked.start, asked.last + 1) == tracker.next
        if asked.is_state or same_batch or not in_order or asked.purpose is Purpose.SNAPSHOT:
            return self.over(asked, now, answered=False)
        epoch.skip_lost()
        if asked.phase in (Phase.CATCH_UP, Phase.RECHECK) and tracker.synced:
            epoch.unverified.forget()
        return Input.ABORTED

    def _goes_on(self, asked: OpenRequest) -> bool:
        """Return whether to ask again where an answer broke off: it may have brought the first part of a state."""
        epoch = asked.epoch
        if epoch.tracker.next > asked.following:
            epoch.interrupted = True
            epoch.gap_attempts = 0
        elif asked.saw_last_delivered:
            epoch.interrupted = False  # it has nothing else under the last number, and nothing more: END was lost
        elif epoch.interrupted:
            epoch.gap_attempts += 1
        waits = asked.phase in (Phase.SYNC, Phase.GAP, Phase.CATCH_UP, Phase.RECHECK, Phase.PROBE)
        return waits and epoch.interrupted and epoch.gap_attempts < self._spec.attempts

    def _shown_by_state(self, asked: OpenRequest, now: float) -> Finding:
        """Return what follows from an answer that was a state alone, which was not taken in.

        A state ends with the newest batch that was sent. Batches up to it may still wait on the live stream.
        """
        epoch, following = asked.epoch, asked.epoch.tracker.next
        if asked.last + 1 < asked.log_end:
            return Restart()  # batches sent before the question are not in it
        if asked.last >= following:
            if epoch.buffer.has_lost(following, now):
                return REBUILT
            epoch.probe_factor = 1
        return Input.ANSWERED

    def _history_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """The publisher has no history at all, or does not answer."""
        if not answered:
            return Input.SILENT
        history = asked.epoch.history
        history.answered(None)
        if asked.epoch.tracker.next == 0:
            history.nothing_sent()
        return Input.ANSWERED

    def _sync_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """The history is in, or nobody has it."""
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if not answered and not asked.items and asked.once_more:
            return Input.SILENT
        if asked.items == 0 and tracker.next == 0:
            if tracker.held and not (answered and self._spec.compacted):
                epoch.baseline(tracker.held.first)
                epoch.history.pending = epoch.history.partial  # perhaps it had not published anything when asked
            elif answered:
                epoch.history.nothing_sent()
            elif self._spec.compacted:
                epoch.unconfirmed()
            if not answered:
                epoch.lost_because = LostReason.NO_ANSWER
        tracker.drain()
        return Input.ANSWERED if answered or asked.items else Input.SILENT

    def _verify_over(self, asked: OpenRequest, now: float, answered: bool) -> Finding:
        """The publisher has shown in which epoch it is, or has not."""
        epoch = asked.epoch
        if asked.saw_last_delivered:
            epoch.unverified.epoch_confirmed(now)
            return Input.ANSWERED
        if answered:
            other = epoch.buffer.keeps is not False or epoch.unverified.stale or asked.items
            return Restart() if other else Input.ANSWERED
        if not asked.once_more:
            if self._spec.on_lost == "clear" or epoch.unverified.consecutive:
                return Restart(pending=True)
            epoch.unverified.forget()
            if self._spec.compacted and self._spec.snapshot:
                epoch.gap_attempts = self._spec.attempts
            elif self._spec.compacted:
                epoch.unconfirmed()
        return Input.SILENT

    def _stream_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """The publisher has answered about a gap or a silence, or has not."""
        epoch = asked.epoch
        if asked.phase is Phase.GAP:
            epoch.lost_because = LostReason.HOLE if answered or asked.items else LostReason.NO_ANSWER
        if answered and asked.expects_batches and not asked.items:
            epoch.buffer.answered_with_nothing(epoch.tracker.live_end)
        return Input.ANSWERED if answered else Input.SILENT

    def _snapshot_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """The request for a snapshot was answered without one, or not at all."""
        return self._no_snapshot(asked, LostReason.HOLE if answered else LostReason.NO_ANSWER)

    def snapshot(self, asked: OpenRequest, seq: int, *, same_epoch: bool) -> Finding:
        """Return what a snapshot as of batch ``seq`` shows, None if it is to be applied. The request is closed."""
        self.stop()
        if asked.purpose is Purpose.HISTORY:
            return REBUILT
        if seq < -1:
            return self._no_snapshot(asked, LostReason.UNAVAILABLE)
        if same_epoch and 0 < asked.epoch.tracker.next > seq:
            return Input.COVERED if asked.phase is Phase.SNAPSHOT else self._no_snapshot(asked, LostReason.HOLE)
        if seq + 1 < asked.log_end and not same_epoch:
            return Restart()  # the publisher has sent more than this: it is in another epoch
        asked.epoch.cover(seq)
        return None

    def _no_snapshot(self, asked: OpenRequest, reason: LostReason) -> Finding:
        """The snapshot did not come, or did not help: what the replay still has is better than nothing."""
        epoch, tracker, replay = asked.epoch, asked.epoch.tracker, self._spec.replay
        if not replay:
            if reason is not LostReason.UNAVAILABLE and asked.once_more:
                return Input.SILENT
            epoch.history.unanswered = reason is not LostReason.HOLE
            epoch.lost_because = reason
        if asked.phase is Phase.GAP_SNAPSHOT:
            if epoch.interrupted:
                epoch.unconfirmed()
            if not tracker.complete:
                epoch.give_up()
        elif not replay:
            if tracker.held:
                epoch.baseline(tracker.held.first)
            else:
                epoch.history.missing_before(NOTHING, pending=True)
            tracker.drain()
        elif tracker.synced:
            if tracker.fingerprints.newest(tracker.next) < 0:
                return Restart()  # nothing is left to compare a replay with
            epoch.unconfirmed()
        return Input.UNAVAILABLE
