"""A stream followed in its log: which records count, in what order, and what a reader then holds. Pure.

It takes records in the log's order, with doubles, with records of writers that were fenced, and with holes where
retention was faster. What it gives is the writer's own stream: a state that begins with AllBlocksCleared, and every
batch behind it once.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final

from kvbus.log.record import Kind, Record, read

LEASE: Final = 5.0
"""Seconds between two leases of a writer."""

LEASE_TTL: Final = 15.0
"""Seconds without a record after which a stream's blocks are void."""


class Holds(Enum):
    """What a reader holds of a stream."""

    NOTHING = "nothing"
    """No block of it counts: nothing was given, it is over, or nobody knows what is true."""
    PART = "part"
    """The beginning of a state; the rest is on its way."""
    ALL = "all"
    """A whole state, and every batch behind it."""
    FORMER = "former"
    """What the writer before has said. The new one has not begun its state."""


class Follower:
    """One stream.

    Attributes:
        epoch: of the newest record that counts; 0 before the first one.
        seq: of the record that comes next.
        holds: what the reader holds now.
        counts: records that were not given, by reason: ``double``, ``old_epoch``, ``malformed``, ``known`` (of a state
            that the reader has already) and ``unusable`` (behind a hole, up to the next state). And ``lost``, the
            records in holes, and ``expired``, the leases.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.holds = Holds.NOTHING
        self.counts: Counter[str] = Counter()
        self._known_state = False
        """The state that comes is one that the reader has."""
        self._heard = 0.0

    @property
    def stranded(self) -> bool:
        """Records come, and none can be given before the next state: an older one has to be read from the log."""
        return self.holds is Holds.NOTHING and self.counts["unusable"] > 0

    def take(self, data: bytes, now: float) -> Record | None:
        """Take the next record of the log; return it if it changes what the reader holds.

        A CLEAR begins with AllBlocksCleared, a STATE and a BATCH are applied, and a GONE clears. A hole clears too:
        :attr:`holds` is then ``NOTHING``.
        """
        try:
            record = read(data)
        except ValueError:
            self.counts["malformed"] += 1
            return None
        if record.epoch < self.epoch:
            self.counts["old_epoch"] += 1
            return None
        self._heard = now
        if record.epoch > self.epoch:
            self._next_writer(record)
        if record.kind is Kind.LEASE:
            self._reach(record.seq)
            return None
        if record.seq < self.seq:
            self.counts["double"] += 1
            return None
        self._reach(record.seq)
        self.seq += 1
        reason = self._given(record)
        if reason is None:
            return record
        self.counts[reason] += 1
        return None

    def _next_writer(self, record: Record) -> None:
        begins = self.epoch == 0
        self.epoch = record.epoch
        self.seq = record.seq if begins else 0
        self._known_state = False
        self.holds = Holds.NOTHING if self.holds is Holds.NOTHING else Holds.FORMER

    def _reach(self, seq: int) -> None:
        """Records before this one will not come any more: nobody knows what they have changed."""
        if seq > self.seq:
            self.counts["lost"] += seq - self.seq
            self.seq = seq
            self._known_state = False
            self.holds = Holds.NOTHING

    def _given(self, record: Record) -> str | None:
        """Why a record is not given."""
        if record.kind is Kind.GONE:
            self.holds = Holds.NOTHING
            return None
        if record.kind is Kind.CLEAR:
            self._known_state = self.holds is Holds.ALL and not record.resync
            if not self._known_state:
                self.holds = Holds.PART if record.more else Holds.ALL
                return None
        if self._known_state and record.kind is not Kind.BATCH:
            self._known_state = record.more
            return "known"
        wanted = Holds.PART if record.kind is Kind.STATE else Holds.ALL
        if self.holds is not wanted:
            self.holds = Holds.NOTHING
            return "unusable"
        if record.kind is Kind.STATE and not record.more:
            self.holds = Holds.ALL
        return None

    def expire(self, now: float) -> bool:
        """Whether the stream's blocks are void from now on, because nothing was heard of its writer for too long."""
        if self.holds is Holds.NOTHING or now - self._heard < LEASE_TTL:
            return False
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        return True
