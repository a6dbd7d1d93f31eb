"""Tests that pass recorded streams of real engines through kvbus's core: a router must end with the engine's blocks."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec import structs

from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered
from kvbus.core.wire.codec import decode
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.profiles import PROFILES, encode, fold
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Script, raw, tick
from tests.doubles.payloads import pack, payload, plain_all, removed, store, unpack
from tests.doubles.router import PlainSetRouter, events_of
from tests.typed import there, well_formed
from tests.wire.captures import BY_PREFIX, CAPTURES, digest, lives, load, matches_truth, points, truth

FILTERED = {
    "lmcache056_vllm032": {Filtered.COPY},
    "sglang055_collisions": {Filtered.COPY},
    "syn_vllm_two_granularities": {Filtered.COARSE},
    "vllm0110_positional_bytes": {Filtered.COPY},
    "vllm033_bytes": {Filtered.COPY},
    "vllm033_hybrid_2176_64": {Filtered.COPY, Filtered.GROUP},
    "vllm033_lookahead": {Filtered.COPY},
    "vllm033_mamba": {Filtered.COPY, Filtered.GROUP},
    "vllm033_mamba_64_16": {Filtered.COPY, Filtered.GROUP},
    "vllm033_map_bytes": {Filtered.COPY, Filtered.GROUP},
    "vllm033_map_extras": {Filtered.COPY},
    "vllm033_map_int": {Filtered.COPY},
    "vllm033_offload_mamba": {Filtered.COPY, Filtered.GROUP},
    "vllm033_offload_native": {Filtered.COPY},
    "vllm033_offload_self": {Filtered.COPY},
    "vllm033_offload_self_chunks": {Filtered.COPY},
    "vllm033_offload_simple": {Filtered.COPY},
    "vllm033_offload_simple_sleep": {Filtered.COPY},
    "vllm033_offload_window": {Filtered.COPY, Filtered.GROUP},
    "vllm033_one_group": {Filtered.COPY},
    "vllm033_restart": {Filtered.COPY},
    "vllm033_session": {Filtered.COPY},
    "vllm033_window": {Filtered.COPY, Filtered.GROUP},
}
"""Reasons for which kvbus leaves out events of a capture. kvbus relays all events of captures that are not listed."""

LMCACHE = "lmcache056_vllm032"
"""Name of a capture with LMCache, whose chunks on the CPU have 64 tokens. The engine's blocks have 32."""


class Played:
    """A capture that has passed kvbus's codec and normalizer, and a router that has applied the resulting events."""

    def __init__(self, name, *, each=None, profile="vllm", **rules):
        self.stats = SourceStats()
        self.normalizer = Normalizer(SourceSpec(**rules), self.stats)
        self.router = PlainSetRouter()
        self.sent = []
        self.held = {}
        """Digests of the router's blocks, at the moments for which the capture has a digest of the engine's cache."""
        told, messages, seq = points(name), 0, 0
        for life in self.lives(name):
            self.normalizer.reset()
            self.router.blocks.clear()  # here the relay would send AllBlocksCleared
            for message in life:
                batch = well_formed(message.payload)
                assert isinstance(batch, Batch)
                events = self.normalizer.apply(batch, first_of_epoch=message.seq == 0)
                if events:
                    body = encode(PROFILES[profile].wire, events, batch.ts, batch.rank or 0)
                    self.router.apply(seq, body)
                    self.sent.append(body)
                    seq += 1
                messages += 1
                if messages in told:
                    self.held[messages] = digest(self.router.blocks)
                if each is not None:
                    each(self)

    def lives(self, name):
        return lives(name)


@pytest.fixture(scope="module", params=CAPTURES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def played(name):
    return Played(name)


class TestEveryCapture:
    def test_the_router_holds_the_engines_blocks_during_and_after_a_capture(self, name, played):
        assert matches_truth(name, played.router) is None
        assert played.held == points(name)

    def test_the_relayed_capture_keeps_every_rule_of_a_stream(self, name, played):
        assert played.router.violations == []
        assert played.router.orphans == 0
        assert len(set(played.router.block_sizes.values())) == (2 if name == LMCACHE else 1)
        assert played.router.events > 0

    def test_no_event_of_a_real_engine_is_rejected(self, name, played):
        assert played.stats.rejected == {}
        assert set(played.stats.filtered) == FILTERED.get(name, set())

    def test_a_new_router_learns_the_state_from_the_announced_blocks(self, played):
        router = PlainSetRouter()
        router.apply(0, encode_batch(list(played.normalizer.announce()), 0.0, 0))
        assert router.blocks == played.router.blocks
        assert router.violations == []
        # an engine's tier may evict a parent before its child, and a parent may be only on another tier
        held = [(group, medium, block.parent) for (group, medium, _), block in router.blocks.items() if block.parent]
        anywhere = {(group, block) for group, _, block in router.blocks}
        nowhere = sum((group, parent) not in anywhere for group, _, parent in held)
        assert nowhere <= router.orphans <= sum(key not in router.blocks for key in held)

    def test_relayed_hashes_are_those_of_the_engine(self, name, played):
        known = {block for m in load(name) for event in events_of(m.payload) for block in event.get("block_hashes", ())}
        told = {block for body in played.sent for event in events_of(body) for block in event.get("block_hashes", ())}
        if name in BY_PREFIX:
            # kvbus announced these blocks under the node's hash before it knew that the engine sends radix nodes.
            told -= {block for block in told if block in known}
            assert len(told) > len(known)  # pages have derived hashes
        else:
            assert told <= known

    def test_positional_output_gives_the_same_blocks(self, name):
        by_position = Played(name, profile="aibrix")
        assert matches_truth(name, by_position.router) is None
        assert by_position.held == points(name)
        assert by_position.router.violations == []

    def test_dynamo_gets_integers_as_hashes(self, name, played):
        router = Played(name, profile="dynamo").router
        assert router.violations == []
        assert set(router.blocks) == {(group, medium, fold(block)) for group, medium, block in played.router.blocks}

    def test_the_complete_relay_gives_the_same_blocks(self, name, played):
        script = Script()
        for message in load(name):
            script >> raw(message.topic, message.seq.to_bytes(8, "big"), message.payload)
            script.whatever()
        script >> tick(1.0)
        script.whatever()
        assert matches_truth(name, script.router) is None
        assert script.router.violations == []
        assert script.router.blocks == played.router.blocks
        assert script.stats.restarts == len(lives(name)) - 1
        assert script.stats.missing == 0

    def test_decoding_and_encoding_preserve_every_field(self, name):
        for message in load(name):
            batch = well_formed(message.payload)
            again = well_formed(encode_batch(batch.events, batch.ts, batch.rank))
            assert plain_all(again.events) == plain_all(batch.events)
            assert (again.ts, again.rank) == (batch.ts, batch.rank)


# -- what else can be asked of particular captures ---------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["vllm033_map_int", "sglang0523_map", "vllm0110_positional_bytes"])
def test_relayed_token_arrays_are_bytes_of_the_engines_batches(capture):
    """kvbus never rewrites tokens: each array of token ids that it sends was in a batch of the engine."""
    arrays = {
        bytes(event.token_ids)
        for message in load(capture)
        for event in well_formed(message.payload).events
        if hasattr(event, "token_ids")
    }
    whole = [
        bytes(event.token_ids) in arrays
        for body in Played(capture).sent
        for event in well_formed(body).events
        if hasattr(event, "token_ids")
    ]
    assert sum(whole) > 0.8 * len(whole)


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_announced_blocks_are_those_of_the_router_at_any_moment(capture):
    turns: list[Any] = []

    def each(played):
        turns.append(None)
        if len(turns) % 97:
            return
        router = PlainSetRouter()
        router.apply(0, encode_batch(list(played.normalizer.announce()), 0.0, 0))
        assert router.blocks.keys() == played.router.blocks.keys()
        assert router.violations == []

    Played(capture, each=each)
    assert len(turns) == len(load(capture))


def test_a_chained_kvbus_derives_the_same_hashes_for_radix_pages():
    """Two kvbus derive the same hashes for pages of radix nodes.

    One relay reads the stream from the start, another learns the state from the first.
    """
    played = Played("syn_sglang_variable")
    copy = Normalizer(SourceSpec(), SourceStats())
    batch = well_formed(encode_batch(list(played.normalizer.announce()), 0.0, 0))
    router = PlainSetRouter()
    router.apply(0, encode_batch(copy.apply(batch), 0.0, 0))
    assert router.blocks == played.router.blocks


@pytest.mark.parametrize("capture", ["syn_sglang_variable", "vllm033_map_int", "sglang0523_hicache"])
def test_the_engines_own_block_size_as_configured_size_changes_nothing(capture):
    assert matches_truth(capture, Played(capture, block_size=16).router) is None


@pytest.mark.parametrize("capture", ["vllm033_map_int", "vllm0110_positional_bytes", "sglang0523_hicache"])
@pytest.mark.parametrize("size", [8, 4])
def test_a_finer_configured_block_size_divides_every_block(capture, size):
    played = Played(capture, block_size=size)
    assert played.router.violations == []
    assert {len(block.tokens) for block in played.router.blocks.values()} == {size}
    whole = Played(capture).router
    tokens = {(key[1], tuple(whole.path(key[0], key[2]))) for key in whole.blocks}
    pieces = {(key[1], tuple(played.router.path(key[0], key[2]))) for key in played.router.blocks}
    assert tokens <= pieces
    assert len(pieces) == len(played.router.blocks)
    router = PlainSetRouter()
    router.apply(0, encode_batch(list(played.normalizer.announce()), 0.0, 0))
    assert router.blocks == played.router.blocks


@pytest.mark.parametrize(
    ("capture", "masked"),
    [
        ("vllm033_mamba_64_16", 0),
        ("vllm033_hybrid_2176_64", 0),
        ("vllm033_mamba", 32),
        ("vllm033_offload_mamba", 31),
        ("vllm033_map_bytes", 0),
        ("vllm033_window", 0),
        ("vllm033_offload_window", 0),
    ],
)
def test_groups_all_relays_the_blocks_of_every_group(capture, masked):
    """With ``groups: all``, routers get the blocks of all groups, not only of groups with prefix caching.

    ``masked`` is the number of the capture's stores in which vLLM leaves out the hashes of some blocks (masked blocks).
    kvbus sends the other blocks of such a store without tokens.
    """
    played = Played(capture, groups="all")
    assert {key[0] for key in played.router.blocks} == {0, 1}
    assert set(played.router.blocks) == truth(capture, every_group=True)
    assert played.router.violations == []
    assert played.stats.rejected == {}
    assert played.stats.filtered[Filtered.HASH_ONLY] == masked


def test_the_mamba_capture_is_not_exact_without_counting_copies():
    """If kvbus did not count copies, it would remove blocks of which the engine has another copy.

    A router that gets this recorded stream from kvbus would then lack these blocks.
    """
    assert matches_truth("vllm033_mamba_64_16", Played("vllm033_mamba_64_16", duplicates="ignore").router) is not None


def test_chunks_on_an_expiring_medium_expire():
    """The setting ``expiring_media`` removes chunks of an LMCache that announces no evictions."""
    script = Script(expiring_media=frozenset({"CPU"}), expire_after=60.0)
    for message in load(LMCACHE):
        script >> raw(message.topic, message.seq.to_bytes(8, "big"), message.payload)
        script.whatever()
    held = truth(LMCACHE)
    assert set(script.router.blocks) == held
    on_cpu = {key for key in held if key[1] == "CPU"}
    assert len(on_cpu) > 40
    script >> tick(61.0)
    script.whatever()
    assert set(script.router.blocks) == held - on_cpu
    assert script.stats.filtered[Filtered.OUTLIVED] == len(on_cpu)
    assert script.router.violations == []


class OnlyTheLast(Played):
    """A capture as an engine with vllm#55092 would send it: it sends a removal only for the last copy of a block."""

    def lives(self, name):
        for life in super().lives(name):
            copies = Counter[Any]()
            yield [structs.replace(message, payload=pack(self._batch(message, copies))) for message in life]

    def _batch(self, message, copies):
        ts, events, *rank = unpack(message.payload)
        return [ts, [event for event in events if self._kept(event, copies)], *rank]

    def _kept(self, event, copies):
        if event["type"] == "AllBlocksCleared":
            copies.clear()
            return True
        keys = [(event.get("group_idx"), event.get("medium"), block) for block in event["block_hashes"]]
        if event["type"] == "BlockStored":
            copies.update(keys)
            return True
        copies.subtract(keys)
        event["block_hashes"] = [key[2] for key in keys if copies[key] <= 0]
        return bool(event["block_hashes"])


class TestCopies:
    def test_duplicates_last_is_exact_for_engines_that_remove_only_the_last_copy(self, name):
        if not name.startswith("vllm033"):
            return
        played = OnlyTheLast(name, duplicates="last")
        assert matches_truth(name, played.router) is None

    def test_counting_copies_leaves_dead_blocks_for_vllm_55092(self):
        """If kvbus counts the copies of an engine with vllm#55092, routers keep dead blocks.

        Such an engine sends one removal for all copies of a block, and kvbus waits for as many removals as stores.
        """
        assert "dead" in str(matches_truth("vllm033_window", OnlyTheLast("vllm033_window").router))


def pair(hashes, parent=None, **more):
    """Return a store event whose blocks have two tokens each."""
    return store(hashes, parent, tokens=[1, 2] * len(hashes), block_size=2) | more


class TestPlainSetRouter:
    """Tests that `PlainSetRouter`, on which the other tests rely, detects streams that break the rules."""

    @pytest.mark.parametrize(
        ("events", "complaint"),
        [
            ([pair([1]), pair([1])], "stored twice"),
            ([removed([1])], "removed but not there"),
            ([pair([1]), pair([2], 1), removed([1, 2])], "removed before its child"),
            ([pair([1]), pair([2], 1), removed([1]), removed([2])], "removed before its child"),
            ([pair([1], token_ids=[1])], "1 blocks of 2 in 1 tokens"),
            ([pair([1]), pair([2], block_size=1, token_ids=[1])], "block size 1 after 2"),
            ([pair([1], medium="gpu")], "medium 'gpu'"),
            ([pair([1, b"x"])], "with hashes"),
            ([pair([])], "with hashes"),
            ([pair([1], 1)], "its own parent"),
            ([pair([1], b"x")], "parent b'x'"),
        ],
    )
    def test_the_router_records_a_broken_rule(self, events, complaint):
        router = PlainSetRouter()
        router.apply(0, payload(*events))
        assert len(router.violations) == 1
        assert complaint in router.violations[0]

    def test_the_router_records_wrong_envelopes_and_gaps(self):
        router = PlainSetRouter()
        router.apply(5, payload())
        router.apply(5, payload(removed([1])))
        assert router.violations == []
        router.apply(7, payload(ts=1))
        router.apply(8, msgspec.msgpack.encode([1.0, []]))
        assert [wrong.split(":")[0] for wrong in router.violations] == ["seq 7", "seq 7", "seq 8"]

    def test_a_difference_from_the_truth_is_described(self):
        router = Played("vllm033_map_int").router
        router.blocks.pop(next(iter(router.blocks)))
        router.blocks[(0, "GPU", 12345)] = next(iter(router.blocks.values()))
        assert there(matches_truth("vllm033_map_int", router)).startswith(
            "vllm033_map_int: 1 of 246 blocks missing, 1 dead"
        )

    @pytest.mark.parametrize("name", CAPTURES)
    def test_the_truth_of_a_capture_is_not_empty(self, name):
        assert len(truth(name)) >= 9
        assert matches_truth(name, PlainSetRouter()) is not None


@pytest.mark.parametrize("name", CAPTURES)
def test_no_batch_of_an_engine_is_decoded_event_by_event(name: str) -> None:
    for message in load(name):
        batch = decode(message.payload)
        assert isinstance(batch, Batch)
        whole = batch.unknown is None
        assert whole != (name == "syn_mooncake_rfc1527"), message.seq  # the fields of its events have other names
