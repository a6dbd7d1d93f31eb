"""Send requests to a publisher, and determine what its answers show.

A request that continues an epoch also asks for the last delivered batches (:data:`OVERLAP`). Their content shows
whether the answer belongs to the same epoch. A publisher in the same epoch has the last delivered batch, unless its
buffer was trimmed beyond it.

:data:`~kvbus.core.sequencing.phases.PHASES` names the method that handles an answer in each phase. The method records
in the epoch what the answer shows. It returns the next input of the table of phases, a :class:`Restart`, or None if the
phase stays the same. The methods of :class:`OpenRequest` only decide what a batch proves.
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
"""Maximum number of delivered batches that a request asks for again, to recognize the epoch by their content.

A single batch is not enough, because it may belong to a new epoch that kvbus has not noticed.
"""

MAX_PATIENT_PROBE: Final = 8
"""Maximum interval between probes of a publisher whose batches are still in transit, in multiples of
``probe_interval``."""


class Restart(NamedTuple):
    """The finding that a new epoch begins.

    Attributes:
        reason: what showed it. ``REBUILT`` means that nothing proves a restart of the publisher.
        proven: whether it counts for the detection of two publishers on one endpoint. A compacted answer with different
            content does not count: it may be a state, which does not prove a restart.
        pending: None if an answer of the publisher will show how far back the new epoch reaches. Otherwise nothing is
            known about the epoch, and ``pending`` says whether the publisher may still have its batches.
    """

    reason: RestartReason = RestartReason.WENT_BACK
    proven: bool = True
    pending: bool | None = None


REBUILT: Final = Restart(RestartReason.REBUILT)

Finding = Input | Restart | None


class OpenRequest(msgspec.Struct):
    """The open request of a source, and the part of its answer that has been received."""

    # The question, and the facts that were known when it was asked.
    id: int
    phase: Phase
    """The phase of the sequencer that waits for the answer."""
    purpose: Purpose
    epoch: Epoch
    once_more: bool
    """Whether the sequencer may repeat the request if the publisher does not answer."""
    start: int
    last_delivered: int
    """Seq of the newest delivered batch whose fingerprint is known; -1 if there is none or the answer need not contain
    it."""
    expects_batches: bool
    """Whether the publisher was known to have sent a batch from ``start`` on. Then an empty answer is unexpected."""
    following: int
    """Seq of the batch that was to be delivered next when the request was made."""
    log_end: int
    """One past the highest batch that was known to exist when the request was made."""

    waits: bool = False
    """Whether the request waits in the daemon and has not been sent yet."""

    # The time limits. :meth:`Requests.sent` sets them.
    deadline: float = inf
    """The time at which kvbus gives the request up. Each batch with a higher seq than before postpones it."""
    hard_deadline: float = inf
    """The time at which kvbus gives the request up even if further batches come."""

    # The received part of the answer.
    items: int = 0
    first: int = -1
    last: int = -1
    saw_last_delivered: bool = False
    is_state: bool = False
    """Whether the answer is a state in place of the requested batches. kvbus then evaluates only the end of
    the answer."""

    def take(self, seq: int, deadline: float) -> None:
        """Count one batch of the answer. If its seq is the highest so far, postpone the deadline to ``deadline``."""
        if not self.items:
            self.first = seq
        self.items += 1
        if seq == self.last_delivered:
            self.saw_last_delivered = True
        if seq > self.last:
            self.last = seq
            self.deadline = deadline

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether a batch of the answer cannot belong to the known epoch. Call it before :meth:`take`."""
        tracker = self.epoch.tracker
        if tracker.fingerprints.matches(seq, payload, tracker.next) is False:
            return True
        if self.purpose is Purpose.SYNC and self.last_delivered < 0:
            return False
        if self.last_delivered < 0:
            return self.purpose is Purpose.VERIFY  # kvbus has no fingerprint to recognize the epoch by
        if self.saw_last_delivered:
            return False
        if seq <= self.last_delivered:
            # kvbus has delivered every batch from the start of the request to the last delivered one. If the publisher
            # leaves one of them out, that batch was of another epoch.
            return self.items > 0 and seq > self.last + 1
        if self.items:
            # the answer has earlier batches than the last delivered one, but lacks that one
            return self.first <= self.last_delivered
        return False

    def begins_beyond(self, seq: int) -> bool:
        """Return whether the answer begins after the last delivered batch, so that it does not show the epoch.

        ``seq`` is the first batch of the answer.

        For a gap, such an answer is normal: the batches in between are known to be missing, and the publisher has
        trimmed them.
        """
        return self.purpose in (Purpose.PROBE, Purpose.VERIFY) and not self.items and 0 <= self.last_delivered < seq

    def shows_other_epoch(self) -> bool:
        """Return whether the complete answer cannot belong to the known epoch.

        There are three cases. It lacks the last delivered batch although it has earlier batches. It lacks batches that
        the publisher sent before the request, so these belonged to another epoch. It is empty although the publisher
        keeps a replay buffer. In the second case both epochs may begin with the same batches: a kvbus that lost its
        numbering sends an engine's history again under the same seqs.
        """
        if not self.items:
            return self.epoch.buffer.keeps is True and self.last_delivered >= 0
        if not self.saw_last_delivered and 0 <= self.first <= self.last_delivered:
            return True
        return self.purpose is Purpose.VERIFY and self.last + 1 < self.log_end


def start_of(purpose: Purpose, tracker: GapTracker, *, compacted: bool = False) -> tuple[int, int]:
    """Return the first seq to request, and the last delivered batch that the answer has to contain (-1: none)."""
    if purpose is Purpose.HISTORY:
        return 0, -1
    if purpose is Purpose.SNAPSHOT or (purpose is Purpose.SYNC and not compacted):
        return tracker.next, -1
    last_delivered = tracker.fingerprints.newest(tracker.next)
    continues = compacted or purpose is Purpose.GAP
    if last_delivered < 0 or (continues and last_delivered != tracker.next - 1):
        return (tracker.next if continues else max(tracker.next - 1, 0)), -1
    # Do not ask again for a lost batch: it may be too large to receive, and the answer would end there. A compacted
    # answer begins with a state if the publisher's journal lacks the start. One batch is enough to notice that.
    return tracker.fingerprints.run_to(last_delivered, 1 if compacted else OVERLAP), last_delivered


class Requests:
    """The requests to one publisher: it sends them and handles the answers. At most one request is open.

    Each request has its own id, which distinguishes its answer from late answers to older requests.

    Args:
        spec: the time limits of answers, and the capabilities of the publisher.
        stats: the counters of the source.
        actions: the queue that receives the sequencer's decisions.
    """

    __slots__ = ("_actions", "_last_id", "_spec", "_stats", "open")

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self.open: OpenRequest | None = None
        self._last_id = 0
        self._spec = spec
        self._stats = stats
        self._actions = actions

    def ask(self, phase: Phase, epoch: Epoch, *, once_more: bool) -> None:
        """Send the request that belongs to ``phase``. Close the open request first."""
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
        """Start the time limits of a request, because the daemon has sent it now.

        It may have waited long after :meth:`ask`.

        If ``now`` is infinity, the request still waits.
        """
        asked = self.open
        if asked is not None and asked.id == request:
            spec = self._spec
            asked.waits = now == inf
            asked.deadline = now + spec.replay_timeout
            if asked.purpose is Purpose.SNAPSHOT or not spec.replay:
                asked.deadline = now + (spec.snapshot_timeout or SNAPSHOT_TIMEOUTS * spec.replay_timeout)
            asked.hard_deadline = now + self._spec.replay_total_timeout

    def unread(self, request: int, now: float) -> None:
        """Extend the time limits of a request: messages of its answer wait in kvbus, so the publisher is not late."""
        asked = self.open
        if asked is not None and asked.id == request:
            until = now + self._spec.replay_timeout
            asked.deadline = max(asked.deadline, until)
            asked.hard_deadline = max(asked.hard_deadline, until)

    def stop(self) -> None:
        """Close the open request, if there is one. Its answer is not needed any more."""
        if self.open is not None:
            self._actions.append(Stop(self.open.id))
            self.open = None

    def match(self, request: int) -> OpenRequest | None:
        """Return the open request if it has this id.

        Otherwise count the message as part of a late answer and return None.
        """
        if self.open is None or self.open.id != request:
            self._stats.stale_replies += 1
            return None
        return self.open

    def timed_out(self, now: float) -> OpenRequest | None:
        """Close and return the open request if it has reached a time limit; otherwise return None.

        Count the timeout.
        """
        asked = self.open
        if asked is None or (now < asked.deadline and now < asked.hard_deadline):
            return None
        self._stats.replay_timeouts += 1
        self.stop()
        return asked

    @property
    def caught_up(self) -> Finding:
        """``CAUGHT_UP`` if all live batches are delivered, so that the answer may be closed; otherwise None."""
        asked = self.open
        if asked is None or asked.phase not in (Phase.SYNC, Phase.GAP, Phase.GAP_SNAPSHOT):
            return None
        return Input.CAUGHT_UP if asked.epoch.tracker.caught_up else None

    # -- batches of an answer ------------------------------------------------------------------------------------------

    def batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, *, whole: bool) -> Finding:
        """Handle one batch of an answer, and return what it shows. ``whole`` says that the batch may begin a state."""
        finding: Finding = getattr(self, PHASES[asked.phase].batch)(asked, seq, payload, now, whole)
        return finding

    def _take_first_of_history(self, asked: OpenRequest, seq: int, payload: bytes, _now: float, whole: bool) -> Finding:
        """Handle the first batch of a history answer. It shows how far back the publisher's replay buffer reaches."""
        tracker, history = asked.epoch.tracker, asked.epoch.history
        more = history.answered(seq) or (whole and not tracker.fingerprints.matches(seq, payload, tracker.next))
        return REBUILT if more else Input.ANSWERED

    def _take_batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, whole: bool) -> Finding:
        """Check whether a batch of an answer belongs to the known epoch. If it does, add it to the stream."""
        if not asked.is_state:
            finding = self._check_epoch(asked, seq, payload, now, whole)
            if finding is not None:
                return finding
        asked.take(seq, now + self._spec.replay_timeout)
        return None if asked.is_state else self._add(asked, seq, payload)

    def _add(self, asked: OpenRequest, seq: int, payload: bytes) -> Finding:
        """Deliver or hold a batch of the known epoch. If it was delivered before, only record its fingerprint."""
        epoch, tracker = asked.epoch, asked.epoch.tracker
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
            tracker.held.replace(seq, payload)  # it replaces a live batch with the same seq
            tracker.drain()
        else:
            tracker.replayed(seq, payload)
        return self.caught_up

    def _take_compacted(self, asked: OpenRequest, seq: int, payload: bytes) -> Finding:
        """Handle a batch of an answer that may contain a state, and is therefore valid only when it is complete."""
        epoch = asked.epoch
        if seq > epoch.tracker.next and asked.items == 1 and asked.purpose in (Purpose.SYNC, Purpose.GAP):
            if self._spec.snapshot and asked.purpose is Purpose.GAP:
                epoch.gap_attempts = self._spec.attempts
                epoch.lost_because = LostReason.TRIMMED
                return Input.ANSWERED
            epoch.trimmed_before(seq)
        epoch.tracker.compacted(seq, payload)
        return None

    def _check_epoch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, whole: bool) -> Finding:
        """Return what a batch of an answer shows about the epoch; return None if it may be added to the stream.

        Mark an answer that is only a state. A state under the seqs of delivered batches does not prove another epoch:
        the publisher has trimmed the requested batches. After a disconnection or a gap, batches are missing, so kvbus
        reads the epoch again from the beginning. It also does so if the publisher trimmed its buffer while it answered.
        A silent stream may have lost nothing: if the answer is only a state, its end shows whether it has
        (:meth:`_state_over`). Batch 0 never counts as the beginning of a state, because batch 0 of a restarted SGLang
        begins with a clear, too.
        """
        contradicts = asked.contradicts(seq, payload)
        # after a snapshot, kvbus has no fingerprint of the last batch to distinguish it from a state under the same seq
        unknown = asked.phase is Phase.PROBE and not asked.items and asked.last_delivered < 0
        if whole and seq > 0 and (contradicts or unknown) and asked.phase is not Phase.RECHECK:
            asked.is_state = asked.phase is Phase.PROBE and not asked.items
            return None if asked.is_state else REBUILT
        if contradicts:
            return Restart(RestartReason.PAYLOAD, proven=not self._spec.compacted)
        return self._start_late(asked, seq, now) if asked.begins_beyond(seq) else None

    def _start_late(self, asked: OpenRequest, seq: int, now: float) -> Finding:
        """Handle an answer that begins after the last delivered batch.

        Return None if its batches have to be added to the stream.

        Such an answer proves neither the same epoch nor another one, because the publisher has trimmed its buffer.
        While the connection was up, the publisher sent the batches in between on it, in order. They may still be in
        transit: after a pause of this process or of the network, or while a backlog is queued. So kvbus waits for them
        on the live stream, for as much time as they may need (:class:`~kvbus.core.sequencing.epoch.PublisherBuffer`).
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is Phase.VERIFY:
            # the publisher sent the batches in between during the disconnection, so they are lost in either epoch
            if epoch.is_far(seq):
                return Restart()
            tracker.expose(seq)
            return REBUILT
        if asked.phase is Phase.RECHECK:
            # the publisher is far beyond the stale batches, so these cannot be the newest batches of another epoch
            epoch.unverified.epoch_confirmed(now)
        elif seq <= tracker.next or epoch.buffer.has_lost(tracker.next, now):
            return None
        epoch.probe_factor = min(epoch.probe_factor, MAX_PATIENT_PROBE)
        return Input.ANSWERED

    # -- end of an answer, or no answer --------------------------------------------------------------------------------

    def over(self, asked: OpenRequest, now: float, *, answered: bool) -> Finding:
        """Handle the end of an answer, and return what it shows.

        ``answered`` is False if it is incomplete or missing.
        """
        epoch = asked.epoch
        if not answered and self._spec.compacted and self._resumes(asked):
            return Input.ABORTED
        if answered:
            epoch.interrupted = False
        if answered or asked.phase is not Phase.BACKFILL:
            epoch.history.unanswered = not answered
        if answered and asked.is_state:
            return self._state_over(asked, now)
        if answered and asked.shows_other_epoch():
            return Restart()
        finding: Finding = getattr(self, PHASES[asked.phase].over)(asked, now, answered)
        return finding

    def aborted(self, asked: OpenRequest, now: float) -> Finding:
        """Handle an answer that ended early at an oversized batch.

        If the answer was in order until then, kvbus knows the seq of the oversized batch and gives up only this batch.
        Otherwise kvbus treats the answer as timed out.
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is not Phase.VERIFY:
            tracker.drain()  # held live batches have arrived, so none of them is the oversized batch
        same_batch = asked.items == 0 and epoch.aborted_at == asked.start
        in_order = max(asked.start, asked.last + 1) == tracker.next
        if asked.is_state or same_batch or not in_order or asked.purpose is Purpose.SNAPSHOT:
            return self.over(asked, now, answered=False)
        epoch.skip_lost()
        if asked.phase in (Phase.CATCH_UP, Phase.RECHECK) and tracker.synced:
            epoch.unverified.forget()
        return Input.ABORTED

    def _resumes(self, asked: OpenRequest) -> bool:
        """Record that a compacted answer ended early. Return whether to repeat the request from the next batch on.

        The answer may have delivered only the first part of a state.
        """
        epoch = asked.epoch
        if epoch.tracker.next > asked.following:
            epoch.interrupted = True
            epoch.gap_attempts = 0
        elif asked.saw_last_delivered:
            epoch.interrupted = False  # the publisher has no newer batch, so only END is missing
        elif epoch.interrupted:
            epoch.gap_attempts += 1
        waits = asked.phase in (Phase.SYNC, Phase.GAP, Phase.CATCH_UP, Phase.RECHECK, Phase.PROBE)
        return waits and epoch.interrupted and epoch.gap_attempts < self._spec.attempts

    def _state_over(self, asked: OpenRequest, now: float) -> Finding:
        """Handle the end of an answer that was only a state. None of its batches was added to the stream.

        A state ends with the publisher's newest batch. Batches up to it may still arrive on the live stream.
        """
        epoch, following = asked.epoch, asked.epoch.tracker.next
        if asked.last + 1 < asked.log_end:
            return Restart()  # the state lacks batches that were sent before the request
        if asked.last >= following:
            if epoch.buffer.has_lost(following, now):
                return REBUILT
            epoch.probe_factor = 1
        return Input.ANSWERED

    def _history_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle an empty or missing answer to a request for the epoch's history."""
        if not answered:
            return Input.SILENT
        history = asked.epoch.history
        history.answered(None)
        if asked.epoch.tracker.next == 0:
            history.nothing_sent()
        return Input.ANSWERED

    def _sync_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle the end of the answer with the epoch's history, or a missing answer."""
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if not answered and not asked.items and asked.once_more:
            return Input.SILENT
        if asked.items == 0 and tracker.next == 0:
            if tracker.held and not (answered and self._spec.compacted):
                epoch.baseline(tracker.held.first)
                # the publisher may not have sent a batch when kvbus asked
                epoch.history.pending = epoch.history.partial
            elif answered:
                epoch.history.nothing_sent()
            elif self._spec.compacted:
                epoch.unconfirmed()
            if not answered:
                epoch.lost_because = LostReason.NO_ANSWER
        tracker.drain()
        return Input.ANSWERED if answered or asked.items else Input.SILENT

    def _verify_over(self, asked: OpenRequest, now: float, answered: bool) -> Finding:
        """Handle the end of an answer that has to show the publisher's epoch, or a missing answer."""
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
        """Handle the end of an answer about a gap or about a silent stream, or a missing answer."""
        epoch = asked.epoch
        if asked.phase is Phase.GAP:
            epoch.lost_because = LostReason.HOLE if answered or asked.items else LostReason.NO_ANSWER
        if answered and asked.expects_batches and not asked.items:
            epoch.buffer.answered_with_nothing(epoch.tracker.live_end)
        return Input.ANSWERED if answered else Input.SILENT

    def _snapshot_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle a snapshot request that the publisher answered without a snapshot, or did not answer."""
        return self._no_snapshot(asked, LostReason.HOLE if answered else LostReason.NO_ANSWER)

    def snapshot(self, asked: OpenRequest, seq: int, *, same_epoch: bool) -> Finding:
        """Close the request and handle a snapshot as of batch ``seq``.

        Return None if the snapshot has to be applied.
        """
        self.stop()
        if asked.purpose is Purpose.HISTORY:
            return REBUILT
        if seq < -1:
            return self._no_snapshot(asked, LostReason.UNAVAILABLE)
        if same_epoch and 0 < asked.epoch.tracker.next > seq:
            return Input.COVERED if asked.phase is Phase.SNAPSHOT else self._no_snapshot(asked, LostReason.HOLE)
        if seq + 1 < asked.log_end and not same_epoch:
            # the publisher has sent more batches than the snapshot includes, so these were of another epoch
            return Restart()
        asked.epoch.cover(seq)
        return None

    def _no_snapshot(self, asked: OpenRequest, reason: LostReason) -> Finding:
        """Continue without a snapshot, because the publisher sent none or it is too old.

        Use the batches of the replay instead.
        """
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
                return Restart()  # kvbus has no fingerprint to compare a replay with
            epoch.unconfirmed()
        return Input.UNAVAILABLE
