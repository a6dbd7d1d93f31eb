"""The core does not do more work a block than was written down, on recorded traffic and on synthetic loads."""

from __future__ import annotations

import functools

import pytest

from tests.long import sample

from .counted import BOUNDS, FAMILIES, SLACK, SYNTHETIC, TOLERANCE, VERSION, bounds, measured, table
from .recorded import Shape, plain_cost

RECORDED = sample(list(FAMILIES), 9)


@functools.cache
def recorded():
    """Recorded loads, counted in one process."""
    return measured(*RECORDED)


@functools.cache
def synthetic(load):
    """One of the others, in a process of its own."""
    return measured(load)[load]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("load", [*SYNTHETIC, *RECORDED])
def test_the_core_does_no_more_work_than_written_down(load):
    known = bounds()
    if known is None:
        pytest.skip(f"{BOUNDS.name} has no bounds for Python {VERSION}: python -m tests.bench.counted --record")
    counted = recorded()[load] if load in FAMILIES else synthetic(load)
    over = {
        name: f"{value} a block, bound {known[load][name]} + {TOLERANCE:.0%}"
        for name, value in counted.items()
        if value > known[load][name] * (1 + TOLERANCE) + SLACK
    }
    assert not over, (
        f"the core does more work on {load} than before: {over}. "
        "If that is what the change is worth: python -m tests.bench.counted --record, and commit counted.json"
    )


def test_counting_repeats_exactly():
    one, two = dict(synthetic("1x1")), measured("1x1")["1x1"]
    # where memory happens to lie decides of an allocation in some ten thousand
    assert one.pop("allocations") == pytest.approx(two.pop("allocations"), rel=0.001)
    assert one == two
    assert measured("vllm-map")["vllm-map"] == pytest.approx(recorded()["vllm-map"], rel=0.01, abs=SLACK)


def test_the_table_sets_families_beside_synthetic_loads():
    counted = {load: {"instructions": each} for load, each in (("8x8", 40.0), ("64x1", 180.0), ("1x1", 800.0))}
    header, line = table(counted | {"vllm-map": {"instructions": 360.0, "calls": 8.0}})
    assert (header.split()[0], line.split()[0]) == ("load", "vllm-map")
    assert [float(cell) for cell in line.split()[-3:-1]] == [9.0, 2.0]


@pytest.mark.parametrize(("blocks", "events", "cost"), [(8, 8, 40.0), (1, 64, 180.0), (1, 1, 800.0)])
def test_a_plain_batch_costs_what_it_costs(blocks, events, cost):
    assert plain_cost(Shape(blocks, events), 40.0, 180.0, 800.0) == pytest.approx(cost)
