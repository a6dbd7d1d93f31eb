"""A model of an engine, its network, kvbus and two routers, with all possible actions and the invariants.

Each batch has one event, which the seq determines: two stores, then the removal of the second stored block, and so on.
Blocks of different epochs have different hashes. A batch can wait on the wire for ever, so only the search decides the
order of sending, reading, answering and ticking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

from kvbus.core.sequencing.phases import State
from tests.doubles.accounting import all_accounted_for
from tests.doubles.payloads import payload, removed, store
from tests.exhaustive.bus import JOURNAL, Bus, Hooks
from tests.exhaustive.canonical import CLOCK, digest
from tests.exhaustive.routers import Checking, Trusting

BUFFER: Final = 3
EPOCHS: Final = 2
PAUSE: Final = 3.0
"""Seconds of a pause. It is longer than the deadline of an answer, and as long as `TIMEOUT`."""

NEVER: Final = 60
"""Maximum seconds until both routers are exact if no further fault occurs. After that, the check fails."""

CALM: Final = 4
"""Seconds for which nothing may change after both routers are exact."""

END: Final = -1


class PromiseError(AssertionError):
    """An error: an invariant of the model does not hold."""


@cache
def block(epoch: int, seq: int) -> int:
    return 100 * epoch + seq + 1


@cache
def batch(epoch: int, seq: int) -> bytes:
    what = seq % 3
    if what == 2:
        event = removed([block(epoch, seq - 1)])
    else:
        event = store([block(epoch, seq)], block(epoch, seq - 1) if what else None)
    return payload(event, ts=float(epoch))


@cache
def cached(epoch: int, end: int) -> frozenset[int]:
    """Return the hashes in the engine's cache after the first ``end`` batches of an epoch."""
    return frozenset(block(epoch, seq) for seq in range(end) if seq % 3 == 0 or (seq % 3 == 1 and seq == end - 1))


@cache
def origin(of: bytes) -> tuple[int, int]:
    """Return the epoch and the seq of the model's batch that has this payload."""
    return next((epoch, seq) for epoch in range(EPOCHS) for seq in range(100) if batch(epoch, seq) == of)


class Model:
    """A state of the search. Each action is a method, and :meth:`enabled` yields the actions that are possible.

    The docstring of an action describes it in the report of a failed search.

    Args:
        batches: maximum number of batches that the engine publishes in an epoch.
        ticks: maximum number of ticks of the clock. The time that passes in pauses does not count.
    """

    def __init__(self, batches: int, ticks: int) -> None:
        self.now = CLOCK
        self.batches, self.ticks = batches, ticks

        # These attributes describe the engine.
        self.epoch = 0
        self.seq = 0

        # These attributes describe the network between the engine and kvbus.
        self.connected = False
        self.wire: list[tuple[int, int]] = []
        """Epoch and seq of each batch that the engine has sent and kvbus has not read, oldest first."""
        self.request: tuple[int, int] | None = None
        """Id and first seq of kvbus's open replay request, or None."""
        self.unserved = False
        """Whether the engine has not read the replay request yet."""
        self.answers: list[tuple[int, int]] = []
        """Epoch and seq of each message of the answer that kvbus has not read. The last message has END as its seq."""
        self.begun = False
        """Whether kvbus has read a message of the engine's replay answer."""

        # These attributes describe kvbus, and record what it has done.
        self.bus = Bus(Hooks(self._published, self._ask, self._cancel, self._delivered, self._new_epoch))
        self.last_seq = -1
        self.delivered: tuple[int, int] | None = None
        """Epoch and seq of the last delivered batch in the epoch that kvbus knows, or None."""

        self.checking = Checking()
        self.trusting = Trusting()

    # -- actions of kvbus ----------------------------------------------------------------------------------------------

    def _published(self, seq: int, message: bytes) -> None:
        if seq != self.last_seq + 1:
            raise PromiseError(f"the output numbers {seq} after {self.last_seq}")
        self.last_seq = seq
        self.checking.published(seq, message)
        self.trusting.published(seq, message)

    def _ask(self, request: int, start: int) -> None:
        self.request, self.unserved = (request, start), True

    def _cancel(self, request: int) -> None:
        if self.request is not None and self.request[0] == request:
            self.request, self.unserved = None, False
            self.answers.clear()

    def _delivered(self, seq: int, message: bytes) -> None:
        epoch, number = origin(message)
        assert number == seq
        if self.delivered is not None and (epoch != self.delivered[0] or seq <= self.delivered[1]):
            raise PromiseError(
                f"batch {seq} of epoch {epoch} was taken in behind {self.delivered[1]} of {self.delivered[0]}"
            )
        self.delivered = epoch, seq

    def _new_epoch(self) -> None:
        self.delivered = None

    # -- possible actions (their docstrings are the steps of a counterexample) -----------------------------------------

    def publishes(self) -> None:
        """The engine publishes a batch."""
        if self.connected:
            self.wire.append((self.epoch, self.seq))
        self.seq += 1

    def connects(self) -> None:
        """kvbus connects to the engine."""
        self.connected = True
        self.bus.connected(self.now, up=True)

    def arrives(self) -> None:
        """The oldest live batch arrives at kvbus."""
        self._read_live(self.wire.pop(0))

    def serves(self) -> None:
        """The engine reads kvbus's replay request and answers from its replay buffer."""
        assert self.request is not None
        first = max(self.request[1], self.seq - BUFFER, 0)
        self.unserved = self.begun = False
        self.answers = [*((self.epoch, seq) for seq in range(first, self.seq)), (self.epoch, END)]

    def answers_one(self) -> None:
        """One message of the engine's replay answer arrives at kvbus."""
        assert self.request is not None
        request = self.request[0]
        epoch, seq = self.answers.pop(0)
        if self.wire and not self.begun:
            self.bus.unread(self.now)
        self.begun = True
        if seq == END:
            self.bus.replay_ended(request, self.now)
        else:
            self.bus.replayed(request, seq, batch(epoch, seq), self.now)

    def tick(self) -> None:
        """One second passes."""
        self.ticks -= 1
        self._time_passes(1.0)

    def checking_subscribes(self) -> None:
        """The router that checks seqs (:class:`Checking`) subscribes."""
        self.checking.subscribe()

    def checking_asks(self) -> None:
        """The router that checks seqs (:class:`Checking`) requests a replay."""
        self.checking.ask(self.bus, self.now)

    def checking_reads(self) -> None:
        """The router that checks seqs (:class:`Checking`) reads one message of its replay answer."""
        self.checking.read_answer(self.bus)

    def checking_goes_on(self) -> None:
        """The router that checks seqs (:class:`Checking`) ends its stall and reads its queued batches."""
        self.checking.stalled = False
        self.checking.read_live()

    def trusting_subscribes(self) -> None:
        """The trusting router, which requests no replay and checks no seq, subscribes and gets the state."""
        self.trusting.subscribe(self.bus, self.now)

    # -- faults

    def loses(self) -> None:
        """The oldest live batch is lost."""
        del self.wire[0]

    def doubles(self) -> None:
        """The oldest live batch arrives at kvbus, and stays on the wire to arrive again."""
        self._read_live(self.wire[0])

    def overtakes(self) -> None:
        """The second-oldest live batch arrives at kvbus before the oldest."""
        self._read_live(self.wire.pop(1))

    def cut(self) -> None:
        """kvbus's connection to the engine breaks, and the batches on the wire are lost."""
        self._disconnect()

    def restarts(self) -> None:
        """The engine restarts, and the batches on the wire are lost."""
        self._disconnect()
        self.epoch, self.seq = self.epoch + 1, 0

    def breaks_off(self) -> None:
        """kvbus's replay request, or the rest of the engine's answer, is lost."""
        self.unserved = False
        self.answers.clear()

    def pause(self) -> None:
        """kvbus pauses for so long that deadlines pass before it reads the waiting messages."""
        self._time_passes(PAUSE)

    def kill(self) -> None:
        """kvbus is killed and restarts from its write-ahead log."""
        self._kill(checkpoint=False)

    def kill_after_checkpoint(self) -> None:
        """kvbus writes a checkpoint, is killed, and restarts from the checkpoint."""
        self._kill(checkpoint=True)

    def checking_stalls(self) -> None:
        """The router that checks seqs (:class:`Checking`) stops reading."""
        self.checking.stalled = True

    def checking_loses(self) -> None:
        """kvbus drops the batches that wait for the router that checks seqs (:class:`Checking`)."""
        self.checking.queue.clear()

    def checking_leaves(self) -> None:
        """The connections of the router that checks seqs (:class:`Checking`) break."""
        self.checking.leave()

    def checking_breaks_off(self) -> None:
        """The replay answer to the router that checks seqs (:class:`Checking`) breaks off."""
        self.checking.break_answer()

    def trusting_leaves(self) -> None:
        """The connection of the router that checks no seqs (:class:`Trusting`) breaks."""
        self.trusting.leave()

    # -- helpers

    def _read_live(self, one: tuple[int, int]) -> None:
        epoch, seq = one
        self.bus.live(seq, batch(epoch, seq), self.now)

    def _disconnect(self) -> None:
        self.wire.clear()
        self.answers.clear()
        self.connected = False
        self.bus.connected(self.now, up=False)

    def _time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.bus.tick(self.now)

    def _kill(self, *, checkpoint: bool) -> None:
        self.wire.clear()
        self.answers.clear()
        self.request, self.unserved, self.connected = None, False, False
        self.checking.leave()
        self.trusting.leave()
        self.bus.killed(self.now, checkpoint=checkpoint)

    def fair(self) -> Iterator[Callable[[], None]]:
        """Yield the actions that are possible without a fault and without time passing, the most urgent action
        first.
        """
        checking, wire, trusting = self.checking, self.wire, self.trusting
        if not self.connected:
            yield self.connects
        if wire:
            yield self.arrives
        if self.unserved:
            yield self.serves
        if self.answers:
            yield self.answers_one
        if not trusting.connected:
            yield self.trusting_subscribes
        if not checking.connected:
            yield self.checking_subscribes
        if checking.wants and not checking.stalled:
            yield self.checking_asks
        if checking.answer is not None and not checking.stalled:
            yield self.checking_reads
        if checking.stalled:
            yield self.checking_goes_on

    def faults(self) -> Iterator[Callable[[], None]]:
        """Yield the faults that are possible in this state."""
        checking, wire = self.checking, self.wire
        if wire:
            yield from (self.loses, self.doubles)
        if len(wire) > 1 and wire[0] != wire[1]:
            yield self.overtakes
        if self.connected:
            yield self.cut
        if self.epoch + 1 < EPOCHS:
            yield self.restarts
        if self.unserved or self.answers:
            yield self.breaks_off
        yield from (self.pause, self.kill, self.kill_after_checkpoint)
        if checking.connected:
            yield self.checking_leaves
            if not checking.stalled:
                yield self.checking_stalls
            elif checking.queue:
                yield self.checking_loses
        if checking.answer is not None:
            yield self.checking_breaks_off
        if self.trusting.connected:
            yield self.trusting_leaves

    def enabled(self, *, faults: bool) -> Iterator[Callable[[], None]]:
        """Yield all actions that are possible in this state."""
        if self.seq < self.batches:
            yield self.publishes
        yield from self.fair()
        if self.ticks:
            yield self.tick
        if faults:
            yield from self.faults()

    # -- invariants ----------------------------------------------------------------------------------------------------

    @property
    def truth(self) -> frozenset[int]:
        """Hashes of the blocks in the engine's cache."""
        return cached(self.epoch, self.seq)

    @property
    def knows_all(self) -> bool:
        """Whether kvbus has delivered the engine's newest batch, and knows the engine's epoch."""
        return self.delivered == (self.epoch, self.seq - 1) if self.seq else self.delivered is None

    def check(self) -> None:
        """Check the invariants of this state.

        Raises:
            PromiseError: an invariant does not hold.
        """
        source, index = self.bus.source, self.bus.index
        all_accounted_for(source)
        if self.bus.journal > JOURNAL:
            raise PromiseError("the journal holds more than it may")
        if self.trusting.connected and self.trusting.blocks != index:
            raise PromiseError(f"the router that trusts holds {self.trusting.blocks}, announced is {index}")
        in_step = self.checking.idle and self.checking.next == self.bus.next_seq
        if in_step and self.checking.blocks != index:
            raise PromiseError(f"the router that checks holds {self.checking.blocks}, announced is {index}")
        if source.state is State.LIVE and self.knows_all and not source.sequencer.pending:
            self._is_true(index)

    def _is_true(self, index: set[int]) -> None:
        if not index <= self.truth:
            raise PromiseError(f"announced is {index}, the engine holds {set(self.truth)}")
        if not self.bus.source.partial and index != self.truth:
            raise PromiseError(f"nothing is partial, announced is {index}, the engine holds {set(self.truth)}")

    def finish(self) -> float:
        """Let all messages arrive and time pass without faults. Return the seconds until both routers are exact.

        If the engine no longer has some of the lost batches, the routers hold only part of the blocks, and the source
        must be ``partial``.
        """
        began = self.now
        while self.now - began <= NEVER:
            self._everything_arrives()
            if self.settled:
                seconds = self.now - began
                self._stays_settled()
                return seconds
            self._time_passes(1.0)
        raise PromiseError(
            f"not exact after {NEVER} s: the engine holds {set(self.truth)}, the router that checks"
            f" {self.checking.blocks}, the one that trusts {self.trusting.blocks}; source {self.bus.source.state},"
            f" partial {self.bus.source.partial}"
        )

    def _everything_arrives(self) -> None:
        while (action := next(self.fair(), None)) is not None:
            action()
        self.check()

    def _stays_settled(self) -> None:
        for _ in range(CALM):
            self._time_passes(1.0)
            self._everything_arrives()
            if not self.settled:
                raise PromiseError("the routers were exact, and with nothing published they are not any more")

    @property
    def settled(self) -> bool:
        """Whether kvbus and both routers have read and applied everything that the engine has sent."""
        source = self.bus.source
        if self.request is not None or source.state is not State.LIVE or not self.knows_all:
            return False
        if not self.checking.idle or self.checking.next != self.bus.next_seq:
            return False
        return not source.partial or (self.seq > BUFFER and not source.sequencer.history.pending)

    def digest(self) -> bytes:
        """Return a digest that is equal for states with the same future behaviour."""
        checking, trusting, bus = self.checking, self.trusting, self.bus
        request = None if self.request is None else self.request[1]
        parts = (
            [self.batches, self.ticks, self.epoch, self.seq, self.connected, self.wire],
            [request, self.unserved, self.answers, self.begun, self.last_seq, self.delivered],
            bus.relay,
            [*bus.saved, *(part for body, payloads in bus.log for part in (body, *payloads))],
            [checking.connected, checking.next, checking.blocks, checking.wants, checking.stalled],
            checking.queue,
            checking.answer,
            [trusting.connected, sorted(trusting.blocks) if trusting.connected else None],
        )
        return digest(parts, self.now)
