"""What a publisher's answers do to a sequencer: the batches of a replay, its end or its absence, and snapshots.

Content decides whether an answer belongs to the epoch known so far. ``replay_requests`` has the rules.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.sequencing.actions import LostReason, RestartReason
from kvbus.core.sequencing.machine import Machine
from kvbus.core.sequencing.phases import Guard, Input, Phase
from kvbus.core.sequencing.replay_requests import OpenRequest, Purpose
from kvbus.core.types import Reason

MAX_PATIENT_PROBE: Final = 8
"""Times :attr:`SourceSpec.probe_interval` after which a publisher is asked again while batches are on their way."""


class Answers(Machine):
    """Takes in what comes back for a request. Whatever comes for an older one is counted and dropped."""

    def sent(self, request: int, now: float) -> None:
        """A request has left the process. Before, it may have waited behind a backlog; at infinity, it waits still."""
        self._replay_client.sent(request, now)

    def unread(self, request: int | None, now: float) -> None:
        """Messages of an open request's answer wait to be read, or, with None, batches of the live stream.

        So whoever has sent them is not silent, however long ago it was that the last one was read.
        """
        if request is None:
            self._known.buffer.unread()
        else:
            self._replay_client.unread(request, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This process has not run for so long, up to ``now``, which leaves it out. Whoever sent to it was held up."""
        self._known.buffer.stood_still(seconds, now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float, *, whole: bool = False) -> None:
        """One batch of a replay answer. ``whole``: it begins as a state does, see :meth:`state_may_begin`."""
        asked = self._replay_client.match(request)
        if asked is None:
            return
        known, tracker = self._known, self._tracker
        if self.phase is Phase.BACKFILL:
            if known.backfill.answered(seq) or (whole and not tracker.fingerprints.matches(seq, payload, tracker.next)):
                self._new_epoch(now, RestartReason.REBUILT)
            else:
                self._take(Input.ANSWERED, now)
            return
        if asked.is_state:
            if asked.take(seq):
                asked.deadline = now + self.spec.replay_timeout
            return
        contradicts = asked.contradicts(seq, payload, tracker)
        # behind a snapshot nothing is known by which a batch under the last number could be told from a state
        unknown = self.phase is Phase.PROBE and not asked.items and asked.last_delivered < 0
        if whole and seq > 0 and (contradicts or unknown) and self.phase is not Phase.RECHECK:
            self._state_begins(asked, seq, now)
            return
        if contradicts:
            self._new_epoch(now, RestartReason.PAYLOAD, proven=not self.spec.compacted)
            return
        if asked.begins_beyond(seq) and not self._accept_beyond(seq, now):
            return
        if asked.take(seq):
            asked.deadline = now + self.spec.replay_timeout
        known.buffer.keeps = True
        known.backfill.answer_begins()
        if asked.saw_last_delivered and self.phase is Phase.VERIFY:
            self._take(Input.CONFIRMED, now)
            if not self.spec.compacted:
                tracker.drain()
        if seq < tracker.next:
            if asked.last_delivered < 0 or asked.saw_last_delivered:
                tracker.fingerprints.learn(seq, payload, tracker.next)
            return
        if known.is_far(seq):
            self.stats.rejected[Reason.SEQ_RANGE] += 1
            return
        if self.spec.compacted:
            if seq > tracker.next and asked.items == 1 and asked.purpose in (Purpose.SYNC, Purpose.GAP):
                if self.spec.snapshot and asked.purpose is Purpose.GAP:
                    known.gap_attempts = self.spec.attempts
                    known.lost_because = LostReason.TRIMMED
                    self._take(Input.ANSWERED, now)
                    return
                known.trimmed_before(seq)
            tracker.compacted(seq, payload)
            return
        if self.phase is Phase.SYNC and asked.items == 1 and tracker.next == 0:
            known.baseline(min(seq, tracker.held.first) if tracker.held else seq)
        if seq in tracker.held:
            tracker.held.replace(seq, payload)  # what the publisher answers is its own
            tracker.drain()
        else:
            tracker.replayed(seq, payload)
        self._check_done(now)

    def state_may_begin(self, seq: int, payload: bytes) -> bool:
        """Whether this batch of an answer may begin a state, as another kvbus sends it in place of batches.

        In the midst of an answer: if it is another one than was delivered.
        """
        asked = self._replay_client.open
        return self.phase is Phase.BACKFILL or (
            asked is not None
            and (not asked.items or self._tracker.fingerprints.matches(seq, payload, self._tracker.next) is False)
        )

    def _state_begins(self, asked: OpenRequest, seq: int, now: float) -> None:
        """An answer has a state under a number delivered: the publisher has trimmed what was asked for.

        That proves no other epoch. After an absence, or behind a gap, batches are missing, and the state is read from
        the beginning; also where it was trimmed while it answered. A silent stream may have lost nothing: where a state
        that is the whole answer ends shows that (:meth:`_state_ended`). Batch 0 is left out, because that of a
        restarted SGLang begins with a clear, too.
        """
        if self.phase is Phase.PROBE and not asked.items:
            asked.is_state = asked.take(seq)
            asked.deadline = now + self.spec.replay_timeout
        else:
            self._new_epoch(now, RestartReason.REBUILT)

    def _state_ended(self, asked: OpenRequest, now: float) -> None:
        """A silent stream's answer was a state, of which nothing was taken. Its last number is the newest one sent.

        What lies beyond may still wait to be read, as where an answer begins beyond the last batch delivered.
        """
        known, following = self._known, self._tracker.next
        if asked.last + 1 < asked.log_end:
            self._new_epoch(now)  # batches sent before the question are not in it
        elif asked.last < following:
            self._take(Input.ANSWERED, now)
        elif known.buffer.has_lost(following, now):
            self._new_epoch(now, RestartReason.REBUILT)
        else:
            self._probe_factor = 1
            self._take(Input.ANSWERED, now)

    def _accept_beyond(self, seq: int, now: float) -> bool:
        """An answer begins with ``seq``, beyond the last batch delivered. That proves neither epoch.

        Returns whether to take it all the same. The publisher has trimmed its buffer. While the connection stood, the
        batches between were sent on it, in order. After a pause of this process or of the network, or behind a backlog,
        they are still on their way. So the live stream is waited for, for as long as that may take
        (:class:`~kvbus.core.sequencing.publisher_buffer.PublisherBuffer`).
        """
        known, tracker = self._known, self._tracker
        if self.phase is Phase.VERIFY:
            # what lies between was sent while the connection was away, and is gone whichever epoch it was of
            far = known.is_far(seq)
            if not far:
                tracker.expose(seq)
            self._new_epoch(now, RestartReason.WENT_BACK if far else RestartReason.REBUILT)
            return False
        if self.phase is Phase.RECHECK:
            # the publisher numbers far beyond the stale batches: they are not the newest ones of another epoch
            known.unverified.epoch_confirmed(now)
        elif seq <= tracker.next or known.buffer.has_lost(tracker.next, now):
            return True
        self._probe_factor = min(self._probe_factor, MAX_PATIENT_PROBE)
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
        if (
            asked.is_state
            or same_batch
            or max(asked.start, asked.last + 1) != self._tracker.next
            or self._waits_for_snapshot
        ):
            self._finish(asked, now, answered=False)
            return
        known.skip_lost()
        if self.phase in (Phase.CATCH_UP, Phase.RECHECK) and self._tracker.synced:
            known.unverified.forget()
        self._take(Input.ABORTED, now)

    def snapshot(self, request: int, seq: int, now: float, *, same_epoch: bool = False) -> bool:
        """A snapshot as of batch ``seq`` has come. -1: nothing was published yet; below: there is no snapshot.

        ``same_epoch``: the publisher says so by its id. Then a snapshot that is older than what is known is only old.
        Returns whether to apply it now. Whoever has applied it calls :meth:`snapshot_applied`.
        """
        asked = self._replay_client.match(request)
        if asked is None:
            return False
        if self.phase is Phase.BACKFILL:
            self._new_epoch(now, RestartReason.REBUILT)
            return False
        if not self._waits_for_snapshot:
            return False
        if seq < -1:
            self._replay_client.stop()
            self._no_snapshot(now, LostReason.UNAVAILABLE)
            return False
        if same_epoch and self._tracker.next > 0 and seq < self._tracker.next:
            self._replay_client.stop()
            if self.phase is Phase.SNAPSHOT:
                self._take(Input.COVERED, now)
            else:
                self._no_snapshot(now, LostReason.HOLE)
            return False
        if seq + 1 < asked.log_end and not same_epoch:
            self._new_epoch(now)  # the publisher has sent more than this: it is in another epoch
            return False
        self._replay_client.stop()
        self._known.cover(seq)
        return True

    def snapshot_applied(self, now: float) -> None:
        """Whoever keeps the blocks has what the snapshot said: go on from there."""
        if self.spec.compacted:
            self._tracker.drain()
        self._take(Input.COVERED, now)

    @property
    def _waits_for_snapshot(self) -> bool:
        return self.phase in (Phase.SNAPSHOT, Phase.GAP_SNAPSHOT)

    def _no_snapshot(self, now: float, reason: LostReason) -> None:
        """The snapshot did not come, or did not help: what the replay still has is better than nothing."""
        known, tracker, replay = self._known, self._tracker, self.spec.replay
        if not replay:
            if reason is not LostReason.UNAVAILABLE and self._holds(Guard.ONCE_MORE):
                self._take(Input.SILENT, now)
                return
            known.backfill.request_finished(answered=reason is LostReason.HOLE)
            known.lost_because = reason
        if self.phase is Phase.GAP_SNAPSHOT:
            if known.interrupted:
                known.unconfirmed()
            if not tracker.complete:
                known.give_up()
        elif not replay:
            self._no_history()
        elif tracker.synced:
            if tracker.fingerprints.newest(tracker.next) < 0:
                self._new_epoch(now)  # nothing is left to compare a replay with
                return
            known.unconfirmed()
        self._take(Input.UNAVAILABLE, now)

    def _no_history(self) -> None:
        """Nobody has what came before: the stream goes on with what it has brought itself."""
        known, tracker = self._known, self._tracker
        if tracker.held:
            known.baseline(tracker.held.first)
        else:
            known.backfill.nothing_known()
        tracker.drain()

    def _finish(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """An answer is over: what it brought, and what it shows by that, is the next phase's input."""
        known = self._known
        over = Input.ANSWERED if answered else Input.SILENT
        if not answered and self.spec.compacted and self._goes_on(asked):
            self._take(Input.ABORTED, now)
            return
        if answered:
            known.interrupted = False
        if self.phase is Phase.BACKFILL:
            if answered:
                known.backfill.answered(None)
                if self._tracker.next == 0:
                    known.backfill.nothing_sent()
            self._take(over, now)
            return
        known.backfill.request_finished(answered=answered)
        if answered and asked.is_state:
            self._state_ended(asked, now)
        elif answered and (
            asked.lacks_last_delivered
            or asked.ends_early
            or (known.buffer.keeps and asked.last_delivered >= 0 and not asked.items)
        ):
            self._new_epoch(now)
        elif self._waits_for_snapshot:
            self._no_snapshot(now, LostReason.HOLE if answered else LostReason.NO_ANSWER)
        elif self.phase is Phase.SYNC:
            self._finish_sync(asked, now, answered=answered)
        elif self.phase in (Phase.VERIFY, Phase.RECHECK, Phase.CATCH_UP):
            self._finish_verify(asked, now, answered=answered)
        else:
            if self.phase is Phase.GAP:
                known.lost_because = LostReason.HOLE if answered or asked.items else LostReason.NO_ANSWER
            if answered and asked.expects_batches and not asked.items:
                known.buffer.answered_with_nothing(self._tracker.live_end)
            self._take(over, now)

    def _goes_on(self, asked: OpenRequest) -> bool:
        """Whether to ask again where an answer broke off: what it has brought may be the first part of a state."""
        known = self._known
        if self._tracker.next > asked.following:
            known.interrupted = True
            known.gap_attempts = 0
        elif asked.saw_last_delivered:
            known.interrupted = False  # it has nothing else under the last number, and nothing more: END was lost
        elif known.interrupted:
            known.gap_attempts += 1
        waits = self.phase in (Phase.SYNC, Phase.GAP, Phase.CATCH_UP, Phase.RECHECK, Phase.PROBE)
        return waits and known.interrupted and known.gap_attempts < self.spec.attempts

    def _finish_sync(self, asked: OpenRequest, now: float, *, answered: bool) -> None:
        """The history is in, or nobody has it."""
        known, tracker = self._known, self._tracker
        if not answered and not asked.items and self._holds(Guard.ONCE_MORE):
            self._take(Input.SILENT, now)
            return
        if asked.items == 0 and tracker.next == 0:
            if tracker.held and not (answered and self.spec.compacted):
                known.baseline(tracker.held.first)
                known.backfill.pending = known.backfill.partial  # perhaps it had not published anything when asked
            elif answered:
                known.backfill.nothing_sent()
            elif self.spec.compacted:
                known.unconfirmed()
            if not answered:
                known.lost_because = LostReason.NO_ANSWER
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
            if self.spec.on_lost != "keep" or known.unverified.consecutive:
                self._new_epoch(now)
                self._known.backfill.nothing_known()
                return
            known.unverified.forget()
            if self.spec.compacted and self.spec.snapshot:
                known.gap_attempts = self.spec.attempts
            elif self.spec.compacted:
                known.unconfirmed()
        self._take(Input.SILENT if silent else Input.ANSWERED, now)
