"""Send requests to a publisher, and determine what its answers show.

A request that continues an epoch also asks for the last delivered batches
(:data:`~kvbus.core.sequencing.request.OVERLAP`). Their content shows whether the answer belongs to the same epoch. A
publisher in the same epoch has the last delivered batch, unless its replay buffer has already dropped that batch.

:data:`~kvbus.core.sequencing.phases.PHASES` names the method that handles an answer in each phase. The method records
in the :class:`Epoch` object what the answer shows. It returns the next input of the table of phases, a
:class:`Restart`, or None if the phase stays the same. An :class:`~kvbus.core.sequencing.request.OpenRequest` is a
request whose answer has not ended. Its methods decide whether a batch of the answer, or a missing batch, shows another
epoch.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Final, NamedTuple

from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, LostReason, RestartReason, Stop
from kvbus.core.sequencing.epoch import NOTHING, Epoch
from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.sequencing.phases import PHASES, REQUESTS, Input, Phase, Purpose
from kvbus.core.sequencing.request import OVERLAP, OpenRequest, start_of
from kvbus.core.source_spec import SNAPSHOT_TIMEOUTS, SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

MAX_PATIENT_PROBE: Final = 8
"""Maximum time between two probes while kvbus waits for batches that may be in transit on the live stream.

A probe asks a silent publisher for its newest batches. The unit of the maximum is ``probe_interval``.
"""


class Restart(NamedTuple):
    """The result of a check which says that a new epoch begins.

    Attributes:
        reason: the observation that showed it. ``REBUILT`` means that nothing proves a restart of the publisher.
        proven: whether the restart counts for the detection of two publishers on one endpoint. It does not count if a
            compacted answer has other content than before: the answer may be a state, which does not prove a restart.
        pending: None if an answer of the publisher will show how far back the new epoch reaches. Otherwise kvbus lacks
            the beginning of the epoch, and ``pending`` says whether the publisher may still have those batches.
    """

    reason: RestartReason = RestartReason.WENT_BACK
    proven: bool = True
    pending: bool | None = None


REBUILT: Final = Restart(RestartReason.REBUILT)
OTHER_PUBLISHER: Final = Restart(RestartReason.OTHER_PUBLISHER, pending=False)

Finding = Input | Restart | None


class Requests:
    """The requests to one publisher: it sends them and handles the answers. At most one request is open.

    Each request has its own id, which distinguishes its answer from late answers to older requests.

    Args:
        spec: the time limits of answers, and the capabilities of the publisher.
        stats: the counters of the source.
        actions: the queue that receives the sequencer's decisions.
    """

    __slots__ = ("_actions", "_last_id", "_stats", "open", "spec")

    def __init__(self, spec: SourceSpec, stats: SourceStats, actions: deque[Action]) -> None:
        self.open: OpenRequest | None = None
        self._last_id = 0
        self.spec = spec
        self._stats = stats
        self._actions = actions

    def ask(self, phase: Phase, epoch: Epoch, *, once_more: bool, confirms: bool = False) -> None:
        """Send the publisher the request that belongs to the phase ``phase``. Close the open request first.

        ``once_more`` says whether the request may be repeated if the publisher does not answer. ``confirms`` says
        whether the answer has to show that its publisher is the one of the live stream.
        """
        self.stop()
        self._last_id += 1
        purpose, tracker = REQUESTS[phase], epoch.tracker
        start, last_delivered = start_of(purpose, tracker, compacted=self.spec.compacted)
        if purpose is Purpose.PROBE and confirms and not self.spec.compacted and tracker.live_from < tracker.next:
            # The answer has to contain a live batch. If it can show whether the batches before it came from the same
            # publisher, request some of them, too.
            last_delivered = max(tracker.live_from, tracker.next - RING // 2)
            start = tracker.fingerprints.run_to(last_delivered, 1 if epoch.took_state else OVERLAP)
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
            live_end=epoch.live_end,
        )
        if phase is Phase.RECHECK and confirms and not self.spec.compacted:
            # Compare a stale batch itself: it may come from another publisher than the answer.
            self.open.start = start = min(start, epoch.unverified.stale.last)
        self._stats.replays += 1
        asks_snapshot = self._asks_snapshot(purpose)
        self._actions.append(AskSnapshot(self._last_id) if asks_snapshot else Ask(self._last_id, start))

    def sent(self, request: int, now: float) -> None:
        """Start the time limits of a request, because the daemon has sent it now.

        If ``now`` is infinity, the request is still in the daemon's queue, and no time limit applies.
        """
        asked = self.open
        if asked is not None and asked.id == request:
            spec = self.spec
            asked.waits = now == inf
            asked.deadline = now + spec.replay_timeout
            if self._asks_snapshot(asked.purpose):
                asked.deadline = now + (spec.snapshot_timeout or SNAPSHOT_TIMEOUTS * spec.replay_timeout)
            asked.hard_deadline = now + self.spec.replay_total_timeout

    def _asks_snapshot(self, purpose: Purpose) -> bool:
        return purpose is Purpose.SNAPSHOT or (purpose is Purpose.HISTORY and not self.spec.replay)

    def unread(self, request: int, now: float) -> None:
        """Extend the time limits of a request, because messages of its answer wait in this process.

        So kvbus is late, not the publisher.
        """
        asked = self.open
        if asked is not None and asked.id == request:
            until = now + self.spec.replay_timeout
            asked.deadline = max(asked.deadline, until)
            asked.hard_deadline = max(asked.hard_deadline, until)

    def stop(self) -> None:
        """Close the open request, if there is one. Its answer is not needed any more."""
        if self.open is not None:
            self._actions.append(Stop(self.open.id))
            self.open = None

    def match(self, request: int) -> OpenRequest | None:
        """Return the open request if a message with the request id ``request`` answers it.

        Otherwise return None, and count the message, because it belongs to a late answer to an older request.
        """
        if self.open is None or self.open.id != request:
            self._stats.stale_replies += 1
            return None
        return self.open

    def timed_out(self, now: float) -> OpenRequest | None:
        """Close, count and return the open request if it has reached a time limit; otherwise return None."""
        asked = self.open
        if asked is None or (now < asked.deadline and now < asked.hard_deadline):
            return None
        self._stats.replay_timeouts += 1
        self.stop()
        return asked

    @property
    def caught_up(self) -> Finding:
        """The input ``CAUGHT_UP`` if all live batches are delivered, so that the request may end; otherwise None."""
        asked = self.open
        if asked is None or asked.phase not in (Phase.SYNC, Phase.GAP, Phase.GAP_SNAPSHOT):
            return None
        return Input.CAUGHT_UP if asked.epoch.tracker.caught_up else None

    # -- batches of an answer ------------------------------------------------------------------------------------------

    def batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, *, may_be_state: bool) -> Finding:
        """Handle one batch of an answer, and return the next input for the sequencer (None: nothing changes).

        ``may_be_state`` says that the batch may be the first of a complete state.
        """
        finding: Finding = getattr(self, PHASES[asked.phase].batch)(asked, seq, payload, now, may_be_state)
        return finding

    def _take_first_of_history(
        self, asked: OpenRequest, seq: int, payload: bytes, _now: float, may_be_state: bool
    ) -> Finding:
        """Handle the first batch of the answer to a request for all older batches of the epoch.

        Its seq shows how far back the publisher's replay buffer reaches.
        """
        tracker, history = asked.epoch.tracker, asked.epoch.history
        more = history.answered(seq) or (may_be_state and not tracker.fingerprints.matches(seq, payload, tracker.next))
        return REBUILT if more else Input.ANSWERED

    def _take_batch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, may_be_state: bool) -> Finding:
        """Check whether a batch of an answer belongs to the known epoch. If it does, deliver it or hold it."""
        if may_be_state and seq > 0:
            asked.shows_publisher, asked.epoch.took_state = False, True
        stale = asked.epoch.unverified.stale
        if seq in stale:
            same = stale.get(seq) == payload
            asked.agrees, asked.differs = asked.agrees or same, asked.differs or not same
        if not asked.is_state:
            finding = self._check_epoch(asked, seq, payload, now, may_be_state)
            if finding is not None:
                return finding
        asked.take(seq, now + self.spec.replay_timeout)
        return None if asked.is_state else self._add(asked, seq, payload)

    def _add(self, asked: OpenRequest, seq: int, payload: bytes) -> Finding:
        """Take a batch of an answer after the answer has shown that it belongs to the known epoch.

        Deliver the batch if it is the next one, or keep it in the reorder buffer until the batches before it arrive. If
        it was delivered before, only record its fingerprint.
        """
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
        if self.spec.compacted:
            return self._take_compacted(asked, seq, payload)
        if asked.phase is Phase.SYNC and asked.items == 1 and tracker.next == 0:
            epoch.baseline(min(seq, tracker.buffer.first) if tracker.buffer else seq)
        if seq in tracker.buffer:
            asked.differs = asked.differs or tracker.buffer.get(seq) != payload
            tracker.replaced(seq, payload)
        else:
            tracker.replayed(seq, payload)
        return self.caught_up

    def _take_compacted(self, asked: OpenRequest, seq: int, payload: bytes) -> Finding:
        """Give the gap tracker a batch of an answer that may be a state (:meth:`GapTracker.compacted`).

        Return the sequencer's next input; None if nothing changes.
        """
        epoch = asked.epoch
        if seq > epoch.tracker.next and asked.items == 1 and asked.purpose in (Purpose.SYNC, Purpose.GAP):
            if self.spec.snapshot and asked.purpose is Purpose.GAP:
                epoch.gap_attempts = self.spec.attempts
                epoch.lost_because = LostReason.TRIMMED
                return Input.ANSWERED
            epoch.trimmed_before(seq)
        epoch.tracker.compacted(seq, payload)
        return None

    def _check_epoch(self, asked: OpenRequest, seq: int, payload: bytes, now: float, may_be_state: bool) -> Finding:
        """Return the sequencer's next input after a batch of an answer. None: kvbus may deliver or hold the batch.

        A publisher that has dropped the requested batches may send a state. Its batches have seqs of delivered batches,
        but other content. This does not prove another epoch. What kvbus does depends on why it asked:

        * After a disconnection or a gap, batches are missing, so kvbus reads the epoch again from the beginning. It
          also does so if the publisher dropped batches while it answered.
        * If kvbus only asked because the stream was silent, perhaps nothing was lost. So it only sets ``is_state``. The
          end of the state shows whether batches were lost (:meth:`_state_over`).

        Batch 0 never counts as the beginning of a state, because batch 0 of a restarted SGLang begins with a clear,
        too.
        """
        contradicts = asked.contradicts(seq, payload)
        # After a snapshot, kvbus has no fingerprint of the last batch. So it cannot see whether the answer begins with
        # that batch or with a state under the same seq.
        unknown = asked.phase is Phase.PROBE and not asked.items and asked.last_delivered < 0
        if may_be_state and seq > 0 and (contradicts or unknown) and asked.phase is not Phase.RECHECK:
            asked.is_state = asked.phase is Phase.PROBE and not asked.items
            return None if asked.is_state else REBUILT
        if contradicts:
            # A publisher that is itself a kvbus numbers its state like the batches that the state replaces, and still
            # sends these batches in later answers. On a silent connection, such a batch proves no other epoch.
            if asked.phase is Phase.PROBE and asked.epoch.took_state and seq < asked.epoch.tracker.live_from:
                return None
            return Restart(RestartReason.PAYLOAD, proven=not self.spec.compacted)
        return self._start_late(asked, seq, now) if asked.begins_beyond(seq) else None

    def _start_late(self, asked: OpenRequest, seq: int, now: float) -> Finding:
        """Handle an answer that begins after the last delivered batch. Return None if kvbus has to use its batches.

        Such an answer proves neither the same epoch nor another one, because the publisher has dropped older batches
        from its buffer. The batches between the last delivered batch and ``seq`` may not be lost: if the connection was
        up, the publisher has sent them on it, in order. They may still be in transit, after a pause of this process or
        of the network, or while a backlog is queued. So kvbus waits for them on the live stream, for as much time as
        they may need (:class:`~kvbus.core.sequencing.epoch.PublisherBuffer`).
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is Phase.VERIFY:
            # Read the epoch again: the publisher sent the batches between the last delivered one and this answer while
            # the connection was down. So they are lost, whether the epoch is the same or not.
            if epoch.is_far(seq):
                return Restart()
            tracker.expose(seq)
            return REBUILT
        if asked.phase is Phase.RECHECK:
            # The stale batches are late copies: the publisher's numbers are far higher, so it has not begun again at
            # their seqs.
            epoch.unverified.epoch_confirmed(now)
        elif seq <= tracker.next or epoch.buffer.has_lost(tracker.next, now):
            return None
        epoch.probe_factor = min(epoch.probe_factor, MAX_PATIENT_PROBE)
        return Input.ANSWERED

    def _compare(self, asked: OpenRequest, seq: int, payload: bytes, now: float, may_be_state: bool) -> Finding:
        """Compare a batch of an answer with the live stream. kvbus does not use the batch otherwise."""
        asked.shows_publisher = asked.shows_publisher and not (may_be_state and seq > 0)
        asked.differs = asked.contradicts(seq, payload) or asked.differs
        asked.take(seq, now + self.spec.replay_timeout)
        return None

    # -- end of an answer, or no answer --------------------------------------------------------------------------------

    def ended(self, asked: OpenRequest, now: float, *, answered: bool) -> Finding:
        """Handle the end of a publisher's answer, and return the sequencer's next input (None: nothing changes).

        ``answered`` is False if the answer is incomplete or missing.
        """
        epoch = asked.epoch
        if asked.phase is Phase.COMPARE:
            return self._compared(asked, now, answered)
        if not answered and self.spec.compacted and self._resumes(asked):
            return Input.ABORTED
        if answered:
            epoch.interrupted = False
        if answered or asked.phase is not Phase.BACKFILL:
            epoch.history.unanswered = not answered
        if answered and asked.is_state:
            return self._state_over(asked, now)
        if answered and asked.shows_other_epoch():
            return Restart()
        finding: Finding = getattr(self, PHASES[asked.phase].at_end)(asked, now, answered)
        return finding

    def aborted(self, asked: OpenRequest, now: float) -> Finding:
        """Handle an answer that ended early because one of its batches was larger than kvbus accepts.

        If the answer was in order until then, kvbus knows the seq of the oversized batch and gives up only this batch.
        Otherwise kvbus treats the answer as timed out.
        """
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if asked.phase is not Phase.VERIFY:
            tracker.drain()  # deliver the waiting live batches: kvbus has them, so none is the batch that is too large
        same_batch = asked.items == 0 and epoch.aborted_at == asked.start
        in_order = max(asked.start, asked.last + 1) == tracker.next
        unused = asked.is_state or asked.purpose in (Purpose.SNAPSHOT, Purpose.COMPARE)
        if unused or same_batch or not in_order:
            return self.ended(asked, now, answered=False)
        epoch.skip_lost()
        if asked.phase in (Phase.CATCH_UP, Phase.RECHECK) and tracker.synced:
            epoch.unverified.forget()
        return Input.ABORTED

    def _resumes(self, asked: OpenRequest) -> bool:
        """Record that an answer with a state ended early. Return whether to repeat the request from the next batch on.

        The request is repeated if the answer may have delivered only the first part of a state.
        """
        epoch = asked.epoch
        if epoch.tracker.next > asked.following:
            epoch.interrupted = True
            epoch.gap_attempts = 0
        elif asked.saw_last_delivered:
            epoch.interrupted = False  # the publisher has no newer batch, so the answer lacked only END
        elif epoch.interrupted:
            epoch.gap_attempts += 1
        waits = asked.phase in (Phase.SYNC, Phase.GAP, Phase.CATCH_UP, Phase.RECHECK, Phase.PROBE)
        return waits and epoch.interrupted and epoch.gap_attempts < self.spec.attempts

    def _state_over(self, asked: OpenRequest, now: float) -> Finding:
        """Handle the end of an answer that was a state. kvbus has used none of its batches.

        The last one was the publisher's newest batch. If kvbus knew a still newer batch, that was of another epoch. If
        kvbus lacks the newest batch, it may still come live. After a timeout, kvbus reads the epoch again.
        """
        epoch, following = asked.epoch, asked.epoch.tracker.next
        if asked.last + 1 < asked.log_end:
            return Restart()  # a batch that kvbus knew before the request is missing, so it was of another epoch
        if asked.last >= following:
            if epoch.buffer.has_lost(following, now):
                return REBUILT
            epoch.probe_factor = 1
        return Input.ANSWERED

    def _history_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle an empty answer to a request for the epoch's history, or the lack of an answer."""
        if not answered:
            return Input.SILENT
        history = asked.epoch.history
        history.answered(None)
        if asked.epoch.tracker.next == 0:
            history.nothing_sent()
        return Input.ANSWERED

    def _sync_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle the end of an answer to a request for all batches of the epoch, or the lack of an answer."""
        epoch, tracker = asked.epoch, asked.epoch.tracker
        if not answered and not asked.items and asked.once_more:
            return Input.SILENT
        if asked.items == 0 and tracker.next == 0:
            if tracker.buffer and not (answered and self.spec.compacted):
                epoch.baseline(tracker.buffer.first)
                # ask again for the older batches: the publisher may have had none yet when it answered
                epoch.history.pending = epoch.history.partial
            elif answered:
                epoch.history.nothing_sent()
            elif self.spec.compacted:
                epoch.unconfirmed()
            if not answered:
                epoch.lost_because = LostReason.NO_ANSWER
        tracker.drain()
        return Input.ANSWERED if answered or asked.items else Input.SILENT

    def _verify_over(self, asked: OpenRequest, now: float, answered: bool) -> Finding:
        """Return what follows from the end, or the lack, of an answer that should show whether the epoch is the same.

        ``answered`` says that the answer came to its end (END).
        """
        epoch = asked.epoch
        if asked.saw_last_delivered:
            epoch.unverified.epoch_confirmed(now)
            return Input.ANSWERED
        if answered:
            other = epoch.buffer.keeps is not False or epoch.unverified.stale or asked.items
            return Restart() if other else Input.ANSWERED
        if not asked.once_more:
            if self.spec.on_lost == "clear" or epoch.unverified.consecutive:
                return Restart(pending=True)
            epoch.unverified.forget()
            if self.spec.compacted and self.spec.snapshot:
                epoch.gap_attempts = self.spec.attempts
            elif self.spec.compacted:
                epoch.unconfirmed()
        return Input.SILENT

    def _stream_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle the end of an answer to a request about a gap or a silent stream, or the lack of an answer."""
        epoch = asked.epoch
        if asked.phase is Phase.GAP:
            epoch.lost_because = LostReason.HOLE if answered or asked.items else LostReason.NO_ANSWER
        if answered and asked.expects_batches and not asked.items:
            epoch.buffer.answered_with_nothing(epoch.tracker.live_end)
        return Input.ANSWERED if answered else Input.SILENT

    def _compared(self, _asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle the end, or the lack, of an answer that kvbus has only compared with the live stream."""
        return Input.ANSWERED if answered else Input.SILENT

    def _snapshot_over(self, asked: OpenRequest, _now: float, answered: bool) -> Finding:
        """Handle a snapshot request that the publisher answered without a snapshot, or did not answer."""
        return self._no_snapshot(asked, LostReason.HOLE if answered else LostReason.NO_ANSWER)

    def snapshot(self, asked: OpenRequest, seq: int, *, same_epoch: bool) -> Finding:
        """Close the snapshot request and handle its reply, a snapshot as of batch ``seq``.

        Return None if the caller has to apply the snapshot; if not (it may be too old), the sequencer's next input.
        """
        self.stop()
        if asked.purpose is Purpose.HISTORY:
            return REBUILT
        if seq < -1:
            return self._no_snapshot(asked, LostReason.UNAVAILABLE)
        if same_epoch and 0 < asked.epoch.tracker.next > seq:
            return Input.COVERED if asked.phase is Phase.SNAPSHOT else self._no_snapshot(asked, LostReason.HOLE)
        if seq + 1 < asked.log_end and not same_epoch:
            # When kvbus sent the request, it knew of batches with higher seqs than the snapshot's. A snapshot of their
            # epoch would include them, so the publisher has begun another epoch.
            return Restart()
        asked.epoch.cover(seq)
        return None

    def _no_snapshot(self, asked: OpenRequest, reason: LostReason) -> Finding:
        """Continue without a snapshot, because the publisher sent none, or sent one that is too old.

        Use the batches of a replay instead, if the publisher offers replays.
        """
        epoch, tracker, replay = asked.epoch, asked.epoch.tracker, self.spec.replay
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
            if tracker.synced and tracker.buffer and tracker.next not in tracker.buffer:
                epoch.give_up()  # the batches between the last delivered one and the first held one are lost
            elif tracker.buffer:
                epoch.baseline(tracker.buffer.first)
            else:
                epoch.history.missing_before(NOTHING, pending=True)
            tracker.drain()
        elif tracker.synced:
            if tracker.fingerprints.newest(tracker.next) < 0:
                # Read the epoch from its beginning: without a fingerprint, no replay can show where to continue.
                return Restart()
            epoch.unconfirmed()
        return Input.UNAVAILABLE
