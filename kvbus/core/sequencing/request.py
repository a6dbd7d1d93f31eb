"""The open request of a source to its publisher, and what the batches of the answer show about the epoch."""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from kvbus.core.sequencing.epoch import Epoch
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.phases import Phase, Purpose

OVERLAP: Final = 8
"""Maximum number of delivered batches that a request asks for again, to recognize the epoch by their content.

A single batch is not enough: the last delivered batch may itself belong to a new epoch whose beginning kvbus missed.
"""


class OpenRequest(msgspec.Struct):
    """The open request of a source to its publisher, and the part of the answer that kvbus has received."""

    # The request, and what kvbus knew when it made the request.
    id: int
    phase: Phase
    """The phase of the sequencer that waits for the answer."""
    purpose: Purpose
    epoch: Epoch
    once_more: bool
    """Whether the sequencer may repeat the request if the publisher does not answer."""
    start: int
    last_delivered: int
    """Seq of the newest delivered batch whose fingerprint kvbus knows.

    kvbus looks for this batch in the answer, to recognize whether the epoch is the same. The seq is -1 if there is no
    such batch, or if the answer need not contain it.
    """
    expects_batches: bool
    """Whether kvbus knew, when it sent the request, that the publisher had sent a batch from ``start`` on.

    An empty answer is then unexpected.
    """
    following: int
    """Seq of the batch that kvbus had to deliver next when the request was made."""
    log_end: int
    """One past the highest batch that kvbus knew to exist when the request was made."""
    live_end: int
    """One past the highest batch that the live stream had shown in this epoch when the request was made.

    See :attr:`Epoch.live_end`.
    """

    waits: bool = False
    """Whether the request waits in the daemon and has not been sent yet."""

    # The time limits of the answer. :meth:`Requests.sent` sets them.
    deadline: float = inf
    """The time at which kvbus gives the request up. A batch with a higher seq than all before postpones this time."""
    hard_deadline: float = inf
    """The time at which kvbus gives the request up even if further batches come."""

    # The part of the answer that kvbus has received.
    items: int = 0
    first: int = -1
    last: int = -1
    saw_last_delivered: bool = False
    is_state: bool = False
    """Whether the answer is a state in place of the requested batches.

    kvbus had asked only to see whether it lacks batches. The seq at which the state ends shows this, so kvbus does not
    apply the state.
    """
    agrees: bool = False
    """Whether a batch of the answer has the content that the live stream has shown under the same seq."""
    differs: bool = False
    """Whether a batch of the answer has other content than the live stream has shown under the same seq."""
    shows_publisher: bool = True
    """Whether the answer can show that its publisher is not the one of the live stream.

    If the answer may contain a state, other content under the same seqs shows nothing.
    """

    def take(self, seq: int, deadline: float) -> None:
        """Record that one batch of the answer has come. If its seq is the highest so far, set a new deadline."""
        if not self.items:
            self.first = seq
        self.items += 1
        if seq == self.last_delivered:
            self.saw_last_delivered = True
        if seq > self.last:
            self.last = seq
            self.deadline = deadline

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Return whether a batch of the answer shows that the publisher is in another epoch than the known one.

        Call it before :meth:`take`.
        """
        tracker = self.epoch.tracker
        same = tracker.fingerprints.matches(seq, payload, tracker.next)
        if same is False:
            return True
        self.agrees = self.agrees or (same is True and seq >= tracker.live_from)
        if self.purpose is Purpose.SYNC and self.last_delivered < 0:
            return False
        if self.last_delivered < 0:
            # Without a fingerprint, nothing can show that the epoch is the same.
            return self.purpose is Purpose.VERIFY
        if self.saw_last_delivered:
            return False
        if seq <= self.last_delivered:
            # kvbus has delivered every batch from the start of the request to the last delivered one. If the answer
            # lacks one of them, the delivered batch with that seq was of another epoch.
            return self.items > 0 and seq > self.last + 1
        if self.items:
            # if the answer has batches before the last delivered one, it should have that one, too
            return self.first <= self.last_delivered
        return False

    def begins_beyond(self, seq: int) -> bool:
        """Return whether the answer begins after the last delivered batch, so that it cannot show the epoch.

        ``seq`` is the first batch of the answer. The result is False for a request about a gap, because such an answer
        is normal then: the batches before ``seq`` are known to be missing, and the publisher has dropped them.
        """
        return self.purpose in (Purpose.PROBE, Purpose.VERIFY) and not self.items and 0 <= self.last_delivered < seq

    def shows_other_epoch(self) -> bool:
        """Return whether the complete answer shows that the publisher is in another epoch than the known one.

        There are three cases. The answer lacks the last delivered batch although it has earlier batches. It lacks
        batches that the publisher sent before the request, so these belonged to another epoch. It is empty although the
        publisher keeps a replay buffer. In the second case both epochs may begin with the same batches: a kvbus that
        lost its numbering sends an engine's history again under the same seqs.
        """
        if not self.items:
            return self.epoch.buffer.keeps is True and self.last_delivered >= 0
        if not self.saw_last_delivered and 0 <= self.first <= self.last_delivered:
            return True
        return self.purpose is Purpose.VERIFY and self.last + 1 < self.log_end


def start_of(purpose: Purpose, tracker: GapTracker, *, compacted: bool = False) -> tuple[int, int]:
    """Return the first seq to request, and the seq of the last delivered batch, which the answer has to contain.

    The second value is -1 if the answer is not compared with a delivered batch.
    """
    if purpose is Purpose.HISTORY:
        return 0, -1
    if purpose is Purpose.SNAPSHOT or (purpose is Purpose.SYNC and not compacted):
        return tracker.next, -1
    last_delivered = tracker.fingerprints.newest(tracker.next)
    continues = compacted or purpose is Purpose.GAP
    if last_delivered < 0 or (continues and last_delivered != tracker.next - 1):
        return (tracker.next if continues else max(tracker.next - 1, 0)), -1
    # Request again some batches that kvbus has delivered: their fingerprints show whether the epoch is the same. Do not
    # go back to a lost batch: it may be too large to receive, and would end the answer early. For a compacted answer,
    # one delivered batch is enough: if the publisher's journal no longer has it, the answer begins with a state.
    return tracker.fingerprints.run_to(last_delivered, 1 if compacted else OVERLAP), last_delivered
