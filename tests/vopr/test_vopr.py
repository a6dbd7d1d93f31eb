"""Tests that run the simulation of the daemon for a short time, and tests of the simulation itself.

Its runs must be reproducible, and its failures become scripts. `make vopr` runs it for a long time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.transport.live.stream import LivePublisher
from tests.long import LONG
from tests.vopr import plan as plans
from tests.vopr.__main__ import failed, finding
from tests.vopr.defects import broken_answer

ROOT = Path(__file__).parents[2]
FOUND_IN = {
    "answer_size": (10, 22, 26),
    "pause": (6, 8, 20),
    "sent_before_commit": (2, 3, 7),
    "uncounted_loss": (2, 3, 6),
    "used_before_reserved": (13, 25),
}
"""For each old defect, the seeds of worlds in which the simulation finds it.

The defect `broken_answer` has a script instead of seeds.
"""

SEEDS = range(1, 61 if LONG else 9)


@pytest.mark.timeout(300)
def test_every_router_is_exact_after_every_fault() -> None:
    steps = settled = 0
    for seed in SEEDS:
        plan = plans.draw(seed)
        world, error = plans.run(seed, plan)
        assert error is None, failed(seed, plan, error, seconds=30)
        steps += world.schedule.steps
        settled += len(world.times)
    assert steps > 5_000 * len(SEEDS)
    assert settled == 4 * len(SEEDS)


def run_apart(hash_seed: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vopr", "--seed", "7", "--steps", "30000"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_two_runs_of_a_seed_send_the_same_bytes() -> None:
    """Two runs of the simulation with one seed send the same bytes to routers: their checksums are equal.

    Each run is a Python process. The processes have different hash seeds.
    """
    said = [run_apart(hash_seed) for hash_seed in (1, 2)]
    checksums = [text.partition("checksum ")[2] for text in said]
    assert checksums[0]
    assert checksums[0] == checksums[1]


def test_a_printed_plan_can_be_parsed() -> None:
    plan = plans.draw(5)
    seed, again = plans.parse(plans.text(5, plan))
    assert seed == 5
    assert [(name, args) for _, name, args in again] == [(name, args) for _, name, args in plan]


def test_the_simulation_finds_and_shortens_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation finds a defect of the daemon, and shortens the plan of faults with which it has found the defect.

    The defect is that subscribing routers get no state. The short plan must still find it.
    """
    monkeypatch.setattr(LivePublisher, "send_state", lambda *_: None)
    plan = plans.draw(1)
    _, error = plans.run(1, plan)
    assert error is not None
    short = plans.shrink(1, plan, error, seconds=60)
    assert len(short) < len(plan) / 4
    _, again = plans.run(*plans.parse(plans.text(1, short)))
    assert again is not None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", sorted(FOUND_IN))
def test_the_simulation_finds_each_old_defect(defect: str) -> None:
    """The simulation finds each old defect of kvbus when it is added again.

    If the random plans of faults have changed, `make vopr ARGS="--defect NAME"` shows which seeds find the defect now.
    """
    worlds = FOUND_IN[defect]
    assert any(finding(defect, seed, 1) for seed in worlds[: None if LONG else 1])


@pytest.mark.timeout(300)
def test_the_simulation_finds_a_router_with_part_of_a_state() -> None:
    seed, plan = plans.parse((Path(broken_answer.__file__).with_suffix(".script")).read_text())
    with broken_answer.put_back():
        _, error = plans.run(seed, plan)
    assert error is not None
    assert plans.run(seed, plan)[1] is None
