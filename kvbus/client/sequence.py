"""A correct subscriber's rules as a pure machine: frames and time in, updates and requests out.

Four rules keep the caller's view right when batches are lost, repeated or late, and when the publisher restarts:

1. Subscribe first, then ask for a replay from 0. Live batches wait until the answer ends. Within an answer its
   own batches count: a compacted replay may have other content under a seq than the live stream.
2. Ask for a gap in one request at a time, *from the last batch received*, not from the batch after it. If that batch
   returns with another payload, or the publisher has no batch that new, the publisher has restarted.
3. When unsure, rebuild from 0. A needless rebuild costs time; a missed restart leaves dead blocks in the view.
4. After a reconnection deliver nothing before rule 2 has been checked. A restarted publisher may be exactly one batch
   ahead, and then its numbers look right (vLLM 0.9 to 0.33 and SGLang to 0.5.23 send no epoch).

Where the publisher serves snapshots, a snapshot replaces the replay from 0: it is the state as of its seq, and the live
stream and the replay bring what is newer. Rule 2 then compares its publisher id. Where the replay cannot fill a gap,
the machine asks for a snapshot.

The number of requests without progress is limited. Then the machine reports the missing batches as lost, once, and
the stream continues.
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
    """Read a sequence frame: the seq and, in 24-byte frames (vLLM's snapshot protocol), the 16-byte publisher id."""
    if len(frame) not in (8, 24):
        return Reason.SEQ_WIDTH
    seq = int.from_bytes(frame[:8], "big")
    if seq > MAX_SEQ:
        return Reason.SEQ_RANGE
    return seq, frame[8:] or None


class Sequence(Repair):
    """One stream's order. Methods take the time as ``now`` (seconds, any origin) and return outputs to carry out."""

    @property
    def next_seq(self) -> int | None:
        """The next seq to deliver; None before the first batch of a stream that is not rebuilt from its start."""
        return self._next

    @property
    def held(self) -> int:
        """The number of batches in the reorder buffer."""
        return len(self._held)

    @property
    def syncing(self) -> bool:
        """Whether a replay or a snapshot is under way, or due."""
        return self._request is not None or self._retry_at is not None

    @property
    def deadline(self) -> float | None:
        """The time at which to call `tick`; None for never."""
        request = self._request
        if request is not None and request.snapshot:
            return request.began + self._timing.snapshot_s
        if request is not None:
            return min(request.heard + self._timing.idle_s, request.began + self._timing.answer_s)
        return self._confirm_at if self._retry_at is None else self._retry_at

    def open(self, now: float) -> list[Output]:
        """Begin. The first replay request waits a moment for the live connection.

        Else the publisher could send a batch after the replay and before the subscription.
        """
        if self._next is not None:
            self._retry_at = now + self._timing.connect_s
        return self._take()

    def connected(self, now: float) -> list[Output]:
        """Handle a new live connection, the first or a later one."""
        self._reconnecting = False
        self._unconfirmed = True
        self._snapshot_failed = False
        self._held.clear()  # these may be an older epoch's batches; if not, a replay brings them again
        if self._request is not None and self._request.snapshot:
            self._ask_again = False
            self._ask_snapshot(now)
        elif self._request is not None:
            self._ask_again = True
        elif self._retry_at is not None:
            self._ask(now)
        elif self._next is not None and self._repairs:
            self._verify(now)
        return self._take()

    def interrupted(self) -> list[Output]:
        """Handle the loss of the live connection. Batches received before it may still follow."""
        if self._repairs:
            self._reconnecting = True
            self._ask_again = self.syncing
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
        elif self._reconnecting and self._next is not None:
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
            # also with an unchanged id: a compacted answer is useless without its beginning
            self._restart(RestartReason.PAYLOAD, now, publisher)
        elif seq < due:
            request.seen = True
            self.duplicates += seq != request.start or not request.overlap
        elif seq == due:
            request.seen = request.progress = True
            self._deliver(Waiting(topic, payload, replayed=True))
        else:
            # a gap, or messages that an older engine's ROUTER dropped at its high-water mark
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
            # its newest batch is older than one it has sent
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
        if self._ask_again:
            self._ask_again = False
            self._ask_snapshot(now)
        elif reply is None or reply.seq <= UNAVAILABLE:
            self._without_snapshot(now, LostReason.UNAVAILABLE)
        else:
            self._replace(reply, request, now)
        return self._take()

    def tick(self, now: float) -> list[Output]:
        """Handle timeouts. Call it at `deadline`."""
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
            # batches but no END: older engines drop END at their high-water mark
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
            self.duplicates += 1  # the answer had it, or rule 2 will check it

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
