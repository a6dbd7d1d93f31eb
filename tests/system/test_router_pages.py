"""Tests that run the instructions of each page in docs/routers with a simulated engine.

A test uses the kvbus.yaml on the page and the page's two commands.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from kvbus.tools.starting import ENGINES, ROUTERS
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Program
from tests.ports import free_ports
from tests.system.test_check import kvbus

PAGES: Final = Path(__file__).parents[2] / "docs" / "routers"
DIALECTS: Final = {"vllm": "vllm-0.33", "sglang": "sglang-0.5.23"}
"""Dialect of the simulated engine that replaces each engine of a page."""
PAIRS: Final = [(router, "vllm") for router in ROUTERS] + [("llm-d", "sglang"), ("dynamo", "sglang")]


def blocks(page: str, heading: str) -> list[str]:
    """Return the texts of the code blocks below a heading of a page."""
    text = page.partition(f"\n{heading}\n")[2]
    return re.findall(
        r"^```\w*\n(.*?)^```$", re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[0], re.MULTILINE | re.DOTALL
    )


@pytest.mark.slow
@pytest.mark.parametrize(("router", "engine"), PAIRS)
async def test_the_commands_of_a_router_page_work(router: str, engine: str, tmp_path: Path) -> None:
    page = (PAGES / f"{router}.md").read_text()
    (command,) = blocks(page, f"### {ENGINES[engine]['name']}")
    config, _ = blocks(page, "## kvbus")
    (look,) = blocks(page, "## See that it works")
    ports = sorted(set(re.findall(r"tcp://[^:\s]+:(\d+)", config)))
    there = dict(zip((*ports, "9477"), map(str, free_ports(len(ports) + 1)), strict=True))

    def moved(text: str) -> str:
        return re.sub(r"(?<=:)\d+\b", lambda port: there.get(port[0], port[0]), text)

    live, replay = (moved(end.replace("*", "127.0.0.1")) for end in re.findall(r'endpoint": "([^"]+)"', command))
    path = tmp_path / "kvbus.yaml"
    path.write_text(f"{moved(config)}http: 127.0.0.1:{there['9477']}\n")
    sim = ("sim", "--bind", "--endpoint", live, "--replay-endpoint", replay, "--dialect", DIALECTS[engine], "--rate=50")
    with Program(tmp_path, *sim, name="engine"), Program(tmp_path, "run", str(path)) as bus:
        await eventually(lambda: "-> live" in bus.said, "the engine is live")
        doctor, dump = (re.sub(r"kvbus\.yaml", str(path), moved(line)).split()[1:] for line in look.splitlines())
        for words in (doctor, dump):
            done = await asyncio.to_thread(kvbus, *words)
            assert done.returncode == 0, done.stdout + done.stderr
        assert int(done.stdout.partition(" ")[0].replace(",", "")) > 0
