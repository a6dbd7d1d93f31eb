"""Tests that a batch which stores or removes very many blocks is applied in parts, with the same result as at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvbus.core import relay
from kvbus.core.commands import Publish
from kvbus.core.normalizing import large_batches
from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch, BlockRemoved
from tests.core.dsl import Script, live, tick, up
from tests.doubles.payloads import cleared, payload, removed, store
from tests.doubles.router import PlainSetRouter, events_of


def decoded(*events: Any) -> Batch:
    batch = decode(payload(*events))
    assert isinstance(batch, Batch)
    return batch


def random_history(rng: random.Random) -> list[list[dict[str, Any]]]:
    """Return batches of stores, removals and clears. The parent of block ``n`` is ``n // 2``."""
    history = []
    for _ in range(6):
        events: list[dict[str, Any]] = []
        for _ in range(rng.randrange(1, 6)):
            medium = rng.choice(["GPU", "GPU", "CPU"])
            kind = rng.random()
            if kind < 0.5:
                blocks = [1 << n for n in range(rng.randrange(1, 9))]
                events.append(store(blocks, medium=medium))
            elif kind < 0.9:
                blocks = rng.choices([1 << n for n in range(9)], k=rng.randrange(1, 9))
                counts = {"remaining_copy_counts": rng.choices([0, 0, 1, 2], k=len(blocks))} if kind < 0.6 else {}
                events.append(removed(blocks, medium=medium, **counts))
            elif kind < 0.95:
                events.append(store([600], medium="CPU", tokens=[], block_size=0))
            else:
                events.append(cleared())
        history.append(events)
    return history


def run(history: list[list[dict[str, Any]]], duplicates: Any) -> tuple[Any, ...]:
    """Apply a history. Return the index, the copies, the counts, and the blocks of a router."""
    stats = SourceStats()
    normalizer = Normalizer(SourceSpec("engine", 0, duplicates=duplicates), stats)
    router = PlainSetRouter()
    seq = 0
    for events in history:
        leaving = normalizer.apply(decoded(*events))
        while True:
            router.take(seq, payload(*leaving))
            seq += 1
            if not normalizer.parts:
                break
            leaving = normalizer.go_on()
    tables = {
        key: (set(each.blocks), dict(each.copies)) for key, each in normalizer.index.tables.items() if each.blocks
    }
    assert {(*key[:2], block) for key, (held, _) in tables.items() for block in held} == set(router.blocks)
    return tables, stats.filtered, stats.rejected, stats.stored, stats.removed, stats.cleared, normalizer.refused


@pytest.mark.parametrize("duplicates", ["count", "last", "ignore"])
def test_the_parts_of_a_batch_have_the_result_of_the_whole_batch(duplicates, monkeypatch):
    rng = random.Random(1)
    for _ in range(100):
        history = random_history(rng)
        monkeypatch.setattr(large_batches, "PART", 1_000_000)
        whole = run(history, duplicates)
        monkeypatch.setattr(large_batches, "PART", rng.randrange(1, 4))
        assert run(history, duplicates) == whole


def test_a_part_has_about_the_maximum_number_of_blocks(monkeypatch):
    monkeypatch.setattr(large_batches, "PART", 10)
    events: Any = decoded(removed(list(range(3))), removed(list(range(25))), removed([1]), cleared()).events
    divided = large_batches.in_parts([(event, None) for event in events])
    assert [[len(each.block_hashes) for each, _ in part if isinstance(each, BlockRemoved)] for part in divided] == [
        [3, 7],
        [10],
        [8, 1],
    ]
    removals = [each for part in divided for each, _ in part if isinstance(each, BlockRemoved)]
    named = [block for each in removals for block in each.block_hashes]
    assert named == [*range(3), *range(25), 1]


def test_the_first_event_of_a_batch_without_events_makes_one_empty_part():
    assert list(large_batches.in_parts([])) == [[]]


def published(commands: list[Any]) -> list[Any]:
    return [event for each in commands if isinstance(each, Publish) for event in events_of(each.payload)]


def test_the_relay_serves_other_events_between_the_parts_of_a_batch(monkeypatch):
    """Between the parts, the batches of another engine go out. The engine's own next batch waits."""
    monkeypatch.setattr(large_batches, "PART", 2)
    script = Script(ranks=(0, 1))
    script >> up() >> up(1)
    script >> live(0, store([1, 2, 3, 4, 5, 6]), removed([6, 5, 4, 3, 2, 1]))
    script.whatever()
    assert script.relay.backlog
    script >> live(0, store([7]), source=1)
    assert [event["block_hashes"] for event in published(script.whatever())] == [[7]]
    script >> live(1, store([8]))
    left = published(script.whatever())
    while script.relay.backlog:
        script >> tick()
        left += published(script.whatever())
    assert [event["block_hashes"] for event in left] == [[6, 5], [4, 3], [2, 1], [8]]
    assert script.router.violations == []


def test_batches_do_not_wait_if_too_many_bytes_wait(monkeypatch):
    monkeypatch.setattr(large_batches, "PART", 2)
    monkeypatch.setattr(relay, "MAX_WAITING", 0)
    script = Script()
    left = script.after(
        up(), live(0, store([1, 2, 3, 4, 5, 6]), removed([6, 5, 4, 3, 2, 1])), live(1, store([7]), store([8]))
    )
    assert published(left)[-1]["block_hashes"] == [8]
    assert not script.source.normalizer.parts
