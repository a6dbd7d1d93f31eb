"""Tests for routers that clear all ranks of a pod when one rank is cleared.

They must still hold the blocks of all ranks.

Engines restart, lose batches, disconnect and come back. Routers join late, are disconnected and miss batches of a
merged stream. `Views` has a model of each kind of router that reads this stream. One release of llm-d counts stores and
removals without ranks. Others keep one set for each rank, and clear all sets, or only the set of the event's rank.
AIBrix keeps one plain set. Its version that ignores clears is correct only while it has missed no batch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, SourceDown, SourceUp, Subscribed
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.types import medium_key
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.payloads import batch, cleared, removed, store, unpack
from tests.doubles.router import events_of, unpack_rank
from tests.doubles.stage import Checking, FromZero, Trusting, cut_states
from tests.properties.test_normalize import EVENTS, Model
from tests.properties.test_state_on_subscription import SLICE, Modelled, specs

TIMEOUT = 30.0


class Views:
    """The blocks that each kind of reader holds after the same batches."""

    def __init__(self) -> None:
        self.counted: Counter[Any] = Counter()
        self.sets_of_all: set[Any] = set()
        self.sets_of_rank: set[Any] = set()
        self.plain: set[Any] = set()
        self.never_cleared: set[Any] = set()

    def apply(self, payload: bytes) -> None:
        rank = unpack_rank(payload)
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                self.counted.clear()
                self.sets_of_all.clear()
                self.plain.clear()
                self.sets_of_rank = {key for key in self.sets_of_rank if key[0] != rank}
                continue
            stores = event["type"] == "BlockStored"
            for block in event["block_hashes"]:
                key = (event.get("group_idx"), medium_key(event.get("medium")), block)
                self.counted[key] += 1 if stores else -1
                for ranked in (self.sets_of_all, self.sets_of_rank):
                    (ranked.add if stores else ranked.discard)((rank, *key))
                for plain in (self.plain, self.never_cleared):
                    (plain.add if stores else plain.discard)(key)

    def are(self, truth: set[Any], profile: str) -> None:
        union = {key[1:] for key in truth}
        assert {key for key, count in self.counted.items() if count} == union
        if PROFILES[profile].one_copy:
            assert set(self.counted.values()) <= {0, 1}
            assert self.plain == union
        else:
            assert self.sets_of_all == truth
            assert self.sets_of_rank == truth
            assert self.counted == Counter(key[1:] for key in truth)


class OfAPod:
    """A router that keeps one set of blocks for each way in which real routers apply clears and copies
    (:class:`Views`).
    """

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.all = Views()

    def apply(self, payload: bytes) -> None:
        self.all.apply(payload)


class Takes(OfAPod, Trusting):
    """A router that applies every batch.

    It keeps one set of blocks for each way in which real routers apply clears and copies (:class:`Views`).
    """


class Checks(OfAPod, Checking):
    """A router that requests missing batches.

    It keeps one set of blocks for each way in which real routers apply clears and copies (:class:`Views`).
    """


class AsksFromZero(OfAPod, FromZero):
    """A router that requests a replay whenever it connects, the first time from 0.

    It keeps one set of blocks for each way in which real routers apply clears and copies (:class:`Views`).
    """


FAMILIES: list[Any] = [Takes, Checks, AsksFromZero]


class PodStage(Modelled):
    """The ranks of a pod on a merged stream.

    The engines have no replay, so kvbus treats each reconnection as a restart.
    """

    def __init__(self, sources: int, journal: int, profile: str) -> None:
        self.witness = Views()
        output = OutputSpec("out", PROFILES[profile], [None], merged=True, heartbeat=0.0, journal_batches=journal)
        super().__init__(specs(sources, ranked=True, source_timeout=TIMEOUT), [output])

    def published(self, command: Publish) -> None:
        self.witness.apply(command.payload)

    def restart_engine(self, source: int) -> None:
        self.models[source % len(self.models)] = Model()
        super().restart_engine(source)

    def expire(self, source: int) -> None:
        """Disconnect an engine for longer than its `source_timeout`."""
        self.handle(SourceDown(source % len(self.models)))
        self.now += TIMEOUT + 1
        self.beat()

    @property
    def truth(self) -> set[Any]:
        return {
            (i, *key[:2], block)
            for i, source in enumerate(self.relay.sources)
            if not source.expired
            for key, table in source.normalizer.index.tables.items()
            for block in table.blocks
        }


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.lists(EVENTS, max_size=6)),
        st.tuples(st.just("say"), st.integers(0, 2), st.lists(EVENTS, max_size=6)),
        st.tuples(st.sampled_from(["restart_engine", "expire", "lose_batch"]), st.integers(0, 2), st.none()),
        st.tuples(st.sampled_from(["connect", "cut", "lose", "new"]), st.integers(0, 2), st.none()),
        st.tuples(st.sampled_from(["take", "break"]), st.integers(0, 2), st.integers(0, 6)),
        st.tuples(st.just("send"), st.just(0), st.none()),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=300)
@given(
    STEPS,
    st.integers(2, 3),
    st.sampled_from([1, 3, 10_000]),
    st.sampled_from(["llm-d", "aibrix"]),
    st.permutations(FAMILIES),
)
def test_routers_of_a_pod_hold_the_blocks_of_its_ranks(
    steps: Any, sources: int, journal: int, profile: str, families: list[Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_states(patch, SLICE, SLICE)
        stage = PodStage(sources, journal, profile)
        routers = [family() for family in families]
        stage.play(routers, steps)
        stage.witness.are(stage.truth, profile)
        if PROFILES[profile].clears == "pod or nothing":
            assert stage.witness.never_cleared == {key[1:] for key in stage.truth}
        stage.connect_all(routers)
        stage.say(0, [("store", None, "GPU", [1])])
        stage.say(1, [("store", None, "CPU", [2])])
        stage.read_all(routers)
        for router in routers:
            router.all.are(stage.truth, profile)


X = [("store", None, "GPU", [1])]


def test_a_block_of_an_expired_engine_is_sent_when_another_rank_stores_it() -> None:
    stage = PodStage(2, 100, "aibrix")
    stage.say(1, X)
    stage.expire(1)
    stage.say(0, X)
    stage.witness.are(stage.truth, "aibrix")
    assert len(stage.truth) == 1


def test_a_block_size_learned_late_keeps_the_blocks_of_another_rank() -> None:
    """After kvbus has learned a block size, it announces the rank's blocks again under new hashes.

    kvbus must send removals of the old hashes, because a clear would also remove the blocks of the other rank.
    """
    stage = PodStage(2, 100, "llm-d")
    stage.handle(BatchReceived(1, batch(1, store([9], tokens=list(range(4)), block_size=4))))
    stage.handle(BatchReceived(0, batch(1, store([1], tokens=list(range(8)), block_size=8))))
    stage.handle(BatchReceived(0, batch(2, store([2], 1, tokens=list(range(8, 12)), block_size=4))))
    stage.handle(BatchReceived(0, batch(3, store([3], 2, tokens=list(range(12, 16)), block_size=4))))
    (source, _) = stage.relay.sources
    names = source.normalizer.index.announced
    assert source.stats.rebuilds == 1
    assert len(stage.witness.sets_of_all) == len(stage.witness.sets_of_rank) == names + 1
    assert stage.witness.counted[None, "GPU", 9] == 1


def per_source() -> Relay:
    relay = Relay(specs(2, ranked=True), [OutputSpec("out", PROFILES["llm-d"], [None, None], heartbeat=0.0)])
    for i in range(2):
        relay.handle(SourceUp(i), 0.0)
    return relay


def types(payloads: list[bytes]) -> list[str]:
    return [event["type"] for payload in payloads for event in unpack(payload)[1]]


class TestOneStreamPerRank:
    """Tests of an output with one stream per rank, for routers that clear all ranks together.

    The streams are separate connections, so their batches have no common order. A clear on one stream may therefore
    arrive before or after a store on another stream.
    """

    def test_a_clear_is_sent_as_removals_while_another_rank_has_blocks(self) -> None:
        relay = per_source()
        relay.handle(BatchReceived(0, batch(1, store([1]), store([2], 1))), 0.0)
        relay.handle(BatchReceived(1, batch(1, store([1]))), 0.0)
        gone = published(relay, BatchReceived(0, batch(2, cleared(), store([3]))))
        assert [(e["type"], e["block_hashes"]) for e in unpack(gone)[1]] == [
            ("BlockRemoved", [2, 1]),
            ("BlockStored", [3]),
        ]
        relay.handle(BatchReceived(1, batch(2, removed([1]))), 0.0)
        gone = published(relay, BatchReceived(0, batch(3, cleared())))
        assert types([gone]) == ["AllBlocksCleared"], "nobody else has any"

    def test_a_state_has_no_clear_while_another_rank_has_blocks(self) -> None:
        relay = per_source()
        relay.handle(BatchReceived(0, batch(1, store([1]))), 0.0)
        assert types(state_of(relay, 0)) == ["AllBlocksCleared", "BlockStored"]
        kept = relay.handle(Subscribed(0, 0, (1,)), 0.0)  # a snapshot that could be shared but must not be
        relay.handle(BatchReceived(1, batch(1, store([1]))), 0.0)
        assert types(state_of(relay, 0)) == ["BlockStored"]
        assert types(state_of(relay, 1)) == ["BlockStored"]
        assert kept

    def test_a_state_has_a_clear_again_after_the_other_ranks_are_empty(self) -> None:
        relay = per_source()
        for i in range(2):
            relay.handle(BatchReceived(i, batch(1, store([1]))), 0.0)
        kept = relay.handle(Subscribed(0, 0, (1,)), 0.0)  # its snapshot starts without a clear and must not be shared
        relay.handle(BatchReceived(1, batch(2, removed([1]))), 0.0)
        assert types(state_of(relay, 0)) == ["AllBlocksCleared", "BlockStored"]
        assert kept


def published(relay: Relay, event: BatchReceived) -> bytes:
    (command,) = relay.handle(event, 0.0)
    assert isinstance(command, Publish)
    return command.payload


def state_of(relay: Relay, stream: int) -> list[bytes]:
    command = relay.handle(Subscribed(0, stream, (1,)), 0.0)[-1]
    assert isinstance(command, SendState)
    return [batch[1] for batch in command.transfer.batches() if batch is not None]
