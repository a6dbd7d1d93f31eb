"""One publisher's batches, put in order: gaps, duplicates, replays, restarts.

A publisher numbers its batches from 0 in each epoch and keeps the newest ones for replay. Nothing on the wire says
which epoch a number belongs to. The sequencer decides which epoch it is, and what to ask the publisher.

Content decides whether a batch belongs to this epoch or to another. The sequencer keeps fingerprints of the last
batches, and every request reaches back over some of them. Where the fingerprints do not reach, it asks the publisher
for its last batches again.

Whatever happens becomes one input of the table in ``phases``. The table says which phase follows, and entering a phase
asks for what it waits for. So at most one request is open, and it follows from the phase. ``answers`` says what an
answer shows.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final

from kvbus.core.sequencing import phases
from kvbus.core.sequencing.actions import Action, Lost, LostReason, NewEpoch, RestartReason, Synced
from kvbus.core.sequencing.answers import REBUILT, Finding, Requests, Restart
from kvbus.core.sequencing.epoch import NOTHING, Conflict, Epoch, History
from kvbus.core.sequencing.gap_tracker import GapTracker, ReorderBuffer
from kvbus.core.sequencing.phases import ASKS, PHASES, SEPARATED, UNHURRIED, Guard, Input, Phase, Purpose, State
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

MAX_PROBE_BACKOFF: Final = 32
"""Times ``probe_interval`` after which an idle publisher is still asked."""


class Sequencer:
    """Takes in batches and replay answers, and puts out actions.

    It is pure: the time is an argument, in seconds on any monotonic clock.

    Args:
        spec: how the publisher is asked and waited for.
        stats: where the account is kept.
    """

    def __init__(self, spec: SourceSpec, stats: SourceStats) -> None:
        self.spec = spec
        self.stats = stats
        self.phase = Phase.AWAY
        self.epoch = 0
        self.actions: deque[Action] = deque()
        """Decisions that are not yet carried out."""
        self._requests = Requests(spec, stats, self.actions)
        self._conflict = Conflict()
        self._epoch_state = Epoch(spec, stats, self.actions)
        self._retries = 0
        """How often the request of this phase was made again because nobody answered."""
        self._synced_at = -inf
        """When the history was last in."""
        self._resyncing = False
        """Report :class:`Synced` as soon as nothing is asked any more."""
        self._idle_since = 0.0
        """When the stream was last heard or asked about."""

    # -- what is shown -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """As ``/sources`` shows it."""
        return PHASES[self.phase].shown

    @property
    def connected(self) -> bool:
        """Whether the connection to the publisher stands."""
        return self.phase not in SEPARATED

    @property
    def tracker(self) -> GapTracker:
        """The numbers of this epoch."""
        return self._epoch_state.tracker

    @property
    def history(self) -> History:
        """How far back this epoch is known."""
        return self._epoch_state.history

    @property
    def partial(self) -> bool:
        """Whether the publisher may hold blocks that no batch has announced."""
        return self._epoch_state.history.partial

    @property
    def next(self) -> int:
        """The number of the batch to be delivered next."""
        return self._epoch_state.tracker.next

    @property
    def held(self) -> ReorderBuffer:
        """The batches that wait for an earlier one."""
        return self._epoch_state.tracker.held

    @property
    def pending(self) -> int:
        """How many batches are missing whose fate is open."""
        return self._epoch_state.tracker.pending

    @property
    def unverified(self) -> ReorderBuffer:
        """The stale batches, kept until the publisher has shown which epoch they are of."""
        return self._epoch_state.unverified.stale

    @property
    def request_waits(self) -> bool:
        """Whether a request could not leave the process yet."""
        asked = self._requests.open
        return asked is not None and asked.waits

    @property
    def lost_because(self) -> LostReason:
        """Why the missing batches are lost, if they are given up now."""
        return self._epoch_state.lost_because

    # -- from phase to phase -----------------------------------------------------------------------------------------

    def _follow(self, finding: Finding, now: float) -> None:
        """Do what follows from an answer."""
        if isinstance(finding, Restart):
            self._begin_epoch(finding, now)
        elif finding is not None:
            self._take(finding, now)

    def _take(self, cause: Input, now: float) -> None:
        """Go on to the phase that follows, and do what it begins with."""
        before, self.phase = self.phase, phases.step(self.phase, cause, self._holds)
        if self.phase is not before:
            self._retries = 0
        elif cause is Input.SILENT:
            self._retries += 1
        asked = self._requests.open
        if self.phase in ASKS:
            self._requests.ask(self.phase, self._epoch_state, once_more=self._holds(Guard.ONCE_MORE))
        elif self.phase is Phase.CATCH_UP and asked is not None:  # the answer goes on
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
        spec, tracker = self.spec, self.tracker
        match guard:
            case Guard.TRUSTED:
                return not spec.asks and tracker.synced and spec.on_lost == "keep"
            case Guard.UNKNOWN:
                unknown = not spec.replay or (spec.compacted and tracker.fingerprints.newest(tracker.next) < 0)
                return spec.snapshot and tracker.synced and tracker.next > 0 and unknown
            case Guard.DELIVERED:
                return spec.replay and tracker.next > 0
            case Guard.CROWDED:
                return self._conflict.until < inf
            case Guard.NO_REPLAY:
                return not spec.replay
            case Guard.FROM_NOW:
                return spec.from_now and self.epoch == 0
            case Guard.TAIL:
                return spec.compacted and spec.replay
            case Guard.SNAPSHOTS:
                return spec.snapshot
            case Guard.ONCE_MORE:
                return self._retries < spec.attempts - 1
            case Guard.SYNCED:
                return tracker.synced
            case _:
                return spec.snapshot and (not spec.replay or self._epoch_state.gap_attempts >= spec.attempts)

    def _settle(self, now: float) -> None:
        """No request is open now: everything known is delivered, or there is a gap to ask for."""
        epoch = self._epoch_state
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
        """Nothing live is delivered now: the epoch is not known, or the open answer counts as a whole."""
        asked = self._requests.open
        return self.phase is Phase.VERIFY or (
            self.spec.compacted and asked is not None and asked.purpose is not Purpose.HISTORY
        )

    def _advance(self, now: float) -> None:
        """Deliver what is in order, and ask for what is missing."""
        epoch, tracker = self._epoch_state, self.tracker
        if not tracker.synced:
            if tracker.held and (self.phase is Phase.WAITING or (tracker.next == 0 and 0 in tracker.held)):
                # nothing to wait for: no history can be had, or the live stream itself begins at the beginning
                epoch.baseline(tracker.held.first)
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
        epoch, spec = self._epoch_state, self.spec
        if not spec.asks:
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
        """Start over. Stale batches are the first live ones of the new epoch; everything held was of the old one."""
        restarted = restart.reason is not RestartReason.REBUILT
        self.stats.restarts += restarted
        self.tracker.write_off()
        first = self._epoch_state.unverified.take_stale()
        self._requests.stop()
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
        self._epoch_state = Epoch(self.spec, self.stats, self.actions)
        self._resyncing = False

    # -- the connection ----------------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """The connection to the publisher stands."""
        if self.connected:
            return
        if self.tracker.synced and not self.spec.asks and self.spec.on_lost == "clear":
            # nobody can be asked whether it is the same epoch; the next batch shows whether it begins with it
            self._begin_epoch(Restart(pending=False), now)
        self._idle_since = now
        if self.spec.compacted:
            self._epoch_state.probe_factor = 1
        self._resyncing = True
        self._epoch_state.gap_attempts = 0
        self._take(Input.UP, now)

    def down(self, now: float) -> None:
        """The connection is gone. Batches held back may still be delivered once it is back."""
        epoch = self._epoch_state
        self._conflict.reconnected()
        epoch.unverified.disconnected()
        epoch.buffer.disconnected()
        self._take(Input.DOWN, now)
        if self.next == 0:
            # nothing was delivered that another epoch could be recognised by: what is held may be of one that is over
            self.tracker.write_off()
            epoch.forget_numbers()
        elif self.spec.compacted:
            # a compacted answer may look the same in another epoch: what is held has to come once more
            self.tracker.write_off()
            self.tracker.forget_ahead()

    def expire(self) -> None:
        """The engine has been gone for too long: it counts as lost, whatever it still held."""
        self._take(Input.EXPIRED, 0.0)  # whatever the time

    def publisher_changed(self, now: float) -> None:
        """The publisher says itself that its epoch is a new one (another publisher id, snapshot protocol)."""
        if self.phase is not Phase.CONFLICT:
            self._begin_epoch(Restart(RestartReason.PUBLISHER_ID), now)

    def rebuild(self, now: float) -> None:
        """Begin anew: what was taken in was misread. Nothing proves that the publisher has restarted."""
        if self.phase is not Phase.CONFLICT:
            self._begin_epoch(REBUILT, now)

    # -- the live stream ---------------------------------------------------------------------------------------------

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether another batch was delivered under this number, or waits under it."""
        held = self.held
        if seq in held:
            return held.get(seq) != payload
        return self.tracker.fingerprints.matches(seq, payload, self.next) is False

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """Take in one batch of the live stream."""
        self.up(now)
        self._idle_since = now
        if not self.spec.compacted:
            self._epoch_state.probe_factor = 1
        tracker, asked = self.tracker, self._requests.open
        if (
            asked is not None
            and self.phase is Phase.PROBE
            and self._live_waits
            and seq == asked.following == tracker.next
        ):
            self._take(Input.CAUGHT_UP, now)  # the stream is not silent, and has lost nothing
        if seq == tracker.next and tracker.synced and not tracker.held and not self._live_waits:
            tracker.live_in_order(seq, payload)
            self._follow(self._requests.caught_up, now)
        elif self.phase is Phase.CONFLICT:
            self.stats.rejected[Reason.CONFLICT] += 1
        elif seq < tracker.next:
            self._below_next(seq, payload, now)
        elif self._epoch_state.is_far(seq):
            self._far_ahead(seq, payload, now)
        elif seq in tracker.held:
            self.stats.duplicates += 1
            if self.spec.replay and tracker.contest(seq, payload):
                self._advance(now)
        else:
            tracker.live_later(seq, payload)
            self._advance(now)
            self._follow(self._requests.caught_up, now)

    def _below_next(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from before ``next``: a late copy, or one of a new epoch.

        Batch 0 of which nothing is known begins an epoch: the live stream has gone back. Where that has shown nothing
        yet, it may only be older than what the publisher's buffer had left of the history, so the publisher is asked.
        """
        tracker, unverified = self.tracker, self._epoch_state.unverified
        same = tracker.fingerprints.matches(seq, payload, tracker.next)
        if same is not True and seq < tracker.answered_end:
            same = True if now < self._synced_at + self.spec.late_copies or self._live_waits else None
        if same:
            self.stats.duplicates += 1
            return
        begins = seq == 0 and tracker.answered_end == 0 and (tracker.live_end > 0 or not self.spec.replay)
        if same is False or begins:
            self._begin_epoch(Restart(RestartReason.PAYLOAD), now)
            self.live(seq, payload, now)
            return
        unverified.keep_stale(seq, payload)
        if not self.spec.replay:
            if unverified.consecutive or self.spec.compacted:
                self._begin_epoch(Restart(), now)
        elif unverified.may_ask(now) and self.phase in UNHURRIED:
            self._take(Input.STALE, now)

    def _far_ahead(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from further ahead than any gap: an odd one, or, if more follow, a new epoch."""
        self.stats.rejected[Reason.SEQ_RANGE] += 1
        if ahead := self._epoch_state.unverified.ahead(seq, payload):
            self._begin_epoch(Restart(), now)
            for number, batch in ahead:
                self.live(number, batch, now)

    # -- the open request --------------------------------------------------------------------------------------------

    def sent(self, request: int, now: float) -> None:
        """A request has left the process. Before, it may have waited behind a backlog; at infinity, it waits still."""
        self._requests.sent(request, now)

    def unread(self, request: int | None, now: float) -> None:
        """Messages of an open request's answer wait to be read, or, with None, batches of the live stream.

        So their sender is not silent, however long ago the last one was read.
        """
        if request is None:
            self._epoch_state.buffer.unread()
        else:
            self._requests.unread(request, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This process has not run for so long, up to ``now``, which leaves it out. Its peers were held up."""
        self._epoch_state.buffer.stood_still(seconds, now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float, *, whole: bool = False) -> None:
        """Take in one batch of an answer. ``whole``: it begins as a state does, see :meth:`state_may_begin`."""
        asked = self._requests.match(request)
        if asked is not None:
            self._follow(self._requests.batch(asked, seq, payload, now, whole=whole), now)

    def state_may_begin(self, seq: int, payload: bytes) -> bool:
        """Return whether this batch of an answer may begin a state, as another kvbus sends it in place of batches.

        In the midst of an answer: if it is another one than was delivered.
        """
        asked = self._requests.open
        return self.phase is Phase.BACKFILL or (
            asked is not None
            and (not asked.items or self.tracker.fingerprints.matches(seq, payload, self.next) is False)
        )

    def replay_ended(self, request: int, now: float) -> None:
        """Take in the END marker of an answer."""
        asked = self._requests.match(request)
        if asked is not None:
            self._requests.stop()  # nothing more will come, and only this closes its socket
            self._follow(self._requests.over(asked, now, answered=True), now)

    def replay_aborted(self, request: int, now: float) -> None:
        """The answer broke off at a batch that is too large to be taken: it is lost, and what follows is asked for."""
        asked = self._requests.match(request)
        if asked is not None:
            self._requests.stop()
            self._follow(self._requests.aborted(asked, now), now)

    def snapshot(self, request: int, seq: int, now: float, *, same_epoch: bool = False) -> bool:
        """A snapshot as of batch ``seq`` has come. -1: nothing was published yet; below: there is no snapshot.

        ``same_epoch``: the publisher says so by its id. Then a snapshot that is older than what is known is only old.
        Return whether to apply it now. Call :meth:`snapshot_applied` after that.
        """
        asked = self._requests.match(request)
        if asked is None or asked.purpose not in (Purpose.SNAPSHOT, Purpose.HISTORY):
            return False
        finding = self._requests.snapshot(asked, seq, same_epoch=same_epoch)
        self._follow(finding, now)
        return finding is None

    def snapshot_applied(self, now: float) -> None:
        """The blocks of the snapshot are in the index: go on from there."""
        if self.spec.compacted:
            self.tracker.drain()
        self._take(Input.COVERED, now)

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: give up on answers that do not come, look for lost tails."""
        asked = self._requests.timed_out(now)
        if asked is not None:
            self._follow(self._requests.over(asked, now, answered=False), now)
        epoch = self._epoch_state
        if now >= epoch.grace_ends:
            epoch.grace_ends = inf
            while not epoch.tracker.complete:
                epoch.give_up()
            self._take(Input.GRACE_OVER, now)
        if self._conflict.over(now):
            self.history.nothing_sent()
            self._take(Input.PAUSE_OVER, now)
        if self.phase is Phase.LIVE and self.spec.asks:
            self._probe(now)

    @property
    def _probe_at(self) -> float:
        """When to ask a silent publisher; infinity for never."""
        interval = self.spec.probe_interval if self.spec.replay else 0.0
        return self._idle_since + interval * self._epoch_state.probe_factor if interval else inf

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to do; infinity for never."""
        times = [self._epoch_state.grace_ends, self._conflict.until]
        asked = self._requests.open
        if asked is not None:
            times += [asked.deadline, asked.hard_deadline]
        if self.phase is Phase.LIVE and self.spec.asks:
            times += [self.history.next_due, self._probe_at]
        return min(times)

    def _probe(self, now: float) -> None:
        if self.history.due(now):
            self._take(Input.BACKFILL_DUE, now)
        elif now >= self._probe_at:
            self._epoch_state.buffer.silent(self.next, self._idle_since)
            self._idle_since = now
            self._epoch_state.probe_factor = min(self._epoch_state.probe_factor * 2, MAX_PROBE_BACKOFF)
            self._take(Input.PROBE_DUE, now)

    # -- decided elsewhere -------------------------------------------------------------------------------------------

    def stand_at(self, phase: Phase, epoch: int, following: int) -> None:
        """Its numbers come from a log, which was read up to here: nothing is asked, and nothing waits."""
        tracker = self.tracker
        self.phase, self.epoch = phase, epoch
        tracker.next = tracker.log_end = tracker.live_end = following

    def complete(self, *, certain: bool) -> None:
        """The batch being delivered has emptied the publisher's cache: what came before it is not missing any more.

        A loss or a new epoch that waits behind the batch is about later batches. If it is not certain that the cache
        was emptied, the publisher is still asked for the history it may have.
        """
        if not any(isinstance(action, Lost | NewEpoch) for action in self.actions):
            self._epoch_state.emptied(certain=certain)

    def dump(self) -> dict[str, Any]:
        """Return what a restart has to know, as plain data: which epoch, how far, and the batches' fingerprints."""
        return {"epoch": self.epoch, **self._epoch_state.dump()}

    def load(self, data: dict[str, Any]) -> None:
        """Go on where a former process was; the connection is away until :meth:`up`."""
        self.epoch = data["epoch"]
        self._epoch_state.load(data)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """Take in a batch of the log: it was delivered before the restart."""
        self._epoch_state.restore_batch(seq, payload)

    def restore_loss(self, count: int) -> None:
        """Take in a loss of the log."""
        self.history.missing_before(self.next + count)

    def restore_snapshot(self, seq: int) -> None:
        """Take in a snapshot of the log."""
        self._epoch_state.restore_snapshot(seq)

    def restore_epoch(self, *, partial: bool) -> None:
        """Take in an epoch of the log."""
        self._forget()
        if partial:
            self.history.missing_before(NOTHING, pending=True)

    def recovery_finished(self) -> None:
        """All of the log was handled: what followed from it was done before the restart."""
        self.actions.clear()
        self._epoch_state.recovery_finished()
