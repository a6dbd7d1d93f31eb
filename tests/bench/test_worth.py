"""The worth of exact views comes out the same every time, its checks can fail, and the documents have the last result."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from . import worth
from .feeds import Bus, Direct
from .fleet import Feed, Oracle, arrivals
from .render import DOCUMENT

LOAD = worth.SMALL
REQUESTS = arrivals(1, LOAD)


def computed(feed: Feed, fault: str) -> int:
    return worth.summary(worth.simulate(LOAD, feed, fault, REQUESTS), LOAD)["computed"]


def test_the_same_tables_come_out_byte_by_byte():
    arguments = ["--quick", "--seeds", "1"]
    here = CliRunner().invoke(worth.main, arguments)
    command = [sys.executable, "-m", "tests.bench.worth", *arguments]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(command, env=env, check=True, capture_output=True, text=True, cwd=worth.ROOT)
    assert here.stdout == there.stdout != ""


def test_the_documents_have_what_was_written_last():
    found = json.loads(worth.RESULTS.read_text())
    assert list(found) == list(worth.CASES)
    assert all(len(runs) == worth.SEEDS for arms in found.values() for runs in arms.values())
    for path, table in ((DOCUMENT, worth.full_tables(found)), (worth.README, worth.short_table(found))):
        assert f"{worth.BEGIN}\n\n{table}\n\n{worth.END}" in path.read_text(), path.name


def test_after_a_restart_of_the_router_kvbus_is_the_oracle_and_direct_is_not():
    best = computed(Oracle(), "")
    assert computed(Bus("vllm", asks=False), "router") == computed(Bus("dynamo", asks=True), "router") == best
    assert computed(Direct(asks=False), "router") > 1.2 * best


@pytest.mark.parametrize("asks", [False, True])
def test_kvbus_without_its_state_does_the_harm_itself(asks):
    best = computed(Oracle(), "")
    assert computed(Bus("vllm", asks=asks), "lost") > 1.2 * best
    assert computed(Bus("vllm", asks=asks), "kept") < 1.1 * best


def test_an_arm_that_chooses_otherwise_without_a_fault_is_found(monkeypatch):
    monkeypatch.setitem(worth.ARMS, "direct", Feed)
    with pytest.raises(AssertionError, match="direct differs without a fault"):
        worth.controls(LOAD, REQUESTS, all_arms=True)


class Proud(Direct):
    """It promises what it cannot keep: it hears of an engine's crash from the first batch after it."""

    promises = True


class Lossy(Bus):
    """What the relay sends of one worker is lost on the way, and nobody notices."""

    def _receive(self, number: int, seq: int, payload: bytes, now: float) -> None:
        if number or now < LOAD.fault_at:
            super()._receive(number, seq, payload, now)


@pytest.mark.parametrize("broken", [Proud(asks=False), Lossy("vllm", asks=False)], ids=["proud", "lossy"])
def test_a_block_that_is_not_there_is_found(broken):
    with pytest.raises(AssertionError, match=r"blocks of worker \d (were|are) not there"):
        worth.simulate(LOAD, broken, "engine", REQUESTS)


def test_a_block_that_is_not_known_at_the_end_is_found():
    class Empty(Bus):
        def check(self) -> None:
            self._readers[0].view.clear()
            super().check()

    with pytest.raises(AssertionError, match="are not known"):
        worth.simulate(LOAD, Empty("vllm", asks=False), "", REQUESTS)


def test_only_the_whole_run_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(worth, "RESULTS", tmp_path / "worth.json")
    assert CliRunner().invoke(worth.main, ["--quick", "--write"]).exit_code == 2
    assert not worth.RESULTS.exists()
