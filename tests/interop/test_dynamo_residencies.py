"""Tests that the real Dynamo indexer holds the same blocks behind kvbus as directly at an engine, if the engine names
localities and owners of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import wait_for
from tests.doubles.payloads import removed, store

from .support import Kvbus, Sentinel, is_sentinel, wait_for_subscribers

if TYPE_CHECKING:
    from pathlib import Path

    from .dynamo import DynamoIndexer

pytestmark = pytest.mark.dynamo

SIZE: Final = 16
OWNERS: Final = [store([2], medium="CPU", ownership="kvcr"), store([2], medium="CPU")]
LOCALITIES: Final = [
    store([1], medium="STORAGE", locality="REMOTE"),
    store([1], medium="STORAGE", locality="LOCAL"),
    store([2], medium="STORAGE", locality="LOCAL"),
    store([2], medium="STORAGE", locality="REMOTE"),
    removed([2], medium="STORAGE", locality="LOCAL"),
]
REMOVED_OWNERS: Final = [
    store([3], medium="CPU"),
    store([3], medium="CPU", ownership="kvcr"),
    removed([3], medium="CPU", ownership="kvcr"),
    store([4], medium="CPU", ownership="kvcr"),
    store([4], medium="CPU"),
    removed([4], medium="CPU"),
]
CASES: Final[dict[str, tuple[list[dict[str, Any]], set[tuple[int, str]]]]] = {
    "owners": (OWNERS, {(2, "host_pinned")}),
    "localities": (LOCALITIES, {(1, "disk")}),
    "removals of owners": (REMOVED_OWNERS, {(3, "host_pinned")}),
}
"""The events of an engine, and the blocks that the indexer holds if it reads them directly at the engine."""


@pytest.mark.parametrize("case", CASES)
def test_the_indexer_holds_the_same_residencies_behind_kvbus(case: str, indexer: DynamoIndexer, tmp_path: Path) -> None:
    """It does so live, if it subscribes late, and after a restart of kvbus with its state."""
    events, expected = CASES[case]
    engine = EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True)
    engine.start()

    def held(model: str, number: int) -> set[tuple[int, str]]:
        mark = Sentinel.make(number, SIZE)
        engine.publish(mark.payload)
        indexer.wait_until_finds(model, mark.tokens)
        return {(block.hash, block.tier) for block in indexer.blocks(model) if not is_sentinel(block.hash)}

    try:
        with Kvbus(engine, tmp_path, state_dir=str(tmp_path / "state")) as kvbus:
            for model, publisher in (("direct", engine), ("live", kvbus)):
                indexer.register(model, publisher.endpoint, publisher.replay_endpoint, SIZE)
            wait_for_subscribers(engine, 2)
            for event in events:
                engine.publish(msgspec.msgpack.encode([0.0, [event], 0]))
            assert held("direct", 0) == expected
            assert held("live", 1) == expected
            wait_for(lambda: kvbus.last_seq() == engine.next_seq - 1, "kvbus has every batch")
            indexer.register("late", kvbus.endpoint, kvbus.replay_endpoint, SIZE)
            assert held("late", 2) == expected
            wait_for(lambda: kvbus.last_seq() == engine.next_seq - 1, "kvbus has every batch")
            kvbus.terminate()
            kvbus.start_again()
            indexer.register("after a restart", kvbus.endpoint, kvbus.replay_endpoint, SIZE)
            assert held("after a restart", 3) == expected
            assert held("live", 4) == expected
    finally:
        engine.close()
