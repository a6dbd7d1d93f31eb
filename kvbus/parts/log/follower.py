"""Follow one stream in its log: decide which records count, which blocks a reader then holds, and what the relay gets.

The module does no I/O. A follower receives records in the log's order, with duplicates, with records of fenced writers,
and with gaps where retention has deleted records. It returns the writer's own stream: a state that begins with
AllBlocksCleared, and then every batch once.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final, NamedTuple

from kvbus.core.events import RecordReceived
from kvbus.core.numbered import EPOCH_BITS, LAST
from kvbus.parts.log.contract import START, Pointer
from kvbus.parts.log.record import RANDOM_BITS, DamagedError, Kind, Record, SchemaError, Stream, read

LEASE: Final = 5.0
"""Seconds between two leases of a writer."""

SILENCE: Final = 10.0
"""Maximum seconds between two records of an epoch. A writer that finds a longer interval between two of its own records
begins another epoch. So a reader that knows of a longer interval may give the epoch up for good."""

LEASE_TTL: Final = 30.0
"""Seconds without a record after which a stream's blocks are void.

If the log was read to its end since then, the stream's epoch is over for good.

It has to be more than ``2 * SILENCE``. A writer sends each record after the answer to the one before, and the interval
between two answers is shorter than :data:`SILENCE`. So the log gets two successive records of one epoch within less
than twice that time. The rest allows for delivery: a reader may get the second record that much later than the first.
"""


OTHER_SCHEMA: Final = "other_schema"
REASONS: Final[dict[type[Exception], str]] = {DamagedError: "damaged", SchemaError: OTHER_SCHEMA}
"""Reasons that count a record that cannot be read, by the error of `read`. Any other error counts as ``malformed``."""


class Holds(Enum):
    """The part of a stream's blocks that a reader holds."""

    NOTHING = "nothing"
    """No block of the stream counts: no state was given yet, the stream is over, or records are missing."""
    PART = "part"
    """The beginning of a state. The rest of the state follows."""
    ALL = "all"
    """A complete state, and every batch after it."""
    FORMER = "former"
    """The blocks of the former writer. The new writer has not begun its state."""


class Step(NamedTuple):
    """A record at which the reader can continue.

    Attributes:
        record: the record.
        known: whether the record changes nothing, because it is a lease, or a part of a state that the reader has
            already.
    """

    record: Record
    known: bool


class Follower:
    """A follower of one stream.

    Attributes:
        epoch: the epoch of the newest record that counts; 0 before the first one.
        seq: the seq of the next record.
        holds: the part of the stream's blocks that the reader holds now.
        counts: records that were not given to the reader, by reason: ``double``, ``old_epoch``, ``malformed``,
            ``damaged`` (the checksum is wrong), ``other_schema`` (this version does not read it), ``known`` (part of a
            state that the reader has already), ``unusable`` (after a gap, up to the next state) and ``late`` (of an
            epoch that was given up). It also counts ``lost`` (the records in gaps), ``expired`` (the times that the
            lease expired) and ``clock_set_back``: the times that a stream began again at a lower epoch, because the log
            had lost its epochs and the writer's clock was set back.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.holds = Holds.NOTHING
        self.counts: Counter[str] = Counter()
        self._known_state = False
        """Whether the state that is being read is one that the reader has already."""
        self._unusable = False
        """Whether records after the newest state were unusable or are missing."""
        self._given_up = False
        """Whether the epoch was given up. No further record of it counts."""
        self.heard = 0.0
        """When the newest record came."""

    @property
    def stranded(self) -> bool:
        """Whether records come, but none is usable before the next state.

        An older state has to be read from the log.
        """
        return self.holds is Holds.NOTHING and self._unusable

    def follow(self, data: bytes, now: float) -> Step | None:
        """Process the next record of the log. Return it if the reader can continue at its seq.

        The reader has to apply the record unless it is known. A CLEAR begins with AllBlocksCleared, a STATE and a BATCH
        are applied, and a GONE clears the stream. A gap clears the stream, too: :attr:`holds` is then ``NOTHING``. A
        relay that republishes the stream with the log's own numbers also needs the known records.
        """
        try:
            record = read(data)
        except ValueError as error:
            self.counts[REASONS.get(type(error), "malformed")] += 1
            return None
        if record.epoch < self.epoch:
            if now - self.heard < LEASE_TTL:
                self.counts["old_epoch"] += 1
                return None
            self.expire(now)
            self.counts["clock_set_back"] += 1
            self.epoch = 0
        self.heard = now
        if record.epoch > self.epoch:
            self._next_writer(record)
        elif self._given_up:
            self.counts["late"] += 1
            return None
        if record.seq < self.seq:
            self.counts["double"] += 1
            return None
        self._reach(record.seq)
        self.seq += 1
        if record.kind is Kind.LEASE:
            return Step(record, known=True) if self.holds in (Holds.PART, Holds.ALL) else None
        reason = self._given(record)
        if reason is not None:
            self.counts[reason] += 1
        self._unusable = self._unusable or reason == "unusable"
        return None if reason == "unusable" else Step(record, known=reason is not None)

    def _next_writer(self, record: Record) -> None:
        begins = self.epoch == 0
        self.epoch = record.epoch
        self._given_up = False
        self.seq = record.seq if begins else 0
        self._known_state = False
        self.holds = Holds.NOTHING if self.holds is Holds.NOTHING else Holds.FORMER

    def _reach(self, seq: int) -> None:
        """Count the missing records before ``seq`` as lost. Nobody knows what they have changed."""
        if seq > self.seq:
            self.counts["lost"] += seq - self.seq
            self.seq = seq
            self._known_state = False
            self.holds = Holds.NOTHING
            self._unusable = True

    def _given(self, record: Record) -> str | None:
        """Return why a record is not given to the reader; None if it is given."""
        if record.kind is Kind.GONE:
            self.holds = Holds.NOTHING
            return None
        if record.kind is Kind.CLEAR:
            self._known_state = self.holds is Holds.ALL and not record.resync
            if not self._known_state:
                self.holds = Holds.PART if record.more else Holds.ALL
                self._unusable = False
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
        """Return whether the stream's blocks are void from now on, because its writer was silent for too long.

        This is for a reader that follows a single stream. An aggregator also considers how far it has read, and calls
        :meth:`give_up`.
        """
        if self.holds is Holds.NOTHING or now - self.heard < LEASE_TTL:
            return False
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        return True

    def give_up(self) -> None:
        """Give the epoch up. The caller knows that the log had no record of it for :data:`LEASE_TTL`.

        Later records of the epoch are dropped. Its writer begins another epoch.
        """
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        self._given_up = True


class Relayed:
    """One stream that is read from its log and fed to the relay.

    Args:
        key: the stream's key.
        pointer: where reading begins.

    Attributes:
        stream: the stream's names, from its key.
        pointer: the newest pointer that was seen.
        position: where reading continues.
        slot: the source's slot; None while the stream is not a source.
        over: whether the stream has no blocks left, until its next epoch.
        written: when the log got the stream's newest record, by the log's clock.
        alive: whether a record came while this reader was level. The writer lives then, or did a moment ago.
        follower: decides which records count.
    """

    def __init__(self, key: str, pointer: Pointer) -> None:
        self.key = key
        self.stream = Stream.parse(key)
        self.pointer = pointer
        self.position = pointer.position
        self.slot: int | None = None
        self.over = False
        self.written = 0.0
        self.alive = False
        self.follower = Follower()
        self._sent = 0
        """The epoch of the newest record that counted. It is kept when reading begins again."""
        self._begun = pointer
        """The pointer at which reading began last."""
        self._sent_at = START
        """The position of the newest record that counted since reading began."""

    def begin_again(self) -> None:
        """Read again from the newest state on, as a new reader does."""
        before, self.follower = self.follower, Follower()
        self.follower.heard = before.heard
        self.follower.counts = before.counts
        self.position, self.over = self.pointer.position, False
        self._sent_at, self._begun = START, self.pointer

    @property
    def misses_state(self) -> bool:
        """Whether the log has a state that was not read, and nothing is known without it.

        There are two cases. In the first case, records come and none is usable. In the second case, the pointer has a
        later epoch, but its position is not after the records of an earlier epoch that were read. Positions ascend, so
        the log has lost its records and begins again.

        A state from before the records that were sent does not help: it cannot contain what was missing since, and its
        numbers are used. But the state of a later epoch may have been skipped. The reader of a server that was cut off
        from the network may be at a higher position than the one at which the other servers began that epoch. Such a
        state is looked for once.
        """
        newest, follower = self.pointer, self.follower
        if newest.seq < 0:
            return False
        if 0 < follower.epoch < newest.epoch and newest.position <= self._sent_at:
            return True
        passed_over = newest.epoch > self._sent and newest != self._begun
        return follower.stranded and (passed_over or (newest.epoch, newest.seq) >= (follower.epoch, follower.seq))

    def take(self, data: bytes, position: int, now: float) -> RecordReceived | None:
        """Process the next record of the log. Return the event for the relay; None if there is none."""
        self.position = position + 1
        step = self.follower.follow(data, now)
        if step is None:
            return None
        record = step.record
        self._sent, self._sent_at = record.epoch, position
        seq = _number(record.epoch, record.seq)
        self.over = record.kind is Kind.GONE
        if self.slot is None:
            return None
        if self.over:
            return self._empty(seq)
        state = record.kind in (Kind.CLEAR, Kind.STATE)
        return RecordReceived(
            self.slot,
            seq,
            record.payload,
            begins=record.kind is Kind.CLEAR,
            more=state and record.more,
            ends=state and not record.more,
            known=step.known,
        )

    def give_up(self) -> RecordReceived | None:
        """Give the epoch up, because its writer was silent for too long.

        Return the event that removes the stream's blocks; None if the stream is not a source.
        """
        self.follower.epoch = self.follower.epoch or self._sent
        self.follower.give_up()
        self.over = True
        return None if self.slot is None else self._empty(_number(self.follower.epoch, LAST))

    def _empty(self, seq: int) -> RecordReceived:
        """Return a state without blocks."""
        return RecordReceived(self.slot or 0, seq, begins=True, ends=True)


def _number(epoch: int, seq: int) -> int:
    """Return the number under which routers get a record: the turn of its epoch, then its seq."""
    return epoch >> RANDOM_BITS << EPOCH_BITS | seq
