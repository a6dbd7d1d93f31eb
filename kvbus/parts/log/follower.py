"""Follow a stream in its log: which records count, what a reader then holds, and what the relay is told. Pure.

A follower takes records in the log's order, with doubles, with records of fenced writers, and with holes where
retention was faster. It gives the writer's own stream: a state that begins with AllBlocksCleared, and every batch after
it once.
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
"""Seconds between two records of an epoch. A writer that finds more between its own begins another epoch, so a reader
that knows of more may give the epoch up for good."""

LEASE_TTL: Final = 30.0
"""Seconds without a record after which a stream's blocks are void; where the log was read to its end since, its epoch
is over for good.

``2 * SILENCE < LEASE_TTL``: each record was sent behind the answer to the one before, and no two answers are
:data:`SILENCE` apart, so two records of one epoch are in the log less than twice that apart. The rest is how much later
than the first a reader may get the second.
"""


OTHER_SCHEMA: Final = "other_schema"
REASONS: Final[dict[type[Exception], str]] = {DamagedError: "damaged", SchemaError: OTHER_SCHEMA}
"""Under which a record is counted that cannot be read; the others are ``malformed``."""


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


class Step(NamedTuple):
    """The next record of a stream.

    Attributes:
        record: the record.
        known: it changes nothing: a lease, or a part of a state that the reader has.
    """

    record: Record
    known: bool


class Follower:
    """One stream.

    Attributes:
        epoch: of the newest record that counts; 0 before the first one.
        seq: of the record that comes next.
        holds: what the reader holds now.
        counts: records that were not given, by reason: ``double``, ``old_epoch``, ``malformed``, ``damaged`` (another
            checksum), ``other_schema`` (this version does not read it), ``known`` (of a state that the reader has
            already), ``unusable`` (behind a hole, up to the next state) and ``late`` (of an epoch that was given up).
            And ``lost``, the records in holes, ``expired``, the leases, and ``clock_set_back``, the times that a
            stream began again at a lower epoch: the log has lost its epochs, and the writer's clock was set back.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.holds = Holds.NOTHING
        self.counts: Counter[str] = Counter()
        self._known_state = False
        """The state that comes is one that the reader has."""
        self._unusable = False
        """Records came, or are missing, that say nothing to this reader since its newest state."""
        self._given_up = False
        """Nothing more of this epoch counts."""
        self.heard = 0.0
        """When the newest record came."""

    @property
    def stranded(self) -> bool:
        """Records come, and none can be given before the next state: an older one has to be read from the log."""
        return self.holds is Holds.NOTHING and self._unusable

    def take(self, data: bytes, now: float) -> Record | None:
        """Take the next record of the log; return it if it changes what the reader holds.

        A CLEAR begins with AllBlocksCleared, a STATE and a BATCH are applied, and a GONE clears. A hole clears too:
        :attr:`holds` is then ``NOTHING``.
        """
        step = self.follow(data, now)
        return None if step is None or step.known else step.record

    def follow(self, data: bytes, now: float) -> Step | None:
        """Take the next record of the log; return it if the reader can stand at its seq, whether it changes anything.

        Whoever hands on the stream under the log's own numbers needs each of them.
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
        """Records before this one will not come any more: nobody knows what they have changed."""
        if seq > self.seq:
            self.counts["lost"] += seq - self.seq
            self.seq = seq
            self._known_state = False
            self.holds = Holds.NOTHING
            self._unusable = True

    def _given(self, record: Record) -> str | None:
        """Why a record is not given."""
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
        """Whether the stream's blocks are void from now on, because nothing was heard of its writer for too long.

        For whoever follows one stream by itself; an aggregator looks at how far it has read, too, and gives up.
        """
        if self.holds is Holds.NOTHING or now - self.heard < LEASE_TTL:
            return False
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        return True

    def give_up(self) -> None:
        """The epoch is over: who asks knows that the log had nothing of it for :data:`LEASE_TTL`.

        What comes of it after all is dropped; its writer begins another one.
        """
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        self._given_up = True


class Relayed:
    """One stream on its way from its log to the relay.

    Args:
        key: the stream's.
        pointer: where reading begins.

    Attributes:
        stream: whose it is.
        pointer: the newest one that was seen.
        position: where reading goes on.
        slot: the source's; None while it is none.
        over: nothing is left of the stream, up to the next epoch.
        written: when the log got its newest record, by the log's clock.
        alive: that came while this reader was level: its writer lives, or did a moment ago.
        follower: which records count.
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
        self._announced = False
        """The source in this slot has had a record."""
        self._sent = 0
        """Epoch of the newest record that counted; it stays when reading begins again."""
        self._begun = pointer
        """Where reading began last."""
        self._sent_at = START
        """Its position, since reading began."""

    def begin_again(self) -> None:
        """Read from the newest state on, as somebody who knows nothing."""
        before, self.follower = self.follower, Follower()
        self.follower.heard = before.heard
        self.follower.counts = before.counts
        self.position, self.over, self._announced = self.pointer.position, False, False
        self._sent_at, self._begun = START, self.pointer

    @property
    def misses_state(self) -> bool:
        """There is a state in the log that was not read, and nothing is known without it.

        Records come that say nothing, or a later epoch is where records of an earlier one were read: positions ascend,
        so the log has lost what it had, and begins again. A state behind what was told cannot say what was missing
        since, and its numbers are used. A later epoch's may have been passed over: who read a server that the network
        had cut off may be, by its positions, ahead of what the others had begun meanwhile. It is looked for once.
        """
        newest, follower = self.pointer, self.follower
        if newest.seq < 0:
            return False
        if 0 < follower.epoch < newest.epoch and newest.position <= self._sent_at:
            return True
        passed_over = newest.epoch > self._sent and newest != self._begun
        return follower.stranded and (passed_over or (newest.epoch, newest.seq) >= (follower.epoch, follower.seq))

    def take(self, data: bytes, position: int, now: float) -> RecordReceived | None:
        """Take the next record; return what the relay has to know of it, if anything."""
        self.position = position + 1
        step = self.follower.follow(data, now)
        if step is None:
            return None
        record = step.record
        self._sent, self._sent_at = record.epoch, position
        seq = _number(record.epoch, record.seq)
        self.over = record.kind is Kind.GONE
        if self.slot is None or (self.over and not self._announced):
            return None  # an erased stream's end is all that is left before what is written anew
        self._announced = True
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
        """The writer is silent for so long that its epoch is over: nothing is left of the stream."""
        self.follower.epoch = self.follower.epoch or self._sent
        self.follower.give_up()
        self.over = True
        return None if self.slot is None else self._empty(_number(self.follower.epoch, LAST))

    def _empty(self, seq: int) -> RecordReceived:
        """A state without a block."""
        return RecordReceived(self.slot or 0, seq, begins=True, ends=True)


def _number(epoch: int, seq: int) -> int:
    """The number under which routers get a record: its epoch's turn, and its seq."""
    return epoch >> RANDOM_BITS << EPOCH_BITS | seq
