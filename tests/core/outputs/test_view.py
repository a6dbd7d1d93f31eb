"""Tests by example for a tenant's view, the stream of a router with limited rights.

They test which stores belong to the view, and which blocks a router of the view never gets.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.core.blocks.index import Index
from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived, SourceDown, SourcePlaced, SourceUp, Subscribed, Tick
from kvbus.core.outputs.spec import NewStream, OutputSpec, Rights
from kvbus.core.outputs.view import TenantIndex
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import NumberingStats
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.profiles import PROFILES
from tests.core.dsl import Script, ask, cancel, down, live, replay_end, replayed, tick, up
from tests.core.dsl import publish as does
from tests.core.outputs.test_fitting import Bus
from tests.doubles.payloads import batch, cleared, payload, plain_all, removed, store
from tests.doubles.router import events_of
from tests.wire import captures

A = Rights(salts=frozenset({"a"}))


def salted(salt: Any, hashes: list[Any], **more: Any) -> dict[str, Any]:
    """Return a store of a chain's first blocks. As in vLLM, the first block's extra keys contain the salt."""
    return store(hashes, extra_keys=[[salt], *[None] * (len(hashes) - 1)], **more)


class ViewBench:
    """A tenant's view to which a test passes the relay's outgoing events.

    The source's index has all blocks of these events.
    """

    def __init__(self, rights: Rights = A) -> None:
        self.stats = NumberingStats()
        self.view = TenantIndex(rights, self.stats)
        self.known = Index()

    def __call__(self, *events: Any) -> list[dict[str, Any]]:
        decoded: Any = decode_batch(payload(*events))
        for event in decoded.events:
            for block in getattr(event, "block_hashes", ()) if hasattr(event, "token_ids") else ():
                self.known.table(None, "GPU").blocks[block] = None  # type: ignore[assignment]
        kept, self.cleared = self.view.take(0, decoded.events, self.known)
        return plain_all(kept)


@pytest.mark.parametrize(
    ("keys", "takes"),
    [
        ([["a"], None], True),
        ([["b"], None], False),
        ([["picture", "a"], None], True),
        ([["a", "picture"], None], False),
        ([["a", b"embeddings"], None], True),
        ([["a", ["picture", 3]], None], True),
        ([None, ["a"]], False),
        ([[], None], False),
        (None, False),
        ("a", False),
        ([], False),
        (["a", "a"], False),
    ],
)
def test_the_salt_of_a_first_block_is_the_last_text_of_its_extra_keys(keys: Any, takes: bool) -> None:
    taken = ViewBench()
    assert bool(taken(store([1, 2], extra_keys=keys))) == takes
    assert taken.stats.not_read == (not takes)


def test_the_adapter_name_among_the_extra_keys_is_not_a_salt() -> None:
    taken = ViewBench()
    assert taken(store([1], lora_name="a", extra_keys=[["a"]])) == []
    assert taken(store([2], lora_name="a", extra_keys=[["a", "a"]])) != []


@pytest.mark.parametrize(("said", "takes"), [("a", True), ("b", False), (7, False), (["a"], False), ({"a": 1}, False)])
def test_the_cache_salt_of_a_store_overrides_its_extra_keys(said: Any, takes: bool) -> None:
    taken = ViewBench()
    assert bool(taken(store([2], 1, cache_salt=said))) == takes
    assert bool(taken(store([3], extra_keys=[["a"]], cache_salt=said))) == takes


def test_a_block_belongs_to_the_view_of_the_first_block_of_its_chain() -> None:
    taken = ViewBench()
    taken(salted("a", [1]), salted("b", [2]))
    assert taken(store([3], 1), store([4], 2)) == plain_all([store([3], 1)])
    taken(removed([1]), removed([2]))
    assert taken(store([5], 3), store([6], 4)) == plain_all([store([5], 3)])
    assert (taken.stats.not_read, taken.stats.undecided) == (3, 0)


def test_a_store_with_an_unknown_parent_is_omitted_and_counted() -> None:
    taken = ViewBench()
    assert taken(store([3], 99)) == []
    assert taken(store([4], 3)) == [], "and so is what follows it"
    assert (taken.stats.undecided, taken.stats.not_read) == (1, 1)


def test_a_view_sends_every_clear_and_lists_the_cleared_blocks() -> None:
    taken = ViewBench()
    taken(salted("a", [1]), salted("b", [2]))
    assert taken(cleared(), salted("a", [3]), cleared()) == plain_all([cleared(), salted("a", [3]), cleared()])
    assert [plain_all(removals()) for removals in taken.cleared] == [[removed([1])], [removed([3])]]


@pytest.mark.parametrize(
    ("said", "takes"),
    [
        ({"lora_name": "team-a", "lora_id": 1}, True),
        ({"lora_name": "team-b", "lora_id": 1}, False),
        ({"lora_name": None, "lora_id": 7}, True),
        ({"lora_name": None, "lora_id": 77}, False),
        ({"lora_name": "team-a\n"}, False),
        ({}, False),
    ],
)
def test_adapters_are_matched_by_name_or_else_by_id(said: dict[str, Any], takes: bool) -> None:
    assert bool(ViewBench(Rights(loras=r"team-a|7"))(store([1], **said))) == takes


def test_a_router_limited_by_adapter_and_salt_reads_blocks_that_match_both() -> None:
    taken = ViewBench(Rights(loras="x", salts=frozenset({"a"})))
    assert taken(salted("a", [1]), store([2], lora_name="x", extra_keys=[["x"]])) == []
    assert taken(store([3], lora_name="x", extra_keys=[["x", "a"]])) != []


def test_a_state_contains_unknown_fields_of_its_blocks() -> None:
    relay = views(A)
    publish(relay, salted("a", [1], unheard_of=7))
    (event,) = [event for event in state(relay) if event["type"] == "BlockStored"]
    assert event["unheard_of"] == 7


# -- in a relay --------------------------------------------------------------------------------------------------------


def views(rights: Rights, **spec: Any) -> Relay:
    """Return a relay with one engine and an output with the given rights."""
    relay = Relay(
        [SourceSpec("e", 0, replay=False, probe_interval=0.0)],
        [OutputSpec("out", PROFILES["vllm"], [None], heartbeat=0.0, rights=rights, **spec)],
    )
    relay.handle(SourceUp(0), 0.0)
    return relay


def publish(relay: Relay, *events: Any, seq: int = 0, now: float = 0.0) -> list[list[dict[str, Any]]]:
    """Apply a batch of the engine, and return the events of each batch that the first output sends."""
    commands = relay.handle(BatchReceived(0, batch(seq, *events)), now)
    return [events_of(each.payload) for each in commands if isinstance(each, Publish) and each.output == 0]


def state(relay: Relay) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    transfer: Any = relay.handle(Subscribed(0, 0, (1,)), 0.0)[-1]
    for got in transfer.transfer.batches():
        found += events_of(got[1]) if got is not None else []
    return found


def test_a_batch_without_blocks_of_the_view_uses_no_seq() -> None:
    relay = views(A)
    assert publish(relay, salted("b", [1])) == []
    assert len(publish(relay, salted("a", [2]), seq=1)) == 1
    assert relay.outputs[0].streams[0].next_seq == 1


def test_an_expired_engine_that_returns_has_its_blocks_in_the_same_views() -> None:
    """After an engine was gone, its blocks are in the same views as before.

    While the engine is gone, kvbus removes its blocks at the routers, but remembers which blocks belong to which view.
    """
    script = Script(replay=True, rights=A)
    a1, b3, a2 = salted("a", [1]), salted("b", [3]), store([2], 1)
    assert script >> up() << ask(0) >> replay_end() << cancel()
    assert script >> live(0, a1, a2, b3, removed([1])) << does(0, a1, a2, removed([1]))
    assert script >> down() >> tick(30.0) << does(1, cleared())
    assert [event["type"] for event in state(script.relay)] == ["AllBlocksCleared"]
    script >> up() << ask(0) >> replayed(0, a1, a2, b3, removed([1])) >> replayed(1, store([4], 2), store([5], 3))
    script >> replay_end()
    (sent,) = (events_of(each.payload) for each in script.whatever() if isinstance(each, Publish))
    assert [event["block_hashes"] for event in sent] == [[2], [4]]


def test_routers_that_clear_by_pod_get_removals_of_the_blocks_in_their_view() -> None:
    bus = Bus("llm-d", 2)
    bus.relay = Relay(
        [SourceSpec(f"e{i}", i, replay=False, probe_interval=0.0) for i in range(2)],
        [OutputSpec("out", PROFILES["llm-d"], [None], merged=True, heartbeat=0.0, rights=A)],
    )
    for i in range(2):
        bus.relay.handle(SourceUp(i), 0.0)
    bus.say(0, salted("a", [1]), salted("b", [2]))
    bus.say(1, salted("b", [2]))
    assert bus.say(1, cleared()) == [], "it had none of these"
    bus.say(1, salted("a", [5]))
    (got,) = bus.say(0, cleared())
    assert [(event["type"], event.get("block_hashes")) for event in events_of(got)] == [("BlockRemoved", [1])]


def test_a_hidden_source_sends_no_blocks_clears_or_heartbeats() -> None:
    relay = Relay(
        [SourceSpec(f"e{i}", i, replay=False, probe_interval=0.0) for i in range(2)],
        [OutputSpec("out", PROFILES["vllm"], [None, None], heartbeat=1.0, hidden=frozenset({1}))],
    )
    sent: list[Any] = []
    for i in range(2):
        sent += relay.handle(SourceUp(i), 0.0)
        sent += relay.handle(BatchReceived(i, batch(1, store([i + 1]))), 0.0)
        sent += relay.handle(SourceDown(i), 0.0)
    for now in (10.0, 40.0, 50.0):
        sent += relay.handle(Tick(0.0), now)
    assert {command.stream for command in sent if isinstance(command, Publish)} == {0}
    assert list(relay.outputs[0].open_streams) == [0]
    assert relay.handle(Subscribed(0, 1, (1,)), 50.0) == []


def test_a_slot_may_change_between_hidden_and_visible_sources() -> None:
    def placed(*, hidden: bool) -> SourcePlaced:
        spec = SourceSpec("f", 0, replay=False, probe_interval=0.0)
        return SourcePlaced(0, spec, [NewStream(b"", 5, hidden=hidden)])

    relay = views(Rights(), hidden=frozenset({0}))
    assert publish(relay, store([1])) == []
    for hidden in (False, True, False):
        relay.handle(placed(hidden=hidden), 0.0)
        relay.handle(SourceUp(0), 0.0)
        sent = relay.handle(BatchReceived(0, batch(1, store([1]))), 0.0)
        assert bool([each for each in sent if isinstance(each, Publish)]) != hidden
        assert relay.outputs[0].streams[0].closed == hidden


@pytest.mark.parametrize("name", ["sglang0523_radix_salts", "sglang0523_salt_session", "vllm033_session"])
def test_each_salted_block_of_a_recorded_engine_is_in_the_view_of_its_salt(name: str) -> None:
    """Each block that a recorded engine holds at the end is in the view of the salt that begins the block's chain."""
    salts = ("tenant-a", "tenant-b")
    relay = Relay(
        [SourceSpec("e", 0, replay=False, probe_interval=0.0)],
        [
            OutputSpec(salt, PROFILES["vllm"], [None], heartbeat=0.0, rights=Rights(salts=frozenset({salt})))
            for salt in salts
        ],
    )
    relay.handle(SourceUp(0), 0.0)
    owner: dict[Any, str | None] = {}
    for message in captures.load(name):
        relay.handle(BatchReceived(0, [b"", message.seq.to_bytes(8, "big"), message.payload]), 0.0)
        for event in events_of(message.payload):
            if event["type"] == "BlockStored":
                keys = (event.get("extra_keys") or [None])[0] or [None]
                parent = event.get("parent_block_hash")
                salt = event.get("cache_salt") or (owner.get(parent) if parent is not None else keys[-1])
                owner.update(dict.fromkeys(event["block_hashes"], salt))
    (source,) = relay.sources
    for output in relay.outputs:
        assert output.view is not None
        mine = {block for block in source.normalizer.index.names() if owner[block] == output.spec.name}
        assert set(output.view.index(0).names()) == mine
        assert mine
        assert output.stats.undecided == 0
