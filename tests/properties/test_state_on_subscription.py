"""State on subscription: every router that is connected ends exact, whether it asks, checks numbers, or does neither.

The relay is real; connections, routers and replays are pulled step by step in an order that Hypothesis draws. A cut
falls anywhere, also between two batches of a state. The families are those of docs/INTEROP.md: a router that applies
what comes (AIBrix, a bound llm-d), one that drops what it has seen and asks for what it misses (Dynamo's indexer, SMG,
the vLLM router), and one that asks from 0 whenever it connects (llm-d with replay).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.core.commands import AnswerReplay, Publish, SendState
from kvbus.core.events import BatchReceived, ReplayAsked, SourceUp, Subscribed, Tick
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.outputs.state_transfer import Reading
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import Profile, Wire
from tests.doubles.answers import reading
from tests.doubles.payloads import batch, unpack
from tests.doubles.router import RankedRouter
from tests.long import LONG
from tests.properties.test_compaction import keys_of
from tests.properties.test_normalize import EVENTS, Model, Naming, named, play

SLICE = 2
"""Blocks of one batch here, so that a state takes several."""


class Connection:
    """What a router's socket holds: batches not read yet, and a transfer whose batches come before them."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.waiting = True
        self.reader: Reading | None = None
        self.live: deque[tuple[int, bytes]] = deque()

    def next(self) -> tuple[int, bytes] | None:
        reader = self.reader
        while reader is not None and not reader.done:
            found = reader.next_batch()
            if found is not None:
                return found
        return self.live.popleft() if self.live else None


class Router:
    """Applies whatever comes, in the order it comes: by rank a plain set, and a count of references."""

    asks = False

    def __init__(self) -> None:
        self.views = RankedRouter()
        self.counts: Counter[Any] = Counter()
        self.connection: Connection | None = None

    def connect(self, stage: Stage) -> None:
        self.connection = stage.connect()

    def take(self, stage: Stage) -> bool:
        """Read one message; False if there is none."""
        if self.connection is None:
            return False
        message = self.connection.next()
        if message is None:
            return False
        self.receive(stage, *message)
        return True

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        del stage, seq
        self.apply(payload)

    def apply(self, payload: bytes) -> None:
        self.views.take(payload)
        _, events, rank = unpack(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.counts = Counter({key: n for key, n in self.counts.items() if key[0] != rank})
                continue
            for key in keys_of(event, rank):
                self.counts[key] += 1 if event["type"] == "BlockStored" else -1

    def holds(self, expected: set[Any]) -> None:
        assert self.views.blocks == expected
        assert {key: n for key, n in self.counts.items() if n} == dict.fromkeys(expected, 1)


class Checking(Router):
    """Drops what it has seen. Where numbers are missing it asks for them, and takes what it gets."""

    asks = True

    def __init__(self) -> None:
        super().__init__()
        self.next = 0
        self.cut_after = -1
        """Messages of the next answer until its connection breaks; -1: it does not."""

    def receive(self, stage: Stage, seq: int, payload: bytes) -> None:
        if seq > self.next:
            self.replay(stage)
        if seq >= self.next:
            self.apply(payload)
            self.next = seq + 1

    def replay(self, stage: Stage) -> None:
        for seq, payload in stage.replay(self.next):
            if self.cut_after == 0:
                self.cut_after = -1
                self.connection = None
                return
            self.cut_after -= self.cut_after > 0
            if seq >= self.next:
                self.apply(payload)
                self.next = seq + 1


class FromZero(Checking):
    """Forgets its numbers when it starts, asks from 0 when it connects first and from where it is later."""

    def connect(self, stage: Stage) -> None:
        super().connect(stage)
        self.replay(stage)


FAMILIES = [Router, Checking, FromZero]


class Stage:
    """Engines, a relay whose output sends the state on subscription, and the shell's part of a transfer."""

    def __init__(self, sources: int, journal: int, *, filled: bool) -> None:
        self.relay = Relay(
            [SourceSpec(f"e{i}", 0, Settings(replay=False, probe_interval=0.0), Rules()) for i in range(sources)],
            [
                OutputSpec(
                    "out",
                    Profile(Wire(), "4", filled),
                    [None],
                    merged=sources > 1,
                    heartbeat=0.0,
                    journal_batches=journal,
                )
            ],
        )
        self.models = [Model() for _ in range(sources)]
        self.naming = Naming("unsigned")
        self.said = [0] * sources
        self.connections: dict[int, Connection] = {}
        self.names = 0
        for i in range(sources):
            self.handle(SourceUp(i))

    def handle(self, event: Any) -> Any:
        return self.carry_out(self.relay.handle(event, 0.0))

    def pull(self, event: Any) -> list[Any]:
        *others, part = self.relay.handle(event, 0.0)
        self.carry_out(others)
        return [part]

    def carry_out(self, commands: list[Any]) -> Any:
        answer = None
        for command in commands:
            if isinstance(command, Publish):
                for connection in self.connections.values():
                    reader = connection.reader
                    if not connection.waiting and (reader is None or command.seq >= reader.transfer.end_seq):
                        connection.live.append((command.seq, command.payload))
            elif isinstance(command, SendState):
                for name in command.routers:
                    connection = self.connections[name]
                    connection.live.clear()
                    connection.waiting, connection.reader = False, command.transfer.reader()
            elif isinstance(command, AnswerReplay):
                answer = reading(self.pull, command)
        return answer

    def connect(self) -> Connection:
        self.names += 1
        connection = self.connections[self.names] = Connection(self.names)
        return connection

    def send_states(self) -> None:
        """One transfer for all who wait."""
        waiting = tuple(name for name, connection in self.connections.items() if connection.waiting)
        if waiting:
            self.handle(Subscribed(0, 0, waiting))

    def lose(self, connection: Connection) -> None:
        """Batches for this router were dropped: it gets the state again."""
        connection.live.clear()
        connection.waiting, connection.reader = True, None

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        answer = self.handle(ReplayAsked(0, 0, [b"id", b"", start.to_bytes(8, "big")]))
        found = []
        while (message := answer.next_message()) is not None:
            if message and message[-2] != END_SEQ:
                found.append((int.from_bytes(message[-2], "big"), message[-1]))
        return found

    def say(self, source: int, wanted: Any) -> None:
        i = source % len(self.models)
        (events,) = play(self.models[i], self.naming, [wanted])
        self.said[i] += 1
        self.handle(BatchReceived(i, batch(self.said[i], *events)))

    @property
    def truth(self) -> set[Any]:
        return {(i, *key) for i, model in enumerate(self.models) for key in named(model, self.naming)}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.lists(EVENTS, max_size=6)),
        st.tuples(st.sampled_from(["connect", "cut", "lose", "restart"]), st.integers(0, 2), st.none()),
        st.tuples(st.sampled_from(["take", "break"]), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.sampled_from(["send", "beat"]), st.just(0), st.none()),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=400)
@given(STEPS, st.integers(1, 3), st.sampled_from([1, 3, 10_000]), st.booleans(), st.permutations(FAMILIES))
def test_whoever_is_connected_in_the_end_is_exact(
    steps: Any, sources: int, journal: int, filled: bool, families: list[type[Router]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbus.core.blocks.compaction.BLOCKS_PER_BATCH", SLICE)
        patch.setattr("kvbus.core.blocks.compaction.MOST_BLOCKS", SLICE)
        stage = Stage(sources, journal, filled=filled)
        routers = [family() for family in families]
        for what, which, more in steps:
            router = routers[which]
            if what == "say":
                stage.say(which, more)
            elif what == "send":
                stage.send_states()
            elif what == "beat":
                stage.handle(Tick(0.0))
            elif what == "connect" and router.connection is None:
                router.connect(stage)
            elif what == "break" and isinstance(router, Checking):
                router.cut_after = more
            elif what == "restart":
                drop(stage, router)
                routers[which] = type(router)()
            elif what == "cut":
                drop(stage, router)
            elif what == "lose" and router.connection is not None:
                stage.lose(router.connection)
            elif what == "take":
                for _ in range(more):
                    router.take(stage)
        for router in routers:
            if isinstance(router, Checking):
                router.cut_after = -1
            while router.connection is None:
                router.connect(stage)
        stage.send_states()
        stage.say(0, [("store", None, "GPU", [1])])
        for router in routers:
            while router.take(stage):
                pass
            router.holds(stage.truth)


def drop(stage: Stage, router: Router) -> None:
    if router.connection is not None:
        stage.connections.pop(router.connection.name, None)
    router.connection = None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("journal", [1, 4, 10_000])
def test_a_router_stopped_after_any_batch_and_connected_again_at_any_later_one(
    monkeypatch: pytest.MonkeyPatch, family: type[Router], journal: int, filled: bool
) -> None:
    monkeypatch.setattr("kvbus.core.blocks.compaction.MOST_BLOCKS", SLICE)
    monkeypatch.setattr("kvbus.core.blocks.compaction.BLOCKS_PER_BATCH", SLICE)
    length = 14 if LONG else 9
    for stopped in range(length):
        for again in range(stopped, length):
            for cut in range(5):
                stage = Stage(1, journal, filled=filled)
                router = family()
                router.connect(stage)
                stage.send_states()
                for at in range(length):
                    if at == stopped:
                        while router.take(stage):
                            pass
                        drop(stage, router)
                    if at == again:  # the first connection breaks in the middle of the state
                        router.connect(stage)
                        stage.send_states()
                        for _ in range(cut):
                            router.take(stage)
                        drop(stage, router)
                        router.connect(stage)
                        stage.send_states()
                    stage.say(0, [("store", None, "GPU", [at]), ("remove", None, "GPU", [at - 8])])
                while router.take(stage):
                    pass
                router.holds(stage.truth)


def test_everybody_else_gets_empty_batches_and_no_replay_is_asked() -> None:
    stage = Stage(1, 100, filled=False)
    there = Checking()
    there.connect(stage)
    stage.send_states()
    for node in range(6):
        stage.say(0, [("store", None, "GPU", [node])])
    while there.take(stage):
        pass
    before = there.next
    late = Checking()
    late.connect(stage)
    stage.send_states()
    assert there.connection is not None
    assert [unpack(payload)[1] for _, payload in there.connection.live] == [[]]
    assert [seq for seq, _ in there.connection.live] == [before]
    late.take(stage)
    late.holds(stage.truth)


def test_the_first_transfer_does_not_begin_at_0() -> None:
    """A batch 0 that begins with AllBlocksCleared would be taken for SGLang's."""
    stage = Stage(1, 100, filled=False)
    router = Router()
    router.connect(stage)
    stage.send_states()
    assert router.connection is not None
    assert router.connection.reader is not None
    assert router.connection.reader.transfer.first_seq == 1
