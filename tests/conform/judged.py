"""Judge the real publishers of vLLM and SGLang by the specification, and give the test vectors to their decoders.

``python -m tests.conform.judged`` writes the results to docs/spec/results.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvbus.tools.conform.engine.probes import Target
from kvbus.tools.conform.engine.watch import Watch
from kvbus.tools.conform.report import Report
from tests.conform.results import RESULTS, SPEC, store
from tests.doubles.bus import PATIENCE, eventually
from tests.ports import free_ports
from tests.typed import there
from tests.wire.captures import DATA

ROOT: Final = SPEC.parents[1]
HOME_ENV: Final = "TEST_ENGINES_HOME"
CAPTURES: Final = {
    "vllm-0.11.1": ("vLLM 0.11.1", "vllm0110_positional_bytes"),
    "vllm-0.33.0": ("vLLM 0.33.0", "vllm033_map_int"),
    "sglang-0.5.23": ("SGLang 0.5.23", "sglang0523_map"),
}
"""For each engine: its release, and the capture that its publisher sends when it is judged.

The key is a directory of ``.ci/engines.sh``.
"""
DECODERS: Final = RESULTS / "decoders.json"


def home_of(engine: str) -> Path | None:
    """Return the directory of an engine's modules; None if there is none.

    If the newest release in :data:`CAPTURES` is not installed, it is the directory ``NAME-newest``, into which
    ``.ci/engines.sh`` can extract the newest published release.
    """
    name = engine.partition("-")[0]
    newest = [f"{name}-newest"] if engine == max(each for each in CAPTURES if each.startswith(name)) else []
    places = [Path(os.environ.get(HOME_ENV, ""), each) for each in [engine, *newest]]
    return next((each for each in places if HOME_ENV in os.environ and each.exists()), None)


def lacking(engine: str) -> str:
    """Return the reason why an engine's tests are skipped on this machine."""
    return f"{HOME_ENV} names no {engine}, as .ci/engines.sh DIR makes it; .ci/run does that"


async def judged(engine: str) -> Report:
    """Watch an engine's publisher and return the report.

    If a busy machine did not receive the complete capture within 4 s, watch again for longer.
    """
    capture = DATA / f"{CAPTURES[engine][1]}.jsonl"
    batches = len(capture.read_bytes().splitlines())
    live = batches - batches // 2
    for seconds in (4.0, 16.0, 32.0):
        watch = await _watched(engine, capture, seconds)
        if watch.judge.batches == live and watch.judge.stream.blocks.complete:
            break
    return watch.report()


async def _watched(engine: str, capture: Path, seconds: float) -> Watch:
    """Watch an engine's publisher that has sent half of a capture before and now sends the rest.

    Return the finished watch.
    """
    live, replay = free_ports(2)
    arguments = [there(home_of(engine)), live, replay, capture]
    program = [sys.executable, "-m", "tests.conform.publishers", *map(str, arguments)]
    running = await asyncio.create_subprocess_exec(
        *program, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while (line := await there(running.stdout).readline()) != b"ready\n":
                assert line, f"{engine} did not start"
        watch = Watch(Target(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", seconds=seconds))
        watching = asyncio.ensure_future(watch.run())
        await eventually(lambda: watch.connected, "the kit is connected")
        there(running.stdin).write(b"\n")
        await asyncio.wait_for(watching, PATIENCE)
    finally:
        there(running.stdin).close()
        await asyncio.wait_for(running.wait(), PATIENCE)
    return watch


def decoded(engine: str) -> dict[str, str]:
    """Return the error of an engine's decoder for each test vector; an empty string if it decodes the vector."""
    program = [sys.executable, "-m", "tests.spec.decoders", str(there(home_of(engine))), str(SPEC / "vectors")]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, timeout=600, check=True)
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return said


def main() -> None:
    for engine, (subject, capture) in CAPTURES.items():
        report = asyncio.run(judged(engine))
        store(f"engines/{engine}", subject, f"its publisher, fed with `{capture}`", report.without_bytes().to_json())
    said = {engine: dict(sorted(decoded(engine).items())) for engine in CAPTURES}
    DECODERS.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
