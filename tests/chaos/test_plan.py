from __future__ import annotations

import pytest

from tests.chaos.faults import MAKERS
from tests.chaos.plan import SHAPES, TRAFFIC, make_round

CELLS = range(len(SHAPES))


@pytest.mark.parametrize("cell", CELLS)
def test_the_same_seed_plans_the_same_faults(cell: int) -> None:
    assert make_round(7, cell, 3, 2) == make_round(7, cell, 3, 2)
    plans = {make_round(seed, cell, generation, 0).faults for seed in range(5) for generation in range(5)}
    assert len(plans) == 25


@pytest.mark.parametrize("cell", CELLS)
def test_every_planned_fault_has_a_function_a_target_and_a_valid_time(cell: int) -> None:
    """Every kind of fault has a function, every target exists in its cell, and every fault begins during the
    traffic.
    """
    shape = SHAPES[cell]
    networks = {"engine", "router"} if shape.namespaces else set()
    links = set() if shape.namespaces else {"live", "replay", "out", "out replay"}
    for number in range(300):
        plan = make_round(1, cell, 0, number)
        assert plan.faults
        assert list(plan.faults) == sorted(plan.faults, key=lambda fault: fault.at)
        for fault in plan.faults:
            assert fault.kind in MAKERS
            assert fault.target in networks | links | {""}
            assert 0 <= fault.at < TRAFFIC
            assert shape.kills_bus or "kvbus" not in fault.kind or fault.kind.startswith("stop")


def test_the_plans_contain_every_kind_of_fault() -> None:
    planned = {fault.kind for cell in CELLS for number in range(600) for fault in make_round(1, cell, 0, number).faults}
    assert planned == set(MAKERS)
