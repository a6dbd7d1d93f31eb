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

Where the publisher serves snapshots, one takes the place of the replay from 0: it is the state as of its seq, and
what came later follows from the live stream and the replay. Its publisher id is what rule 2 compares there. Where
the replay cannot fill a gap, a snapshot passes over it.

Requests without progress are bounded; what they do not bring is reported lost, once, and the stream goes on.
"""

from __future__ import annotations

from typing import Final

from kvbus.client.buffers import Waiting
from kvbus.client.outputs import Malformed, Output, StopAsking
from kvbus.client.repair import Repair
from kvbus.client.updates import Gap, Lost, LostReason, RestartReason
from kvbus.core.outputs.snapshot import UNAVAILABLE, parse_snapshot
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


class Sequence(Repair):
    """One stream's order. Methods take the time as ``now`` (seconds, any origin) and return what follows."""

    @property
    def next_seq(self) -> int | None:
        """The seq that is due; None until a stream without a start has begun."""
        return self._next

    @property
    def held(self) -> int:
        """Batches held back for order."""
        return len(self._held)

    @property
    def overflowed(self) -> int:
        """Batches dropped because too many were held; they are asked for again."""
        return self._held.overflowed

    @property
    def syncing(self) -> bool:
        """A replay or a snapshot is under way or about to be asked for."""
        return self._request is not None or self._retry_at is not None

    @property
    def deadline(self) -> float | None:
        """When `tick` is due, if nothing else happens."""
        request = self._request
        if request is not None and request.snapshot:
            return request.began + self._timing.snapshot_s
        if request is not None:
            return min(request.heard + self._timing.idle_s, request.began + self._timing.answer_s)
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
        self._in_vain = False
        self._held.clear()  # it came over an older connection, perhaps from an older life; a replay has it if not
        if self._request is not None and self._request.snapshot:
            self._again = False
            self._ask_snapshot(now)
        elif self._request is not None:
            self._again = True
        elif self._retry_at is not None:
            self._ask(now)
        elif self._next is not None and self._repairs:
            self._verify(now)
        return self._take()

    def interrupted(self) -> list[Output]:
        """Take note of a live connection that broke; batches from before may still be handed in."""
        if self._repairs:
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
        batch = Waiting(topic, payload, replayed=False)
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
            if not self._incomplete:
                self._confirm_at = None
            self._deliver(batch)
        elif seq > self._next:
            self._gap(seq, batch, now)
        else:
            self._went_back(seq, batch, now, known=publisher is not None)
        return self._take()

    def replayed(self, topic: bytes, frame: bytes, payload: bytes, now: float) -> list[Output]:
        """Take a batch that answers the last `Ask`."""
        request = self._request
        read = read_seq(frame)
        if request is None or request.snapshot:
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
            if self._trimmed(seq, now):
                request.seen = request.progress = True
                self._deliver(Waiting(topic, payload, replayed=True))
        elif not request.seen and request.overlap and not self._recent.same(seq, payload):
            # also with an unchanged id: a compacted answer's tail is worth nothing without its head
            self._restart(RestartReason.PAYLOAD, now, publisher)
        elif seq < due:
            request.seen = True
            self.duplicates += seq != request.start or not request.overlap
        elif seq == due:
            request.seen = request.progress = True
            self._deliver(Waiting(topic, payload, replayed=True))
        else:
            # a hole, or frames that an older engine's ROUTER dropped at its high-water mark
            request.seen = True
            self._hold(seq, Waiting(topic, payload, replayed=True))
        return self._take()

    def replay_ended(self, now: float) -> list[Output]:
        """Take the END marker of the answer to the last `Ask`."""
        request = self._request
        if request is None or request.snapshot:
            return self._take()
        self._request = None
        if request.overlap and not request.seen:
            # it has nothing as new as what it sent before
            self._restart(RestartReason.WENT_BACK, now, None)
        else:
            self._finish(request, now, answered=True)
        return self._take()

    def snapshot(self, frames: list[bytes], now: float) -> list[Output]:
        """Take the message that answers the last `AskSnapshot`."""
        request = self._request
        if request is None or not request.snapshot:
            return self._take()
        reply = parse_snapshot(frames)
        self._request = None
        if self._again:
            self._again = False
            self._ask_snapshot(now)
        elif reply is None or reply.seq <= UNAVAILABLE:
            self._without_snapshot(now, LostReason.UNAVAILABLE)
        else:
            self._replace(reply, request, now)
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
        if request.snapshot and self._replay:
            self._without_snapshot(now, LostReason.NO_ANSWER)
            return self._take()
        if self._attempts < self._timing.attempts:
            self._ask(now, quiet=request.quiet, tail=request.tail)
        elif request.seen or request.quiet or request.tail:
            # batches but never an END: older engines lose it at their high-water mark
            self._attempts = self._timing.attempts
            self._finish(request, now, answered=False)
        else:
            self._unanswered(now, LostReason.NO_ANSWER)
        return self._take()

    # -- decisions

    def _live_while_syncing(self, seq: int, batch: Waiting, now: float) -> None:
        if seq >= self._due:
            self._hold(seq, batch)
            return
        if self._recent.other(seq, batch.payload):
            self._restart(RestartReason.PAYLOAD, now, self._publisher, (seq, batch))
        else:
            self.duplicates += 1  # the answer had it, or will be checked against its last batch

    def _gap(self, seq: int, batch: Waiting, now: float) -> None:
        first = self._due
        self._out.append(Gap(first, seq - 1))
        if not self._repairs:
            self._out.append(Lost(first, seq - 1, LostReason.NO_REPLAY))
            self._next = seq
            self._deliver(batch)
            return
        self._hold(seq, batch)
        self._ask(now)

    def _went_back(self, seq: int, batch: Waiting, now: float, *, known: bool) -> None:
        if known or self._recent.same(seq, batch.payload):
            self.duplicates += 1
        elif self._recent.other(seq, batch.payload):
            self._restart(RestartReason.PAYLOAD, now, None, (seq, batch))
        elif not self._repairs:
            self._restart(RestartReason.WENT_BACK, now, None, (seq, batch))
        elif now < self._settled + self._timing.overlap_s:
            self.duplicates += 1
        else:
            self._verify(now)
