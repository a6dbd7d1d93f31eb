"""One publisher's batches, put in order: gaps, duplicates, replays, restarts.

A publisher numbers its batches from 0 in each of its lives (epochs) and keeps the newest ones for replay; nothing on
the wire says which life a number belongs to. The numbers of the current life are in ``gap_tracker``; here is which life
it is, and what to ask the publisher. At most one replay request is open at a time, each under an id of
its own, so that answers to an old one cannot mix in. Whether numbers belong to this life or to another is decided by
content: a mark of the last batches is kept, every question reaches back over some of them, and where the marks do not
reach, the publisher is asked for the last batches again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from kvbus.core.sequencing.actions import Action, NewEpoch, Synced
from kvbus.core.sequencing.backfill import History
from kvbus.core.sequencing.conflict import Conflict
from kvbus.core.sequencing.gap_tracker import Numbering
from kvbus.core.sequencing.reorder_buffer import Held
from kvbus.core.sequencing.replay_requests import ATTEMPTS, INTERRUPTIBLE, Asking, Purpose, Request
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.sequencing.unverified import Doubts
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason

MAX_PROBE_BACKOFF: Final = 32

FAR: Final = 2**32
"""Numbers ahead beyond which a batch is not taken for one behind a gap: no publisher loses as many."""


class Sequencer:
    """Pure: batches and replay answers in, actions out; time is an argument in seconds on any monotonic clock."""

    def __init__(self, settings: Settings, stats: SourceStats) -> None:
        self.settings = settings
        self.stats = stats
        self.state = State.CONNECTING
        self.epoch = 0
        self.partial = False
        self.connected = False
        self.actions: deque[Action] = deque()
        self._asking = Asking(settings, stats, self.actions)
        self._conflict = Conflict()
        self._begin_life()

    def _begin_life(self) -> None:
        self._forget_numbers()
        self._history = History(self.settings.replay_timeout)
        self._doubts = Doubts(self.settings.reorder_bytes)
        self._gap_start = -1
        self._cut_at = -1
        """Where the question went on after a batch that was too large."""
        self._attempts = 0
        self._idle_since = 0.0
        self._probe_factor = 1
        self._grace: float | None = None
        self._buffer: bool | None = None
        """Whether the publisher keeps a buffer, by its answers, or by empty ones while it publishes; None: unknown.

        Empty answers of one that does show that it is in another life, of one that does not they prove nothing.
        """
        self._trimmed_at = -1
        """``next`` when a probe was answered from beyond the tip; -1: none was."""
        self._trimmed_since = 0.0
        self._empty_at = -1
        """``live_top`` when an answer was empty that should not have been, on this connection; -1: there was none."""
        self._resyncing = False
        self._unverified = False
        """The connection was away, and the publisher has not shown since that it is in the same life."""

    @property
    def next(self) -> int:
        """The number of the batch to be delivered next."""
        return self.numbers.next

    @property
    def held(self) -> Held:
        """The batches that wait for their turn."""
        return self.numbers.held

    @property
    def synced(self) -> bool:
        """Whether holes count as missing."""
        return self.numbers.synced

    @property
    def horizon(self) -> int:
        """One past the highest batch known to exist."""
        return self.numbers.horizon

    # -- what the shell tells ----------------------------------------------------------------------------------------

    def up(self, now: float) -> None:
        """The connection to the publisher stands."""
        if self.connected:
            return
        self.connected = True
        self._idle_since = now
        self._resyncing = True
        if not self.settings.replay:
            self.state = State.LIVE  # there is no history to wait for: the stream begins with its next batch
            if self.synced and self.settings.trust_unverified:
                self._settled(now)
            elif self.synced:
                self._new_epoch(now)
                self.partial = True  # until its next batch shows whether this is the beginning of a life
            return
        self.state = State.SYNCING
        self._attempts = 0
        if self.next == 0:
            self._sync()
        else:
            self._unverified = True
            self._ask(Purpose.VERIFY)

    def down(self, now: float) -> None:
        """The connection is gone; what is held back may still be completed once it is back."""
        del now
        self.connected = False
        self._conflict.reconnected()
        self._asking.stop()
        self._doubts.clear()
        self._empty_at = -1
        if self.next == 0:
            # nothing was delivered that a new life could be told by: what is held may be of a life that is over
            self.numbers.write_off()
            self._forget_numbers()
        if self.state is not State.LOST:
            self.state = State.CONNECTING

    def passes(self, seq: int, payload: bytes, now: float) -> int | None:
        """The commonest case of :meth:`live`: the next batch, with nothing missing and nothing open.

        Its fingerprint: it is taken, and to be delivered at once, without an action. None: nothing has changed.
        """
        numbers = self.numbers
        if not (seq == numbers.next == numbers.horizon and numbers.synced and self.connected):
            return None
        if self._asking.open is not None or self._unverified or self.actions:
            return None
        self._idle_since = now
        self._probe_factor = 1
        return numbers.passed(seq, payload)

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """One batch of the live stream."""
        if not self.connected:
            self.up(now)
        self._idle_since = now
        self._probe_factor = 1
        numbers = self.numbers
        if seq == numbers.next and numbers.synced and not numbers.held and not self._unverified:
            numbers.live_in_order(seq, payload)
            if self._asking.open is not None:
                self._check_done(now)
            return
        if self._conflict.until is not None:
            self.stats.rejected[Reason.CONFLICT] += 1
            return
        if seq < numbers.next:
            self._low(seq, payload, now)
            return
        if self._is_far(seq):
            self._far(seq, payload, now)
            return
        if seq in numbers.held:
            self.stats.duplicates += 1
            if self.settings.replay and numbers.contest(seq, payload):
                self._advance(now)
            return
        numbers.live_later(seq, payload)
        self._advance(now)
        self._check_done(now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float) -> None:
        """One batch of a replay answer."""
        asked = self._asking.answered_by(request)
        if asked is None:
            return
        if asked.purpose is Purpose.HISTORY:
            self._asking.stop()
            if self._history.answered(seq):
                self._new_epoch(now, restart=False)
            else:
                self._settled(now)
            return
        numbers = self.numbers
        if asked.contradicts(seq, payload, numbers):
            self._new_epoch(now)
            return
        if asked.begins_beyond_tip(seq) and not self._goes_on_behind_tip(asked, seq, now):
            return
        if asked.take(seq):
            asked.deadline = now + self.settings.replay_timeout
        self._buffer = True
        if asked.seen_tip and self._unverified:
            self._unverified = False
            numbers.drain()
        if seq < numbers.next:
            if asked.tip < 0 or asked.seen_tip:
                numbers.marks.learn(seq, payload, numbers.next)
            return
        if self._is_far(seq):
            self.stats.rejected[Reason.SEQ_RANGE] += 1
            return
        if asked.items == 1 and not numbers.synced and numbers.next == 0 and asked.purpose is Purpose.SYNC:
            self._baseline(min(seq, numbers.held.first) if numbers.held else seq)
        if seq in numbers.held:
            numbers.held.replace(seq, payload)  # what the publisher answers is its own
            if not self._unverified:
                numbers.drain()
        else:
            numbers.replayed(seq, payload)
        self._check_done(now)

    def _goes_on_behind_tip(self, asked: Request, seq: int, now: float) -> bool:
        """An answer begins with ``seq``, beyond the tip, which proves neither epoch; whether to take it all the same.

        The publisher has trimmed its buffer beyond what was delivered. While the connection stood, what lies between
        was sent on it, in order: after a pause of this process, or behind a backlog, it still waits to be read. So the
        live stream is waited for, until it has brought nothing for longer than an answer may take.
        """
        numbers = self.numbers
        if self._unverified:
            # it was sent while the connection was away, and is gone whichever epoch it was of
            far = self._is_far(seq)
            if not far:
                numbers.expose(seq)
            self._new_epoch(now, restart=far)
            return False
        if asked.purpose is Purpose.VERIFY:
            self._doubts.settled(now)  # it numbers far beyond the suspects: they are not its newest batches
        elif seq <= numbers.next:
            return True
        elif self._trimmed_at != numbers.next:
            self._trimmed_at, self._trimmed_since = numbers.next, now
        elif now - self._trimmed_since >= 2 * self.settings.replay_timeout:
            return True
        self._asking.stop()
        self._settled(now)
        return False

    def sent(self, request: int, now: float) -> None:
        """A question has left: it was only asked before, perhaps behind a backlog of batches."""
        self._asking.sent(request, now)

    def replay_ended(self, request: int, now: float) -> None:
        """The END marker of an answer."""
        asked = self._asking.answered_by(request)
        if asked is None:
            return
        self._asking.stop()  # nothing more will come, and its socket is only closed by this
        self._finish(asked, now, answered=True)

    def replay_cut(self, request: int, now: float) -> None:
        """The answer broke off at a batch that is too large to be taken: it is lost, and what follows is asked for.

        Which one it was is known where the answer was in order so far. Otherwise the answer ends as one that timed out.
        """
        asked = self._asking.answered_by(request)
        if asked is None:
            return
        self._asking.stop()
        again = asked.items == 0 and self._cut_at == asked.start
        if again or max(asked.start, asked.last + 1) != self.next:
            self._finish(asked, now, answered=False)
            return
        self.partial = True
        self._history.begins(self.next + 1)
        self.numbers.lose_next()
        self._cut_at = self.next
        if not self.synced:
            self._ask(Purpose.SYNC)
            return
        if asked.purpose is Purpose.VERIFY:
            self._doubts.suspects.clear()
        self.state = State.GAP
        self._ask(Purpose.GAP)

    def snapshot(self, request: int, seq: int, now: float) -> bool:
        """A snapshot as of batch ``seq`` (-1: nothing was published yet, below: there is none); True: apply it now.

        After it was applied, :meth:`snapshot_applied`.
        """
        asked = self._asking.answered_by(request)
        if asked is None:
            return False
        if seq < -1:
            self._asking.stop()
            self._no_snapshot(now)
            return False
        if seq + 1 < asked.known:
            self._new_epoch(now)  # it has not come as far as what it has sent: it is in another life
            return False
        self._asking.stop()
        self.partial = False
        self._history = History(self.settings.replay_timeout)
        self.numbers.jump(seq + 1)
        return True

    def snapshot_applied(self, now: float) -> None:
        """What a snapshot said is in the index: go on from there."""
        self._settled(now)

    def tick(self, now: float) -> None:
        """Let time pass: give up on answers that do not come, look for lost tails."""
        asked = self._asking.expired(now)
        if asked is not None:
            self._finish(asked, now, answered=False)
        if self._grace is not None and now >= self._grace:
            self._grace = None
            self._settle_without_replay()
        if self._conflict.over(now):
            self._begin_life()
            self.partial = False
            if self.settings.replay:
                self._sync()
            else:
                self.state = State.LIVE
        self._probe(now)

    def another_life(self, now: float) -> None:
        """The publisher says itself that it is in a new life (another publisher id, snapshot protocol)."""
        if self._conflict.until is None:
            self._new_epoch(now)

    def lose(self) -> None:
        """The engine has been gone for too long: from now on it counts as lost, whatever it still held."""
        self.state = State.LOST

    # -- over a restart of this process ------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """What a restart has to know, as plain data: which life, how far, and by what its batches are told."""
        return {
            "epoch": self.epoch,
            "next": self.next,
            "partial": self.partial,
            "synced": self.synced,
            "buffer": self._buffer,
            "history": self._history.dump(),
            "delivered": self.numbers.marks.dump(),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Go on where a former process was; the connection is away until :meth:`up`."""
        self.epoch, self.partial = data["epoch"], data["partial"]
        self._buffer = data["buffer"]
        self._history.load(data["history"])
        numbers = self.numbers
        numbers.next = numbers.horizon = data["next"]
        numbers.synced = data["synced"]
        numbers.marks.load(data["delivered"])

    def again(self, seq: int, payload: bytes) -> None:
        """A batch of the log: it was delivered before the restart."""
        if self.next == 0:
            self.partial = seq > 0
        if seq > self.next:
            self._history.begins(seq)
        self.numbers.again(seq, payload)

    def resumed(self) -> None:
        """All of the log was handled: what followed from it was done before the restart."""
        self.actions.clear()
        self._history.owed = self.partial  # the log does not say why

    def again_snapshot(self, seq: int) -> None:
        """A snapshot of the log."""
        self.partial = False
        self._history = History(self.settings.replay_timeout)
        self.numbers.synced = True
        self.numbers.jump(seq + 1)

    def again_another_life(self, *, partial: bool) -> None:
        """An epoch of the log."""
        self.epoch += 1
        self.partial = partial
        self._begin_life()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, purpose: Purpose) -> None:
        self._asking.ask(purpose, self.numbers)

    def _sync(self) -> None:
        """Learn what a life has been so far."""
        self.state = State.SYNCING
        self._ask(Purpose.SNAPSHOT if self.settings.snapshot else Purpose.SYNC)

    def _probe(self, now: float) -> None:
        interval = self.settings.probe_interval
        if not (self.settings.replay and self.connected and self.state is State.LIVE):
            return
        if self._asking.open is None and self._history.due(now):
            self._ask(Purpose.HISTORY)
        if self._asking.open is None and interval and now - self._idle_since >= interval * self._probe_factor:
            self._idle_since = now
            self._probe_factor = min(self._probe_factor * 2, MAX_PROBE_BACKOFF)
            self._ask(Purpose.PROBE)

    def _check_done(self, now: float) -> None:
        """An answer that has caught up with the live stream has done its work, whether or not it ever ENDs."""
        asked = self._asking.open
        if asked is None or asked.purpose in INTERRUPTIBLE or asked.purpose is Purpose.VERIFY:
            return
        if self.numbers.caught_up:
            self._asking.stop()
            self._settled(now)

    def _finish(self, asked: Request, now: float, *, answered: bool) -> None:
        """An answer is over. What it did not bring is asked for once more, then given up."""
        purpose = asked.purpose
        if purpose is Purpose.HISTORY:
            if answered:
                self._history.answered(None)
                self.partial = self.partial and self.next > 0
            self._settled(now)
            return
        self._history.question_over(answered=answered)
        if answered and (asked.lacks_tip or (self._buffer and asked.tip >= 0 and not asked.items)):
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
                    self._history.owed = self.partial  # it was asked before it had said anything, perhaps
                elif answered:
                    self.partial = False  # it has said nothing yet
            self.numbers.drain()
        elif answered and asked.expects and not asked.items:
            if self._empty_at < 0:
                self._empty_at = self.numbers.live_top
            elif self._empty_at < self.numbers.live_top:
                self._buffer = False
        self._settled(now)

    def _no_snapshot(self, now: float) -> None:
        """It did not come, or there is none: what the replay still has is better than nothing."""
        if self.synced and not self.numbers.complete:
            self._give_up()
            self._settled(now)
        else:
            self._ask(Purpose.SYNC)

    def _settled(self, now: float) -> None:
        """Between requests: either everything known is delivered, or there is a gap to ask for."""
        if not self.synced:
            if far := self.numbers.drop_far(FAR):
                self.stats.rejected[Reason.SEQ_RANGE] += far
            self.numbers.open()
            self._attempts = 0
            self._resyncing = True
        if self._resyncing:
            self._resyncing = False
            self.actions.append(Synced())
        self.state = State.LIVE if self.connected else State.CONNECTING
        if self._doubts.suspects and self.settings.replay and self._doubts.may_ask(now):
            self._ask(Purpose.VERIFY)
        self._advance(now)

    # -- order -------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Deliver what is in order; ask for what is missing."""
        if not self.synced:
            if self.held and (not self.settings.replay or (self.next == 0 and 0 in self.held)):
                # nothing to wait for: no history can be had, or the live stream itself begins at the beginning
                self._asking.stop()
                self._baseline(self.held.first)
                self._settled(now)
            return
        if self._unverified:
            if self._asking.open is None:
                self._ask(Purpose.VERIFY)
            return
        self.numbers.drain()
        if self.numbers.complete:
            self._grace = None
            if self._asking.open is None and self.state is State.GAP:
                self.state = State.LIVE
            return
        if not self._asking.interruptible:
            return
        self._asking.stop()
        if self._gap_start != self.next:
            self._gap_start = self.next
            self._attempts = 0
        self.state = State.GAP
        if not self.settings.replay:
            if self._grace is None:
                self.stats.gaps += 1
                self._grace = now + self.settings.reorder_grace
            return
        if not self._attempts:
            self.stats.gaps += 1
        if self._attempts >= ATTEMPTS:
            if self.settings.snapshot:
                self._ask(Purpose.SNAPSHOT)  # what is lost for good, the publisher can still tell the sum of
                return
            self._give_up()
            self._advance(now)
            return
        self._attempts += 1
        self._ask(Purpose.GAP)

    def _settle_without_replay(self) -> None:
        while not self.numbers.complete:
            self._give_up()
        self.state = State.LIVE

    def _give_up(self) -> None:
        self.partial = True
        self._history.begins(self.held.first if self.held else self.horizon)
        self.numbers.give_up()

    def _forget_numbers(self) -> None:
        settings = self.settings
        self.numbers = Numbering(Held(settings.reorder_batches, settings.reorder_bytes), self.stats, self.actions)

    def _baseline(self, seq: int) -> None:
        """The first batch of this life that can still be had. What came before it is history kvbus never saw."""
        self.partial = seq > 0
        self._history.begins(seq)
        self.numbers.begin_at(seq)

    # -- lives -------------------------------------------------------------------------------------------------------

    def _low(self, seq: int, payload: bytes, now: float) -> None:
        """A live batch from before ``next``: a late copy, or the publisher's new life."""
        same = self.numbers.marks.matches(seq, payload, self.next)
        if same:
            self.stats.duplicates += 1
            return
        if same is False or seq == 0:
            self._new_epoch(now)
            self.live(seq, payload, now)
            return
        self.stats.duplicates += 1
        self._doubts.suspect(seq, payload)
        if not self.settings.replay:
            if self._doubts.go_on:
                self._new_epoch(now)
            return
        if self._doubts.may_ask(now) and self._asking.interruptible:
            self._ask(Purpose.VERIFY)

    def _is_far(self, seq: int) -> bool:
        """Whether a number is too far ahead of what is known to be behind a gap."""
        numbers = self.numbers
        return seq - numbers.horizon >= FAR and (numbers.synced or numbers.next > 0)

    def _far(self, seq: int, payload: bytes, now: float) -> None:
        """A live batch from further ahead than any gap: an odd one, or, if it goes on, another numbering."""
        self.stats.rejected[Reason.SEQ_RANGE] += 1
        ahead = self._doubts.ahead(seq, payload)
        if ahead:
            self._new_epoch(now)
            for number, batch in ahead:
                self.live(number, batch, now)

    def _verified(self, asked: Request, now: float, *, answered: bool) -> bool:
        """A verifying answer is over; False if it opened a new epoch or another question."""
        if asked.seen_tip:
            self._doubts.settled(now)
            return True
        if not answered:
            self._attempts += 1
            if self._attempts < ATTEMPTS:
                self._ask(Purpose.VERIFY)
                return False
            if self.settings.trust_unverified and not self._doubts.go_on:
                self._unverified = False
                self._doubts.suspects.clear()
                return True
        elif self._buffer is False and not self._doubts.suspects and not asked.items:
            self._unverified = False
            return True
        self._new_epoch(now)
        if not answered:
            self.partial = True
            self._history.owe()
        return False

    def _new_epoch(self, now: float, *, restart: bool = True) -> None:
        """Start over: the suspects are the new life's first live batches, everything held was the old one's.

        Without a restart it is the same life, of which more can be had than is known.
        """
        self.stats.restarts += restart
        self.numbers.write_off()
        suspects = self._doubts.suspects
        self._asking.stop()
        self.epoch += 1
        self.partial = False
        self._begin_life()
        self._idle_since = now
        self.actions.append(NewEpoch())
        if restart and self._conflict.another_life(now):
            self.partial = True
            self.state = State.CONFLICT
            return
        for seq in suspects:
            self.stats.duplicates -= 1
            self.numbers.live_later(seq, suspects.get(seq))
        if self.settings.replay:
            self._sync()
        else:
            self.state = State.LIVE
        self._advance(now)
