"""Tests that run kvbus's relay without I/O in random worlds: engines, network, kvbus and routers act in any order.

:class:`~tests.properties.world.World` has the steps, and checks invariants after each. A failing run is shortened and
printed as a script for ``test_regressions.py``. `make soak` runs more worlds.
"""

import pytest

from tests.long import LONG
from tests.properties.soak import soak


@pytest.mark.parametrize("seed", range(4))
def test_every_router_is_exact_in_random_worlds(seed):
    """Run random worlds of one seed. `make soak` uses other seeds."""
    steps, worlds, failure = soak(1_000_000 + seed, 30_000 if LONG else 10_000)
    assert failure is None, failure
    assert steps > 50 * worlds > 0
