"""The plugin in a pytest of its own, against an engine on real sockets."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from kvbus.conform.engine.clauses import WATCHED
from kvbus.conform.vectors import message, stored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port
from tests.system.bus import PATIENCE


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
        where = ["--kv-engine", engine.endpoint, "--kv-engine-replay", str(engine.replay_endpoint)]
        status, said = await pytest_of(tmp_path, *where, "--kv-engine-seconds", "0.5")
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


async def test_without_its_option_it_collects_nothing(tmp_path):
    assert (await pytest_of(tmp_path))[0] == 5
