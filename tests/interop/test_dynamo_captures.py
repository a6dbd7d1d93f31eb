"""Tests that send recorded traffic of engines to the real Dynamo indexer, directly and through kvbus.

The expected numbers are the table of docs/INTEROP.md: a row that differs from the measured numbers fails the test.
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
    """One capture's row of the table in docs/INTEROP.md.

    It has the engine's number of blocks, and the indexer's score directly and through kvbus.
    """

    truth: int
    direct: Score
    kvbus: Score


def table() -> dict[str, Row]:
    """Return the rows of the table in docs/INTEROP.md, by the name of their capture."""
    row = re.compile(r"^\| `(\w+)` \|" + r" (\d+) \|" * 5, re.MULTILINE)
    found = {}
    for name, *cells in row.findall(DOCUMENT.read_text()):
        truth, *scores = map(int, cells)
        found[name] = Row(truth, Score(*scores[:2]), Score(*scores[2:]))
    return found


ROWS: Final = table()
SUBSCRIBERS: Final = 'kvbus_output_subscribers{output="routers"}'
LIVE: Final = 'kvbus_output_router_states_total{output="routers",state="live"}'


def score(capture: Capture, indexer: DynamoIndexer, model: str, marks: list[Sentinel]) -> Score:
    """Compare the indexer's index with the engine's cache at the end of the capture.

    The comparison is by hash and tier, or, without integer hashes, by queries of prompts.
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


def test_the_table_has_every_capture() -> None:
    assert set(ROWS) | UNSCORED == {path.name.removesuffix(".jsonl") for path in DATA.glob("*.jsonl")}


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_capture_direct_and_through_kvbus(
    name: str, indexer: DynamoIndexer, engine: EnginePublisher, tmp_path: Path
) -> None:
    capture = Capture.load(name)
    expected = ROWS[name]
    assert len(capture.truth) == expected.truth
    with Kvbus(engine, tmp_path) as kvbus:
        indexer.register("direct", engine.endpoint, engine.replay_endpoint, capture.block_size)
        indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, capture.block_size)
        wait_for_subscribers(engine, 2)
        # A state could contain the first batches, and then the indexer would not get them one by one.
        wait_for(lambda: kvbus.metric(LIVE) == 1, "the indexer reads kvbus's live stream")
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


def test_chunks_of_lmcache_are_read_in_the_size_of_the_engines_blocks(
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


def test_media_of_offloaded_blocks(indexer: DynamoIndexer, engine: EnginePublisher, tmp_path: Path) -> None:
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
