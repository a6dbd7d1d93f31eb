"""Tests of the client library in many short random worlds.

They need less time than worlds drawn by Hypothesis, so there are more of them.
"""

from __future__ import annotations

import pytest

from kvbus.client import sequence
from kvbus.core.source_spec import SourceSpec
from tests.client.walk import World


def failing(worlds: range) -> int:
    """Return how many of these random worlds fail. Each number is the seed of a world."""
    failed = 0
    for seed in worlds:
        try:
            World(seed).run()
        except Exception:  # noqa: BLE001 - a wrong state may show as anything
            failed += 1
    return failed


def test_every_random_world_ends_in_the_state_of_the_publisher():
    for seed in range(2000):
        World(seed).run()


def test_random_worlds_find_a_client_that_ignores_compacted_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "SourceSpec", lambda **keys: SourceSpec(**keys | {"compacted": False}))
    assert failing(range(1000))
