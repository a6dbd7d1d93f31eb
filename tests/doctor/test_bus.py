"""Tests for `kvbus doctor` if a kvbus, or another HTTP server, already runs at the configured HTTP port."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbus.core.findings.bus import ROUTER_STALLED, STATE_NOT_WRITTEN
from kvbus.core.findings.engine import BLOCK_SIZE
from kvbus.core.findings.finding import Finding, Reported
from kvbus.tools import asking
from kvbus.tools.doctor.examine import examine_bus
from kvbus.tools.doctor.findings import render
from tests.doctor.mistakes import Scene, made
from tests.doctor.test_score import examine_scene
from tests.doubles.bus import eventually, running_bus
from tests.ports import free_port

SOURCE: dict[str, Any] = {
    "name": "engine",
    "endpoint": "tcp://127.0.0.1:5557",
    "state": "live",
    "epoch": 0,
    "last_seq": 5,
    "partial": False,
    "blocks": {"GPU": 3},
}
ROUTER: dict[str, Any] = {
    "output": "routers",
    "state": "live",
    "left": None,
}


class Http:
    """An HTTP server that answers the paths that doctor requests."""

    def __init__(self, sources: object, routers: object = (), *findings: Finding) -> None:
        self._answers = {"/sources": sources, "/routers": routers, "/findings": msgspec.to_builtins(findings)}

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/{path}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        answer = self._answers[request.path]
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))


def reported(finding: Finding, **subject: Any) -> Reported:
    return Reported(**msgspec.structs.asdict(finding), **subject)


def first_line(report) -> str:
    return render(report, as_json=False, colour=False).splitlines()[0]


async def test_doctor_reports_the_findings_and_sources_of_a_running_bus():
    said = reported(BLOCK_SIZE(count=3, size=24, own=""), kind="source", name="engine")
    async with Http([{**SOURCE, "partial": True}], [ROUTER, {**ROUTER, "left": "gone"}], said) as url:
        report = await examine_bus(url, timeout=10)
    assert first_line(report) == (
        "source engine: events refused (3): block_size is 24, but the engine has blocks [block_size]: "
        "set block_size to the engine's block size, or to auto"
    )
    assert [str(each) for each in report.seen] == [
        "sources[0] engine: tcp://127.0.0.1:5557; live, epoch 0, seq 5, 3 blocks, partial",
        "outputs routers: routers: 1 live",
    ]


async def test_doctor_reports_the_findings_of_a_bus_and_its_routers():
    stalled = ROUTER_STALLED(at="outputs[0]", who="router 10.0.0.7:40000 of output routers", dropped=7)
    full = STATE_NOT_WRITTEN(where="/var/lib/kvbus", why="No space left on device")
    router = reported(stalled, kind="router", output="routers", peer="10.0.0.7:40000", stream=0)
    async with Http([SOURCE], [ROUTER], reported(full), router) as url:
        report = await examine_bus(url, timeout=10)
    assert report.findings == [full, stalled]
    assert not report.healthy


async def test_doctor_finds_nothing_wrong_with_a_bus_without_findings():
    async with Http([SOURCE]) as url:
        report = await examine_bus(url, timeout=10)
    assert first_line(report) == "nothing is wrong"


@pytest.mark.parametrize(
    "answer",
    ["<html>", "{}", "[1]", '[{"name": 1}]', json.dumps([{**SOURCE, "blocks": {"GPU": "many"}}]), "[" * 10_000],
)
async def test_doctor_recognizes_a_server_that_is_not_a_kvbus(answer):
    async with Http(answer, "[]") as url:
        report = await examine_bus(url, timeout=10)
    assert first_line(report).startswith(f"the server at {url} is not a kvbus (")


async def test_doctor_limits_the_size_of_an_answer_of_the_bus(monkeypatch):
    monkeypatch.setattr(asking, "MAX_BYTES", 1000)
    async with Http([SOURCE] * 100) as url:
        report = await examine_bus(url, timeout=10)
    assert "more than 1000 bytes" in first_line(report)


async def test_doctor_escapes_control_characters_in_answers_of_the_bus():
    async with Http([{**SOURCE, "name": "\x1b[2Jengine\n"}], [{**ROUTER, "state": "\x07"}]) as url:
        report = await examine_bus(url, timeout=10)
    text = render(report, as_json=False, colour=False)
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b[2Jengine\\x0a" in text


async def test_doctor_recognizes_a_bus_with_another_configuration(tmp_path):
    async def other(scene: Scene) -> None:
        await scene.engine()

    http = free_port()
    async with running_bus(http=f"127.0.0.1:{http}") as bus, made(other, tmp_path) as scene:
        await eventually(lambda: bus.daemon.started, "the bus")
        scene.over["http"] = f"127.0.0.1:{http}"
        report = await examine_scene(scene)
    assert first_line(report).startswith(f"the bus at http://127.0.0.1:{http} runs another configuration")
