"""One publisher's batches, put in order: gaps, duplicates, replays, restarts.

A publisher numbers its batches from 0 in each epoch and keeps the newest ones for replay. Nothing on the wire says
which epoch a number belongs to. ``epoch`` has what is known of the current one. The sequencer decides which epoch it
is, and what to ask the publisher. Each request has an id of its own, so that answers to an old one cannot mix in.
``answers`` takes them in; connections, live batches and the time come in here.

Content decides whether a batch belongs to this epoch or to another. The sequencer keeps fingerprints of the last
batches, and every request reaches back over some of them. Where the fingerprints do not reach, it asks the publisher
for its last batches again.
"""

from __future__ import annotations

from math import inf
from typing import Any, Final

from kvbus.core.sequencing.actions import Lost, LostReason, NewEpoch, RestartReason
from kvbus.core.sequencing.answers import Answers
from kvbus.core.sequencing.phases import SEPARATED, SHOWN, UNHURRIED, Input, Phase, State
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.types import Reason

MAX_PROBE_BACKOFF: Final = 32
"""Times :attr:`SourceSpec.probe_interval` after which an idle publisher is still asked."""


class Sequencer(Answers):
    """Takes in batches and replay answers, and puts out actions.

    It is pure: the time is an argument, in seconds on any monotonic clock.

    Args:
        spec: how the publisher is asked and waited for.
        stats: where the account is kept.
    """

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
    def held(self) -> ReorderBuffer[bytes]:
        """The batches that wait for their turn."""
        return self._tracker.held

    @property
    def unverified(self) -> ReorderBuffer[bytes]:
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

    @property
    def unanswered(self) -> bool:
        """Whether the publisher has not answered the last request."""
        return self._known.backfill.unanswered

    @property
    def request_waits(self) -> bool:
        """Whether a request could not leave the process yet."""
        asked = self._replay_client.open
        return asked is not None and asked.waits

    @property
    def lost_because(self) -> LostReason:
        """Why what is missing now is lost, if it is given up."""
        return self._known.lost_because

    # -- the connection ----------------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """The connection to the publisher stands."""
        if self.connected:
            return
        self._idle_since = now
        if self.spec.compacted:
            self._probe_factor = 1
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
        elif self.spec.compacted:
            # a compacted answer may look the same in another epoch: what is held has to come once more
            self._tracker.write_off()
            self._tracker.forget_ahead()

    def expire(self) -> None:
        """The engine has been gone for too long: from now on it counts as lost, whatever it still held."""
        self._take(Input.EXPIRED, 0.0)  # whatever the time

    def publisher_changed(self, now: float) -> None:
        """The publisher says itself that its epoch is a new one (another publisher id, snapshot protocol)."""
        if self.phase is not Phase.CONFLICT:
            self._new_epoch(now, RestartReason.PUBLISHER_ID)

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether another batch was delivered under this number, or waits under it."""
        held = self.held
        if seq in held:
            return held.get(seq) != payload
        return self._tracker.fingerprints.matches(seq, payload, self.next) is False

    def rebuild(self, now: float) -> None:
        """Begin anew: what was taken in was misread. Nothing proves that the publisher has restarted."""
        if self.phase is not Phase.CONFLICT:
            self._new_epoch(now, RestartReason.REBUILT)

    # -- the live stream ---------------------------------------------------------------------------------------------

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """One batch of the live stream."""
        self.up(now)
        self._idle_since = now
        if not self.spec.compacted:
            self._probe_factor = 1
        tracker = self._tracker
        asked = self._replay_client.open
        if (
            asked is not None
            and self._live_waits
            and self.phase is Phase.PROBE
            and seq == asked.following == tracker.next
        ):
            self._take(Input.CAUGHT_UP, now)  # the stream is not silent, and has lost nothing
        if seq == tracker.next and tracker.synced and not tracker.held and not self._live_waits:
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
            if self.spec.replay and tracker.contest(seq, payload):
                self._advance(now)
        else:
            tracker.live_later(seq, payload)
            self._advance(now)
            self._check_done(now)

    def _below_next(self, seq: int, payload: bytes, now: float) -> None:
        """Take in a live batch from before ``next``: a late copy, or one of a new epoch.

        Batch 0 of which nothing is known begins an epoch: the live stream has gone back. Where that has shown nothing
        yet, it may only be older than what the publisher's buffer had left of the history, so the publisher is asked.
        """
        tracker, unverified = self._tracker, self._known.unverified
        same = tracker.fingerprints.matches(seq, payload, self.next)
        if same is not True and seq < tracker.answered_end:
            same = True if now < self._synced_at + self.spec.late_copies or self._live_waits else None
        if same:
            self.stats.duplicates += 1
            return
        begins = seq == 0 and tracker.answered_end == 0 and (tracker.live_end > 0 or not self.spec.replay)
        if same is False or begins:
            self._new_epoch(now, RestartReason.PAYLOAD)
            self.live(seq, payload, now)
            return
        unverified.keep_stale(seq, payload)
        if not self.spec.replay:
            if unverified.consecutive or self.spec.compacted:
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

    # -- a log's numbers -------------------------------------------------------------------------------------------

    def stand_at(self, phase: Phase, epoch: int, following: int) -> None:
        """Its numbers come from a log, which was read up to here: nothing is asked, and nothing waits."""
        tracker = self._tracker
        self.phase, self.epoch = phase, epoch
        tracker.next = tracker.log_end = tracker.live_end = following

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
        if self.phase is Phase.LIVE and self.spec.asks:
            self._probe(now)

    @property
    def deadline(self) -> float:
        """When :meth:`tick` has something to do; infinity for never."""
        known, asked, spec = self._known, self._replay_client.open, self.spec
        times = [inf if known.grace_ends is None else known.grace_ends]
        if asked is not None:
            times += [asked.deadline, asked.hard_deadline]
        if self._conflict.until is not None:
            times.append(self._conflict.until)
        if self.phase is Phase.LIVE and spec.asks:
            times.append(known.backfill.next_due)
            if spec.probe_interval and spec.replay:
                times.append(self._idle_since + spec.probe_interval * self._probe_factor)
        return min(times)

    def _probe(self, now: float) -> None:
        interval = self.spec.probe_interval
        if self._known.backfill.due(now):
            self._take(Input.BACKFILL_DUE, now)
        elif interval and self.spec.replay and now >= self._idle_since + interval * self._probe_factor:
            self._known.buffer.silent(self._tracker.next, self._idle_since)
            self._idle_since = now
            self._probe_factor = min(self._probe_factor * 2, MAX_PROBE_BACKOFF)
            self._take(Input.PROBE_DUE, now)

    # -- epochs ------------------------------------------------------------------------------------------------------

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
