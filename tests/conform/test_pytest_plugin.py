"""The plugin in a pytest of its own, against an engine and against routers on real sockets."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.router.cases import CASES
from kvbus.tools.conform.vectors import message, stored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import PATIENCE
from tests.ports import free_port


async def pytest_of(directory: Path, *options: str) -> tuple[int, str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(running.communicate(), PATIENCE)
    return running.returncode or 0, out.decode()


async def test_an_item_for_each_clause_fails_where_a_must_is_broken(tmp_path):
    async with EnginePublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True) as engine:
        engine.publish(message(0, stored(1), stored(2, medium="cloud"))[2])
        where = f"{engine.endpoint} --replay-endpoint {engine.replay_endpoint} --seconds 0.5"
        status, said = await pytest_of(tmp_path, f"--kv-engine={where}")
    assert status == 1, said
    assert re.search(r"FAILED .*9\.1 known media", said), said
    assert "event 1 of batch 0 is on 'cloud'" in said
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped)", said)}
    assert counts["failed"] == 1
    assert sum(counts.values()) == len(WATCHED)


async def test_one_clause_can_be_chosen_and_nobody_there_is_a_failure(tmp_path):
    where = ["--kv-engine", f"tcp://127.0.0.1:{free_port()}"]
    status, said = await pytest_of(tmp_path, *where, "-k", "6.12")
    assert (status, f"{len(WATCHED) - 1} deselected" in said, "nothing listens" in said) == (1, True, True), said


NEVER_ASKS = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.doubles.socket_routers import NeverAsks
router = NeverAsks([stream["live"] for stream in json.loads(input())["streams"]])
for line in sys.stdin:
    print(json.dumps({{"held": list(router.read())}}), flush=True)
"""


async def test_a_router_has_an_item_for_each_clause_in_each_case(tmp_path):
    (tmp_path / "router.py").write_text(NEVER_ASKS)
    way = f"--driver '{sys.executable} router.py' --settle 1"
    status, said = await pytest_of(tmp_path, f"--kv-router={way}", "-k", "duplicate-number or late-join")
    assert status == 1, said
    assert re.search(r"FAILED .*3\.5 duplicate-number: no batch is applied twice", said), said
    assert re.search(r"broken \(MUST\): .* it asked for no replays \(0 missing, 1 dead\)", said), said
    assert re.search(r"SKIPPED .*broken \(SHOULD\): .* \(24 missing, 0 dead\)", said), said
    items = sum(len(case.clauses) for case in CASES)
    assert re.search(rf"1 failed, 1 skipped, {items - 2} deselected", said), said


async def test_a_router_that_does_not_listen_is_a_failure(tmp_path):
    live, replay = free_port(), free_port()
    engine = f"tcp://127.0.0.1:{live},tcp://127.0.0.1:{replay}"
    where = f"--kv-router=--view-url http://127.0.0.1:1 --engine {engine} --connect 0.2"
    status, said = await pytest_of(tmp_path, where, "-k", "late-join")
    assert (status, "is the adapter?" in said, "nobody subscribes" in said) == (1, True, True), said


async def test_what_is_not_seen_is_skipped(tmp_path):
    engine = ",".join(f"tcp://127.0.0.1:{free_port()}" for _ in "12")
    status, said = await pytest_of(
        tmp_path, f"--kv-router=--client --engine {engine}", "-k", "two-ranks-clear or order-in-a-batch"
    )
    assert status == 0, said
    assert re.search(r"SKIPPED .*not seen \(MUST\): .*: it takes a second rank", said), said
    assert re.search(r"1 passed, \d+ skipped", said), said


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--kv-router=--topic t"], "name one way to ask the router: --driver"),
        (["--kv-router=--client --driver x"], "name one way"),
        (["--kv-router=--telepathy"], "No such option"),
        (["--kv-router=--driver"], "requires an argument"),
        (["--kv-router=--driver 'x"], "No closing quotation"),
        (["--kv-router=--client --engine here"], "--engine here: LIVE,REPLAY"),
        (["--kv-router=--client --reads a,b"], "takes --engine"),
        (["--kv-router=--client --settle 0"], "0"),
        (["--kv-engine=--replay-endpoint tcp://127.0.0.1:1"], "Missing argument"),
        (["--kv-engine=tcp://127.0.0.1:1 --seconds 0"], "0"),
    ],
)
def test_what_is_named_wrongly_is_a_usage_error(tmp_path, capsys, options, wrong):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    status = pytest.main(["-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path), *options])
    said = capsys.readouterr()
    assert (status, wrong in said.out + said.err) == (4, True), said


async def test_without_its_option_it_collects_nothing(tmp_path):
    assert (await pytest_of(tmp_path))[0] == 5
