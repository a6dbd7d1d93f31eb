"""The sequencer for users of the library: it puts the batches of one stream in order, and returns updates.

The sequencer is the one that the daemon uses (:mod:`kvbus.core.sequencing`). Its settings here suit any publisher that
speaks the protocol: a replay may be a compacted state, and the user decides what happens after a loss. This module
turns the sequencer's actions into updates, and reports each range of lost seqs once, with its reason. It also reads
seqs and publisher ids from sequence frames.

Users can choose the settings in :class:`Timing` and :class:`BufferLimits`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvbus.client.updates import Conflict, Gap, Lost, Rejected, Restarted, Synced
from kvbus.core.outputs.snapshot import UNAVAILABLE, parse_snapshot
from kvbus.core.sequencing import actions
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, LostReason, RestartReason, Stop
from kvbus.core.sequencing.phases import Phase
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Reason
from kvbus.core.wire.codec import begins_with_clear
from kvbus.core.wire.frames import FrameLimits, ReplayEnd, parse_live, parse_replay

if TYPE_CHECKING:
    from collections.abc import Sequence as Frames


@dataclass(frozen=True, slots=True)
class Timing:
    """The timeouts of a subscriber in seconds, and its number of attempts.

    Attributes:
        connect_s: maximum time for which the first replay request waits for the live connection.
        idle_s: silence after which a replay request has failed. An idle engine answers up to 0.1 s late.
        answer_s: maximum time for one complete answer.
        snapshot_s: maximum time for a snapshot. It is one message, so nothing arrives before it is complete.
        attempts: number of consecutive requests without a new batch after which the missing batches are lost.
        confirm_s: pause between a connection and a second request for the last batch, unless live batches arrive. The
            second request finds a batch that was published after the first answer, but before the publisher had the
            subscription.
        rebuild_s: pause before the next request after batches were lost because the publisher did not answer.
        unreachable_s: time without a connection after which the subscriber finds out the reason and reports it.
        overlap_s: time after a replay in which live batches may repeat batches of the replay.
    """

    connect_s: float = 0.5
    idle_s: float = 2.0
    answer_s: float = 120.0
    snapshot_s: float = 10.0
    attempts: int = 3
    confirm_s: float = 0.5
    rebuild_s: float = 5.0
    unreachable_s: float = 3.0
    overlap_s: float = 2.0


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of the memory that a subscriber uses.

    Attributes:
        held_batches: maximum number of batches in the reorder buffer. At the limit, the subscriber drops newer batches
            and requests them again later.
        held_bytes: maximum size in bytes of the payloads in the reorder buffer. At this limit, the subscriber drops
            newer batches and requests them again later, too.
    """

    held_batches: int = 10_000
    held_bytes: int = 64 * 1024 * 1024


_LIMITS: Final = FrameLimits(max_frame_bytes=sys.maxsize)
"""Limits for parsing a message: none for the size of a frame, because the sockets refuse frames that are too large."""

_GAP: Final = (Phase.GAP, Phase.GAP_SNAPSHOT, Phase.GRACE)


class Payload(bytes):
    """An undecoded batch, with its topic and whether it was replayed. The sequencer ignores the two attributes."""

    topic: bytes
    replayed: bool

    @classmethod
    def of(cls, payload: bytes, topic: bytes, *, replayed: bool) -> Payload:
        """Return a payload with its topic and whether it was replayed."""
        made = cls(payload)
        made.topic = topic
        made.replayed = replayed
        return made


class Replace(msgspec.Struct, frozen=True):
    """The complete state as of batch ``seq``, as undecoded batches. It replaces all earlier batches."""

    seq: int
    chunks: tuple[bytes, ...]


Output = Deliver | Replace | Rejected | Gap | Lost | Restarted | Synced | Conflict | Ask | AskSnapshot | Stop


class Sequence:
    """The sequencer of one stream, which puts its batches in order. It has no sockets and no clock.

    Each method that handles an event gets the time as ``now``, in seconds from any origin. It returns the outputs that
    the caller must carry out: updates for the user, and requests to the publisher.

    Args:
        replay: whether there is a replay endpoint.
        snapshot: whether there is a snapshot endpoint.
        from_start: True to rebuild the state from seq 0 or from a snapshot; False to begin with the first live batch.
        timing: timeouts and attempts; None for the defaults.
        limits: limits of the buffers; None for the defaults.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        snapshot: bool = False,
        from_start: bool = True,
        timing: Timing | None = None,
        limits: BufferLimits | None = None,
    ) -> None:
        timing, limits = timing or Timing(), limits or BufferLimits()
        self.stats: Final = SourceStats()
        self.epoch = 0
        self._can_request: Final = replay or snapshot
        self._sequencer: Final = Sequencer(
            SourceSpec(
                replay=replay,
                snapshot=snapshot,
                replay_timeout=timing.idle_s,
                replay_total_timeout=timing.answer_s,
                probe_interval=timing.confirm_s,
                reorder_batches=limits.held_batches,
                max_held_bytes=limits.held_bytes,
                on_lost="keep",
                reorder_grace=0.0,
                compacted=True,
                from_now=not from_start,
                attempts=timing.attempts,
                snapshot_timeout=timing.snapshot_s,
                backfill_pause=timing.rebuild_s,
                late_copies=timing.overlap_s,
            ),
            self.stats,
        )

        # If the sockets have not reported the live connection `connect_s` after `open` (at `_connect_at`), the stream
        # counts as connected.
        self._connect_s: Final = timing.connect_s
        self._connect_at = inf

        # These attributes record the reports that the caller has got, so that nothing is reported twice.
        self._position: int | None = 0 if self._can_request and from_start else None
        self._gap_end = 0
        """The seq after the last missing batch that was reported as a gap."""
        self._unanswered = False
        """Whether an unanswered request was reported as a loss, and no request has been answered since."""
        self._owes_synced = False
        self._in_conflict = False

        # The id of the current publisher, and the number of the last request to it.
        self._publisher: bytes | None = None
        self._request = -1
        self._out: list[Output] = []

    @property
    def next_seq(self) -> int | None:
        """The next seq to deliver; None before the first batch if the stream begins with a live batch."""
        return self._position

    @property
    def held(self) -> int:
        """Number of batches in the reorder buffer."""
        return len(self._sequencer.reorder_buffer)

    @property
    def deadline(self) -> float:
        """The time at which `tick` must be called; infinity if it need not be called."""
        return min(self._connect_at, self._sequencer.deadline)

    def open(self, now: float) -> list[Output]:
        """Start the timer for the first request, which waits briefly for the live connection.

        A request that is sent before the publisher has the subscription could miss a batch: one that is published after
        the answer and before the subscription.
        """
        self._connect_at = now + self._connect_s
        return self._take()

    def connected(self, now: float) -> list[Output]:
        """Handle a new live connection: the first one, or one after a disconnection."""
        self._connect_at = inf
        if self._sequencer.connected:
            self._sequencer.down(now)
        self._sequencer.up(now)
        return self._take()

    def interrupted(self, now: float) -> list[Output]:
        """Record that the live connection is lost, and return the resulting updates."""
        self._sequencer.down(now)
        return self._take()

    def live(self, frames: Frames[bytes], now: float) -> list[Output]:
        """Handle a message of the live stream.

        Return what follows from it: updates for the user, and requests to send.
        """
        message = parse_live(frames, _LIMITS)
        if isinstance(message, Reason):
            self._out.append(Rejected(None, frames[0], message))
            return self._take()
        sequencer, seq = self._sequencer, message.seq
        known = message.publisher_id is not None and message.publisher_id == self._publisher
        if self._changed(message.publisher_id):
            sequencer.publisher_changed(now)
        if known and seq < sequencer.next:
            self.stats.duplicates += 1  # the publisher id has not changed, so the batch is repeated, not of a new epoch
        else:
            sequencer.live(seq, Payload.of(message.payload, message.topic, replayed=False), now)
        out = self._take()
        if not self._can_request:
            sequencer.tick(now)  # without a replay endpoint, missing batches are lost at once
            out += self._take()
        return out

    def replayed(self, frames: Frames[bytes], now: float) -> list[Output]:
        """Handle a message of the answer to the last replay request (`Ask`)."""
        message = parse_replay(frames, _LIMITS)
        if isinstance(message, Reason):
            self._out.append(Rejected(None, b"", message))
        elif isinstance(message, ReplayEnd):
            self._sequencer.replay_ended(self._request, now)
        elif self._changed(message.publisher_id):
            self._sequencer.publisher_changed(now)
        else:
            batch = Payload.of(message.payload, message.topic or b"", replayed=True)
            may_be_state = self._sequencer.phase is Phase.BACKFILL and begins_with_clear(batch)
            self._sequencer.replayed(self._request, message.seq, batch, now, may_be_state=may_be_state)
        return self._take()

    def snapshot(self, frames: Frames[bytes], now: float) -> list[Output]:
        """Handle the message that answers the last snapshot request (`AskSnapshot`)."""
        sequencer, reply = self._sequencer, parse_snapshot(frames)
        if reply is None or reply.seq <= UNAVAILABLE:
            sequencer.snapshot(self._request, UNAVAILABLE, now)
            return self._take()
        known = self._publisher is not None
        if self._changed(reply.publisher_id):
            sequencer.publisher_changed(now)
        elif sequencer.snapshot(self._request, reply.seq, now, same_epoch=known):
            out = self._take()
            if reply.seq >= 0:
                self._out.append(Replace(reply.seq, tuple(reply.chunks)))
            self._position = reply.seq + 1
            sequencer.snapshot_applied(now)
            return out + self._take()
        return self._take()

    def tick(self, now: float) -> list[Output]:
        """Handle the timeouts that have passed. Call this at `deadline`."""
        if now >= self._connect_at:
            self._connect_at = inf
            self._sequencer.up(now)
        self._sequencer.tick(now)
        return self._take()

    def unread(self, now: float) -> None:
        """Postpone the timeout of the last request, because received messages of its answer have not been read yet."""
        self._sequencer.unread(self._request, now)

    def sent(self, request: int, now: float) -> None:
        """Start the timeout of a request that was sent."""
        self._sequencer.sent(request, now)

    def _changed(self, publisher: bytes | None) -> bool:
        if publisher is None or publisher == self._publisher:
            return False
        known, self._publisher = self._publisher, publisher
        return known is not None

    # -- outputs for the caller

    def _take(self) -> list[Output]:
        decided = self._sequencer.actions
        lost = synced = False
        while decided:
            action = decided.popleft()
            if isinstance(action, Deliver):
                lost |= self._lose_before(action)
                self._position = action.seq + 1
                self._owes_synced |= isinstance(action.payload, Payload) and action.payload.replayed
                self._out.append(action)
            elif isinstance(action, actions.Lost):
                first = self._position or 0
                self._position = first + action.count
                self._out.append(Lost(first, self._position - 1, action.reason))
                lost = True
            elif isinstance(action, actions.NewEpoch):
                self.epoch += 1
                self._position = 0
                self._gap_end = 0
                if action.reason in (RestartReason.WENT_BACK, RestartReason.PAYLOAD):
                    self._publisher = None  # the new publisher's id comes with its first message
                self._out.append(Restarted(self.epoch, action.reason))
            elif isinstance(action, actions.Synced):
                synced = self.stats.replays > 0
            else:
                if isinstance(action, Ask | AskSnapshot):
                    self._request = action.request
                self._out.append(action)
        self._report(lost=lost, synced=synced)
        out, self._out = self._out, []
        return out

    def _lose_before(self, batch: Deliver) -> bool:
        """Report the batches that are missing before a delivered batch as lost. Return whether there are any."""
        seq = batch.seq
        if self._position is None or seq <= self._position or _begins_anew(batch.payload):
            return False
        sequencer = self._sequencer
        known = sequencer.history.pending or not self._can_request
        self._out.append(Lost(self._position, seq - 1, sequencer.current.lost_because if known else LostReason.TRIMMED))
        return True

    def _report(self, *, lost: bool, synced: bool) -> None:
        """Report a conflict, a gap, an unanswered request, or that the stream is complete, if this is new."""
        sequencer = self._sequencer
        conflict = sequencer.phase is Phase.CONFLICT
        if conflict and not self._in_conflict:
            self._out.append(Conflict())
        self._in_conflict = conflict
        end = sequencer.reorder_buffer.first if sequencer.reorder_buffer else sequencer.tracker.log_end
        if sequencer.phase in _GAP and self._gap_end <= sequencer.next < end:
            self._gap_end = end
            self._owes_synced = True
            self._out.append(Gap(sequencer.next, end - 1))
        unanswered = sequencer.history.pending
        if unanswered and not self._unanswered and not lost:
            self._out.append(Lost(self._position or 0, None, sequencer.current.lost_because))
        self._unanswered = unanswered
        self._owes_synced |= synced
        # In the phase PROBE, the sequencer has requested newer batches and waits for the answer. After a complete
        # replay (`synced`), the stream is complete without this answer. After a snapshot it is not, because the answer
        # may contain the batches that follow the snapshot.
        quiet = sequencer.phase is Phase.LIVE or (synced and sequencer.phase is Phase.PROBE)
        if self._owes_synced and quiet and self._can_request and not unanswered:
            self._owes_synced = False
            self._out.append(Synced((self._position or 0) - 1))


def _begins_anew(payload: bytes) -> bool:
    """Return whether a replayed batch begins with AllBlocksCleared, as a state from kvbus does.

    The batches before it are not missing in that case, because the state replaces them.
    """
    return isinstance(payload, Payload) and payload.replayed and begins_with_clear(payload)
