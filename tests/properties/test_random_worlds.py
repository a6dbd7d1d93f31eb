"""The pure relay against the truth, in worlds drawn from a seed: engines, network, kvbus and routers, in any order.

What a :class:`~tests.properties.world.World` is made of, and what must hold after each step, is there. A failure is
shortened, and printed as a script that can be pasted into ``test_regressions.py``. At length: `make soak`.
"""

import pytest

from tests.long import LONG
from tests.properties.soak import soak


@pytest.mark.parametrize("seed", range(4))
def test_every_router_knows_what_its_engines_hold(seed):
    """The seeds are not those of `make soak`."""
    steps, worlds, failure = soak(1_000_000 + seed, 30_000 if LONG else 10_000)
    assert failure is None, failure
    assert steps > 50 * worlds > 0
