"""Tests that send recorded traffic of engines to the real Dynamo indexer, directly and through kvbus.

docs/INTEROP.md has some of the expected numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import wait_for

from .dynamo import MASK, DynamoIndexer, Held
from .support import DATA, Capture, Kvbus, Sentinel, is_sentinel, wait_for_subscribers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.dynamo

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "INTEROP.md"
TIERS: Final = {
    None: "device",
    "GPU": "device",
    "CPU": "host_pinned",
    "CPU_PINNED": "host_pinned",
    "DISK": "disk",
    "STORAGE": "disk",
}


class Score(NamedTuple):
    """The numbers of blocks in which an index differs from the engine's cache."""

    missing: int
    """Blocks in the engine that the index lacks: cache hits that a router does not see."""
    dead: int
    """Blocks in the index that the engine lacks: a router sends requests to a worker that must compute them again."""


class Row(NamedTuple):
    """The expected result of one capture: the number of the engine's blocks, and the indexer's missing and dead
    blocks.

    ``direct`` is the result if the indexer reads the engine, ``kvbus`` the result if it reads kvbus.
    """

    truth: int
    direct: Score
    kvbus: Score


ROWS: Final = {
    "lmcache056_vllm032": Row(93, Score(49, 0), Score(49, 96)),
    "sglang0510_positional": Row(255, Score(0, 0), Score(0, 0)),
    "sglang0523_eagle_bigram": Row(251, Score(0, 0), Score(0, 0)),
    "sglang0523_hicache": Row(261, Score(0, 0), Score(0, 0)),
    "sglang0523_map": Row(185, Score(0, 0), Score(0, 0)),
    "sglang0523_page1": Row(253, Score(0, 0), Score(0, 0)),
    "sglang0523_radix_eagle": Row(112, Score(0, 0), Score(0, 0)),
    "sglang0523_radix_page16": Row(136, Score(0, 0), Score(0, 0)),
    "sglang0523_radix_salts": Row(129, Score(0, 0), Score(0, 0)),
    "sglang0523_salt_session": Row(254, Score(0, 0), Score(0, 0)),
    "sglang055_collisions": Row(9, Score(4, 0), Score(0, 0)),
    "sglang055_eagle": Row(250, Score(0, 0), Score(0, 0)),
    "sglang055_positional": Row(254, Score(0, 0), Score(0, 0)),
    "syn_mooncake_rfc1527": Row(120, Score(120, 0), Score(0, 0)),
    "syn_sglang0523_tiers_disk": Row(240, Score(0, 0), Score(0, 0)),
    "syn_sglang_39991": Row(60, Score(0, 0), Score(0, 0)),
    "syn_sglang_variable": Row(400, Score(384, 0), Score(0, 1)),
    "syn_trtllm_native": Row(59, Score(0, 0), Score(0, 0)),
    "syn_vllm020_positional": Row(139, Score(0, 0), Score(0, 0)),
    "syn_vllm023_positional": Row(139, Score(0, 0), Score(0, 0)),
    "syn_vllm033_tiers_storage": Row(197, Score(0, 0), Score(0, 0)),
    "syn_vllm090_positional": Row(139, Score(139, 0), Score(0, 0)),
    "syn_vllm_two_granularities": Row(500, Score(0, 0), Score(0, 0)),
    "vllm0110_positional_bytes": Row(184, Score(184, 0), Score(0, 0)),
    "vllm033_hybrid_2176_64": Row(697, Score(659, 0), Score(0, 0)),
    "vllm033_lookahead": Row(154, Score(55, 1), Score(55, 1)),
    "vllm033_mamba": Row(94, Score(0, 0), Score(0, 0)),
    "vllm033_mamba_64_16": Row(141, Score(115, 0), Score(0, 0)),
    "vllm033_map_bytes": Row(122, Score(122, 0), Score(0, 0)),
    "vllm033_map_extras": Row(251, Score(163, 5), Score(131, 5)),
    "vllm033_map_int": Row(246, Score(59, 0), Score(0, 0)),
    "vllm033_offload_mamba": Row(377, Score(109, 0), Score(0, 0)),
    "vllm033_offload_native": Row(513, Score(364, 0), Score(0, 0)),
    "vllm033_offload_self": Row(513, Score(202, 0), Score(0, 0)),
    "vllm033_offload_self_chunks": Row(315, Score(146, 0), Score(0, 0)),
    "vllm033_offload_simple": Row(525, Score(425, 0), Score(4, 0)),
    "vllm033_offload_simple_sleep": Row(308, Score(44, 0), Score(0, 0)),
    "vllm033_offload_window": Row(317, Score(95, 0), Score(0, 0)),
    "vllm033_one_group": Row(152, Score(0, 0), Score(0, 0)),
    "vllm033_restart": Row(243, Score(243, 248), Score(0, 0)),
    "vllm033_session": Row(151, Score(124, 0), Score(124, 0)),
    "vllm033_window": Row(122, Score(89, 0), Score(0, 0)),
}
"""The expected results, by the names of the captures. The table of docs/INTEROP.md has some of them."""

SUBSCRIBERS: Final = 'kvbus_output_subscribers{output="routers"}'
LIVE: Final = 'kvbus_output_router_states_total{output="routers",state="live"}'
REPLAYS: Final = 'kvbus_replay_requests_total{outcome="complete",output="routers"}'


def score(capture: Capture, indexer: DynamoIndexer, model: str, marks: list[Sentinel]) -> Score:
    """Compare the indexer's index with the engine's cache at the end of the capture.

    Blocks are compared by hash and tier. If the engine's hashes are not integers, kvbus sends other hashes. The
    indexer is then asked for each block's prompt instead, and has the block if it finds the complete prompt.
    """
    held = indexer.blocks(model)
    if capture.by_hash:
        there = {(block.tier, block.hash) for block in without_sentinels(held)}
        truth = {(TIERS[block.medium], block.hash & MASK) for block in capture.truth}  # type: ignore[operator]
        return Score(len(truth - there), len(there - truth))

    def found(paths: list[list[int]]) -> int:
        return sum(indexer.matched(model, path) == len(path) for path in paths)

    true = found([list(block.path) for block in capture.truth])
    return Score(len(capture.truth) - true, len(held) - true - found([mark.tokens for mark in marks]))


def without_sentinels(held: frozenset[Held]) -> frozenset[Held]:
    return frozenset(block for block in held if not is_sentinel(block.hash))


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    publisher = EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True)
    publisher.start()
    yield publisher
    publisher.close()


UNSCORED: Final = frozenset({"vllm033_bytes"})
"""Captures with hashes of type bytes and without tokens, whose blocks cannot be looked up in the indexer."""


def test_the_interop_page_has_the_expected_numbers_of_each_capture() -> None:
    row = re.compile(r"^\| `(\w+)` \|" + r" (\d+) \|" * 5, re.MULTILINE)
    found = {name: tuple(map(int, cells)) for name, *cells in row.findall(DOCUMENT.read_text())}
    assert found == {name: (ROWS[name].truth, *ROWS[name].direct, *ROWS[name].kvbus) for name in found}
    assert len(found) > 10


def test_every_capture_has_expected_numbers() -> None:
    assert set(ROWS) | UNSCORED == {path.name.removesuffix(".jsonl") for path in DATA.glob("*.jsonl")}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_dynamo_indexer_reads_a_capture_directly_and_through_kvbus(
    name: str, indexer: DynamoIndexer, engine: EnginePublisher, tmp_path: Path
) -> None:
    capture = Capture.load(name)
    expected = ROWS[name]
    assert len(capture.truth) == expected.truth
    with Kvbus(engine, tmp_path) as kvbus:
        indexer.register("direct", engine.endpoint, engine.replay_endpoint, capture.block_size)
        indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, capture.block_size)
        wait_for_subscribers(engine, 2)
        # The indexer requests a replay from 0 when it gets its first batch. A state or an answer that came later could
        # contain the capture's first batches, and then the indexer would not get them one by one.
        wait_for(lambda: kvbus.metric(LIVE) == kvbus.metric(REPLAYS) == 1, "the indexer reads kvbus's live stream")
        marks = []

        def mark(number: int, seq: int | None = None, hashes: type = int) -> list[int]:
            marks.append(Sentinel.make(number, capture.block_size, hashes=hashes))
            engine.publish(marks[-1].payload, seq=seq)
            return marks[-1].tokens

        for life, batches in enumerate(capture.lives):
            if life:
                wait_for(lambda: kvbus.last_seq() == engine.next_seq - 1, "kvbus has the first life")
                first_life = engine.next_seq
                engine.restart()
                wait_for_subscribers(engine, 2)
            for seq, payload in batches:
                engine.publish(payload, seq=seq)
            indexer.wait_until_finds("kvbus", mark(life, hashes=capture.hashes))
            if not life:
                indexer.wait_until_finds("direct", mark(50))
        through_kvbus = without_sentinels(indexer.blocks("kvbus"))
        kvbus_score = score(capture, indexer, "kvbus", marks)
        if len(capture.lives) > 1:
            # Dynamo silently drops the batches of a restarted engine until their seqs pass the seqs before the restart.
            # Directly at the engine, it reads none of them before that.
            indexer.wait_until_finds("direct", mark(99, seq=first_life))
        direct = without_sentinels(indexer.blocks("direct"))

        assert (score(capture, indexer, "direct", marks), kvbus_score) == (expected.direct, expected.kvbus)
        if expected.direct == Score(0, 0):
            assert through_kvbus == direct  # also equal: parents, token hashes, tiers and ranks


def test_dynamo_reads_lmcaches_chunks_through_kvbus_in_the_engines_block_size(
    indexer: DynamoIndexer, engine: EnginePublisher, tmp_path: Path
) -> None:
    """With the setting ``block_size``, kvbus divides LMCache's chunks of 64 tokens into blocks of 32, which Dynamo
    reads.
    """
    capture = Capture.load("lmcache056_vllm032")
    with Kvbus(engine, tmp_path, block_size=capture.block_size) as kvbus:
        indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, capture.block_size)
        wait_for_subscribers(engine, 1)
        wait_for(lambda: kvbus.metric(SUBSCRIBERS) == 1, "the indexer is subscribed to kvbus")
        for seq, payload in capture.lives[0]:
            engine.publish(payload, seq=seq)
        mark = Sentinel.make(0, capture.block_size)
        engine.publish(mark.payload)
        indexer.wait_until_finds("kvbus", mark.tokens)
        held = without_sentinels(indexer.blocks("kvbus"))
    chunks = {
        event["block_hashes"][0]: (event["parent_block_hash"], event["token_ids"])
        for _, payload in capture.lives[0]
        for event in msgspec.msgpack.decode(payload)[1]
        if event["type"] == "BlockStored" and event["medium"] == "CPU"
    }

    def path(chunk: int | None) -> list[int]:
        return [] if chunk is None else path(chunks[chunk][0]) + chunks[chunk][1]

    on_cpu = [path(block.hash) for block in capture.truth if block.medium == "CPU"]  # type: ignore[arg-type]
    # Two chunks with the same first half have one block in common.
    halves = {tuple(tokens[:end]) for tokens in on_cpu for end in (len(tokens) - capture.block_size, len(tokens))}
    assert len(on_cpu) > 40
    expected = {"device": len(capture.truth) - len(on_cpu), "host_pinned": len(halves)}
    assert Counter(block.tier for block in held) == expected


def test_offloaded_blocks_arrive_through_kvbus_in_the_right_tier(
    indexer: DynamoIndexer, engine: EnginePublisher, tmp_path: Path
) -> None:
    """The indexer drops blocks with the media `FS` and `OBJ` if it reads the engine directly.

    Through kvbus these blocks arrive in the right tier.
    """
    block_size = 16
    events = [
        {
            "type": "BlockStored",
            "block_hashes": [number],
            "parent_block_hash": None,
            "token_ids": [number] * block_size,
            "block_size": block_size,
            "lora_id": None,
            "medium": medium,
        }
        for number, medium in enumerate(["GPU", "FS", "OBJ"], 1)
    ]
    mark = Sentinel.make(0, block_size)
    with Kvbus(engine, tmp_path) as kvbus:
        indexer.register("direct", engine.endpoint, engine.replay_endpoint, block_size)
        indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, block_size)
        wait_for_subscribers(engine, 2)
        engine.publish(msgspec.msgpack.encode([0.0, events, 0]))
        engine.publish(mark.payload)
        tiers = {}
        for model in ("direct", "kvbus"):
            indexer.wait_until_finds(model, mark.tokens)
            tiers[model] = {(block.hash, block.tier) for block in without_sentinels(indexer.blocks(model))}
        assert tiers == {"direct": {(1, "device")}, "kvbus": {(1, "device"), (2, "disk"), (3, "external")}}
