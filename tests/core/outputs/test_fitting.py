"""Tests that a complete relay changes a batch as the routers of each profile need it."""

from typing import Any

import msgspec
import pytest

from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, SourceUp, Subscribed
from kvbus.core.outputs.fitting import halves, runs_of
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.payloads import batch, cleared, removed, store, unpack
from tests.doubles.router import events_of


class Bus:
    """A relay with one output that has the given profile."""

    def __init__(self, profile: str, sources: int = 1, *, topics: Any = (), merged: bool = True) -> None:
        specs = [SourceSpec(f"e{i}", i, replay=False, probe_interval=0.0) for i in range(sources)]
        output = OutputSpec("out", PROFILES[profile], topics or [None], merged=merged, heartbeat=0.0)
        self.relay = Relay(specs, [output])
        self.seqs = [0] * sources
        for i in range(sources):
            self.relay.handle(SourceUp(i), 0.0)

    def say(self, i: int, *events: Any) -> list[bytes]:
        self.seqs[i] += 1
        commands = self.relay.handle(BatchReceived(i, batch(self.seqs[i], *events)), 0.0)
        return [command.payload for command in commands if isinstance(command, Publish)]

    def state(self, stream: int = 0) -> list[bytes]:
        command = self.relay.handle(Subscribed(0, stream, (1,)), 0.0)[-1]
        assert isinstance(command, SendState)
        return [batch[1] for batch in command.transfer.batches() if batch is not None]


def blocks(payloads: list[bytes]) -> list[Any]:
    return [
        (event["type"], event["block_hashes"])
        for payload in payloads
        for event in events_of(payload)
        if event["type"] != "AllBlocksCleared"
    ]


def test_a_batch_with_too_many_events_for_the_vllm_router_is_split() -> None:
    bus = Bus("vllm-router")
    stores = [store([at], tokens=[at], block_size=1) for at in range(1, 5000)]
    assert len(bus.say(0, store([9999], tokens=[1], block_size=1))) == 1
    got = bus.say(0, *stores)
    assert len(got) > 1
    assert all(len(events_of(payload)) <= 4096 for payload in got)
    assert blocks(got) == [("BlockStored", [at]) for at in range(1, 5000)]


@pytest.mark.parametrize("blocks_an_event", [1, 400])
def test_a_batch_with_too_many_bytes_for_smg_is_split(blocks_an_event: int) -> None:
    bus = Bus("smg")
    size, wide = 1000, 2**31
    hashes = list(range(1, 1201))
    events = [
        store(some, some[0] - 1 or None, tokens=[wide] * size * len(some), block_size=size)
        for some in (hashes[at : at + blocks_an_event] for at in range(0, len(hashes), blocks_an_event))
    ]
    got = bus.say(0, *events)
    assert len(got) > 1
    assert all(len(payload) <= 4 * 1024 * 1024 for payload in got)
    assert [block for _, some in blocks(got) for block in some] == hashes
    parents = [event["parent_block_hash"] for payload in got for event in events_of(payload)]
    assert parents == [some[0] - 1 or None for _, some in blocks(got)]


def test_a_batch_of_a_single_large_block_is_not_split() -> None:
    event = store([1], tokens=[2**31] * 10, block_size=10)
    assert halves([event]) == [[event]]
    assert [len(part) for part in halves([event, event, event])] == [1, 2]


def test_llm_d_gets_a_group_kind_in_batches_without_other_changes() -> None:
    bus = Bus("llm-d")
    for at in range(1, 5):
        (payload,) = bus.say(0, store([at], at - 1 or None, group=0, lora_id=None, lora_name=None))
        assert events_of(payload)[0]["kv_cache_spec_kind"] == "full_attention"


def test_mooncake_gets_one_group_and_other_groups_are_counted() -> None:
    bus = Bus("mooncake")
    bus.say(0, store([1], group=1))
    got = bus.say(0, store([2], 1, group=1), store([1], group=2), removed([1], group=1))
    assert blocks(got) == [("BlockStored", [2]), ("BlockRemoved", [1])]
    assert bus.say(0, store([2], 1, group=2)) == []
    assert blocks(bus.state()) == [("BlockStored", [2])]
    assert all("group_idx" not in event for payload in [*got, *bus.state()] for event in events_of(payload))
    assert bus.relay.outputs[0].stats.other_group == 2


def test_aibrix_gets_a_shared_block_once() -> None:
    bus = Bus("aibrix", 2)
    bus.say(0, store([1, 2, 3]))
    assert blocks(bus.say(1, store([1, 2, 3]), store([4], 3))) == [("BlockStored", [4])]
    assert bus.say(0, removed([3])) == []
    assert blocks(bus.say(0, removed([2]), store([5], 1))) == [("BlockStored", [5])]
    assert blocks(bus.say(0, cleared())) == [("BlockRemoved", [5])]
    state = bus.state()
    assert blocks(state) == [("BlockStored", [block]) for block in (1, 2, 3, 4)]
    assert [event["type"] for event in events_of(state[0])] == ["AllBlocksCleared"]


@pytest.mark.parametrize("profile", [name for name, each in PROFILES.items() if each.one_copy])
def test_a_rank_without_tokens_does_not_suppress_the_block_of_another_rank(profile: str) -> None:
    bus = Bus(profile, 2)
    bus.say(0, store([7], tokens=[], medium="CPU"))
    assert blocks(bus.say(1, store([7], medium="CPU"))) == [("BlockStored", [7])]
    assert blocks(bus.state()) == [("BlockStored", [7])]
    assert blocks(bus.say(1, removed([7], medium="CPU"))) == [("BlockRemoved", [7])]


def test_kthena_gets_the_first_group_of_each_rank() -> None:
    bus = Bus("kthena", 2)
    bus.say(0, store([1], group=0), store([5], group=1))
    assert blocks(bus.say(1, store([5], group=1), store([1], group=1))) == [("BlockStored", [5])]
    assert bus.say(0, removed([1], group=0)) == []
    assert blocks(bus.say(1, removed([1, 5], group=1))) == [("BlockRemoved", [1, 5])]


def test_aibrix_gets_removals_in_addition_to_a_clear() -> None:
    """AIBrix 0.7.0 ignores AllBlocksCleared, so kvbus also sends removals."""
    bus = Bus("aibrix")
    bus.say(0, store([1, 2]), store([7]))
    assert blocks(bus.say(0, cleared())) == [("BlockRemoved", [7, 2, 1])]


def test_a_clear_of_one_pod_does_not_clear_another_pod() -> None:
    bus = Bus("llm-d", 2, topics=[b"kv@a@m", b"kv@b@m"], merged=False)
    bus.say(0, store([1]))
    bus.say(1, store([1]))
    (payload,) = bus.say(0, cleared())
    assert [event["type"] for event in unpack(payload)[1]] == ["AllBlocksCleared"]
    assert events_of(bus.state(1)[0])[0]["type"] == "AllBlocksCleared"


def test_runs_of_returns_the_ranges_of_true_values() -> None:
    assert list(runs_of([True, True, False, True])) == [(0, 2), (3, 4)]
    assert list(runs_of([False])) == []


@pytest.mark.parametrize(("profile", "ranks"), [("smg", {0}), ("llm-d", {0, 1})])
def test_a_merged_stream_for_smg_has_only_rank_0(profile: str, ranks: set[int]) -> None:
    bus = Bus(profile, 2, topics=[b"kv@a@m"])
    live = [*bus.say(0, store([1, 2])), *bus.say(1, store([3], 1))]
    for payloads in (live, bus.state()):
        assert {msgspec.msgpack.decode(payload)[2] for payload in payloads} == ranks
