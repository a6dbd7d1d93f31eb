"""The core does not do more work a block than was written down, on recorded traffic and on synthetic loads."""

from __future__ import annotations

import functools

import pytest

from .counted import BOUNDS, COUNTED, FAMILIES, SLACK, TOLERANCE, VERSION, bounds, measured, table


@functools.cache
def recorded():
    """All recorded loads, counted in one process."""
    return measured(*FAMILIES)


@pytest.mark.parametrize("load", COUNTED)
def test_the_core_does_no_more_work_than_written_down(load):
    known = bounds()
    if known is None:
        pytest.skip(f"{BOUNDS.name} has no bounds for Python {VERSION}: python -m tests.bench.counted --record")
    counted = recorded()[load] if load in FAMILIES else measured(load)[load]
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
    assert measured("1x1") == measured("1x1")
    assert measured("vllm-map")["vllm-map"] == pytest.approx(recorded()["vllm-map"], rel=0.01, abs=SLACK)


def test_plain_batches_cost_what_plain_batches_cost():
    """The comparison with plain batches is one of equals: a family that cost as much would stand at 1."""
    counted = {load: {"instructions": each, "calls": 1.0} for load, each in (("8x8", 40), ("64x1", 180), ("1x1", 800))}
    header, line = table(counted | {"vllm-map": {"instructions": 180.0, "calls": 8.0}})
    assert header.split()[-4:] == ["8x8", "by", "64x1", "by", "plain"][-4:]
    assert line.split()[0] == "vllm-map"
    assert [float(cell) for cell in line.split()[-3:-1]] == [4.5, 1.0]
