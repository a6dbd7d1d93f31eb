"""Whatever happens to the live stream and to the answers, the view ends up as the publisher's own state."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvbus.client.sequence import Replace, Sequence
from kvbus.client.timeouts import BufferLimits, Timing
from kvbus.client.updates import Lost, Restarted, Snapshot, Synced
from kvbus.client.view import BlockView
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Stop
from kvbus.core.sequencing.phases import Phase
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from tests.typed import well_formed

END = [b"", END_SEQ, b""]
TOKENS = msgspec.Raw(msgspec.msgpack.encode([1, 2]))


def stored(*hashes: int) -> BlockStored:
    return BlockStored(tuple(hashes), None, TOKENS, 2)


class Subscription(RuleBasedStateMachine):
    """A publisher with a whole history, a bad network, and the sequence machine.

    What the network cannot do is what TCP cannot do: a frame of the publisher's next life does not come before the
    connection broke and stood again. Requests are retried for ever, so nothing may be reported lost.
    """

    @initialize(
        mode=st.sampled_from(["replay", "snapshot", "stale", "fresh"]),
        compacting=st.booleans(),
        ids=st.booleans(),
        held=st.integers(1, 6),
        journal=st.sampled_from([1, 2, 5, 1000]),
        before=st.sampled_from([0, 12, 30]),
    )
    def begin(self, mode: str, compacting: bool, ids: bool, held: int, journal: int, before: int) -> None:
        self.mode = mode
        self.compacting = compacting  # an answer from before the journal is the state at its end, not the history
        self.journal = journal
        self.ids = ids or mode != "replay"
        self.life = 0
        self.log: list[bytes | None] = []  # None: a seq used up for nothing
        self.truth: set[int] = set()
        self.states: list[frozenset[int]] = []
        self.flying: list[tuple[int, bytes]] = []
        self.up = False
        self.asked: int | AskSnapshot | None = None
        self.answer: list[Any] = []
        self.now = 0.0
        self.view = BlockView()
        self.synced = False
        self.sequence = Sequence(
            replay=mode != "snapshot",
            snapshot=mode != "replay",
            timing=Timing(attempts=2, snapshot_s=1e9) if mode == "fresh" else Timing(attempts=10**9),
            limits=BufferLimits(held_batches=held, held_bytes=400),
        )
        self.follow(self.sequence.open(self.now))
        for seq in range(before):
            self.publish(("store" if seq % 7 < 5 else "remove", seq % 10), lost=True)

    # -- the publisher

    @rule(
        change=st.one_of(
            st.tuples(st.just("store"), st.integers(0, 9)),
            st.tuples(st.just("remove"), st.integers(0, 9)),
            st.tuples(st.sampled_from(["clear", "nothing"]), st.just(0)),
        ),
        lost=st.booleans(),
    )
    def publish(self, change: tuple[str, int], lost: bool) -> None:
        kind, block = change
        changes: dict[str, list[AnyEvent]] = {
            "store": [stored(block)],
            "remove": [BlockRemoved((block,))],
            "clear": [AllBlocksCleared()],
            "nothing": [],
        }
        events = changes[kind]
        if kind == "store":
            self.truth.add(block)
        elif kind == "remove":
            self.truth.discard(block)
        elif kind == "clear":
            self.truth.clear()
        payload = encode_batch(events, self.life * 1e6 + len(self.log), 0)
        self.log.append(payload)
        self.states.append(frozenset(self.truth))
        if self.up and not lost:
            self.flying.append((len(self.log) - 1, payload))

    @rule()
    @precondition(lambda self: self.mode in ("snapshot", "fresh"))
    def skip(self) -> None:
        self.log.append(None)
        self.states.append(frozenset(self.truth))

    @rule(stale=st.integers(0, 2))
    @precondition(lambda self: self.up)
    def restart(self, stale: int) -> None:
        self.break_connection(stale)
        self.life += 1
        self.log = []
        self.truth = set()
        self.states = []

    @rule(stale=st.integers(0, 2), answer_lives=st.booleans())
    @precondition(lambda self: self.up)
    def break_connection(self, stale: int, answer_lives: bool = False) -> None:
        self.up = False
        self.asked = None
        if not (answer_lives and self.answer and self.answers_snapshot):
            self.answer = []  # a snapshot may have arrived already
        flying, self.flying, frame = self.flying, [], self.frame
        self.follow(self.sequence.interrupted(self.now))
        for seq, payload in flying[:stale]:  # read after the break was noticed
            self.follow(self.sequence.live([b"", frame(seq), payload], self.now))

    @rule()
    @precondition(lambda self: not self.up)
    def connect(self) -> None:
        self.up = True
        self.follow(self.sequence.connected(self.now))

    # -- the network

    @rule(index=st.integers(0, 3), again=st.booleans())
    @precondition(lambda self: self.flying)
    def arrive(self, index: int, again: bool) -> None:
        index = min(index, len(self.flying) - 1)
        seq, payload = self.flying[index] if again else self.flying.pop(index)
        self.follow(self.sequence.live([b"", self.frame(seq), payload], self.now))

    @rule(age=st.integers(0, 3), available=st.booleans(), trimmed=st.integers(0, 6))
    @precondition(lambda self: self.asked is not None and self.up)
    def serve(self, age: int = 0, available: bool = True, trimmed: int = 0) -> None:
        start, self.asked = self.asked, None
        assert start is not None
        self.first_of_answer = True
        self.answers_snapshot = isinstance(start, AskSnapshot)
        if isinstance(start, AskSnapshot):
            age, available = (age, available) if self.mode == "stale" else (0, True)
            self.answer = [
                self.snapshot(len(self.log) - 1 - age)
                if available
                else [(-2).to_bytes(8, "big", signed=True), bytes(16)]
            ]
            return
        start = max(start, trimmed) if self.mode == "fresh" else start
        answer = [(seq, payload) for seq, payload in enumerate(self.log) if payload is not None and seq >= start]
        if self.compacting and start < len(self.log) - self.journal:
            # the whole state first, in slices, and empty batches up to the newest
            state: list[AnyEvent] = [AllBlocksCleared(), *map(stored, self.truth)]
            numbers = range(start, len(self.log))
            cuts = [state[at : at + 2] for at in range(0, len(state), 2)]
            cuts[len(numbers) - 1 :] = [[event for cut in cuts[len(numbers) - 1 :] for event in cut]]
            cuts += [[]] * (len(numbers) - len(cuts))
            answer = [(seq, encode_batch(cut, -1.0, 0)) for seq, cut in zip(numbers, cuts, strict=True)]
        self.answer = [*([b"", self.frame(seq), payload] for seq, payload in answer), END]

    @rule(lost=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.answer)
    def answer_arrives(self, lost: bool) -> None:
        item = self.answer.pop(0)
        first, self.first_of_answer = self.first_of_answer, False
        if lost and not first:
            if self.compacting:
                self.answer = []  # it breaks off
            return  # an older engine's ROUTER drops when its queue is full: never the first
        take = self.sequence.snapshot if self.answers_snapshot else self.sequence.replayed
        self.follow(take(item, self.now))

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.sequence.tick(self.now))

    # -- the subscriber

    def snapshot(self, seq: int) -> list[bytes]:
        if seq < 0:
            return [(-1).to_bytes(8, "big", signed=True), self.frame(0)[8:]]
        chunks: list[list[Any]] = [[AllBlocksCleared()], *([stored(block)] for block in self.states[seq])]
        return [seq.to_bytes(8, "big"), self.frame(0)[8:], *(encode_batch(chunk, -1.0, 0) for chunk in chunks)]

    def frame(self, seq: int) -> bytes:
        return seq.to_bytes(8, "big") + (bytes([self.life]) * 16 if self.ids else b"")

    def follow(self, outputs: Iterable[object]) -> None:
        for output in outputs:
            assert not isinstance(output, Lost), output
            if isinstance(output, Deliver):
                self.view.apply_batch(well_formed(output.payload))
            elif isinstance(output, Restarted):
                self.view.clear()
            elif isinstance(output, Replace):
                self.view.update(Snapshot(output.seq, tuple(well_formed(chunk) for chunk in output.chunks)))
            elif isinstance(output, Ask):
                assert self.mode != "snapshot"
                self.asked, self.answer = output.start, []
                self.sequence.sent(output.request, self.now)
            elif isinstance(output, AskSnapshot):
                assert self.mode != "replay"
                self.asked, self.answer = output, []
                self.sequence.sent(output.request, self.now)
            elif isinstance(output, Stop):
                self.asked, self.answer = None, []
            elif isinstance(output, Synced):
                self.synced = True

    def settle(self) -> None:
        for _ in range(1000):
            if self.asked is not None:
                self.serve()
            elif self.answer:
                self.answer_arrives(lost=False)
            elif self.flying:
                seq, payload = self.flying.pop(0)
                self.follow(self.sequence.live([b"", self.frame(seq), payload], self.now))
            elif self.exact and self.synced:
                return
            elif self.sequence.deadline < inf:
                self.now = max(self.now, self.sequence.deadline)
                self.follow(self.sequence.tick(self.now))
            else:
                return
        raise AssertionError("the subscriber never comes to rest")

    @property
    def exact(self) -> bool:
        """In step with the publisher, and with nothing left to take in."""
        newest = max((seq for seq, payload in enumerate(self.log) if payload is not None), default=-1)
        return (self.sequence.next_seq or 0) > newest and not self.sequence.held

    def in_step(self) -> None:
        """Whoever has everything that the publisher has, and waits for nothing, has its state."""
        sequencer = self.sequence._sequencer  # noqa: SLF001
        if self.up and sequencer.phase is Phase.LIVE and not sequencer.backfill_pending and self.exact:
            assert {block.hash for block in self.view} == self.truth

    def check(self) -> None:
        assert {block.hash for block in self.view} == self.truth
        assert self.exact

    def teardown(self) -> None:
        if not hasattr(self, "sequence"):
            return
        if not self.up:
            self.connect()
        self.settle()
        self.now += 10
        self.publish(("nothing", 0), lost=False)
        self.settle()
        assert self.synced
        self.check()
        # and it goes on as it should
        self.publish(("store", 42), lost=False)
        self.settle()
        self.check()


Subscription.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestSubscription = Subscription.TestCase
