"""Follow one stream in a log: decide which records to accept, and how many of the stream's blocks the reader then has.

A follower receives records in the order of the log. Some are duplicates, some are of former writers, and some are
missing because the log has deleted its oldest records. The follower returns only the records that a reader needs: first
a state that begins with AllBlocksCleared, and then every batch once. :class:`LogStreamReader` makes events for
the relay from these records. This module does no I/O.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Final, NamedTuple

from kvbus.core.events import RecordReceived
from kvbus.core.log_relay import EPOCH_BITS, LAST
from kvbus.parts.log.contract import START, Pointer
from kvbus.parts.log.record import RANDOM_BITS, DamagedError, Kind, Record, SchemaError, Stream, read

LEASE: Final = 5.0
"""Time in seconds after which a writer without batches appends a lease, a record which shows that it is running."""

SILENCE: Final = 10.0
"""Maximum time in seconds between two records of one epoch.

A writer that notices a longer interval between two of its own records begins another epoch. So if a reader sees no
record for much longer (:data:`LEASE_TTL`), it can drop all later records of the epoch.
"""

LEASE_TTL: Final = 30.0
"""Time in seconds without a record after which a reader drops a stream's blocks, because the stream's writer is gone.

If the reader has then read the log to its end, it also drops all later records of this epoch. A writer that was silent
for so long begins another epoch.

The value has to be more than ``2 * SILENCE``. A writer sends each record after the log has confirmed the record before
it, and the interval between two confirmations is shorter than :data:`SILENCE`. So the log gets two successive records
of one epoch within less than twice that time. The remaining time allows for delays: a reader may get the second record
that much later than the first.
"""


OTHER_SCHEMA: Final = "other_schema"
REASONS: Final[dict[type[Exception], str]] = {DamagedError: "damaged", SchemaError: OTHER_SCHEMA}
"""Reasons under which undecodable records are counted, by the type of the error that `read` raises.

If `read` raises any other ValueError, the reason is ``malformed``.
"""


class Holds(Enum):
    """How many of a stream's blocks a reader has, after the records that it has read so far."""

    NOTHING = "nothing"
    """The reader has no valid blocks of the stream.

    Either no state has come yet, or the stream has ended, or records are missing.
    """
    PART = "part"
    """The reader has the first records of a state (the stream's live blocks). The remaining records follow."""
    ALL = "all"
    """The reader has a complete state, and every batch after that state."""
    FORMER = "former"
    """The reader has the blocks of the stream's former writer. The new writer has not begun its state yet."""


class Step(NamedTuple):
    """A record that the follower accepts. It is not a duplicate, and the reader can use it.

    Attributes:
        record: the record.
        known: whether the record changes nothing for the reader. Such a record is a lease, or a part of a state that
            the reader already has.
    """

    record: Record
    known: bool


class Follower:
    """The position of a reader in one stream of a log, and the rules by which it accepts or drops records.

    Attributes:
        epoch: the epoch of the newest record that was accepted; 0 before the first such record.
        seq: the seq that the next record of the epoch should have.
        holds: how many of the stream's blocks the reader has now.
        counts: number of records that the reader did not get, by reason: ``double`` (a duplicate), ``old_epoch`` (of a
            former writer), ``malformed`` (not a record), ``damaged`` (the checksum is wrong), ``other_schema`` (this
            version cannot read it), ``known`` (part of a state that the reader already has), ``unusable`` (after
            missing records and before the next state) and ``late`` (of an epoch that the reader gave up, because its
            writer was silent for too long). Three keys count something else: ``lost`` is the number of missing records.
            ``expired`` is how many times the writer was silent for too long. ``clock_set_back`` is how many times a
            stream began again at a lower epoch, because the log had lost its epochs and the writer's clock was set
            back.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.holds = Holds.NOTHING
        self.counts: Counter[str] = Counter()
        self._known_state = False
        """Whether the reader already has the state whose records are coming now."""
        self._unusable = False
        """Whether a record after the newest state was unusable or is missing."""
        self._given_up = False
        """Whether the epoch is abandoned, because its writer was silent for too long.

        Its further records are dropped.
        """
        self.heard = 0.0
        """Time at which the newest record came, by the clock of :meth:`follow`'s caller."""

    @property
    def stranded(self) -> bool:
        """Whether the reader has no blocks and cannot use the arriving records until the next state comes.

        The reader then has to look for an earlier state in the log.
        """
        return self.holds is Holds.NOTHING and self._unusable

    def follow(self, data: bytes, now: float) -> Step | None:
        """Decide whether the reader needs the next record of the log. Return the record, or None if it is dropped.

        If :attr:`Step.known` is True, the reader already has the content of the record. Otherwise it has to apply the
        record: a CLEAR begins with AllBlocksCleared, a STATE and a BATCH have events, and a GONE removes all blocks of
        the stream. If records are missing, :attr:`holds` becomes ``NOTHING``, and the reader has to remove all blocks,
        too.

        Records that the reader already has are returned for a relay that publishes the stream with the seqs of the log.
        Such a relay must not leave out a seq.
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
        """Count the records between the expected seq and ``seq`` as lost.

        If there are any, the reader's blocks become void, because the changes in the lost records are missing.
        """
        if seq > self.seq:
            self.counts["lost"] += seq - self.seq
            self.seq = seq
            self._known_state = False
            self.holds = Holds.NOTHING
            self._unusable = True

    def _given(self, record: Record) -> str | None:
        """Return the reason why the reader does not get a record (a key of ``counts``); None if the reader gets it."""
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
        """Return whether the stream's blocks become void now, because the log had no record for :data:`LEASE_TTL`.

        Only the reader of a single stream uses this method. An aggregator, which reads many streams, also considers how
        far it has read the log, and calls :meth:`give_up`.
        """
        if self.holds is Holds.NOTHING or now - self.heard < LEASE_TTL:
            return False
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        return True

    def give_up(self) -> None:
        """Abandon the epoch, because the log had no record of it for :data:`LEASE_TTL`.

        The reader has no blocks any more.

        Later records of this epoch are dropped. A writer that was silent for so long begins another epoch.
        """
        self.counts["expired"] += 1
        self.holds = Holds.NOTHING
        self._given_up = True


class LogStreamReader:
    """One stream that is read from a log and passed to the relay as a source.

    Args:
        key: the stream's key.
        pointer: the stream's pointer in the log, which says where its newest state is. Reading begins there.

    Attributes:
        stream: the names that the stream's key contains: cluster, model, worker and rank.
        pointer: the newest pointer that was read from the log.
        position: the position of the next record to read.
        slot: the number of the source in the relay; None while the stream is not a source.
        over: whether the stream has ended. It then has no blocks until its next epoch.
        written: the time at which the log got the stream's newest record, by the log's clock.
        alive: whether a record came after the reader had caught up with the log. This proves that the writer was
            running.
        follower: the object that decides which records are accepted.
        floor: the newest turn of all other streams with the same engine name. Records of earlier turns are not passed
            to the relay: routers may already have seqs of the newest turn, and seqs of earlier turns are lower.
    """

    def __init__(self, key: str, pointer: Pointer) -> None:
        self.key = key
        self.stream = Stream.parse(key)
        self.pointer = pointer
        self.position = pointer.position
        self.slot: int | None = None
        self.ended = False
        self.written = 0.0
        self.alive = False
        self.follower = Follower()
        self.floor = 0
        self._sent = 0
        """The epoch of the newest record that was accepted. :meth:`begin_again` does not reset it."""
        self._begun = pointer
        """The pointer at which reading began or, after :meth:`begin_again`, began again."""
        self._sent_at = START
        """The position of the newest record that was accepted. :meth:`begin_again` resets it."""

    def begin_again(self) -> None:
        """Read the stream again from its newest state on, as a new reader does."""
        before, self.follower = self.follower, Follower()
        self.follower.heard = before.heard
        self.follower.counts = before.counts
        self.position, self.ended = self.pointer.position, False
        self._sent_at, self._begun = START, self.pointer

    @property
    def turn(self) -> int:
        """The number of the writer's turn in the newest accepted epoch; 0 before the first record.

        It is the epoch without its random bits, and the high part of the seqs that routers get.
        """
        return max(self._sent, self.follower.epoch) >> RANDOM_BITS

    @property
    def misses_state(self) -> bool:
        """Whether the log has a state that this reader has skipped and needs.

        If so, the caller calls :meth:`begin_again`. There are two cases:

        * No arriving record is usable, and the pointer names a state from which the reader can continue. A state of the
          reader's own epoch must not be older than the next expected record. Otherwise it lacks the missing records,
          and routers have already got batches with its seqs. Any state of a later epoch is suitable. The reader can
          have skipped that state because it read from a server that was cut off from the network. The reader begins
          again at such a state only once.
        * The log has lost its records, and its positions begin again. The pointer then has a later epoch, but its
          position is not after the newest record that the reader has accepted.
        """
        newest, follower = self.pointer, self.follower
        if newest.seq < 0:
            return False
        if 0 < follower.epoch < newest.epoch and newest.position <= self._sent_at:
            return True
        passed_over = newest.epoch > self._sent and newest != self._begun
        return follower.stranded and (passed_over or (newest.epoch, newest.seq) >= (follower.epoch, follower.seq))

    def take(self, data: bytes, position: int, now: float) -> RecordReceived | None:
        """Process the next record of the log.

        Return its event for the relay; None if the relay does not need the record.

        Args:
            data: the record.
            position: the position of the record in the log.
            now: the present time by the caller's clock.
        """
        self.position = position + 1
        step = self.follower.follow(data, now)
        if step is None:
            return None
        record = step.record
        self._sent, self._sent_at = record.epoch, position
        seq = _number(record.epoch, record.seq)
        self.ended = record.kind is Kind.GONE
        if self.slot is None:
            return None
        if self.ended:
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
        """Abandon the epoch, because its writer was silent for too long.

        Return the event that removes the stream's blocks; None if the stream is not a source.
        """
        self.follower.epoch = self.follower.epoch or self._sent
        self.follower.give_up()
        self.ended = True
        return None if self.slot is None else self._empty(_number(self.follower.epoch, LAST))

    def _empty(self, seq: int) -> RecordReceived:
        """Return an event for the relay: a state without blocks, which routers get with the seq ``seq``."""
        return RecordReceived(self.slot or 0, seq, begins=True, ends=True)


def _number(epoch: int, seq: int) -> int:
    """Return the seq with which routers get a record of a log.

    The seq that routers get ascends even if the writer changes: its high bits are the epoch's turn, its low bits
    ``seq``.
    """
    return epoch >> RANDOM_BITS << EPOCH_BITS | seq
