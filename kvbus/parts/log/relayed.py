"""One stream of a log as the relay's events: which record is told under which number. Pure."""

from __future__ import annotations

from kvbus.core.events import RecordReceived
from kvbus.core.numbered import EPOCH_BITS, LAST
from kvbus.parts.log.contract import START, Pointer
from kvbus.parts.log.follower import Follower
from kvbus.parts.log.record import RANDOM_BITS, Kind, Stream


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
