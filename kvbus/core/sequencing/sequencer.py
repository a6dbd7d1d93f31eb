"""Put one publisher's batches in order: handle gaps, duplicates, replays and restarts.

A publisher numbers its batches from 0 in each epoch, and keeps the newest ones for replay. No message names its epoch,
but the content of a batch shows whether it belongs to the known one. The sequencer keeps fingerprints of the last
batches, and every request also asks for some of these batches. If a live batch is older than the fingerprints, the
sequencer requests the publisher's last batches again.

Every occurrence becomes one input of the table in ``phases``, which gives the next phase. When a phase begins, the
sequencer sends the request that the phase waits for. So at most one request is open. ``answers`` evaluates the answers.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any

from msgspec import structs

from kvbus.core.sequencing import phases
from kvbus.core.sequencing.actions import Action, Lost, NewEpoch, RestartReason, Synced
from kvbus.core.sequencing.answers import OTHER_PUBLISHER, REBUILT, Finding, Requests, Restart
from kvbus.core.sequencing.epoch import MAX_PROBE_BACKOFF, NOTHING, Conflict, Epoch, History
from kvbus.core.sequencing.gap_tracker import GapTracker, ReorderBuffer
from kvbus.core.sequencing.guards import holds
from kvbus.core.sequencing.phases import PHASES, REQUESTS, SEPARATED, UNHURRIED, Guard, Input, Phase, Purpose, State
from kvbus.core.sequencing.request import OpenRequest
from kvbus.core.sequencing.trust import ReplayTrust
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason


class Sequencer:
    """The sequencer of one publisher. It receives batches and replay answers, and produces actions.

    It performs no I/O. The time ``now`` is an argument of its methods, in seconds on any monotonic clock.

    Args:
        spec: the timeouts and the capabilities of the publisher.
        stats: the counters of the source.
    """

    def __init__(self, spec: SourceSpec, stats: SourceStats) -> None:
        self._configured = spec
        self.spec = spec
        """The capabilities of the publisher. They include no replay while kvbus does not trust the replay endpoint."""
        self.stats = stats
        self.phase = Phase.AWAY
        self.epoch = 0
        self.actions: deque[Action] = deque()
        """The actions that the caller has to carry out, in order. The caller removes each action from the queue."""
        self._requests = Requests(spec, stats, self.actions)
        self._conflict = Conflict()
        self._trust = ReplayTrust()
        self.current = Epoch(spec, stats, self.actions)
        """What kvbus knows about the current epoch."""
        self._retries = 0
        """How often the request of the current phase was repeated because the publisher did not answer."""
        self._synced_at = -inf
        """The time at which kvbus last finished reading the publisher's history."""
        self._resyncing = False
        """Whether the sequencer has to report that it is in sync (:class:`Synced`) as soon as no request is open."""
        self._idle_since = 0.0
        """The time of the last live batch or of the last probe of the publisher, whichever is later."""

    @property
    def state(self) -> State:
        """The state of the source as ``/sources`` shows it."""
        return PHASES[self.phase].shown

    @property
    def connected(self) -> bool:
        """Whether kvbus has a connection to the publisher."""
        return self.phase not in SEPARATED

    @property
    def tracker(self) -> GapTracker:
        """The delivered, held and missing seqs of the current epoch."""
        return self.current.tracker

    @property
    def history(self) -> History:
        """The record of how far back kvbus knows the batches of the current epoch."""
        return self.current.history

    @property
    def partial(self) -> bool:
        """Whether the publisher may hold blocks that no received batch has announced."""
        return self.current.history.partial

    @property
    def next(self) -> int:
        """Seq of the batch that kvbus has to deliver next."""
        return self.current.tracker.next

    @property
    def reorder_buffer(self) -> ReorderBuffer:
        """The received batches that wait for an earlier batch, which is missing."""
        return self.current.tracker.buffer

    @property
    def pending(self) -> int:
        """Number of missing batches that may still arrive."""
        return self.current.tracker.pending

    @property
    def request_waits(self) -> bool:
        """Whether the open request to the publisher waits in the daemon's queue and has not been sent yet."""
        asked = self._requests.open
        return asked is not None and asked.waits

    @property
    def replay_of_another(self) -> bool:
        """Whether the replay endpoint belongs to another publisher than the live stream, so that kvbus does not use it.

        See :mod:`kvbus.core.sequencing.trust`.
        """
        return self._trust.lost

    # -- phases --------------------------------------------------------------------------------------------------------

    def _follow(self, finding: Finding, now: float) -> None:
        """Carry out what the evaluation of an answer has found: a restart, or an input that may change the phase.

        If ``finding`` is None, nothing changes.
        """
        if isinstance(finding, Restart):
            self._begin_epoch(finding, now)
        elif finding is not None:
            self._take(finding, now)

    def _take(self, cause: Input, now: float) -> None:
        """Enter the phase that follows after the input ``cause``, and send the request that belongs to this phase."""
        before, self.phase = self.phase, phases.step(self.phase, cause, self._holds)
        if self.phase is not before:
            self._retries = 0
        elif cause is Input.SILENT:
            self._retries += 1
        asked = self._requests.open
        if self.phase in REQUESTS:
            facts = {"once_more": self._holds(Guard.ONCE_MORE), "confirms": not self._trust.confirmed}
            self._requests.ask(self.phase, self.current, **facts)
        elif self.phase is Phase.CATCH_UP and asked is not None:
            # Keep the open request: the rest of its answer has the batches that kvbus missed.
            asked.phase = Phase.CATCH_UP
            if not self.spec.compacted:
                self.tracker.drain()
        else:
            self._requests.stop()
        if self.phase is Phase.LIVE:
            self._settle(now)
        elif self.phase is Phase.FRESH:
            self._take(Input.BEGIN, now)

    def _holds(self, guard: Guard) -> bool:
        crowded = self._conflict.until < inf
        return holds(guard, self.spec, self.current, epoch=self.epoch, retries=self._retries, crowded=crowded)

    def _settle(self, now: float) -> None:
        """Begin to wait for live batches, because no request is open. If a batch is missing, request it."""
        epoch = self.current
        if not epoch.tracker.synced:
            epoch.open()
            self._resyncing = True
        if epoch.interrupted:
            if self.spec.snapshot:
                epoch.gap_attempts = self.spec.attempts
                self._take(Input.HOLE, now)
                return
            epoch.unconfirmed()
        if self._resyncing:
            self._resyncing = False
            self._synced_at = now
            self.actions.append(Synced())
        if epoch.unverified.stale and self.spec.replay and epoch.unverified.may_ask(now):
            self._take(Input.STALE, now)
        self._advance(now)

    @property
    def _live_waits(self) -> bool:
        """Whether live batches have to wait for the answer to the open request.

        They wait if the answer has to show the epoch, or if the answer is valid only when it is complete.
        """
        asked = self._requests.open
        return self.phase in (Phase.VERIFY, Phase.SNAPSHOT) or (
            self.spec.compacted and asked is not None and asked.purpose is not Purpose.HISTORY
        )

    def _advance(self, now: float) -> None:
        """Deliver the held batches that are next in order, and request missing batches."""
        epoch, tracker = self.current, self.tracker
        if not tracker.synced:
            if tracker.buffer and (self.phase is Phase.WAITING or (tracker.next == 0 and 0 in tracker.buffer)):
                # Begin without an answer: there is no history to request, or the live stream begins with batch 0.
                epoch.baseline(tracker.buffer.first)
                self._take(Input.FIRST, now)
            return
        if self._live_waits:
            return
        tracker.drain()
        if tracker.complete:
            epoch.grace_ends = inf
            if self.phase is Phase.GRACE:
                self._take(Input.FILLED, now)
        elif self.phase in UNHURRIED:
            self._ask_for_gap(now)

    def _ask_for_gap(self, now: float) -> None:
        epoch, spec = self.current, self.spec
        if not spec.requests_replay:
            if epoch.grace_ends == inf:
                self.stats.gaps += 1
                epoch.grace_ends = now + spec.reorder_grace
            self._take(Input.HOLE, now)
            return
        self.stats.gaps += epoch.asks_for_gap()
        if epoch.gap_attempts >= spec.attempts and not spec.snapshot:
            epoch.give_up()
            self._advance(now)
            return
        self._take(Input.HOLE, now)
        epoch.gap_attempts += self.phase is Phase.GAP

    def _begin_epoch(self, restart: Restart, now: float) -> None:
        """Begin a new epoch with the stale batches as its first live batches. Drop the held batches of the old one."""
        restarted = restart.reason not in (RestartReason.REBUILT, RestartReason.OTHER_PUBLISHER)
        self.stats.restarts += restarted
        self.tracker.write_off()
        first = self.current.unverified.take_stale()
        self._requests.stop()
        self._trust.epoch_began()
        self._forget()
        self._idle_since = now
        self.actions.append(NewEpoch(restart.reason))
        pending = restart.pending
        if restarted and restart.proven and self._conflict.epoch_began(now):
            self.stats.rejected[Reason.CONFLICT] += len(first)
            first, pending = [], False
        if pending is not None:
            self.history.missing_before(NOTHING, pending=pending)
        for seq, payload in first:
            self.tracker.live_later(seq, payload)
        self._take(Input.NEW_EPOCH, now)
        self._advance(now)

    def _forget(self) -> None:
        self.epoch += 1
        self.current = Epoch(self.spec, self.stats, self.actions)
        self._resyncing = False

    # -- connection ----------------------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """Handle a new connection to the publisher."""
        if self.connected:
            return
        if self.tracker.synced and not self.spec.requests_replay and self.spec.on_lost == "clear":
            # kvbus cannot ask this publisher whether its epoch is the same, so a new epoch begins with the next batch
            self._begin_epoch(Restart(pending=False), now)
        self._idle_since = now
        if self.spec.compacted:
            self.current.probe_factor = 1
        self._resyncing = True
        self.current.gap_attempts = 0
        self.tracker.live_from = self.next
        self._take(Input.UP, now)

    def down(self, now: float) -> None:
        """Handle the loss of the connection. Keep the held batches if they can be delivered after a reconnection."""
        epoch = self.current
        self._conflict.reconnected()
        self._trust.disconnected()
        self.spec = self._requests.spec = self._configured
        epoch.unverified.disconnected()
        epoch.buffer.disconnected()
        self._take(Input.DOWN, now)
        if self.next == 0:
            # Drop the held batches: no delivered batch could show their epoch after the reconnection.
            self.tracker.write_off()
            epoch.forget_numbers()
        elif self.spec.compacted:
            # Receive the held batches again: the next answer may be a state, which does not show their epoch.
            self.tracker.write_off()
            self.tracker.forget_ahead()

    def expire(self) -> None:
        """Enter the phase ``lost``, because the engine was gone for ``source_timeout``."""
        self._take(Input.EXPIRED, 0.0)  # this input does not use the time

    def publisher_changed(self, now: float) -> None:
        """Begin a new epoch, because the batches carry another publisher id (snapshot protocol)."""
        if self.phase is not Phase.CONFLICT:
            self._begin_epoch(Restart(RestartReason.PUBLISHER_ID), now)

    def rebuild(self, now: float) -> None:
        """Read the epoch again, without the empty batches that kvbus has delivered in place of other topics' batches.

        They were wrong, because each topic of the socket has its own numbering. The publisher has not restarted.
        """
        if self.phase is not Phase.CONFLICT:
            self._begin_epoch(REBUILT, now)

    # -- live stream ---------------------------------------------------------------------------------------------------

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether kvbus has delivered or holds a different batch with this seq."""
        buffer = self.reorder_buffer
        if seq in buffer:
            return buffer.get(seq) != payload
        return self.tracker.fingerprints.matches(seq, payload, self.next) is False

    def expected(self, seq: int, payload: bytes, now: float) -> int | None:
        """Return the fingerprint of a live batch that the caller may deliver at once; None for a case for :meth:`live`.

        It may if the batch is the next one, and no request, action or earlier batch holds the batch back.
        """
        if self.phase is not Phase.LIVE or self._requests.open is not None or self.actions:
            return None
        known = self.current.tracker.take_next(seq, payload)
        if known is not None:
            self._idle_since = now
            if not self.spec.compacted:
                self.current.probe_factor = 1
        return known

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """Handle one batch of the publisher's live stream."""
        self.up(now)
        self._idle_since = now
        if not self.spec.compacted:
            self.current.probe_factor = 1
        tracker, asked = self.tracker, self._requests.open
        probed = asked.following if asked is not None and self.phase is Phase.PROBE else None
        if seq == probed == tracker.next and self._live_waits:
            self._take(Input.CAUGHT_UP, now)  # the next batch came live: the request for lost batches can end
        if not self._live_waits and tracker.live_in_order(seq, payload):
            self._follow(self._requests.caught_up, now)
        elif self.phase is Phase.CONFLICT:
            self.stats.rejected[Reason.CONFLICT] += 1
        elif seq < tracker.next:
            self._below_next(seq, payload, now)
        elif self.current.is_far(seq):
            self._far_ahead(seq, payload, now)
        elif seq in tracker.buffer:
            self.stats.duplicates += 1
            if self.spec.replay and tracker.contest(seq, payload):
                self._advance(now)
        else:
            tracker.live_later(seq, payload)
            self._advance(now)
            self._follow(self._requests.caught_up, now)

    def _below_next(self, seq: int, payload: bytes, now: float) -> None:
        """Handle a live batch with a seq below ``next``: a late copy, or a batch of a new epoch.

        A batch 0 with unknown content begins an epoch, unless it is the first batch of the live stream: it may then be
        an old batch that the publisher's replay buffer has dropped. kvbus requests a replay to find out.
        """
        tracker, unverified = self.tracker, self.current.unverified
        same = tracker.fingerprints.matches(seq, payload, tracker.next)
        if same is not True and seq < tracker.answered_end:
            same = True if now < self._synced_at + self.spec.late_copies or self._live_waits else None
        if same:
            self.stats.duplicates += 1
            return
        begins = seq == 0 and tracker.answered_end == 0 and (tracker.live_end > 0 or not self.spec.replay)
        if same is False or begins:
            restart: Finding = Restart(RestartReason.PAYLOAD)
            if seq < tracker.live_end:
                self._trust.live_restarted()
            elif same is False and self.spec.replay and not self.spec.compacted:
                restart = self._doubted(restart, seq - 1, asked=seq)  # only an answer has shown the other content
            self._follow(restart, now)
            self.live(seq, payload, now)
            return
        unverified.keep_stale(seq, payload)
        if not self.spec.replay:
            if unverified.consecutive or self.spec.compacted:
                self._begin_epoch(Restart(), now)
        elif unverified.may_ask(now) and self.phase in UNHURRIED:
            self._take(Input.STALE, now)

    def _far_ahead(self, seq: int, payload: bytes, now: float) -> None:
        """Handle a live batch whose seq is so high that the batches before it cannot be a gap.

        A single such batch is refused. If batches with the next seqs follow it, a new epoch has begun.
        """
        self.stats.rejected[Reason.SEQ_RANGE] += 1
        if ahead := self.current.unverified.ahead(seq, payload):
            self._begin_epoch(Restart(), now)
            for number, batch in ahead:
                self.live(number, batch, now)

    # -- open request --------------------------------------------------------------------------------------------------

    def sent(self, request: int, now: float) -> None:
        """Start the time limits of a request, because the daemon has sent it now.

        If ``now`` is infinity, the request is still in the daemon's queue, and no time limit applies.
        """
        self._requests.sent(request, now)

    def unread(self, request: int | None, now: float) -> None:
        """Record that messages of the publisher wait in this process, so that the publisher does not count as silent.

        The messages belong to the answer to ``request``, or to the live stream if ``request`` is None.
        """
        if request is None:
            self.current.buffer.unread()
        else:
            self._requests.unread(request, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """Record that this process was suspended for ``seconds``, so that messages of the publisher may arrive late.

        ``now``, the relay's time, does not include these seconds.
        """
        self.current.buffer.stood_still(seconds, now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float, *, may_be_state: bool = False) -> None:
        """Handle one batch of a replay answer.

        ``may_be_state`` says that the batch may be the first of a complete state (:meth:`state_may_begin`).
        """
        asked = self._requests.match(request)
        if asked is not None:
            finding = self._requests.batch(asked, seq, payload, now, may_be_state=may_be_state)
            self._follow(self._judged(asked, finding), now)

    def state_may_begin(self, seq: int, payload: bytes) -> bool:
        """Return whether this batch of a replay answer may be the first batch of a state.

        Another kvbus sends a state in place of batches that its journal lacks. The first batch of an answer may begin a
        state. So may any batch of a backfill, and a batch under whose seq kvbus has delivered a different batch.
        """
        asked = self._requests.open
        return self.phase is Phase.BACKFILL or (
            asked is not None
            and (not asked.items or self.tracker.fingerprints.matches(seq, payload, self.next) is False)
        )

    def replay_ended(self, request: int, now: float) -> None:
        """Handle the END message of a replay answer: the answer is complete."""
        asked = self._requests.match(request)
        if asked is not None:
            self._requests.stop()  # close the request's connection, because the answer is complete
            finding = self._judged(asked, self._requests.ended(asked, now, answered=True))
            if self._trust.restored_by(asked):
                self.spec = self._requests.spec = self._configured
                self.history.pending = self.history.first > 0  # request the batches again that were not repaired
            self._follow(finding, now)

    def _judged(self, asked: OpenRequest, finding: Finding) -> Finding:
        """Return what follows from an answer, which may come from another publisher than the live stream."""
        restarts = isinstance(finding, Restart) and finding.reason is not RestartReason.REBUILT
        contradicts = not self.spec.compacted and self._trust.contradicted_by(asked, restarts=restarts)
        return self._doubted(finding, self.current.live_end - 1, asked=asked.live_end - 1) if contradicts else finding

    def _doubted(self, finding: Finding, live: int, *, asked: int) -> Finding:
        """Return what follows from a contradiction (see :meth:`ReplayTrust.contradicted` for the two seqs)."""
        if not self._trust.contradicted(live, asked=asked):
            return finding
        self.spec = self._requests.spec = structs.replace(self._configured, replay=False)
        return OTHER_PUBLISHER

    def replay_aborted(self, request: int, now: float) -> None:
        """Handle a replay answer that ended early because one of its batches was larger than kvbus accepts.

        That batch is lost, and kvbus requests the batches after it.
        """
        asked = self._requests.match(request)
        if asked is not None:
            self._requests.stop()
            self._follow(self._requests.aborted(asked, now), now)

    def snapshot(self, request: int, seq: int, now: float, *, same_epoch: bool = False) -> bool:
        """Handle a snapshot as of batch ``seq``, and return whether the caller has to apply it now.

        After the caller has applied it, it must call :meth:`snapshot_applied`.

        Args:
            request: the id of the request.
            seq: the last batch that the snapshot includes; -1 if the publisher has not published a batch yet; less than
                -1 if it has no snapshot.
            now: the time.
            same_epoch: whether the publisher's id is unchanged. Then a low ``seq`` does not mean that it has restarted.
        """
        asked = self._requests.match(request)
        if asked is None or asked.purpose not in (Purpose.SNAPSHOT, Purpose.HISTORY):
            return False
        finding = self._requests.snapshot(asked, seq, same_epoch=same_epoch)
        self._follow(finding, now)
        return finding is None

    def snapshot_applied(self, now: float) -> None:
        """Continue after the caller has added the blocks of the snapshot to the index."""
        if self.spec.compacted:
            self.tracker.drain()
        self._take(Input.COVERED, now)

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Handle timeouts. If the live stream has been silent for long enough, ask the publisher for its last batches.

        The answer shows whether these batches were lost.
        """
        asked = self._requests.timed_out(now)
        if asked is not None:
            self._follow(self._requests.ended(asked, now, answered=False), now)
        epoch = self.current
        if now >= epoch.grace_ends:
            epoch.grace_ends = inf
            while not epoch.tracker.complete:
                epoch.give_up()
            self._take(Input.GRACE_OVER, now)
        if self._conflict.ended(now):
            self.history.nothing_sent()
            self._take(Input.PAUSE_OVER, now)
        if self.phase is Phase.LIVE:
            self._probe(now)

    @property
    def _probe_at(self) -> float:
        """The time at which kvbus probes the publisher if it stays silent until then; infinity if there is no probe."""
        interval = self.spec.probe_interval if self.spec.replay else 0.0
        return self._idle_since + interval * self.current.probe_factor if interval else inf

    @property
    def deadline(self) -> float:
        """The time at which :meth:`tick` has to be called next; infinity if no timeout is pending."""
        times = [self.current.grace_ends, self._conflict.until]
        asked = self._requests.open
        if asked is not None:
            times += [asked.deadline, asked.hard_deadline]
        if self.phase is Phase.LIVE and self.spec.requests_replay:
            times += [self.history.next_due, self._probe_at]
        return min(times)

    def _probe(self, now: float) -> None:
        """Send a request that no received batch needs, if one is due. The phase must be LIVE."""
        spec, tracker, trust = self.spec, self.tracker, self._trust
        if spec.requests_replay and self.history.due(now):
            self._take(Input.BACKFILL_DUE, now)
        elif spec.requests_replay and now >= self._probe_at:
            self.current.buffer.silent(self.next, self._idle_since)
            self._idle_since = now
            self.current.probe_factor = min(self.current.probe_factor * 2, MAX_PROBE_BACKOFF)
            self._take(Input.PROBE_DUE, now)
        elif tracker.live_from < tracker.next and not spec.compacted:
            if trust.lost and trust.due(now, spec.probe_interval or spec.replay_timeout):
                self._take(Input.COMPARE_DUE, now)
            elif spec.replay and spec.probe_interval and not trust.confirmed and trust.due(now, spec.probe_interval):
                self._take(Input.PROBE_DUE, now)

    # -- decisions of the caller ---------------------------------------------------------------------------------------

    def stand_at(self, phase: Phase, epoch: int, following: int) -> None:
        """Set the phase, the epoch and the next seq of a source that is read from a log (Kafka, NATS, Redis).

        The sequencer does nothing else for such a source: the source never has an open request or a waiting batch.
        """
        tracker = self.tracker
        self.phase, self.epoch = phase, epoch
        tracker.next = tracker.log_end = tracker.live_end = following

    def complete(self, *, certain: bool) -> None:
        """Record that the batch which is being delivered clears the publisher's cache.

        Batches that are missing before it do not matter any more. Record nothing if ``actions`` has a lost batch or a
        new epoch: then later batches are missing, or the batch's epoch is over. If it is not ``certain`` that the clear
        emptied the complete cache, kvbus continues to request the older batches that it lacks.
        """
        if not any(isinstance(action, Lost | NewEpoch) for action in self.actions):
            self.current.emptied(certain=certain)

    def dump(self) -> dict[str, Any]:
        """Return the epoch's number, next seq, history and last fingerprints as plain data for a new process."""
        return {"epoch": self.epoch, **self.current.dump()}

    def load(self, data: dict[str, Any]) -> None:
        """Restore the result of :meth:`dump` from the previous process. There is no connection until :meth:`up`."""
        self.epoch = data["epoch"]
        self.current.load(data)

    def restore_epoch(self, *, partial: bool) -> None:
        """Begin a new epoch while kvbus restarts, because the write-ahead log has a record of the epoch's beginning.

        ``partial`` says that the publisher's cache may hold blocks that kvbus cannot learn.
        """
        self._forget()
        if partial:
            self.history.missing_before(NOTHING, pending=True)

    def recovery_finished(self) -> None:
        """Finish the recovery from the saved state: drop the actions, which the previous process has carried out."""
        self.actions.clear()
        self.current.recovery_finished()
