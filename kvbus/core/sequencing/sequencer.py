"""One publisher's batches, put in order: gaps, duplicates, replays, restarts.

A publisher numbers its batches from 0 in each epoch and keeps the newest ones for replay. Nothing on the wire says
which epoch a number belongs to. ``epoch`` has what is known of the current one. The sequencer decides which epoch it
is, and what to ask the publisher. It is a state machine: ``phases`` has the table. Whatever comes in is put into one
input, the table says which phase follows, and entering a phase asks what it waits for. At most one request is open at a
time. Each has an id of its own, so that answers to an old one cannot mix in.

Content decides whether a batch belongs to this epoch or to another. The sequencer keeps fingerprints of the last
batches, and every request reaches back over some of them. Where the fingerprints do not reach, it asks the publisher
for its last batches again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from kvbus.core.sequencing import phases
from kvbus.core.sequencing.actions import Action, Lost, NewEpoch, Synced
from kvbus.core.sequencing.conflict import Conflict
from kvbus.core.sequencing.epoch import Epoch
from kvbus.core.sequencing.phases import ASKS, SEPARATED, SHOWN, UNHURRIED, Guard, Input, Phase
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.sequencing.replay_requests import ATTEMPTS, OpenRequest, ReplayClient
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

MAX_PROBE_BACKOFF: Final = 32
"""Times :attr:`Settings.probe_interval` after which an idle publisher is still asked."""

_LIVE: Final = Phase.LIVE  # the hot path reads a global, and no attribute of an enumeration


class Sequencer:
    """Takes in batches and replay answers, and puts out actions.

    It is pure: the time is an argument, in seconds on any monotonic clock.
    """

    def __init__(self, settings: Settings, stats: SourceStats) -> None:
        self.settings = settings
        self.stats = stats
        self.phase = Phase.AWAY
        self.epoch = 0
        self.actions: deque[Action] = deque()
        """What was decided and is not yet carried out."""
        self._replay_client = ReplayClient(settings, stats, self.actions)
        self._conflict = Conflict()
        self._known = Epoch(settings, stats, self.actions)
        self._tracker = self._known.tracker
        self._retries = 0
        """How often the request of this phase was made again because nobody answered."""
        self._resyncing = False
        """The next time nothing is asked any more is to be reported as :class:`Synced`."""

        # Probes of an idle stream.
        self._idle_since = 0.0
        self._probe_factor = 1

    # -- what is shown -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """As ``/sources`` shows it."""
        return SHOWN[self.phase]

    @property
    def connected(self) -> bool:
        """Whether the connection to the publisher stands."""
        return self.phase not in SEPARATED

    @property
    def partial(self) -> bool:
        """Whether the publisher may hold blocks that no batch has told of."""
        return self._known.backfill.partial

    @property
    def next(self) -> int:
        """The number of the batch to be delivered next."""
        return self._tracker.next

    @property
    def held(self) -> ReorderBuffer:
        """The batches that wait for their turn."""
        return self._tracker.held

    @property
    def unverified(self) -> ReorderBuffer:
        """The stale batches, kept until the publisher has said which epoch they are of."""
        return self._known.unverified.stale

    @property
    def synced(self) -> bool:
        """Whether holes count as missing."""
        return self._tracker.synced

    @property
    def log_end(self) -> int:
        """One past the highest batch known to exist."""
        return self._tracker.log_end

    @property
    def pending(self) -> int:
        """How many batches are missing whose fate is open."""
        return self._tracker.pending

    @property
    def known_from(self) -> int:
        """The number from which on nothing is missing in what was delivered; see :class:`Backfill`."""
        return self._known.backfill.first

    @property
    def backfill_pending(self) -> bool:
        """What is missing may still come: the publisher has not said how far back its buffer reaches."""
        return self._known.backfill.pending

    # -- the machine -------------------------------------------------------------------------------------------------

    def _take(self, cause: Input, now: float) -> None:
        """Go on to the phase that follows, and do what it begins with."""
        before, self.phase = self.phase, phases.step(self.phase, cause, self._holds)
        if self.phase is not before:
            self._retries = 0
        elif cause is Input.SILENT:
            self._retries += 1
        purpose = ASKS.get(self.phase)
        if purpose is not None:
            self._replay_client.ask(purpose, self._tracker)
        elif self.phase is not Phase.CATCH_UP:
            self._replay_client.stop()
        if self.phase is Phase.LIVE:
            self._settle(now)
        elif self.phase is Phase.FRESH:
            self._take(Input.BEGIN, now)

    def _holds(self, guard: Guard) -> bool:
        settings, tracker = self.settings, self._tracker
        match guard:
            case Guard.TRUSTED:
                return not settings.replay and tracker.synced and settings.trust_unverified
            case Guard.DELIVERED:
                return settings.replay and tracker.next > 0
            case Guard.CROWDED:
                return self._conflict.until is not None
            case Guard.NO_REPLAY:
                return not settings.replay
            case Guard.SNAPSHOTS:
                return settings.snapshot
            case Guard.ONCE_MORE:
                return self._retries < ATTEMPTS - 1
            case Guard.SYNCED:
                return tracker.synced
            case _:
                return settings.snapshot and self._known.gap_attempts >= ATTEMPTS

    def _settle(self, now: float) -> None:
        """No request is open now: either everything known is delivered, or there is a gap to ask for."""
        if not self._tracker.synced:
            self._known.open()
            self._resyncing = True
        if self._resyncing:
            self._resyncing = False
            self.actions.append(Synced())
        unverified = self._known.unverified
        if unverified.stale and self.settings.replay and unverified.may_ask(now):
            self._take(Input.STALE, now)
        self._advance(now)

    # -- the connection ----------------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """The connection to the publisher stands."""
        if self.connected:
            return
        self._idle_since = now
        self._resyncing = True
        self._known.gap_attempts = 0
        self._take(Input.UP, now)
        if self.phase is Phase.WAITING and self._tracker.synced:
            self._new_epoch(now)  # nobody can be asked whether it is the same one
            self._known.backfill.nothing_known(pending=False)  # until its next batch shows whether it begins with it

    def down(self, now: float) -> None:
        """The connection is gone. The batches held back may still get their turn once it is back."""
        known = self._known
        self._conflict.reconnected()
        known.unverified.disconnected()
        known.buffer.disconnected()
        self._take(Input.DOWN, now)
        if self.next == 0:
            # nothing was delivered that another epoch could be recognised by: what is held may be of one that is over
            self._tracker.write_off()
            known.forget_numbers()
            self._tracker = known.tracker

    def expire(self) -> None:
        """The engine has been gone for too long: from now on it counts as lost, whatever it still held."""
        self._take(Input.EXPIRED, 0.0)  # whatever the time

    def publisher_changed(self, now: float) -> None:
        """The publisher says itself that its epoch is a new one (another publisher id, snapshot protocol)."""
        if self.phase is not Phase.CONFLICT:
            self._new_epoch(now)

    # -- the live stream ---------------------------------------------------------------------------------------------

    def accept_in_order(self, seq: int, payload: bytes, now: float) -> int | None:
        """Take in the commonest case of :meth:`live`: the next batch, with nothing missing and no request open.

        Returns the fingerprint of a batch that was taken: whoever calls delivers it at once, there is no action. None
        if it is another case; then nothing has changed.
        """
        tracker = self._tracker
        if not (seq == tracker.next == tracker.log_end and self.phase is _LIVE) or self.actions:
            return None
        self._idle_since = now
        self._probe_factor = 1
        return tracker.accept_next(seq, payload)

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """One batch of the live stream."""
        self.up(now)
        self._idle_since = now
        self._probe_factor = 1
        tracker = self._tracker
        if seq == tracker.next and tracker.synced and not tracker.held and self.phase is not Phase.VERIFY:
            tracker.live_in_order(seq, payload)
            self._check_done(now)
        elif self.phase is Phase.CONFLICT:
            self.stats.rejected[Reason.CONFLICT] += 1
        elif seq < tracker.next:
            self._below_next(seq, payload, now)
        elif self._known.is_far(seq):
            self._far_ahead(seq, payload, now)
        elif seq in tracker.held:
            self.stats.duplicates += 1
            if self.settings.replay and tracker.contest(seq, payload):
                self._advance(now)
        else:
            tracker.live_later(seq, payload)
            self._advance(now)
            self._check_done(now)

    def _below_next(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from before ``next``: a late copy, or one of a new epoch."""
        same = self._tracker.fingerprints.matches(seq, payload, self.next)
        if same:
            self.stats.duplicates += 1
            return
        if same is False or seq == 0:
            self._new_epoch(now)
            self.live(seq, payload, now)
            return
        unverified = self._known.unverified
        unverified.keep_stale(seq, payload)
        if not self.settings.replay:
            if unverified.consecutive:
                self._new_epoch(now)
        elif unverified.may_ask(now) and self.phase in UNHURRIED:
            self._take(Input.STALE, now)

    def _far_ahead(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from further ahead than any gap: an odd one, or, if more follow, a new epoch."""
        self.stats.rejected[Reason.SEQ_RANGE] += 1
        ahead = self._known.unverified.ahead(seq, payload)
        if ahead:
            self._new_epoch(now)
            for number, batch in ahead:
                self.live(number, batch, now)

    def _advance(self, now: float) -> None:
        """Deliver what is in order; ask for what is missing."""
        known, tracker = self._known, self._tracker
        if not tracker.synced:
            if tracker.held and (not self.settings.replay or (tracker.next == 0 and 0 in tracker.held)):
                # nothing to wait for: no history can be had, or the live stream itself begins at the beginning
                known.baseline(tracker.held.first)
                self._take(Input.FIRST, now)
            return
        if self.phase is Phase.VERIFY:
            return
        tracker.drain()
        if tracker.complete:
            known.grace_ends = None
            if self.phase is Phase.GRACE:
                self._take(Input.FILLED, now)
        elif self.phase in UNHURRIED:
            self._ask_for_gap(now)

    def _ask_for_gap(self, now: float) -> None:
        known, settings = self._known, self.settings
        if not settings.replay:
            if known.grace_ends is None:
                self.stats.gaps += 1
                known.grace_ends = now + settings.reorder_grace
            self._take(Input.HOLE, now)
            return
        self.stats.gaps += known.asks_for_gap()
        if known.gap_attempts >= ATTEMPTS and not settings.snapshot:
            known.give_up()
            self._advance(now)
            return
        self._take(Input.HOLE, now)
        known.gap_attempts += self.phase is Phase.GAP

    def _check_done(self, now: float) -> None:
        """Close a request whose answer has caught up with the live stream, whether or not it ever ENDs."""
        if self.phase in (Phase.SYNC, Phase.GAP, Phase.GAP_SNAPSHOT) and self._tracker.caught_up:
            self._take(Input.CAUGHT_UP, now)

    # -- answers -----------------------------------------------------------------------------------------------------

    def sent(self, request: int, now: float) -> None:
        """A request has left the process. Before, it may have waited behind a backlog; at infinity, it waits still."""
        self._replay_client.sent(request, now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float) -> None:
        """One batch of a replay answer."""
        asked = self._replay_client.match(request)
        if asked is None:
            return
        known, tracker = self._known, self._tracker
        if self.phase is Phase.BACKFILL:
            if known.backfill.answered(seq):
                self._new_epoch(now, restart=False)
            else:
                self._take(Input.ANSWERED, now)
            return
        if asked.contradicts(seq, payload, tracker):
            self._new_epoch(now)
            return
        if asked.begins_beyond(seq) and not self._accept_beyond(seq, now):
            return
        if asked.take(seq):
            asked.deadline = now + self.settings.replay_timeout
        known.buffer.keeps = True
        if asked.saw_last_delivered and self.phase is Phase.VERIFY:
            self._take(Input.CONFIRMED, now)
            tracker.drain()
        if seq < tracker.next:
            if asked.last_delivered < 0 or asked.saw_last_delivered:
                tracker.fingerprints.learn(seq, payload, tracker.next)
            return
        if known.is_far(seq):
            self.stats.rejected[Reason.SEQ_RANGE] += 1
            return
        if self.phase is Phase.SYNC and asked.items == 1 and tracker.next == 0:
            known.baseline(min(seq, tracker.held.first) if tracker.held else seq)
        if seq in tracker.held:
            tracker.held.replace(seq, payload)  # what the publisher answers is its own
            tracker.drain()
        else:
            tracker.replayed(seq, payload)
        self._check_done(now)

    def _accept_beyond(self, seq: int, now: float) -> bool:
        """An answer begins with ``seq``, beyond the last batch delivered. That proves neither epoch.

        Returns whether to take it all the same. The publisher has trimmed its buffer. While the connection stood, the
        batches between were sent on it, in order. After a pause of this process, or behind a backlog, they still wait
        to be read. So the live stream is waited for, until it has brought nothing for longer than an answer may take.
        """
        known, tracker = self._known, self._tracker
        if self.phase is Phase.VERIFY:
            # what lies between was sent while the connection was away, and is gone whichever epoch it was of
            far = known.is_far(seq)
            if not far:
                tracker.expose(seq)
            self._new_epoch(now, restart=far)
            return False
        if self.phase is Phase.RECHECK:
            # the publisher numbers far beyond the stale batches: they are not the newest ones of another epoch
            known.unverified.epoch_confirmed(now)
        elif seq <= tracker.next:
            return True
        elif known.buffer.trimmed_for(tracker.next, now) >= 2 * self.settings.replay_timeout:
            return True
        self._take(Input.ANSWERED, now)
        return False

    def replay_ended(self, request: int, now: float) -> None:
        """The END marker of an answer."""
        asked = self._replay_client.match(request)
        if asked is not None:
            self._replay_client.stop()  # nothing more will come, and only this closes its socket
            self._finish(asked, now, answered=True)

    def replay_aborted(self, request: int, now: float) -> None:
        """The answer broke off at a batch that is too large to be taken: it is lost, and what follows is asked for.

        If the answer was in order so far, it is known which batch that was. Otherwise the answer counts as timed out.
        """
        asked = self._replay_client.match(request)
        if asked is None:
            return
        self._replay_client.stop()
        known = self._known
        if self.phase is not Phase.VERIFY:
            self._tracker.drain()  # what the live stream has brought is not the batch that is too large
        same_batch = asked.items == 0 and known.aborted_at == asked.start
        if same_batch or max(asked.start, asked.last + 1) != self.next or self._waits_for_snapshot:
            self._finish(asked, now, answered=False)
            return
        known.skip_lost()
        if self.phase in (Phase.CATCH_UP, Phase.RECHECK) and self._tracker.synced:
            known.unverified.forget()
        self._take(Input.ABORTED, now)

    def snapshot(self, request: int, seq: int, now: float) -> bool:
        """A snapshot as of batch ``seq`` has come. -1: nothing was published yet; below: there is no snapshot.

        Returns whether to apply it now. Whoever has applied it calls :meth:`snapshot_applied`.
        """
        asked = self._replay_client.match(request)
        if asked is None or not self._waits_for_snapshot:
            return False
        if seq < -1:
            self._replay_client.stop()
            self._no_snapshot(now)
            return False
        if seq + 1 < asked.log_end:
            self._new_epoch(now)  # the publisher has sent more than this: it is in another epoch
            return False
        self._replay_client.stop()
        self._known.cover(seq)
        return True

    def snapshot_applied(self, now: float) -> None:
        """The index holds what the snapshot said: go on from there."""
        self._take(Input.COVERED, now)

    @property
    def _waits_for_snapshot(self) -> bool:
        return self.phase in (Phase.SNAPSHOT, Phase.GAP_SNAPSHOT)

    def _no_snapshot(self, now: float) -> None:
        """The snapshot did not come, or there is none: what the replay still has is better than nothing."""
        if self.phase is Phase.GAP_SNAPSHOT:
            self._known.give_up()
        self._take(Input.UNAVAILABLE, now)

    def _finish(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """An answer is over. Ask once more for what it did not bring, then give it up."""
        known = self._known
        over = Input.ANSWERED if answered else Input.SILENT
        if self.phase is Phase.BACKFILL:
            if answered:
                known.backfill.answered(None)
                if self.next == 0:
                    known.backfill.nothing_sent()
            self._take(over, now)
            return
        known.backfill.request_finished(answered=answered)
        if answered and (
            asked.lacks_last_delivered or (known.buffer.keeps and asked.last_delivered >= 0 and not asked.items)
        ):
            self._new_epoch(now)
        elif self._waits_for_snapshot:
            self._no_snapshot(now)
        elif self.phase is Phase.SYNC:
            self._finish_sync(asked, now, answered=answered)
        elif self.phase in (Phase.VERIFY, Phase.RECHECK, Phase.CATCH_UP):
            self._finish_verify(asked, now, answered=answered)
        else:
            if answered and asked.expects_batches and not asked.items:
                known.buffer.answered_with_nothing(self._tracker.live_end)
            self._take(over, now)

    def _finish_sync(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """The history is in, or nobody has it."""
        known, tracker = self._known, self._tracker
        if not answered and not asked.items and self._holds(Guard.ONCE_MORE):
            self._take(Input.SILENT, now)
            return
        if asked.items == 0 and tracker.next == 0:
            if tracker.held:
                known.baseline(tracker.held.first)
                known.backfill.pending = known.backfill.partial  # perhaps it had not published anything when asked
            elif answered:
                known.backfill.nothing_sent()
        tracker.drain()
        self._take(Input.ANSWERED if answered or asked.items else Input.SILENT, now)

    def _finish_verify(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """The publisher has shown in which epoch it is, or has not."""
        known = self._known
        silent = not answered and not asked.saw_last_delivered
        if asked.saw_last_delivered:
            known.unverified.epoch_confirmed(now)
        elif answered:
            if known.buffer.keeps is not False or known.unverified.stale or asked.items:
                self._new_epoch(now)
                return
        elif not self._holds(Guard.ONCE_MORE):
            if not self.settings.trust_unverified or known.unverified.consecutive:
                self._new_epoch(now)
                self._known.backfill.nothing_known()
                return
            known.unverified.forget()
        self._take(Input.SILENT if silent else Input.ANSWERED, now)

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: give up on answers that do not come, look for lost tails."""
        asked = self._replay_client.timed_out(now)
        if asked is not None:
            self._finish(asked, now, answered=False)
        known = self._known
        if known.grace_ends is not None and now >= known.grace_ends:
            known.grace_ends = None
            while not self._tracker.complete:
                known.give_up()
            self._take(Input.GRACE_OVER, now)
        if self._conflict.over(now):
            self._forget()
            self._take(Input.PAUSE_OVER, now)
        if self.phase is Phase.LIVE and self.settings.replay:
            self._probe(now)

    def _probe(self, now: float) -> None:
        interval = self.settings.probe_interval
        if self._known.backfill.due(now):
            self._take(Input.BACKFILL_DUE, now)
        elif interval and now - self._idle_since >= interval * self._probe_factor:
            self._idle_since = now
            self._probe_factor = min(self._probe_factor * 2, MAX_PROBE_BACKOFF)
            self._take(Input.PROBE_DUE, now)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _new_epoch(self, now: float, *, restart: bool = True) -> None:
        """Start over. Stale batches are the first live ones of the new epoch; everything held was of the old one.

        Without ``restart`` nothing proves that the publisher restarted: more of its epoch can be had than is known, or
        nobody knows.
        """
        self.stats.restarts += restart
        self._tracker.write_off()
        first = self._known.unverified.take_stale()
        self._replay_client.stop()
        self.epoch += 1
        self._forget()
        self._idle_since = now
        self.actions.append(NewEpoch())
        if restart and self._conflict.epoch_began(now):
            self.stats.rejected[Reason.CONFLICT] += len(first)
            self._known.backfill.nothing_known(pending=False)
        else:
            for seq, payload in first:
                self._tracker.live_later(seq, payload)
        self._take(Input.NEW_EPOCH, now)
        self._advance(now)

    def _forget(self) -> None:
        self._known = Epoch(self.settings, self.stats, self.actions)
        self._tracker = self._known.tracker
        self._probe_factor = 1
        self._resyncing = False

    def complete(self, *, certain: bool) -> None:
        """The batch being delivered has emptied the publisher's cache: what came before it is not missing any more.

        A loss or a new epoch that waits behind the batch is about later batches. If it is not certain that the cache
        was emptied, the publisher is still asked for the history it may have.
        """
        if not any(isinstance(action, Lost | NewEpoch) for action in self.actions):
            self._known.emptied(certain=certain)

    # -- over a restart of this process ------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """What a restart has to know, as plain data: which epoch, how far, and the fingerprints of its batches."""
        return {"epoch": self.epoch, **self._known.dump()}

    def load(self, data: dict[str, Any]) -> None:
        """Go on where a former process was; the connection is away until :meth:`up`."""
        self.epoch = data["epoch"]
        self._known.load(data)

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """A batch of the log: it was delivered before the restart."""
        self._known.restore_batch(seq, payload)

    def restore_loss(self, count: int) -> None:
        """A loss of the log."""
        self._known.backfill.begins(self.next + count)

    def restore_snapshot(self, seq: int) -> None:
        """A snapshot of the log."""
        self._known.restore_snapshot(seq)

    def restore_epoch(self, *, partial: bool) -> None:
        """An epoch of the log."""
        self.epoch += 1
        self._forget()
        if partial:
            self._known.backfill.nothing_known()

    def recovery_finished(self) -> None:
        """All of the log was handled: what followed from it was done before the restart."""
        self.actions.clear()
        self._known.recovery_finished()
        self._tracker = self._known.tracker
