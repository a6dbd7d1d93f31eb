"""Recorded engine traffic into the real Dynamo indexer, directly and through kvbus, side by side.

The expected numbers are the table of docs/INTEROP.md: a row that is not what is measured fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from kvbus.transport.publisher import EnginePublisher

from .dynamo import MASK, DynamoIndexer, Held
from .support import DATA, Capture, Kvbus, is_sentinel, sentinel, wait_for, wait_for_subscribers

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
    """An index against the engine's truth, in blocks."""

    missing: int
    """In the engine, not in the index: cache hits a router does not see."""
    dead: int
    """In the index, not in the engine: requests sent to a worker that has to compute them anew."""


class Row(NamedTuple):
    """One line of the table."""

    truth: int
    direct: Score
    kvbus: Score


def table() -> dict[str, Row]:
    """The rows of docs/INTEROP.md that begin with a capture's name."""
    row = re.compile(r"^\| `(\w+)` \|" + r" (\d+) \|" * 5, re.MULTILINE)
    found = {}
    for name, *cells in row.findall(DOCUMENT.read_text()):
        truth, *scores = map(int, cells)
        found[name] = Row(truth, Score(*scores[:2]), Score(*scores[2:]))
    return found


ROWS: Final = table()


def score(capture: Capture, indexer: DynamoIndexer, model: str) -> Score:
    """Compare an index with the truth: by hash and tier, or by what a request finds where hashes are not integers."""
    held = without_sentinels(indexer.blocks(model))
    if all(isinstance(block.hash, int) for block in capture.truth):
        there = {(block.tier, block.hash) for block in held}
        truth = {(TIERS[block.medium], block.hash & MASK) for block in capture.truth}  # type: ignore[operator]
        return Score(len(truth - there), len(there - truth))
    found = sum(indexer.matched(model, list(block.path)) == len(block.path) for block in capture.truth)
    return Score(len(capture.truth) - found, len(held) - found)


def without_sentinels(held: frozenset[Held]) -> frozenset[Held]:
    return frozenset(block for block in held if not is_sentinel(block.hash))


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    publisher = EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True)
    publisher.start()
    yield publisher
    publisher.close()


def test_the_table_has_every_capture() -> None:
    assert set(ROWS) == {path.name.removesuffix(".jsonl") for path in DATA.glob("*.jsonl")}


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
        past_old_mark = 0
        for life, batches in enumerate(capture.lives):
            if life:
                past_old_mark = engine.next_seq
                wait_for(lambda: kvbus.last_seq() == past_old_mark - 1, "kvbus has the first life")  # noqa: B023
                engine.restart()
                wait_for_subscribers(engine, 2)
            for seq, payload in batches:
                engine.publish(payload, seq=seq)
            mark, batch = sentinel(life, capture.block_size)
            engine.publish(batch)
            indexer.wait_until_holds("kvbus", mark)
            if not life:
                indexer.wait_until_holds("direct", mark)
        through_kvbus = without_sentinels(indexer.blocks("kvbus"))
        kvbus_score = score(capture, indexer, "kvbus")
        if past_old_mark:
            # Dynamo drops a second life in silence until its numbers pass the first one's: only there it hears again
            mark, batch = sentinel(99, capture.block_size)
            engine.publish(batch, seq=past_old_mark)
            indexer.wait_until_holds("direct", mark)
        direct = without_sentinels(indexer.blocks("direct"))

        assert (score(capture, indexer, "direct"), kvbus_score) == (expected.direct, expected.kvbus)
        if expected.direct == Score(0, 0):
            assert through_kvbus == direct  # parents, token hashes, tiers and ranks too
