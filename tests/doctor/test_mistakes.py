"""For each mistake the first line names the cause and the configuration key; on a healthy bus nothing is found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbus.config import load
from kvbus.tools.doctor.examine import examine
from kvbus.tools.doctor.findings import Report, render
from tests.doctor.mistakes import MISTAKES, Scene, made
from tests.ports import free_port

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
TIMEOUT = 5.0
SLACK = 20.0
"""Seconds beyond the timeouts, on a loaded machine."""


async def examined(scene: Scene, seconds: float = TIMEOUT) -> Report:
    config = load(None, env={}, overrides=scene.config())
    async with asyncio.timeout(3 * seconds + SLACK):
        return await examine(config, timeout=seconds, **scene.options)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[each.make.__name__ for each in MISTAKES])
async def test_the_first_line_names_the_cause_and_the_key(mistake, tmp_path):
    async with made(mistake.make, tmp_path) as scene:
        report = await examined(scene)
    text = render(report, as_json=False, colour=False)
    first = text.splitlines()[0]
    assert mistake.says in first, text
    assert f"[{mistake.key}]: " in first, text


async def healthy(scene: Scene) -> None:
    await scene.engine()


async def test_on_a_healthy_engine_nothing_is_found(tmp_path):
    async with made(healthy, tmp_path) as scene:
        report = await examined(scene)
    assert report.findings == []
    (source, output) = report.seen
    assert "its replay answers from seq" in source.text
    assert "block size 16" in source.text
    assert output.text.count("is free") == 2


async def test_a_log_is_looked_at(tmp_path):
    async def no_server(scene: Scene) -> None:
        await scene.engine()
        scene.over["model"] = "m"
        scene.output = {"name": "log", "type": "redis", "endpoint": f"tcp://127.0.0.1:{free_port()}"}

    async with made(no_server, tmp_path) as scene:
        report = await examined(scene)
    assert [finding.key for finding in report.findings] == ["outputs[0].endpoint"]


async def test_an_output_that_is_not_looked_at_is_named(tmp_path):
    async def plane(scene: Scene) -> None:
        await scene.engine()
        scene.over["model"] = "m"
        scene.output = {"name": "plane", "type": "dynamo", "dynamo": {"discovery": f"file://{tmp_path}"}}

    async with made(plane, tmp_path) as scene:
        report = await examined(scene)
    text = render(report, as_json=False, colour=False)
    assert text.startswith(
        "note: output plane was not looked at: doctor has no probe for type dynamo [outputs[0].type]"
    )
    assert "nothing is wrong" not in text


def test_the_documentation_has_every_mistake_and_no_other():
    section = OPERATIONS.read_text().partition("## What is wrong?\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| mistake")]
    assert rows == [f"| {each.what} | {each.says} | `{each.key}` |" for each in MISTAKES]
