"""The core does not do more work a block than was written down."""

from __future__ import annotations

import pytest

from .counted import BOUNDS, COUNTED, SLACK, TOLERANCE, VERSION, bounds, measured


@pytest.mark.parametrize("load", COUNTED)
def test_the_core_does_no_more_work_than_written_down(load):
    known = bounds()
    if known is None:
        pytest.skip(f"{BOUNDS.name} has no bounds for Python {VERSION}: python -m tests.bench.counted --record")
    counted = measured(load)
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
