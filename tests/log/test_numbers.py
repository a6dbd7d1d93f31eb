"""Tests that two aggregators of one log send the same seqs: a router may change between them, and stays exact.

The log is simulated and random. A writer begins epochs, writes states and leases, or is silent. Records expire or are
damaged. Readers lag, begin again, and find that an epoch has ended. Routers change the aggregator at any message.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.core.commands import AnswerReplay, Publish, SendState
from kvbus.core.events import (
    LogReached,
    RecordReceived,
    RelayEvent,
    ReplayAsked,
    SourceDown,
    SourcePlaced,
    SourceRemoved,
    Started,
    Subscribed,
    Tick,
)
from kvbus.core.log_relay import EPOCH_BITS, LAST
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from kvbus.parts.log.contract import Pointer
from kvbus.parts.log.follower import LogStreamReader
from kvbus.parts.log.record import RANDOM_BITS, Kind, Stream
from tests.doubles.payloads import payload, removed, store
from tests.doubles.router import PlainSetRouter, events_of, unpack_rank
from tests.log.records import clear, gone, lease, record, state

KEY = Stream("eu", "m", "pod-a/engine", 0).key
TURN = 1 << RANDOM_BITS


class Writer:
    """A simulated writer of the log, with its true blocks and the records that it has appended.

    The position of a record is its index in ``log``. If retention deletes a record, None takes its place.
    """

    def __init__(self) -> None:
        self.log: list[bytes | None] = []
        self.pointer = Pointer(1)
        self.blocks = set(range(1, 7))
        self.epoch, self.seq, self._next = 0, 0, 7
        self.ended = self.damaged = False
        self.claim()

    def append(self, data: bytes) -> None:
        self.log.append(data)
        self.seq += 1

    def claim(self) -> None:
        self.epoch, self.seq, self.ended = self.epoch + TURN, 0, False
        self.pointer = Pointer(self.epoch, -1, self.pointer.position)
        self.state(resync=True)

    def change(self, stored: int, gone: int) -> None:
        new = list(range(self._next, self._next + stored))
        out = sorted(self.blocks)[:gone]
        self._next += stored
        self.blocks = (self.blocks | set(new)) - set(out)
        events = [*(store([block]) for block in new), *([removed(out)] if out else [])]
        if events:
            self.append(record(Kind.BATCH, self.epoch, self.seq, payload=payload(*events)))

    def state(self, *, resync: bool = False) -> None:
        pieces = [sorted(self.blocks)[at : at + 2] for at in range(0, len(self.blocks), 2)] or [[]]
        begin, position = self.seq, len(self.log)
        for at, piece in enumerate(pieces):
            more = at + 1 < len(pieces)
            if at:
                self.append(state(self.epoch, self.seq, *piece, more=more))
            else:
                self.append(clear(self.epoch, self.seq, *piece, more=more, resync=resync))
        self.pointer = Pointer(self.epoch, begin, position)

    def lose(self) -> None:
        """Change the blocks without a record, as if the writer's queue had been full, and then append a state."""
        self.blocks = set(sorted(self.blocks)[1:]) | {self._next}
        self._next += 1
        self.state(resync=True)

    def end(self) -> None:
        self.append(gone(self.epoch, self.seq))
        self.blocks, self.ended = set(), True

    def damage(self, back: int) -> None:
        """Flip a bit of an old record.

        The writer does not notice it, so only its next regular state repairs the damage.
        """
        data = self.log[-back] if back <= len(self.log) else None
        if data is not None:
            self.log[-back] = data[:-1] + bytes([data[-1] ^ 1])
            self.damaged = True

    def retain(self, keep: int) -> None:
        for at in range(max(0, min(len(self.log) - keep, self.pointer.position))):
            self.log[at] = None


class Aggregator:
    def __init__(self, writer: Writer, said: dict[int, frozenset[str]], profile: str) -> None:
        self._writer, self._said = writer, said
        spec = SourceSpec("pod-a", 0, replay=False, clears="all", numbered=True)
        self.relay = Relay([spec], [OutputSpec("out", PROFILES[profile], [b"kv@a"], by_topic=True, numbered=True)])
        self.relayed = LogStreamReader(KEY, writer.pointer)
        self.relayed.slot = 0
        self.connections: list[Connection] = []
        self.newest = -1

    def read(self, count: int) -> None:
        for _ in range(count):
            at = self.relayed.position
            if at >= len(self._writer.log):
                return
            data = self._writer.log[at]
            if data is None:
                self.relayed.position += 1
                continue
            self.handle(self.relayed.take(data, at, 0.0))
            self.relayed.pointer = self._writer.pointer
            if self.relayed.misses_state:
                self.relayed.begin_again()

    def give_up(self) -> None:
        self.read(len(self._writer.log))
        if not self.relayed.ended and self.relayed.follower.epoch:
            self.handle(self.relayed.give_up())

    def handle(self, event: Any) -> None:
        for command in () if event is None else self.relay.handle(event, 0.0):
            if isinstance(command, Publish):
                assert command.seq > self.newest, "a number went back"
                self.newest = command.seq
                for each in self.connections:
                    if not each.waiting:
                        each.queue.append((command.seq, command.payload))
            elif isinstance(command, SendState):
                for each in self.connections:
                    if each.waiting:
                        for found in command.transfer.batches():
                            assert found is not None
                            each.queue.append(found)
                        each.waiting = False

    def compare(self) -> None:
        """Check that each seq has the same events as at the other aggregator of the log."""
        for seq, batch in self._kept():
            said = frozenset(map(repr, events_of(batch)))
            if said:
                assert self._said.setdefault(seq, said) == said, "two batches under one number"

    def _kept(self) -> list[tuple[int, bytes]]:
        stream = self.relay.outputs[0].streams[0]
        return [(entry.seq, entry.payload) for entry in stream.journal.entries()]

    def serve(self) -> None:
        self.compare()
        if any(each.waiting for each in self.connections):
            self.handle(Subscribed(0, 0, (1,)))


class Connection:
    def __init__(self) -> None:
        self.waiting = True
        self.queue: deque[tuple[int, bytes]] = deque()


class Router:
    """A router of one of three kinds, which differ in how they handle a seq that is not the next one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.view = PlainSetRouter()
        self.last = -1
        self.at: Aggregator | None = None
        self.connection = Connection()

    def go_to(self, aggregator: Aggregator) -> None:
        if self.at is not None and self.connection in self.at.connections:
            self.at.connections.remove(self.connection)
        self.at, self.connection = aggregator, Connection()
        aggregator.connections.append(self.connection)

    def take(self, count: int) -> None:
        for _ in range(min(count, len(self.connection.queue))):
            self._take(*self.connection.queue.popleft())

    def _take(self, seq: int, batch: bytes) -> None:
        if self.kind == "drops" and seq <= self.last:
            return
        if self.kind == "restarts" and seq < self.last:
            self.view.blocks.clear()
        self.view.take(seq, batch)
        self.last = seq

    @property
    def blocks(self) -> set[Any]:
        return {block for *_, block in self.view.blocks}


STEPS = st.one_of(
    st.tuples(st.just("change"), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("change"), st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.just("state")),
    st.tuples(st.sampled_from(["lose", "claim", "lease", "silence", "end"])),
    st.tuples(st.just("retain"), st.integers(0, 4)),
    st.tuples(st.just("damage"), st.integers(1, 6)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(1, 30)),
    st.tuples(st.just("begin"), st.integers(0, 1)),
    st.tuples(st.just("go"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("serve"), st.integers(0, 1)),
    st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 6)),
)


class World:
    def __init__(self, profile: str) -> None:
        self.profile = profile
        self.writer = Writer()
        self.said: dict[int, frozenset[str]] = {}
        self.aggregators = [self._aggregator(), self._aggregator()]
        self.routers = [Router(kind) for kind in ("drops", "applies", "restarts")]
        for number, router in enumerate(self.routers):
            router.go_to(self.aggregators[number % 2])

    def _aggregator(self) -> Aggregator:
        return Aggregator(self.writer, self.said, self.profile)

    def step(self, what: str, *args: int) -> None:
        writer = self.writer
        if what in ("read", "begin", "serve"):
            at, *rest = args
            if what == "begin":
                gone, self.aggregators[at] = self.aggregators[at], self._aggregator()
                for router in self.routers:
                    if router.at is gone:
                        router.go_to(self.aggregators[at])
            else:
                getattr(self.aggregators[at], what)(*rest)
        elif what == "go":
            self.routers[args[0]].go_to(self.aggregators[args[1]])
        elif what == "take":
            self.routers[args[0]].take(args[1])
        elif what in ("retain", "damage"):
            getattr(writer, what)(args[0])
        elif what == "claim" or writer.ended:
            writer.claim()
        elif what == "lease":
            writer.append(lease(writer.epoch, writer.seq))
        elif what == "silence":
            for aggregator in self.aggregators[: len(writer.log) % 3]:
                aggregator.give_up()  # the other aggregators have not given up yet
            if len(writer.log) % 2:  # the writer was only late, and notices that it was given up
                writer.state()
            else:
                writer.change(1, 0)
            writer.claim()
        else:
            getattr(writer, what)(*args)

    def settle(self) -> None:
        if self.writer.damaged and not self.writer.ended:
            self.writer.state()
        for aggregator in self.aggregators:
            aggregator.read(len(self.writer.log))
            if self.writer.damaged and self.writer.ended:  # the damaged record may be the end of the stream
                aggregator.give_up()
            aggregator.serve()
        for router in self.routers:
            router.take(1 << 30)


@settings(max_examples=200)
@given(profile=st.sampled_from(["vllm", "dynamo"]), steps=st.lists(STEPS, min_size=12, max_size=40))
def test_a_router_at_either_aggregator_has_the_blocks_of_the_engine(
    profile: str, steps: list[tuple[str, *tuple[int, ...]]]
) -> None:
    world = World(profile)
    for what, *args in steps:
        world.step(what, *args)
    world.settle()
    for router in world.routers:
        assert router.blocks == world.writer.blocks, router.kind


def test_an_aggregator_sends_the_seqs_of_the_records() -> None:
    world = World("vllm")
    world.writer.change(2, 0)
    world.settle()
    assert world.aggregators[0].newest == 1 << EPOCH_BITS | 3
    world.aggregators[0].give_up()
    assert world.aggregators[0].newest == 1 << EPOCH_BITS | LAST
    world.writer.claim()
    world.settle()
    assert [each.newest for each in world.aggregators] == [2 << EPOCH_BITS | 3] * 2


def published(relay: Relay, event: Any) -> list[tuple[int, int, list[str]]]:
    """Return the batches that a router gets for one event of the relay.

    Each entry has the seq, the number of events, and the types of the events.
    """
    commands = [each for each in relay.handle(event, 0.0) if isinstance(each, Publish)]
    return [(each.seq, each.events, [found["type"] for found in events_of(each.payload)]) for each in commands]


def relay_of(**keys: Any) -> Relay:
    spec = SourceSpec("pod-a", 0, replay=False, clears="all", numbered=True)
    return Relay([spec], [OutputSpec("out", PROFILES["vllm"], [b"kv@a"], by_topic=True, numbered=True, **keys)])


def test_an_unreadable_record_is_counted_and_its_seq_gets_an_empty_batch() -> None:
    relay = relay_of()
    assert published(relay, RecordReceived(0, 7, b"\xc1", begins=True, ends=True)) == [(7, 0, [])]
    assert relay.sources[0].stats.rejected == {"not_msgpack": 1}


def test_a_source_whose_stream_ended_comes_back_with_its_state() -> None:
    relay = relay_of()
    state = RecordReceived(0, 7, payload({"type": "AllBlocksCleared"}, store([1])), begins=True, ends=True)
    said = (7, 2, ["AllBlocksCleared", "BlockStored"])
    assert published(relay, state) == [said]
    assert published(relay, RecordReceived(0, 8, begins=True, ends=True)) == [(8, 1, ["AllBlocksCleared"])]
    spec = relay.sources[0].spec
    assert published(relay, SourceRemoved(0)) == []
    relay.handle(SourcePlaced(0, spec, [NewStream(b"kv@a")]), 0.0)
    assert published(relay, state) == [said]
    assert (relay.sources[0].state.value, len(relay.sources[0].normalizer.index)) == ("live", 1)


def test_an_aggregator_uses_a_seq_only_for_a_record() -> None:
    """An aggregator publishes batches only for records of the log.

    Otherwise two aggregators would publish different batches with the same seq.
    """
    relay = relay_of(heartbeat=1.0, journal_bytes=1, max_batch_blocks=1)
    spec = relay.sources[0].spec
    state = payload({"type": "AllBlocksCleared"}, *(store([block]) for block in range(1, 5)))
    assert len(published(relay, RecordReceived(0, 7, state, begins=True, ends=True))) == 1
    assert len(published(relay, RecordReceived(0, 8, payload(store([5]))))) == 1
    (command,) = relay.handle(ReplayAsked(0, 0, [b"id", b"", (7).to_bytes(8, "big")]), 0.0)
    assert isinstance(command, AnswerReplay)
    # the configuration allows no replay with such seqs
    with pytest.raises(AssertionError, match="repeats the records of a log"):
        list(command.answer.messages())
    events: list[RelayEvent] = [
        Started(1.0),
        Tick(1000.0),
        Subscribed(0, 0, (1,)),
        SourceDown(0),
        LogReached(0, reached=False),
        Tick(2000.0),
        SourceRemoved(0),
        SourcePlaced(0, spec, [NewStream(b"kv@a")]),
    ]
    for at, event in enumerate(events):
        commands = relay.handle(event, 1000.0 * at)
        assert not [each for each in commands if isinstance(each, Publish)], event
    assert relay.outputs[0].streams[0].next_seq == 9


def test_a_source_does_not_expire_after_its_log_is_read_again() -> None:
    relay = relay_of()
    record = RecordReceived(0, 7, payload({"type": "AllBlocksCleared"}, store([1])), begins=True, ends=True)
    events: list[RelayEvent] = [record, SourceDown(0), LogReached(0, reached=True), record]
    for now, event in enumerate(events):
        relay.handle(event, float(now))
    assert relay.handle(Tick(0.0), 1000.0) == []
    assert (relay.sources[0].state.value, relay.sources[0].expired) == ("live", False)


def test_an_expired_source_has_its_blocks_again_after_its_log_is_read() -> None:
    relay = relay_of()
    record = RecordReceived(0, 7, payload({"type": "AllBlocksCleared"}, store([1])), begins=True, ends=True)
    relay.handle(record, 0.0)
    relay.handle(SourceDown(0), 1.0)
    relay.handle(Tick(0.0), 1000.0)
    assert (relay.sources[0].state.value, relay.sources[0].expired) == ("lost", True)
    relay.handle(LogReached(0, reached=True), 1001.0)
    relay.handle(RecordReceived(0, 8, payload(store([2]))), 1001.0)
    assert (relay.sources[0].state.value, relay.sources[0].expired) == ("live", False)


def test_outgoing_batches_have_the_rank_of_the_newest_records() -> None:
    """All batches of an aggregator have the rank that the newest records name.

    The key of a stream may name another rank: kvbus makes the key before the engine's batches name their rank.
    """
    relay = relay_of()
    spec = relay.sources[0].spec

    def ranks(*events: Any) -> set[int]:
        commands = [each for event in events for each in relay.handle(event, 0.0)]
        return {unpack_rank(each.payload) for each in commands if isinstance(each, Publish)}

    def state(rank: int, seq: int) -> RecordReceived:
        batch = payload({"type": "AllBlocksCleared"}, store([1]), rank=rank)
        return RecordReceived(0, seq, batch, begins=True, ends=True)

    placed, lease = SourcePlaced(0, spec, [NewStream(b"kv@a")]), RecordReceived(0, 8, known=True)
    assert ranks(state(3, 7), lease) == {3}
    assert ranks(RecordReceived(0, LAST, begins=True, ends=True)) == {3}
    relay.handle(SourceRemoved(0), 0.0)
    relay.handle(placed, 0.0)
    relay.handle(SourceRemoved(0), 0.0)  # no record of the stream was read
    assert ranks(placed, RecordReceived(0, LAST, begins=True, ends=True)) == {3}
    relay.handle(SourceRemoved(0), 0.0)
    assert ranks(placed, state(5, 7), lease, state(6, 9)) == {5, 6}
    assert relay.sources[0].stats.filtered["other_rank"] == 0
    renamed = SourcePlaced(0, spec, [NewStream(b"kv@b")])
    assert ranks(renamed, RecordReceived(0, LAST, begins=True, ends=True)) == {0}, "nobody has said anything"


def test_blocks_stay_while_the_log_is_unreachable_and_no_seq_is_used() -> None:
    relay = relay_of(heartbeat=1.0)
    relay.handle(RecordReceived(0, 7, payload({"type": "AllBlocksCleared"}, store([1])), begins=True, ends=True), 0.0)
    assert relay.handle(LogReached(0, reached=False), 1.0) == []
    assert relay.sources[0].state.value == "connecting"
    assert relay.handle(Tick(0.0), 1000.0) == []
    relay.handle(LogReached(0, reached=True), 1000.0)
    assert relay.sources[0].state.value == "syncing"
    assert published(relay, RecordReceived(0, 8, known=True)) == [(8, 0, [])]
    assert relay.sources[0].state.value == "live"


def test_a_state_that_outgrows_the_journal_is_not_sent() -> None:
    relay = relay_of(journal_bytes=1000)
    stream = relay.outputs[0].streams[0]
    state = payload({"type": "AllBlocksCleared"}, store([1]))
    batches = [payload(store([block])) for block in range(2, 50)]

    def asked() -> list[Any]:
        return [each for each in relay.handle(Subscribed(0, 0, (1,)), 0.0) if isinstance(each, SendState)]

    assert published(relay, RecordReceived(0, 7, state, begins=True, ends=True))[0][1] == 2
    assert len(asked()) == 1
    for seq, each in enumerate(batches, 8):
        assert published(relay, RecordReceived(0, seq, each)) == [(seq, 1, ["BlockStored"])]
        assert stream.journal.bytes <= 1000
    assert (stream.outgrown, asked()) == (1, [])
    for at, part in enumerate((state, *batches)):  # this state has no room either
        begins, ends = at == 0, at == len(batches)
        event = RecordReceived(0, 56 + at, part, begins=begins, more=not ends, ends=ends, known=True)
        assert published(relay, event) == [(56 + at, 0, [])]
    assert (stream.outgrown, asked()) == (1, [])
    assert published(relay, RecordReceived(0, 105, state, begins=True, ends=True, known=True)) == [(105, 0, [])]
    (sent,) = asked()
    assert next(sent.transfer.batches()) == (105, state)


def test_an_output_that_hides_a_source_sends_no_batch_of_it() -> None:
    assert published(relay_of(hidden=frozenset({0})), RecordReceived(0, 7, begins=True, ends=True)) == []


def test_a_log_reader_searches_once_for_a_skipped_state() -> None:
    log = [
        clear(TURN, 0, 1),
        clear(2 * TURN, 0, 5),
        *(record(Kind.BATCH, 2 * TURN, seq, payload=payload(store([5 + seq]))) for seq in (1, 2)),
    ]
    for state_of, whole in ((log[1], True), (log[1][:-1] + b"!", False)):
        relayed = LogStreamReader(KEY, Pointer(TURN, 0, 0))
        relayed.slot = 0
        assert relayed.take(log[0], 0, 0.0) is not None
        relayed.pointer = Pointer(2 * TURN, 0, 1)
        assert relayed.take(log[3], 3, 0.0) is None, "nothing can be said of it"
        assert relayed.misses_state
        relayed.begin_again()
        told = [relayed.take(data, 1 + at, 0.0) for at, data in enumerate([state_of, *log[2:]])]
        assert [event is not None for event in told] == [whole] * 3
        assert not relayed.misses_state
