"""Tests for faults between an engine and the real Dynamo indexer: how they damage its index, and that kvbus
prevents it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles import replay_faults
from tests.doubles.bus import wait_for

from .support import Capture, Kvbus, Sentinel, is_sentinel, wait_for_subscribers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .dynamo import DynamoIndexer

pytestmark = pytest.mark.dynamo

CAPTURE: Final = Capture.load("syn_vllm023_positional")
"""A capture that Dynamo reads exactly if no fault happens."""
TRUTH: Final = frozenset(block.hash for block in CAPTURE.truth)
HALF: Final = len(CAPTURE.lives[0]) // 2


def publish(engine: EnginePublisher, batches: slice = slice(None)) -> None:
    for _, payload in CAPTURE.lives[0][batches]:
        engine.publish(payload)


def publish_sentinel(engine: EnginePublisher, number: int = 0) -> list[int]:
    mark = Sentinel.make(number, CAPTURE.block_size)
    engine.publish(mark.payload)
    return mark.tokens


def indexed_hashes(indexer: DynamoIndexer, model: str) -> frozenset[int]:
    return frozenset(block.hash for block in indexer.blocks(model) if not is_sentinel(block.hash))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[EnginePublisher]:
    """A running engine with a replay buffer of 10,000 batches, like vLLM's, or of the size that the test requests."""
    publisher = EnginePublisher(
        "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True, buffer_steps=getattr(request, "param", 10_000)
    )
    publisher.start()
    yield publisher
    publisher.close()


@pytest.fixture
def kvbus(request: pytest.FixtureRequest, engine: EnginePublisher, tmp_path: Path) -> Iterator[Kvbus]:
    """A kvbus that runs before the engine publishes. A test may change its settings."""
    settings = {"probe_interval": 0.5, **getattr(request, "param", {})}
    if settings.pop("keeps_state", False):
        settings["state_dir"] = str(tmp_path / "state")
    with Kvbus(engine, tmp_path, **settings) as running:
        wait_for_subscribers(engine, 1)
        yield running


def register(indexer: DynamoIndexer, engine: EnginePublisher, kvbus: Kvbus) -> None:
    indexer.register("direct", engine.endpoint, engine.replay_endpoint, CAPTURE.block_size)
    indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, CAPTURE.block_size)


@pytest.mark.parametrize(
    "kvbus", [{"first_seq": 2_000_000, "output": {"on_subscribe": "nothing", "journal_batches": 20}}], indirect=True
)
def test_the_indexer_is_exact_after_a_replay_answer_that_begins_late(
    indexer: DynamoIndexer, engine: EnginePublisher, kvbus: Kvbus
) -> None:
    """The indexer becomes exact even if the replay that it requests from seq 0 begins at a high seq.

    It gets no state on subscription. The answer begins at the seqs of kvbus's state, without empty batches before them.
    """
    publish(engine, slice(HALF))
    wait_for(lambda: kvbus.last_seq() == engine.next_seq - 1, "kvbus has the stream so far")
    indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, CAPTURE.block_size)
    wait_for(lambda: indexed_hashes(indexer, "kvbus"), "a heartbeat makes it ask")
    publish(engine, slice(HALF, None))
    indexer.wait_until_finds("kvbus", publish_sentinel(engine))
    assert indexed_hashes(indexer, "kvbus") == TRUTH
    assert kvbus.metric('kvbus_replay_requests_total{outcome="late",output="routers"}') >= 1
    assert kvbus.metric('kvbus_replay_batches_total{output="routers"}') < 1000


def test_the_indexer_keeps_old_hashes_if_a_restarted_engine_renames_its_blocks(
    indexer: DynamoIndexer, engine: EnginePublisher, kvbus: Kvbus
) -> None:
    """A restarted vLLM without PYTHONHASHSEED gives blocks of the same prompts new hashes.

    Dynamo keeps the old hashes.
    """
    indexer.register("kvbus", kvbus.endpoint, kvbus.replay_endpoint, CAPTURE.block_size)
    publish(engine)
    indexer.wait_until_finds("kvbus", publish_sentinel(engine))
    assert indexed_hashes(indexer, "kvbus") == TRUTH
    engine.restart()
    wait_for_subscribers(engine, 1)
    for _, payload in CAPTURE.lives[0]:
        engine.publish(renamed(payload))
    indexer.wait_until_finds("kvbus", publish_sentinel(engine, 1))
    # Dynamo knows no block by its new hash, so no block can be removed or be a parent.
    assert not indexed_hashes(indexer, "kvbus") & {block ^ 1 for block in TRUTH if isinstance(block, int)}


def renamed(payload: bytes) -> bytes:
    """Return a copy of the batch in which each block has another hash."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    for event in events:
        if event[0] != "AllBlocksCleared":
            event[1] = [block ^ 1 for block in event[1]]
        if event[0] == "BlockStored" and event[2] is not None:
            event[2] ^= 1
    return msgspec.msgpack.encode([ts, events, rank])


def test_the_indexer_is_exact_through_kvbus_if_a_replay_loses_its_end(
    indexer: DynamoIndexer, engine: EnginePublisher, kvbus: Kvbus
) -> None:
    register(indexer, engine, kvbus)
    wait_for_subscribers(engine, 2)
    engine.replay_fault = replay_faults.no_end
    publish(engine, slice(HALF))
    engine.publish(CAPTURE.lives[0][HALF][1], live=False)
    publish(engine, slice(HALF + 1, None))
    wait_for(lambda: engine.replay_requests >= 2, "both ask for the hole")
    marks = [publish_sentinel(engine, number) for number in range(20)]
    indexer.wait_until_finds("kvbus", marks[-1], 60)
    assert indexed_hashes(indexer, "kvbus") == TRUTH
    # Directly at the engine, the indexer waits for END for ever, so batches after the replay never reach its index.
    mark = publish_sentinel(engine, 20)
    indexer.wait_until_finds("kvbus", mark)
    assert indexer.matched("direct", mark) == 0
