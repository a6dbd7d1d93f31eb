"""A message does not take more work on its way from socket to socket than was written down."""

from __future__ import annotations

import pytest

from tests.long import LONG

from .around import BOUNDS, TOLERANCE, VALGRIND, VERSION, bounds, measured, ratios


@pytest.mark.timeout(600)  # half a minute of CPU, on a machine that may have other work
@pytest.mark.skipif(not LONG, reason="half a minute of callgrind: with TEST_LONG=1, as in .ci/run")
@pytest.mark.skipif(VALGRIND is None, reason="valgrind is not installed: nothing counts a message's instructions")
def test_a_message_takes_no_more_work_than_written_down():
    known = bounds()
    if known is None:
        pytest.skip(f"{BOUNDS.name} has no bounds for Python {VERSION}: python -m tests.bench.around --record")
    counted = measured()
    over = {
        name: f"{value} of the yardstick, bound {known[name]} + {TOLERANCE:.0%}"
        for name, value in ratios(counted).items()
        if value > known[name] * (1 + TOLERANCE)
    }
    assert not over, (
        f"a message takes more work than before: {over} ({counted}). "
        "If that is what the change is worth: python -m tests.bench.around --record, and commit around.json"
    )
