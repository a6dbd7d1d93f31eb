"""Tests that a usual batch, and the state for a late router, take no more calls than the budget allows.

``python -m tests.path.trace 1x1`` prints the calls of a case as a tree.
"""

from typing import Final

import pytest

from tests.path.trace import trace_case

BUDGET: Final = {
    "1x1": {"calls": 83, "functions": 74, "modules": 42},
    "8x8": {"calls": 132, "functions": 74, "modules": 42},
    "late": {"functions": 183, "modules": 33},
}
"""Maximum number of calls, of different functions and of different modules in each case.

A batch has a number of events, each with a number of blocks: ``8x8`` has 8 events of 8 blocks. ``late`` is a connected
router that subscribes late, and gets its state of 60 blocks.

These numbers only go down. If you shorten the way, lower them in the same commit. If a change makes the way longer,
shorten it elsewhere. The goal for a batch is 35 functions in 14 modules, and for a late router 80 functions.
"""


@pytest.mark.parametrize("case", BUDGET)
async def test_the_way_of_a_batch_and_of_a_state_stay_within_the_budget(case, tmp_path):
    trace = await trace_case(case, str(tmp_path))
    over = {what: (trace.figures[what], most) for what, most in BUDGET[case].items() if trace.figures[what] > most}
    assert not over, f"{case}, (counted, maximum): {over}\n{trace}"
