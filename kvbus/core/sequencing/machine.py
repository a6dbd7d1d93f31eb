"""The machine under the sequencer: which phase follows, what it begins with, and how an epoch begins.

Whatever comes in is put into one input. The table in ``phases`` says which phase follows, and entering a phase asks
what it waits for. So the open request follows from the phase, and at most one is open at a time.
"""

from __future__ import annotations

from collections import deque

from kvbus.core.sequencing import phases
from kvbus.core.sequencing.actions import Action, NewEpoch, RestartReason, Synced
from kvbus.core.sequencing.conflict import Conflict
from kvbus.core.sequencing.epoch import Epoch
from kvbus.core.sequencing.phases import ASKS, UNHURRIED, Guard, Input, Phase
from kvbus.core.sequencing.replay_requests import Purpose, ReplayClient
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Reason


class Machine:
    """The phase, what is known of the epoch, and the open request. Inputs come from the classes built on it."""

    def __init__(self, spec: SourceSpec, stats: SourceStats) -> None:
        self.spec = spec
        self.stats = stats
        self.phase = Phase.AWAY
        self.epoch = 0
        self.actions: deque[Action] = deque()
        """What was decided and is not yet carried out."""
        self._replay_client = ReplayClient(spec, stats, self.actions)
        self._conflict = Conflict()
        self._known = Epoch(spec, stats, self.actions)
        self._tracker = self._known.tracker
        self._retries = 0
        """How often the request of this phase was made again because nobody answered."""
        self._synced_at = float("-inf")
        """When the history was last in."""
        self._resyncing = False
        """The next time nothing is asked any more is to be reported as :class:`Synced`."""

        # Probes of an idle stream.
        self._idle_since = 0.0
        self._probe_factor = 1

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
        spec, tracker = self.spec, self._tracker
        match guard:
            case Guard.TRUSTED:
                return not spec.asks and tracker.synced and spec.on_lost == "keep"
            case Guard.UNKNOWN:
                unknown = not spec.replay or (spec.compacted and tracker.fingerprints.newest(tracker.next) < 0)
                return spec.snapshot and tracker.synced and tracker.next > 0 and unknown
            case Guard.DELIVERED:
                return spec.replay and tracker.next > 0
            case Guard.CROWDED:
                return self._conflict.until is not None
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
                return spec.snapshot and (not spec.replay or self._known.gap_attempts >= spec.attempts)

    def _settle(self, now: float) -> None:
        """No request is open now: either everything known is delivered, or there is a gap to ask for."""
        known = self._known
        if not self._tracker.synced:
            known.open()
            self._resyncing = True
        if known.interrupted:
            if self.spec.snapshot:
                known.gap_attempts = self.spec.attempts
                self._take(Input.HOLE, now)
                return
            known.unconfirmed()
        if self._resyncing:
            self._resyncing = False
            self._synced_at = now
            self.actions.append(Synced())
        unverified = known.unverified
        if unverified.stale and self.spec.replay and unverified.may_ask(now):
            self._take(Input.STALE, now)
        self._advance(now)

    @property
    def _live_waits(self) -> bool:
        """Nothing live is delivered now: the epoch is not known, or the open answer counts as a whole."""
        asked = self._replay_client.open
        return self.phase is Phase.VERIFY or (
            self.spec.compacted and asked is not None and asked.purpose is not Purpose.HISTORY
        )

    def _advance(self, now: float) -> None:
        """Deliver what is in order; ask for what is missing."""
        known, tracker = self._known, self._tracker
        if not tracker.synced:
            if tracker.held and (self.phase is Phase.WAITING or (tracker.next == 0 and 0 in tracker.held)):
                # nothing to wait for: no history can be had, or the live stream itself begins at the beginning
                known.baseline(tracker.held.first)
                self._take(Input.FIRST, now)
            return
        if self._live_waits:
            return
        tracker.drain()
        if tracker.complete:
            known.grace_ends = None
            if self.phase is Phase.GRACE:
                self._take(Input.FILLED, now)
        elif self.phase in UNHURRIED:
            self._ask_for_gap(now)

    def _ask_for_gap(self, now: float) -> None:
        known, spec = self._known, self.spec
        if not spec.asks:
            if known.grace_ends is None:
                self.stats.gaps += 1
                known.grace_ends = now + spec.reorder_grace
            self._take(Input.HOLE, now)
            return
        self.stats.gaps += known.asks_for_gap()
        if known.gap_attempts >= spec.attempts and not spec.snapshot:
            known.give_up()
            self._advance(now)
            return
        self._take(Input.HOLE, now)
        known.gap_attempts += self.phase is Phase.GAP

    def _check_done(self, now: float) -> None:
        """Close a request whose answer has caught up with the live stream, whether or not it ever ENDs."""
        if self.phase in (Phase.SYNC, Phase.GAP, Phase.GAP_SNAPSHOT) and self._tracker.caught_up:
            self._take(Input.CAUGHT_UP, now)

    def _new_epoch(self, now: float, reason: RestartReason = RestartReason.WENT_BACK, *, proven: bool = True) -> None:
        """Start over. Stale batches are the first live ones of the new epoch; everything held was of the old one.

        ``REBUILT`` says that nothing proves a restart. A compacted answer with another content does not either: that
        may be a state, and speaks of no other publisher on the endpoint.
        """
        restart = reason is not RestartReason.REBUILT
        self.stats.restarts += restart
        self._tracker.write_off()
        first = self._known.unverified.take_stale()
        self._replay_client.stop()
        self.epoch += 1
        self._forget()
        self._idle_since = now
        self.actions.append(NewEpoch(reason))
        if restart and proven and self._conflict.epoch_began(now):
            self.stats.rejected[Reason.CONFLICT] += len(first)
            self._known.backfill.nothing_known(pending=False)
        else:
            for seq, payload in first:
                self._tracker.live_later(seq, payload)
        self._take(Input.NEW_EPOCH, now)
        self._advance(now)

    def _forget(self) -> None:
        self._known = Epoch(self.spec, self.stats, self.actions)
        self._tracker = self._known.tracker
        self._probe_factor = 1
        self._resyncing = False
