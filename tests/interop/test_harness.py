"""What every comparison of a router rests on: the engine's cache, the words of the expectations and the table."""

from __future__ import annotations

import pytest

from tests.doubles.router import PlainSetRouter

from .cache import DEPTH, Block, Cache, Score, score
from .expected import Belief, but
from .kinds import KINDS
from .report import BEGIN, END, Cell, replaced, written


@pytest.mark.parametrize("by_position", [False, True])
def test_a_cache_publishes_what_it_holds(by_position: bool) -> None:
    cache, router = Cache(seed=1, by_position=by_position), PlainSetRouter()
    for seq in range(400):
        router.apply(seq, cache.batch())
    assert (router.violations, router.orphans) == ([], 0)
    assert {block for _, _, block in router.blocks} == cache.live.keys()
    assert len(cache.live) == 300
    assert cache.live.keys() < cache.known.keys()
    assert max(len(router.path(None, block)) for block in cache.live) == 16 * (DEPTH + 1)


def test_known_blocks_come_behind_what_they_hang_on() -> None:
    cache = Cache(seed=2)
    for _ in range(1000):
        cache.batch()
    known = list(cache.known.items())
    at = {block: place for place, (block, _) in enumerate(known)}
    assert all(entry.parent is None or at[entry.parent] < at[block] for block, entry in known)
    assert len(known) < 3000


def test_another_epoch_has_other_blocks() -> None:
    cache = Cache(seed=1)
    cache.batch()
    first = set(cache.live)
    cache.restart(seed=2)
    cache.batch()
    assert not first & cache.live.keys()
    assert first <= cache.known.keys()


def test_a_score_counts_both_ways() -> None:
    live = dict.fromkeys((1, 2, 3), Block(None, ()))
    assert score({2, 3, 4}, live) == Score(missing=1, dead=1)


def test_each_belief_agrees_with_its_own_kind_of_score_alone() -> None:
    exact, nothing, wrong = Score(0, 0), Score(9, 0), Score(2, 1)
    agrees = {belief: [belief.agrees(found, 9) for found in (exact, nothing, wrong)] for belief in Belief}
    assert agrees == {
        Belief.EXACT: [True, False, False],
        Belief.NOTHING: [False, True, False],
        Belief.WRONG: [False, True, True],
        Belief.CHANCE: [True, True, True],
    }
    assert but("a b", nothing="c") == {"a": Belief.WRONG, "b": Belief.WRONG, "c": Belief.NOTHING}


def test_the_tables_stand_between_the_two_comments() -> None:
    first, *others = [kind.name for kind in KINDS]
    text = written({(first, "late"): Cell(300, Score(300, 0), Score(0, 0))}, dict.fromkeys(others, "not here"))
    document = replaced(f"before\n{BEGIN}\nold\n{END}\nafter\n", text)
    assert document == f"before\n{BEGIN}\n\n{text}\n\n{END}\nafter\n"
    assert "| joins late, the engine is quiet | 0 / 0 |" in text
    assert "| joins late, the engine is quiet | 300 / 0 |" in text
    assert f"Not measured: {others[0]} (not here)." in text
