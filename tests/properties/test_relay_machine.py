"""The whole pure relay against a naive model: engine, network, router, in any order Hypothesis can think of.

The network loses, doubles and reorders live batches and cuts the connection; the engine restarts, forgets its oldest
batches and skips numbers for good; the router misses batches, restarts, replays. After each quiescence every block the
router holds is live in the engine, and, unless the relay itself says that it is partial, the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus.core.answer import ReplayAnswer
from kvbus.core.commands import AnswerReplay, CancelReplay, Publish, RequestReplay
from kvbus.core.encoding import Profile
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceDown, SourceUp, Tick
from kvbus.core.frames import END_SEQ
from kvbus.core.normalize import Rules
from kvbus.core.parts import OutputSpec, SourceSpec
from kvbus.core.persist import Loader, decode_log, dump, encode_log
from kvbus.core.relay import Relay
from kvbus.core.sequencer import Settings, State

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode


def seq_frame(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


@dataclass
class Engine:
    """A publisher and the truth behind it: one life at a time."""

    buffer_steps: int
    life: int = 0
    seq: int = 0
    buffer: list[tuple[int, bytes]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def publish(self, changes: list[tuple[bool, int]]) -> tuple[int, bytes]:
        events: list[list[object]] = []
        for stored, block in changes:
            if stored:
                self.copies[block] = self.copies.get(block, 0) + 1
                events.append(["BlockStored", [block], None, [block, block + 1], 2, None])
            elif self.copies.get(block):
                self.copies[block] -= 1
                events.append(["BlockRemoved", [block]])
        payload = encode([float(self.life), events, 0])
        message = (self.seq, payload)
        self.seq += 1
        self.buffer = [*self.buffer, message][-self.buffer_steps :]
        return message

    def restart(self) -> None:
        self.life += 1
        self.seq = 0
        self.buffer = []
        self.copies = {}

    @property
    def truth(self) -> set[int]:
        return {block for block, count in self.copies.items() if count}


class Router:
    """A router built on a plain set: subscribes, asks the standard replay when it sees a hole."""

    def __init__(self) -> None:
        self.next = 0
        self.blocks: set[int] = set()
        self.highest = -1

    def apply(self, seq: int, payload: bytes) -> bool:
        """Take one batch; False if there is a hole before it."""
        assert seq <= self.next or seq > self.highest or seq > self.next
        if seq < self.next:
            return True
        if seq > self.next:
            return False
        self.next = seq + 1
        batch = decode(payload)
        assert len(batch) == 3
        for event in batch[1]:
            if event["type"] == "BlockStored":
                assert not self.blocks & set(event["block_hashes"]), "a live block was stored again"
                self.blocks |= set(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                assert self.blocks >= set(event["block_hashes"]), "an unknown block was removed"
                self.blocks -= set(event["block_hashes"])
            else:
                self.blocks.clear()
        return True


class LateRouter:
    """Subscribes, asks everything from 0, and reads the answer slowly while the live stream goes on."""

    def __init__(self, answer: ReplayAnswer) -> None:
        self.answer: ReplayAnswer | None = answer
        self.live: list[tuple[int, bytes]] = []
        self.router = Router()

    def read(self) -> None:
        """The next message of the answer, if it is not over."""
        message = self.answer.next_message() if self.answer is not None else None
        if message is None:
            return
        if message[-2] == END_SEQ:
            assert self.answer is not None
            assert self.answer.next_message() is None
            self.answer = None
            return
        seq = int.from_bytes(message[-2], "big")
        assert seq == self.router.next, "an answer is contiguous from the seq asked for"
        self.router.apply(seq, message[-1])

    def read_live(self) -> None:
        """What came live since the request."""
        for seq, payload in self.live:
            assert self.router.apply(seq, payload), "a hole between the answer and the live stream"
        self.live.clear()


CHANGES = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=4)


class RelayMachine(RuleBasedStateMachine):
    @initialize(
        buffer_steps=st.sampled_from([3, 10, 1000]),
        replay=st.sampled_from([True, True, True, False]),
        timeout=st.sampled_from([5.0, 1e9]),
        reorder=st.sampled_from([4, 1000]),
        journal=st.sampled_from([1, 3, 10_000]),
    )
    def begin(self, buffer_steps: int, replay: bool, timeout: float, reorder: int, journal: int) -> None:
        self.engine = Engine(buffer_steps)
        self.now = 100.0
        self.make_relay = lambda: Relay(
            [
                SourceSpec(
                    "engine",
                    0,
                    Settings(replay=replay, replay_timeout=2.0, probe_interval=1.0, reorder_batches=reorder),
                    Rules(),
                    "clear",
                    timeout,
                )
            ],
            [OutputSpec("out", Profile(), [None], heartbeat=1.0, journal_batches=journal)],
        )
        self.relay = self.make_relay()
        self.relay.records = []
        self.saved = list(dump(self.relay))
        self.log: list[bytes] = []
        self.source = self.relay.sources[0]
        self.connected = False
        self.wire: list[tuple[int, bytes]] = []
        self.answers: list[tuple[int, list[bytes]]] = []
        self.router = Router()
        self.router_deaf = False
        self.late: LateRouter | None = None
        self.last_seq = -1
        self.heard = (0, -1)

    # -- plumbing ------------------------------------------------------------------------------------------------

    def feed(self, event: object) -> None:
        for command in self.relay.handle(event, self.now):  # type: ignore[arg-type]
            if isinstance(command, Publish):
                assert command.seq == self.last_seq + 1, "an output's seq is dense and never goes back"
                self.last_seq = command.seq
                if self.late is not None:
                    self.late.live.append((command.seq, command.payload))
                if not self.router_deaf and not self.router.apply(command.seq, command.payload):
                    self.router_replay()
            elif isinstance(command, RequestReplay):
                self.serve(command)
            elif isinstance(command, CancelReplay):
                self.answers = [(r, m) for r, m in self.answers if r != command.request]
            else:
                assert isinstance(command, AnswerReplay)

    def router_replay(self) -> None:
        commands = self.relay.handle(ReplayAsked(0, 0, [b"r", b"", seq_frame(self.router.next)]), self.now)
        (answer,) = [c.answer for c in commands if isinstance(c, AnswerReplay)]
        while (message := answer.next_message()) is not None:
            if message[-2] == END_SEQ:
                return
            assert self.router.apply(int.from_bytes(message[-2], "big"), message[-1]), "the journal has a hole"
        raise AssertionError("an answer without END")

    def serve(self, command: RequestReplay) -> None:
        if not self.connected:
            return  # the request is lost with the connection
        for seq, payload in self.engine.buffer:
            if seq >= command.start:
                self.answers.append((command.request, [b"", b"", seq_frame(seq), payload]))
        self.answers.append((command.request, [b"", b"", END_SEQ, b""]))

    def deliver(self, seq: int, payload: bytes) -> None:
        self.heard = (int(decode(payload)[0]), seq)
        self.feed(BatchReceived(0, [b"", seq_frame(seq), payload]))

    # -- the engine ----------------------------------------------------------------------------------------------

    @rule(changes=CHANGES, times=st.integers(1, 5))
    def publish(self, changes: list[tuple[bool, int]], times: int) -> None:
        for _ in range(times):
            message = self.engine.publish(changes)
            if self.connected:
                self.wire.append(message)

    @rule()
    def skip_a_number(self) -> None:
        self.engine.seq += 1

    @rule()
    def restart_engine(self) -> None:
        """The process dies: connections drop, what was on the way arrives or not."""
        self.disconnect_now()
        self.engine.restart()

    # -- the network ---------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.feed(SourceUp(0))

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        self.disconnect_now()

    def disconnect_now(self) -> None:
        self.wire.clear()
        self.answers.clear()
        if self.connected:
            self.connected = False
            self.feed(SourceDown(0))

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), how=st.sampled_from(["first", "first", "first", "any", "lose", "double"]))
    def live_batch(self, data: st.DataObject, how: str) -> None:
        at = 0 if how == "first" else data.draw(st.integers(0, min(len(self.wire) - 1, 5)))
        seq, payload = self.wire.pop(at)
        if how == "lose":
            return
        self.deliver(seq, payload)
        if how == "double":
            self.deliver(seq, payload)

    @precondition(lambda self: self.wire)
    @rule()
    def all_live_batches(self) -> None:
        while self.wire:
            self.deliver(*self.wire.pop(0))

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 20))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            if not self.answers:
                return
            request, frames = self.answers.pop(0)
            self.feed(ReplayReceived(0, request, frames))

    @precondition(lambda self: self.answers)
    @rule()
    def answer_is_lost(self) -> None:
        self.answers.clear()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick(self.now))

    # -- kvbus itself --------------------------------------------------------------------------------------------

    @rule(new_generation=st.booleans())
    def kvbus_is_killed_and_comes_back(self, new_generation: bool) -> None:
        """With its state: same index, same numbering, same journal; counters and connections begin anew."""
        self.write_log()
        blocks = {block for table in self.source.normalizer.index.tables.values() for block in table.blocks}
        if new_generation:
            self.saved, self.log = list(dump(self.relay)), []
        self.disconnect_now()
        self.write_log()
        relay = self.make_relay()
        loader = Loader(relay)
        for blob in self.saved:
            loader.feed(blob)
        assert loader.complete
        for blob in self.log:
            for record in decode_log(blob):
                relay.again(record, self.now)
        relay.resumed(self.now)
        assert relay.outputs[0].streams[0].next_seq == self.last_seq + 1
        again = relay.sources[0]
        assert {block for table in again.normalizer.index.tables.values() for block in table.blocks} == blocks
        assert again.sequencer.next <= self.source.sequencer.next
        relay.records = []
        self.relay, self.source = relay, again

    def write_log(self) -> None:
        assert self.relay.records is not None
        self.log.append(encode_log(self.relay.records))
        self.relay.records = []

    # -- the router ----------------------------------------------------------------------------------------------

    @rule(deaf=st.booleans())
    def router_link(self, deaf: bool) -> None:
        self.router_deaf = deaf

    @rule()
    def router_restarts(self) -> None:
        self.router = Router()
        self.router_replay()

    @rule()
    def late_router_asks(self) -> None:
        commands = self.relay.handle(ReplayAsked(0, 0, [b"l", b"", seq_frame(0)]), self.now)
        (answer,) = [c.answer for c in commands if isinstance(c, AnswerReplay)]
        self.late = LateRouter(answer)

    @precondition(lambda self: self.late is not None and self.late.answer is not None)
    @rule(messages=st.integers(1, 4))
    def late_router_reads(self, messages: int) -> None:
        assert self.late is not None
        for _ in range(messages):
            self.late.read()

    # -- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def nothing_uncounted(self) -> None:
        if not hasattr(self, "relay"):
            return
        stats, sequencer = self.source.stats, self.source.sequencer
        assert stats.pending >= 0
        assert stats.missing == stats.recovered + stats.lost + stats.pending
        if sequencer.synced and not sequencer.actions:
            holes = sequencer.horizon - sequencer.next - len(sequencer.held)
            assert stats.pending == holes

    @rule()
    def quiescence(self) -> None:
        if not self.connected:
            self.connect()
        for _ in range(80):
            while self.wire or self.answers:
                if self.wire:
                    self.deliver(*self.wire.pop(0))
                if self.answers:
                    request, frames = self.answers.pop(0)
                    self.feed(ReplayReceived(0, request, frames))
            self.now += 0.5
            self.feed(Tick(self.now))
        self.router_deaf = False
        self.router_replay()
        assert self.source.state is State.LIVE
        assert self.source.stats.pending == 0
        if self.late is not None:
            while self.late.answer is not None:
                self.late.read()
            self.late.read_live()
            assert self.late.router.next == self.last_seq + 1
            assert self.late.router.blocks == self.router.blocks
        view, truth = self.router.blocks, self.engine.truth
        replay = self.source.spec.settings.replay
        if not replay and self.heard != (self.engine.life, self.engine.seq - 1):
            return  # without a replay an idle engine's lost tail, or its quiet new life, cannot be known of
        assert view <= truth
        if not self.source.partial:
            assert view == truth


RelayMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRelayMachine = RelayMachine.TestCase
