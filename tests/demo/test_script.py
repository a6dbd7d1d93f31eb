"""The plan: everything happens, in order, in whatever time there is."""

from itertools import islice, pairwise

import pytest

from kvbus.tools.demo.script import LAP_S, Kind, plan

RANKS = ("vllm/0", "vllm/1", "sglang/0", "sglang/1")


@pytest.mark.parametrize("seconds", [1.0, 3.0, 6.0, 23.0, 24.0])
def test_a_short_demo_has_the_whole_first_lap(seconds):
    acts = list(plan(RANKS, seconds, 0))
    assert [act.kind for act in acts] == [Kind.LOSE, Kind.JOIN, Kind.CRASH, Kind.JUMBLE]
    assert all(0 < act.at < seconds for act in acts)


@pytest.mark.parametrize("seconds", [25.0, 60.0, 100.0, 1000.0])
def test_acts_come_in_order_and_not_at_the_very_end(seconds):
    acts = list(plan(RANKS, seconds, 7))
    assert all(a.at < b.at for a, b in pairwise(acts))
    assert acts[-1].at < seconds - 0.9


def test_without_an_end_it_never_ends_and_every_engine_crashes():
    acts = list(islice(plan(RANKS, None, 3), 400))
    assert acts[-1].at > 90 * LAP_S
    assert {act.target for act in acts if act.kind is Kind.CRASH} == {"vllm", "sglang"}
    assert {act.target for act in acts if act.kind is Kind.LOSE} == set(RANKS)
    assert all(act.count > 0 for act in acts if act.kind in (Kind.LOSE, Kind.JUMBLE))


def test_the_same_seed_is_the_same_plan():
    first, same, other = (list(plan(RANKS, 500, seed)) for seed in (1, 1, 2))
    assert first == same != other
