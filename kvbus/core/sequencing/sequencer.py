"""One publisher's batches, put in order: gaps, duplicates, replays, restarts.

A publisher numbers its batches from 0 in each epoch and keeps the newest ones for replay. Nothing on the wire says
which epoch a number belongs to. ``gap_tracker`` has the numbers of the current epoch. The sequencer decides which epoch
it is, and what to ask the publisher. At most one request is open at a time. Each has an id of its own, so that answers
to an old one cannot mix in.

Content decides whether a batch belongs to this epoch or to another. The sequencer keeps fingerprints of the last
batches, and every request reaches back over some of them. Where the fingerprints do not reach, it asks the publisher
for its last batches again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from kvbus.core.sequencing.actions import Action, Lost, NewEpoch, Synced
from kvbus.core.sequencing.backfill import Backfill
from kvbus.core.sequencing.conflict import Conflict
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.sequencing.replay_requests import ATTEMPTS, INTERRUPTIBLE, OpenRequest, Purpose, ReplayClient
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.sequencing.unverified import UnverifiedBatches
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

MAX_PROBE_BACKOFF: Final = 32
"""Times :attr:`Settings.probe_interval` after which an idle publisher is still asked."""

FAR: Final = 2**32
"""A batch so many numbers ahead is not behind a gap: no publisher loses as many."""


class Sequencer:
    """Takes in batches and replay answers, and puts out actions.

    It is pure: the time is an argument, in seconds on any monotonic clock.
    """

    def __init__(self, settings: Settings, stats: SourceStats) -> None:
        self.settings = settings
        self.stats = stats

        # As ``/sources`` shows it.
        self.state = State.CONNECTING
        self.epoch = 0
        self.partial = False
        self.connected = False

        # What goes on over epochs.
        self.actions: deque[Action] = deque()
        """What was decided and is not yet carried out."""
        self._replay_client = ReplayClient(settings, stats, self.actions)
        self._conflict = Conflict()

        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._forget_numbers()
        self._backfill = Backfill(self.settings.replay_timeout)
        self._unverified_batches = UnverifiedBatches(self.settings.reorder_bytes, self.stats)

        # The gap that is being asked for.
        self._gap_start = -1
        self._attempts = 0
        self._aborted_at = -1
        """Where the request went on after a batch that was too large."""
        self._grace_ends: float | None = None
        """When the gap is given up, where there is no replay."""

        # Probes of an idle stream.
        self._idle_since = 0.0
        self._probe_factor = 1

        # What answers have shown of the publisher's replay buffer.
        self._keeps_buffer: bool | None = None
        """Whether the publisher keeps a buffer: it has answered with batches, or with none while it publishes.

        None: nobody knows yet. If a publisher with a buffer answers with nothing, it is in another epoch. If one
        without a buffer does, that proves nothing.
        """
        self._trimmed_at = -1
        """``next`` when a probe was answered from beyond the last batch delivered; -1: none was."""
        self._trimmed_since = 0.0
        self._empty_at = -1
        """``live_end`` when an answer was empty that should not have been, on this connection; -1: there was none."""

        # What a reconnection leaves open.
        self._resyncing = False
        """The next end of a request is to be reported as :class:`Synced`."""
        self._epoch_unverified = False
        """The connection was away, and the publisher has not shown since that it is in the same epoch."""

    @property
    def next(self) -> int:
        """The number of the batch to be delivered next."""
        return self.tracker.next

    @property
    def held(self) -> ReorderBuffer:
        """The batches that wait for their turn."""
        return self.tracker.held

    @property
    def unverified(self) -> ReorderBuffer:
        """The stale batches, kept until the publisher has said which epoch they are of."""
        return self._unverified_batches.stale

    @property
    def synced(self) -> bool:
        """Whether holes count as missing."""
        return self.tracker.synced

    @property
    def log_end(self) -> int:
        """One past the highest batch known to exist."""
        return self.tracker.log_end

    @property
    def pending(self) -> int:
        """How many batches are missing whose fate is open."""
        return self.tracker.pending

    @property
    def known_from(self) -> int:
        """The number from which on nothing is missing in what was delivered; see :class:`Backfill`."""
        return self._backfill.first

    @property
    def backfill_pending(self) -> bool:
        """What is missing may still come: the publisher has not said how far back its buffer reaches."""
        return self._backfill.pending

    # -- what the shell reports --------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """The connection to the publisher stands."""
        if self.connected:
            return
        self.connected = True
        self._idle_since = now
        self._resyncing = True
        if not self.settings.replay:
            self.state = State.LIVE  # no history can be had: the stream begins with its next batch
            if self.synced and self.settings.trust_unverified:
                self._request_done(now)
            elif self.synced:
                self._new_epoch(now)
                self.partial = True  # until its next batch shows whether the epoch begins with it
            return
        self.state = State.SYNCING
        self._attempts = 0
        if self.next == 0:
            self._sync()
        else:
            self._epoch_unverified = True
            self._ask(Purpose.VERIFY)

    def down(self, now: float) -> None:
        """The connection is gone. The batches held back may still get their turn once it is back."""
        del now
        self.connected = False
        self._conflict.reconnected()
        self._replay_client.stop()
        self._unverified_batches.disconnected()
        self._empty_at = -1
        if self.next == 0:
            # nothing was delivered that another epoch could be recognised by: what is held may be of one that is over
            self.tracker.write_off()
            self._forget_numbers()
        if self.state is not State.LOST:
            self.state = State.CONNECTING

    def accept_in_order(self, seq: int, payload: bytes, now: float) -> int | None:
        """Take in the commonest case of :meth:`live`: the next batch, with nothing missing and no request open.

        Returns the fingerprint of a batch that was taken: whoever calls delivers it at once, there is no action. None
        if it is another case; then nothing has changed.
        """
        tracker = self.tracker
        if not (seq == tracker.next == tracker.log_end and tracker.synced and self.connected):
            return None
        if self._replay_client.open is not None or self._epoch_unverified or self.actions:
            return None
        self._idle_since = now
        self._probe_factor = 1
        return tracker.accept_next(seq, payload)

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """One batch of the live stream."""
        if not self.connected:
            self.up(now)
        self._idle_since = now
        self._probe_factor = 1
        tracker = self.tracker
        if seq == tracker.next and tracker.synced and not tracker.held and not self._epoch_unverified:
            tracker.live_in_order(seq, payload)
            if self._replay_client.open is not None:
                self._check_done(now)
            return
        if self._conflict.until is not None:
            self.stats.rejected[Reason.CONFLICT] += 1
            return
        if seq < tracker.next:
            self._below_next(seq, payload, now)
            return
        if self._is_far(seq):
            self._far_ahead(seq, payload, now)
            return
        if seq in tracker.held:
            self.stats.duplicates += 1
            if self.settings.replay and tracker.contest(seq, payload):
                self._advance(now)
            return
        tracker.live_later(seq, payload)
        self._advance(now)
        self._check_done(now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float) -> None:
        """One batch of a replay answer."""
        asked = self._replay_client.match(request)
        if asked is None:
            return
        if asked.purpose is Purpose.HISTORY:
            self._replay_client.stop()
            if self._backfill.answered(seq):
                self._new_epoch(now, restart=False)
            else:
                self._request_done(now)
            return
        tracker = self.tracker
        if asked.contradicts(seq, payload, tracker):
            self._new_epoch(now)
            return
        if asked.begins_beyond(seq) and not self._accept_beyond(asked, seq, now):
            return
        if asked.take(seq):
            asked.deadline = now + self.settings.replay_timeout
        self._keeps_buffer = True
        if asked.saw_last_delivered and self._epoch_unverified:
            self._epoch_unverified = False
            tracker.drain()
        if seq < tracker.next:
            if asked.last_delivered < 0 or asked.saw_last_delivered:
                tracker.fingerprints.learn(seq, payload, tracker.next)
            return
        if self._is_far(seq):
            self.stats.rejected[Reason.SEQ_RANGE] += 1
            return
        if asked.items == 1 and not tracker.synced and tracker.next == 0 and asked.purpose is Purpose.SYNC:
            self._baseline(min(seq, tracker.held.first) if tracker.held else seq)
        if seq in tracker.held:
            tracker.held.replace(seq, payload)  # what the publisher answers is its own
            if not self._epoch_unverified:
                tracker.drain()
        else:
            tracker.replayed(seq, payload)
        self._check_done(now)

    def _accept_beyond(self, asked: OpenRequest, seq: int, now: float) -> bool:
        """An answer begins with ``seq``, beyond the last batch delivered. That proves neither epoch.

        Returns whether to take it all the same. The publisher has trimmed its buffer. While the connection stood, the
        batches between were sent on it, in order. After a pause of this process, or behind a backlog, they still wait
        to be read. So the live stream is waited for, until it has brought nothing for longer than an answer may take.
        """
        tracker = self.tracker
        if self._epoch_unverified:
            # what lies between was sent while the connection was away, and is gone whichever epoch it was of
            far = self._is_far(seq)
            if not far:
                tracker.expose(seq)
            self._new_epoch(now, restart=far)
            return False
        if asked.purpose is Purpose.VERIFY:
            # the publisher numbers far beyond the stale batches: they are not the newest ones of another epoch
            self._unverified_batches.epoch_confirmed(now)
        elif seq <= tracker.next:
            return True
        elif self._trimmed_at != tracker.next:
            self._trimmed_at, self._trimmed_since = tracker.next, now
        elif now - self._trimmed_since >= 2 * self.settings.replay_timeout:
            return True
        self._replay_client.stop()
        self._request_done(now)
        return False

    def sent(self, request: int, now: float) -> None:
        """A request has left the process. Before, it may have waited behind a backlog; at infinity, it waits still."""
        self._replay_client.sent(request, now)

    def replay_ended(self, request: int, now: float) -> None:
        """The END marker of an answer."""
        asked = self._replay_client.match(request)
        if asked is None:
            return
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
        same_batch = asked.items == 0 and self._aborted_at == asked.start
        if same_batch or max(asked.start, asked.last + 1) != self.next:
            self._finish(asked, now, answered=False)
            return
        self.partial = True
        self._backfill.begins(self.next + 1)
        self.tracker.skip_lost()
        self._aborted_at = self.next
        if not self.synced:
            self._ask(Purpose.SYNC)
            return
        if asked.purpose is Purpose.VERIFY:
            self._unverified_batches.forget()
        self.state = State.GAP
        self._ask(Purpose.GAP)

    def snapshot(self, request: int, seq: int, now: float) -> bool:
        """A snapshot as of batch ``seq`` has come. -1: nothing was published yet; below: there is no snapshot.

        Returns whether to apply it now. Whoever has applied it calls :meth:`snapshot_applied`.
        """
        asked = self._replay_client.match(request)
        if asked is None:
            return False
        if seq < -1:
            self._replay_client.stop()
            self._no_snapshot(now)
            return False
        if seq + 1 < asked.log_end:
            self._new_epoch(now)  # the publisher has sent more than this: it is in another epoch
            return False
        self._replay_client.stop()
        self.partial = False
        self._backfill = Backfill(self.settings.replay_timeout)
        self.tracker.jump(seq + 1)
        return True

    def snapshot_applied(self, now: float) -> None:
        """The index holds what the snapshot said: go on from there."""
        self._request_done(now)

    def complete(self, *, certain: bool) -> None:
        """The batch being delivered has emptied the publisher's cache: what came before it is not missing any more.

        A loss or a new epoch that waits behind the batch is about later batches. If it is not certain that the cache
        was emptied, the publisher is still asked for the history it may have.
        """
        if any(isinstance(action, Lost | NewEpoch) for action in self.actions):
            return
        self.partial = False
        if certain:
            self._backfill = Backfill(self.settings.replay_timeout)

    def tick(self, now: float) -> None:
        """Let time pass: give up on answers that do not come, look for lost tails."""
        asked = self._replay_client.timed_out(now)
        if asked is not None:
            self._finish(asked, now, answered=False)
        if self._grace_ends is not None and now >= self._grace_ends:
            self._grace_ends = None
            self._give_up_gaps()
        if self._conflict.over(now):
            self._begin_epoch()
            self.partial = False
            if self.settings.replay:
                self._sync()
            else:
                self.state = State.LIVE
        self._probe(now)

    def publisher_changed(self, now: float) -> None:
        """The publisher says itself that its epoch is a new one (another publisher id, snapshot protocol)."""
        if self._conflict.until is None:
            self._new_epoch(now)

    def expire(self) -> None:
        """The engine has been gone for too long: from now on it counts as lost, whatever it still held."""
        self.state = State.LOST

    # -- over a restart of this process ------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """What a restart has to know, as plain data: which epoch, how far, and the fingerprints of its batches."""
        return {
            "epoch": self.epoch,
            "next": self.next,
            "partial": self.partial,
            "synced": self.synced,
            "buffer": self._keeps_buffer,
            "history": self._backfill.dump(),
            "delivered": self.tracker.fingerprints.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Go on where a former process was; the connection is away until :meth:`up`."""
        self.epoch, self.partial = data["epoch"], data["partial"]
        self._keeps_buffer = data["buffer"]
        self._backfill.load(data["history"])
        tracker = self.tracker
        tracker.next = tracker.log_end = data["next"]
        tracker.synced = data["synced"]
        tracker.fingerprints.load(data["delivered"])

    def restore_batch(self, seq: int, payload: bytes) -> None:
        """A batch of the log: it was delivered before the restart."""
        if self.next == 0:
            self.partial = seq > 0
        if seq > self.next:
            self._backfill.begins(seq)
        self.tracker.restore_batch(seq, payload)

    def recovery_finished(self) -> None:
        """All of the log was handled: what followed from it was done before the restart."""
        self.actions.clear()
        self._backfill.pending = self.partial or self._backfill.first > 0  # the log does not say why

    def restore_snapshot(self, seq: int) -> None:
        """A snapshot of the log."""
        self.partial = False
        self._backfill = Backfill(self.settings.replay_timeout)
        self.tracker.synced = True
        self.tracker.jump(seq + 1)

    def restore_epoch(self, *, partial: bool) -> None:
        """An epoch of the log."""
        self.epoch += 1
        self.partial = partial
        self._begin_epoch()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, purpose: Purpose) -> None:
        self._replay_client.ask(purpose, self.tracker)

    def _sync(self) -> None:
        """Ask for what the epoch has brought so far."""
        self.state = State.SYNCING
        self._ask(Purpose.SNAPSHOT if self.settings.snapshot else Purpose.SYNC)

    def _probe(self, now: float) -> None:
        interval = self.settings.probe_interval
        if not (self.settings.replay and self.connected and self.state is State.LIVE):
            return
        if self._replay_client.open is None and self._backfill.due(now):
            self._ask(Purpose.HISTORY)
        if self._replay_client.open is None and interval and now - self._idle_since >= interval * self._probe_factor:
            self._idle_since = now
            self._probe_factor = min(self._probe_factor * 2, MAX_PROBE_BACKOFF)
            self._ask(Purpose.PROBE)

    def _check_done(self, now: float) -> None:
        """Close a request whose answer has caught up with the live stream, whether or not it ever ENDs."""
        asked = self._replay_client.open
        if asked is None or asked.purpose in INTERRUPTIBLE or asked.purpose is Purpose.VERIFY:
            return
        if self.tracker.caught_up:
            self._replay_client.stop()
            self._request_done(now)

    def _finish(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """An answer is over. Ask once more for what it did not bring, then give it up."""
        purpose = asked.purpose
        if purpose is Purpose.HISTORY:
            if answered:
                self._backfill.answered(None)
                self.partial = self.partial and self.next > 0
            self._request_done(now)
            return
        self._backfill.request_finished(answered=answered)
        if answered and (
            asked.lacks_last_delivered or (self._keeps_buffer and asked.last_delivered >= 0 and not asked.items)
        ):
            self._new_epoch(now)
            return
        if purpose is Purpose.VERIFY:
            if not self._verified(asked, now, answered=answered):
                return
        elif purpose is Purpose.SNAPSHOT:
            self._no_snapshot(now)
            return
        elif purpose is Purpose.SYNC and not self.synced:
            if not answered and not asked.items and self._attempts < ATTEMPTS - 1:
                self._attempts += 1
                self._ask(Purpose.SYNC)
                return
            if asked.items == 0 and self.next == 0:
                if self.held:
                    self._baseline(self.held.first)
                    self._backfill.pending = self.partial  # perhaps it was asked before it had published anything
                elif answered:
                    self.partial = False  # it has published nothing yet
            self.tracker.drain()
        elif answered and asked.expects_batches and not asked.items:
            if self._empty_at < 0:
                self._empty_at = self.tracker.live_end
            elif self._empty_at < self.tracker.live_end:
                self._keeps_buffer = False
        self._request_done(now)

    def _no_snapshot(self, now: float) -> None:
        """The snapshot did not come, or there is none: what the replay still has is better than nothing."""
        if self.synced and not self.tracker.complete:
            self._give_up()
            self._request_done(now)
        else:
            self._ask(Purpose.SYNC)

    def _request_done(self, now: float) -> None:
        """No request is open now: either everything known is delivered, or there is a gap to ask for."""
        if not self.synced:
            if far := self.tracker.drop_far(FAR):
                self.stats.rejected[Reason.SEQ_RANGE] += far
            self.tracker.open()
            self._attempts = 0
            self._resyncing = True
        if self._resyncing:
            self._resyncing = False
            self.actions.append(Synced())
        self.state = State.LIVE if self.connected else State.CONNECTING
        if self._unverified_batches.stale and self.settings.replay and self._unverified_batches.may_ask(now):
            self._ask(Purpose.VERIFY)
        self._advance(now)

    # -- order -------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Deliver what is in order; ask for what is missing."""
        if not self.synced:
            if self.held and (not self.settings.replay or (self.next == 0 and 0 in self.held)):
                # nothing to wait for: no history can be had, or the live stream itself begins at the beginning
                self._replay_client.stop()
                self._baseline(self.held.first)
                self._request_done(now)
            return
        if self._epoch_unverified:
            if self._replay_client.open is None:
                self._ask(Purpose.VERIFY)
            return
        self.tracker.drain()
        if self.tracker.complete:
            self._grace_ends = None
            if self._replay_client.open is None and self.state is State.GAP:
                self.state = State.LIVE
            return
        if not self._replay_client.interruptible:
            return
        self._replay_client.stop()
        if self._gap_start != self.next:
            self._gap_start = self.next
            self._attempts = 0
        self.state = State.GAP
        if not self.settings.replay:
            if self._grace_ends is None:
                self.stats.gaps += 1
                self._grace_ends = now + self.settings.reorder_grace
            return
        if not self._attempts:
            self.stats.gaps += 1
        if self._attempts >= ATTEMPTS:
            if self.settings.snapshot:
                self._ask(Purpose.SNAPSHOT)  # it holds the outcome of the batches that are lost for good
                return
            self._give_up()
            self._advance(now)
            return
        self._attempts += 1
        self._ask(Purpose.GAP)

    def _give_up_gaps(self) -> None:
        while not self.tracker.complete:
            self._give_up()
        self.state = State.LIVE

    def _give_up(self) -> None:
        self.partial = True
        self._backfill.begins(self.held.first if self.held else self.log_end)
        self.tracker.give_up()

    def _forget_numbers(self) -> None:
        settings = self.settings
        self.tracker = GapTracker(
            ReorderBuffer(settings.reorder_batches, settings.reorder_bytes), self.stats, self.actions
        )

    def _baseline(self, seq: int) -> None:
        """``seq`` is the first batch of this epoch that can still be had. kvbus never saw what came before it."""
        self.partial = seq > 0
        self._backfill.begins(seq)
        self.tracker.begin_at(seq)

    # -- epochs ------------------------------------------------------------------------------------------------------

    def _below_next(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from before ``next``: a late copy, or one of a new epoch."""
        same = self.tracker.fingerprints.matches(seq, payload, self.next)
        if same:
            self.stats.duplicates += 1
            return
        if same is False or seq == 0:
            self._new_epoch(now)
            self.live(seq, payload, now)
            return
        self._unverified_batches.keep_stale(seq, payload)
        if not self.settings.replay:
            if self._unverified_batches.consecutive:
                self._new_epoch(now)
            return
        if self._unverified_batches.may_ask(now) and self._replay_client.interruptible:
            self._ask(Purpose.VERIFY)

    def _is_far(self, seq: int) -> bool:
        """Whether a number is too far ahead of what is known to be behind a gap."""
        tracker = self.tracker
        return seq - tracker.log_end >= FAR and (tracker.synced or tracker.next > 0)

    def _far_ahead(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from further ahead than any gap: an odd one, or, if more follow, a new epoch."""
        self.stats.rejected[Reason.SEQ_RANGE] += 1
        ahead = self._unverified_batches.ahead(seq, payload)
        if ahead:
            self._new_epoch(now)
            for number, batch in ahead:
                self.live(number, batch, now)

    def _verified(self, asked: OpenRequest, now: float, *, answered: bool) -> bool:
        """A verifying answer is over; False if it opened a new epoch or another request."""
        if asked.saw_last_delivered:
            self._unverified_batches.epoch_confirmed(now)
            return True
        if not answered:
            self._attempts += 1
            if self._attempts < ATTEMPTS:
                self._ask(Purpose.VERIFY)
                return False
            if self.settings.trust_unverified and not self._unverified_batches.consecutive:
                self._epoch_unverified = False
                self._unverified_batches.forget()
                return True
        elif self._keeps_buffer is False and not self._unverified_batches.stale and not asked.items:
            self._epoch_unverified = False
            return True
        self._new_epoch(now)
        if not answered:
            self.partial = True
            self._backfill.nothing_known()
        return False

    def _new_epoch(self, now: float, *, restart: bool = True) -> None:
        """Start over. Stale batches are the first live ones of the new epoch; everything held was of the old one.

        Without ``restart`` nothing proves that the publisher restarted: more of its epoch can be had than is known, or
        nobody knows.
        """
        self.stats.restarts += restart
        self.tracker.write_off()
        first = self._unverified_batches.take_stale()
        self._replay_client.stop()
        self.epoch += 1
        self.partial = False
        self._begin_epoch()
        self._idle_since = now
        self.actions.append(NewEpoch())
        if restart and self._conflict.epoch_began(now):
            self.partial = True
            self.state = State.CONFLICT
            self.stats.rejected[Reason.CONFLICT] += len(first)
            return
        for seq, payload in first:
            self.tracker.live_later(seq, payload)
        if self.settings.replay:
            self._sync()
        else:
            self.state = State.LIVE
        self._advance(now)
