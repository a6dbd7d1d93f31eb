"""Runs the pure relay in worlds drawn from a seed, with engines, network, kvbus and routers in any order of events.

:class:`~tests.properties.world.World` has the steps, and the invariants after each step. A failure is shortened and
printed as a script for ``test_regressions.py``. `make soak` runs this for long.
"""

import pytest

from tests.long import LONG
from tests.properties.soak import soak


@pytest.mark.parametrize("seed", range(4))
def test_every_router_knows_what_its_engines_hold(seed):
    """The seeds differ from those of `make soak`."""
    steps, worlds, failure = soak(1_000_000 + seed, 30_000 if LONG else 10_000)
    assert failure is None, failure
    assert steps > 50 * worlds > 0
