"""vLLM's and SGLang's own publishers, judged: what docs/spec/matrix.md says of them as *judged*."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvbus.conform.engine.watch import Target, Watch
from kvbus.conform.verdict import Outcome
from tests.ports import free_ports
from tests.system.bus import PATIENCE
from tests.typed import there
from tests.wire.captures import DATA

CASES = {
    "vllm": ("TEST_VLLM_PYTHON", "vllm033_map_int", {"3.6", "4.1", "5.1", "7.1", "7.2", "11.3"}),
    "sglang": ("TEST_SGLANG_PYTHON", "sglang0523_map", {"3.6", "4.1", "5.1", "6.12"}),
}


@pytest.mark.parametrize("engine", CASES)
async def test_a_publisher_of_an_engine_breaks_what_the_matrix_says(engine):
    variable, capture, wrong = CASES[engine]
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with {engine}")
    live, replay = free_ports(2)
    program = [
        python,
        Path(__file__).with_name("publishers.py"),
        engine,
        str(live),
        str(replay),
        DATA / f"{capture}.jsonl",
    ]
    running = await asyncio.create_subprocess_exec(
        *program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while (line := await there(running.stdout).readline()) != b"ready\n":
                assert line, f"{engine} did not start"
        watch = Watch(Target(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", seconds=4.0))
        await asyncio.wait_for(watch.run(), PATIENCE)
    finally:
        there(running.stdin).close()
        await asyncio.wait_for(running.wait(), PATIENCE)
    assert {str(each.clause) for each in watch.report().verdicts if each.outcome is Outcome.BROKEN} == wrong
