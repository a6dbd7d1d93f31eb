"""A correct subscriber's rules as a pure machine: frames and time in, updates and requests out.

Four rules make the caller's view right whatever is lost, doubled, late or restarted on the way:

1. Subscribe first, then ask for a replay from 0; hold live batches back until the answer ends. Within an
   answer its own batches count: a compacted replay may put other content behind a seq than the live stream
   did.
2. A gap is asked for, one request at a time, *from the last batch received*, not from the one after it: if
   that batch comes back with another payload, or the publisher has nothing so new, it is not the publisher it
   was.
3. In doubt, rebuild from 0. A needless rebuild costs time; a missed restart leaves a dead cache in the view.
4. After a reconnection nothing is delivered before rule 2 has been checked: the restarted publisher may be
   exactly one batch ahead, and then the numbers alone say nothing (vLLM 0.9 to 0.33 and SGLang to 0.5.23 send
   no epoch).

Requests without progress are bounded; what they do not bring is reported lost, once, and the stream goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvbus.client.outputs import Ask, Deliver, Malformed, Output, StopAsking
from kvbus.client.patience import Limits, Timing
from kvbus.client.updates import Gap, Lost, LostReason, Restarted, RestartReason, Synced
from kvbus.core.types import Reason

MAX_SEQ: Final = 2**63 - 1


def read_seq(frame: bytes) -> tuple[int, bytes | None] | Reason:
    """The seq and, from 24-byte frames (vLLM's snapshot protocol), the 16-byte publisher id."""
    if len(frame) not in (8, 24):
        return Reason.SEQ_WIDTH
    seq = int.from_bytes(frame[:8], "big")
    if seq > MAX_SEQ:
        return Reason.SEQ_RANGE
    return seq, frame[8:] or None


@dataclass(slots=True)
class _Request:
    start: int
    overlap: bool  # its first batch is one we have: the check of rule 2
    began: float
    heard: float
    seen: bool = False
    progress: bool = False
    quiet: bool = False  # of no interest to the caller unless it brings something


@dataclass(frozen=True, slots=True)
class _Held:
    topic: bytes
    payload: bytes
    replayed: bool


class Sequence:
    """One stream's order. Methods take the time as ``now`` (seconds, any origin) and return what follows.

    Args:
        replay: a replay endpoint exists.
        from_start: True rebuilds from seq 0; False begins with the first live batch.
        timing: patience.
        limits: bounds.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        from_start: bool = True,
        timing: Timing | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.epoch = 0
        self.duplicates = 0
        self.overflowed = 0
        self._replay: Final = replay
        self._timing: Final = timing or Timing()
        self._limits: Final = limits or Limits()
        self._next: int | None = 0 if replay and from_start else None
        self._publisher: bytes | None = None
        self._request: _Request | None = None
        self._retry_at: float | None = None
        self._unconfirmed = False  # no live batch has come over this connection yet
        self._confirm_at: float | None = None
        self._attempts = 0
        self._again = False  # the connection changed: the answer under way may be another life's
        self._overflow = False  # batches were dropped that the answer under way may not cover
        self._suspect = False  # the connection broke; who comes back is not known yet
        self._held: dict[int, _Held] = {}
        self._held_bytes = 0
        self._recent: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        self._settled = float("-inf")
        self._out: list[Output] = []

    @property
    def next_seq(self) -> int | None:
        """The seq that is due; None until a stream without a start has begun."""
        return self._next

    @property
    def held(self) -> int:
        """Batches held back for order."""
        return len(self._held)

    @property
    def syncing(self) -> bool:
        """A replay is under way or about to be asked for."""
        return self._request is not None or self._retry_at is not None

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, if nothing else happens."""
        if self._request is not None:
            return min(self._request.heard + self._timing.idle_s, self._request.began + self._timing.answer_s)
        return self._confirm_at if self._retry_at is None else self._retry_at

    def open(self, now: float) -> list[Output]:
        """Begin: wait a moment for the live connection, or a batch falls between replay and subscription."""
        if self._next is not None:
            self._retry_at = now + self._timing.connect_s
        return self._take()

    def connected(self, now: float) -> list[Output]:
        """Take note of a live connection that stands, first or anew."""
        self._suspect = False
        self._unconfirmed = True
        self._drop_held()  # it came over an older connection, perhaps from an older life; a replay has it if not
        if self._request is not None:
            self._again = True
        elif self._retry_at is not None:
            self._ask(now)
        elif self._next is not None and self._replay:
            self._verify(now)
        return self._take()

    def interrupted(self) -> list[Output]:
        """Take note of a live connection that broke; batches from before may still be handed in."""
        if self._replay:
            self._suspect = True
            self._again = self.syncing
        return self._take()

    def live(self, topic: bytes, frame: bytes, payload: bytes, now: float) -> list[Output]:
        """Take a message of the live stream."""
        read = read_seq(frame)
        if isinstance(read, Reason):
            self._out.append(Malformed(topic, read))
            return self._take()
        seq, publisher = read
        batch = _Held(topic, payload, replayed=False)
        if self._changed(publisher):
            self._restart(RestartReason.PUBLISHER_ID, now, publisher, (seq, batch))
        elif self.syncing:
            self._live_while_syncing(seq, batch, now)
        elif self._suspect and self._next is not None:
            self._hold(seq, batch)
            self._verify(now)
        elif self._next is None or seq == self._next:
            self._next = seq
            self._unconfirmed = False
            self._confirm_at = None
            self._deliver(batch)
        elif seq > self._next:
            self._gap(seq, batch, now)
        else:
            self._went_back(seq, batch, now)
        return self._take()

    def replayed(self, topic: bytes, frame: bytes, payload: bytes, now: float) -> list[Output]:
        """Take a batch that answers the last `Ask`."""
        request = self._request
        read = read_seq(frame)
        if request is None:
            return self._take()
        request.heard = now
        if isinstance(read, Reason):
            self._out.append(Malformed(topic, read))
            return self._take()
        seq, publisher = read
        due = self._due
        if self._changed(publisher):
            self._restart(RestartReason.PUBLISHER_ID, now, publisher)
        elif seq < request.start:
            self.duplicates += 1
        elif not request.seen and seq > request.start:
            request.seen = True
            self._trimmed(seq)
            self._deliver(_Held(topic, payload, replayed=True))
            request.progress = True
        elif not request.seen and request.overlap and self._recent[seq][0] != hash(payload):
            # also with an unchanged id: a compacted answer's tail is worth nothing without its head
            self._restart(RestartReason.PAYLOAD, now, publisher)
        elif seq < due:
            request.seen = True
            self.duplicates += seq != request.start or not request.overlap
        elif seq == due:
            request.seen = request.progress = True
            self._deliver(_Held(topic, payload, replayed=True))
        else:
            # a hole, or frames that an older engine's ROUTER dropped at its high-water mark
            request.seen = True
            self._hold(seq, _Held(topic, payload, replayed=True))
        return self._take()

    def replay_ended(self, now: float) -> list[Output]:
        """Take the END marker of the answer to the last `Ask`."""
        request = self._request
        if request is None:
            return self._take()
        self._request = None
        if request.overlap and not request.seen:
            # it has nothing as new as what it sent before
            self._restart(RestartReason.WENT_BACK, now, None)
        else:
            self._finish(request, now, answered=True)
        return self._take()

    def tick(self, now: float) -> list[Output]:
        """Take note of the time; due at `deadline`."""
        request = self._request
        if self.deadline is None or now < self.deadline:
            return self._take()
        if request is None:
            if self._retry_at is None:
                self._verify(now, quiet=True)
            else:
                self._ask(now)
            return self._take()
        self._request = None
        self._out.append(StopAsking())
        self._attempts = 0 if request.progress else self._attempts + 1
        if self._attempts < self._timing.attempts:
            self._ask(now, quiet=request.quiet)
        elif request.seen or request.quiet:
            # batches but never an END: older engines lose it at their high-water mark
            self._attempts = self._timing.attempts
            self._finish(request, now, answered=False)
        else:
            self._unanswered(now)
        return self._take()

    # -- decisions

    @property
    def _due(self) -> int:
        return self._next or 0

    def _live_while_syncing(self, seq: int, batch: _Held, now: float) -> None:
        if seq >= self._due:
            self._hold(seq, batch)
            return
        known = self._recent.get(seq)
        if known is not None and known[1] and known[0] != hash(batch.payload):
            self._restart(RestartReason.PAYLOAD, now, self._publisher, (seq, batch))
        else:
            self.duplicates += 1  # the answer had it, or will be checked against its last batch

    def _gap(self, seq: int, batch: _Held, now: float) -> None:
        first = self._due
        self._out.append(Gap(first, seq - 1))
        if not self._replay:
            self._out.append(Lost(first, seq - 1, LostReason.NO_REPLAY))
            self._next = seq
            self._deliver(batch)
            return
        self._hold(seq, batch)
        self._ask(now)

    def _went_back(self, seq: int, batch: _Held, now: float) -> None:
        known = self._recent.get(seq)
        if self._publisher is not None or (known is not None and known[0] == hash(batch.payload)):
            self.duplicates += 1
        elif known is not None and known[1]:
            self._restart(RestartReason.PAYLOAD, now, None, (seq, batch))
        elif not self._replay:
            self._restart(RestartReason.WENT_BACK, now, None, (seq, batch))
        elif now < self._settled + self._timing.overlap_s:
            self.duplicates += 1
        else:
            self._verify(now)

    def _verify(self, now: float, *, quiet: bool = False) -> None:
        """Ask from the last batch; if there is none to compare with, begin anew."""
        if self._due == 0 or self._due - 1 in self._recent:
            self._ask(now, quiet=quiet)
        else:
            self._restart(RestartReason.WENT_BACK, now, self._publisher)

    def _ask(self, now: float, *, quiet: bool = False) -> None:
        overlap = self._due - 1 in self._recent
        start = self._due - 1 if overlap else self._due
        self._retry_at = self._confirm_at = None
        self._suspect = False
        self._request = _Request(start, overlap, now, now, quiet=quiet)
        self._out.append(Ask(start))

    def _trimmed(self, seq: int) -> None:
        """The answer begins later than asked for: what lies between is gone, and with it rule 2's check."""
        due = self._due
        self._out.append(Lost(due, seq - 1 if seq > due else None, LostReason.TRIMMED))
        self._recent.clear()
        self._next = seq

    def _finish(self, request: _Request, now: float, *, answered: bool) -> None:
        """The answer is over: deliver what was held, or ask for what it left out."""
        if request.progress:
            self._attempts = 0
        if self._again:
            self._again = False
            self._ask(now)
            return
        self._flush()
        while self._held:
            self._attempts += answered
            if self._attempts < self._timing.attempts:
                self._retry_at = now + self._timing.retry_s
                return
            oldest = min(self._held)
            reason = LostReason.HOLE if request.seen or answered else LostReason.NO_ANSWER
            self._out.append(Lost(self._due, oldest - 1, reason))
            self._next = oldest
            self._attempts = 0
            self._flush()
        if self._overflow:
            self._overflow = False
            self._ask(now)
            return
        self._attempts = 0
        self._settled = now
        if self._unconfirmed:
            self._unconfirmed = False
            self._confirm_at = now + self._timing.confirm_s
        if not request.quiet or request.progress:
            self._out.append(Synced(self._due - 1))

    def _unanswered(self, now: float) -> None:
        """Nobody answers: go on with what is there."""
        self._attempts = 0
        self._again = False
        due = self._due
        oldest = min((seq for seq in self._held if seq >= due), default=due)
        self._out.append(Lost(due, oldest - 1 if oldest > due else None, LostReason.NO_ANSWER))
        self._recent.clear()
        self._next = oldest
        self._flush()
        if self._held:
            first = min(self._held)
            self._out.append(Gap(self._due, first - 1))
            self._ask(now)

    def _restart(
        self,
        reason: RestartReason,
        now: float,
        publisher: bytes | None,
        batch: tuple[int, _Held] | None = None,
    ) -> None:
        self.epoch += 1
        self._publisher = publisher
        self._recent.clear()
        # whatever was received before the request below is in its answer
        self._drop_held()
        self._attempts = 0
        self._again = self._overflow = False
        self._next = 0
        self._out.append(Restarted(self.epoch, reason))
        if self._replay:
            if batch is not None:
                self._hold(*batch)
            self._ask(now)
        elif batch is not None:
            seq, held = batch
            if seq:
                self._out.append(Lost(0, seq - 1, LostReason.NO_REPLAY))
            self._next = seq
            self._deliver(held)

    # -- bookkeeping

    def _changed(self, publisher: bytes | None) -> bool:
        if publisher is None or publisher == self._publisher:
            return False
        first = self._publisher is None
        self._publisher = publisher
        return not first

    def _hold(self, seq: int, batch: _Held) -> None:
        if seq in self._held:
            self.duplicates += 1
            return
        size = len(batch.payload)
        full = len(self._held) >= self._limits.held_batches or self._held_bytes + size > self._limits.held_bytes
        if full and self._held:  # one is always held, however big, or a hole could never be passed
            self.overflowed += 1
            self._overflow = True
            return
        self._held[seq] = batch
        self._held_bytes += size

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _flush(self) -> None:
        while self._held:
            batch = self._held.pop(self._due, None)
            if batch is None:
                for seq in [seq for seq in self._held if seq < self._due]:
                    self._held_bytes -= len(self._held.pop(seq).payload)
                return
            self._held_bytes -= len(batch.payload)
            self._deliver(batch)

    def _deliver(self, batch: _Held) -> None:
        seq = self._due
        self._recent[seq] = (hash(batch.payload), not batch.replayed)
        if len(self._recent) > self._limits.recent:
            self._recent.popitem(last=False)
        self._next = seq + 1
        self._out.append(Deliver(seq, batch.topic, batch.payload, batch.replayed))

    def _take(self) -> list[Output]:
        out, self._out = self._out, []
        return out
