"""Tests that kvbus's first message about each operator's mistake names the cause and the configuration key.

``NUMBERED`` is the score. Mistakes 1 to 25 were made by a person who had not seen kvbus before; ten more are the
developers' own. With some mistakes kvbus refuses to start, so no running bus has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbus.common.errors import BindError, ConfigError, InUseError
from kvbus.config import load
from kvbus.daemon import bus_log, unreachable
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.files import look
from kvbus.tools.doctor.examine import examine
from kvbus.tools.doctor.findings import Report, render
from tests.doctor.mistakes import HOST, MISTAKES, Mistake, Scene, both_bind, made, port_taken
from tests.doubles.bus import eventually
from tests.ports import free_port, free_ports

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
TIMEOUT = 5.0
SLACK = 20.0
"""Seconds that a test permits in addition to kvbus's timeouts, because the machine may be busy."""

OFFLINE = [each for each in MISTAKES if each.says]
RUNNING = [each for each in MISTAKES if each.running]


def name(mistake: Mistake) -> str:
    return mistake.make.__name__


# -- seen by doctor, without a bus


async def examine_scene(scene: Scene, seconds: float = TIMEOUT) -> Report:
    config = load(None, env={}, overrides=scene.config())
    async with asyncio.timeout(3 * seconds + SLACK):
        return await examine(config, timeout=seconds, **scene.options)


@pytest.mark.parametrize("mistake", OFFLINE, ids=map(name, OFFLINE))
async def test_doctors_first_line_names_the_cause_and_the_key_of_a_mistake(mistake: Mistake, tmp_path: Path) -> None:
    async with made(mistake.make, tmp_path) as scene:
        report = await examine_scene(scene)
    text = render(report, as_json=False, colour=False)
    first = text.splitlines()[0]
    assert mistake.says in first, text
    assert f"[{mistake.key}]: " in first, text


# -- seen by a running bus


@pytest.mark.parametrize("mistake", RUNNING, ids=map(name, RUNNING))
async def test_a_running_bus_first_names_the_cause_and_the_key_of_a_mistake(
    mistake: Mistake, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(unreachable, "AFTER", 0.5)
    monkeypatch.setattr(unreachable, "FURTHER_AFTER", 0.5)
    monkeypatch.setattr(bus_log, "FIRST_ANSWER_S", 0.5)

    def findings() -> list[tuple[str, str]]:
        said = [record for record in caplog.records if re.search(r" \[[^ ]+\]: ", record.getMessage())]
        return [(vars(each)["reason"], each.getMessage()) for each in said if "reason" in vars(each)]

    async with made(mistake.make, tmp_path) as scene:
        daemon = Daemon(load(None, env={}, overrides={**scene.config(), "probe_interval": 0.2, "replay_timeout": 1.0}))
        await daemon.start()
        try:
            await eventually(findings, "a finding", 60)
        finally:
            await daemon.close(drain=0)
    id_, line = findings()[0]
    assert (id_, f"[{mistake.key}]: " in line) == (mistake.running, True), line


# -- refused at the start


@pytest.mark.parametrize(("make", "key"), [(both_bind, "sources[0].bind"), (port_taken, "outputs[0].endpoint")])
async def test_a_used_endpoint_is_named_with_its_key(make: Callable[[Scene], Any], key: str, tmp_path: Path) -> None:
    async with made(make, tmp_path) as scene:
        daemon = Daemon(load(None, env={}, overrides=scene.config()))
        with pytest.raises(BindError, match=rf"cannot listen on tcp://.*Address already in use \[{re.escape(key)}\]: "):
            await daemon.start()


@pytest.mark.parametrize(
    ("over", "key"),
    [
        ({"http": "PORT"}, "http"),
        ({"front": {"listen": "PORT", "engine": "http://127.0.0.1:1"}}, "front.listen"),
        ({"front_grpc": {"listen": "PORT", "engine": "127.0.0.1:1"}}, "front_grpc.listen"),
        ({"interpose": {"endpoint": "tcp://PORT"}}, "interpose.endpoint"),
    ],
    ids=["http", "front", "front_grpc", "interpose"],
)
async def test_a_used_http_address_is_named_with_the_reason_and_its_key(over: dict[str, Any], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        config = json.loads(
            json.dumps({"http": f"127.0.0.1:{free_port()}", "state_dir": None} | over).replace("PORT", place)
        )
        if key != "interpose.endpoint":
            config["sources"] = [{"endpoint": f"{HOST}:{free_port()}"}]
            config["outputs"] = [{"endpoint": f"{HOST}:{free_port()}"}]
        daemon = Daemon(load(None, env={}, overrides=config))
        with pytest.raises(BindError, match=rf"cannot listen on .*{place}: Address already in use \[{key}\]: "):
            await daemon.start()


async def test_a_second_kvbus_with_the_same_state_directory_is_refused(tmp_path: Path) -> None:
    def config() -> dict[str, Any]:
        engine, out = free_ports(2)
        sources, outputs = [{"endpoint": f"{HOST}:{engine}"}], [{"endpoint": f"{HOST}:{out}"}]
        return {"sources": sources, "outputs": outputs, "http": None, "state_dir": str(tmp_path)}

    first = Daemon(load(None, env={}, overrides=config()))
    try:
        with pytest.raises(InUseError, match=r"is in use by process \d+ .*needs a state_dir of its own"):
            Daemon(load(None, env={}, overrides=config()))
    finally:
        await first.close(drain=0)


Change = tuple[str, object]
REFUSED: list[tuple[int, str, dict[str, object], str]] = [
    (11, "a misspelt key", {"sorces": []}, "sorces"),
    (0, "an unknown key of a source", {"sources.0.topics": "kv@"}, "sources[0].topics"),
    (12, "kafka:// as an endpoint", {"outputs.0.endpoint": "kafka://host:9092"}, "outputs[0].endpoint"),
    (
        13,
        "a secret key that others may read",
        {"sources.0.curve_secret_key_file": "FILE", "sources.0.curve_server_key_file": "FILE"},
        "sources[0].curve_secret_key_file",
    ),
    (14, "a state_dir that is a file", {"state_dir": "FILE"}, "state_dir"),
    (14, "a state_dir that cannot be made", {"state_dir": "/proc/kvbus"}, "state_dir"),
    (18, "IPv6 without brackets", {"sources.0.endpoint": "tcp://::1:5557"}, "sources[0].endpoint"),
    (
        21,
        "a profile and a topic that do not fit",
        {"outputs.0.profile": "vllm-router", "outputs.0.topic": "kv@"},
        "outputs[0].topic",
    ),
    (0, "a profile that is none", {"outputs.0.profile": "nobody"}, "outputs[0].profile"),
    (0, "the same port twice", {"outputs.0.replay_endpoint": "tcp://*:5657"}, "outputs[0]"),
    (25, "a topic of 5,000 characters", {"sources.0.topic": "x" * 5000}, "sources[0].topic"),
]


@pytest.mark.parametrize(("number", "what", "change", "key"), REFUSED, ids=[each[1] for each in REFUSED])
def test_an_unusable_configuration_is_refused_with_its_key(
    number: int, what: str, change: dict[str, object], key: str, tmp_path: Path
) -> None:
    del number, what
    path = tmp_path / "file"
    path.write_text("")
    config: dict[str, Any] = {
        "sources": [{"name": "engine", "endpoint": f"{HOST}:{free_port()}"}],
        "outputs": [{"name": "routers", "endpoint": "tcp://*:5657"}],
        "state_dir": None,
    }
    for place, value in change.items():
        *way, last = place.split(".")
        node: Any = config
        for piece in way:
            node = node[int(piece) if piece.isdigit() else piece]
        node[last] = str(path) if value == "FILE" else value
    with pytest.raises(ConfigError) as refused:
        load(None, env={}, overrides=config, look=lambda read: look(read)[1])
    first = refused.value.problems[0]
    assert first.key.startswith(key)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("text", "env", "says"),
    [
        ("sources:\n\t- endpoint: tcp://127.0.0.1:5557\n", {}, r"kvbus\.yaml.*line 2"),
        ("sources: [{}]\noutputs: [{}]\n", {"KVBUS_HTPP": "127.0.0.1:1"}, "KVBUS_HTPP"),
    ],
    ids=["tabs in YAML", "a misspelt variable"],
)
def test_an_invalid_configuration_file_or_variable_is_named(
    text: str, env: dict[str, str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "kvbus.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(path, env=env, overrides={})


# -- the score

STARTS = {3, 16, 17, 19, 20, 36, *(number for number, *_ in REFUSED)}
"""Numbers of the mistakes with which kvbus does not start. Number 36 is about the port of the API proxy (`front`)."""
INDEX = {10}
"""Numbers of the mistakes that only `kvbus index` can notice, because it has the tokens of all workers: see
tests/index.
"""


def test_doctor_and_a_running_bus_recognize_every_mistake() -> None:
    offline = STARTS | {each.number for each in OFFLINE}
    running = STARTS | INDEX | {each.number for each in RUNNING}
    theirs, ours = set(range(1, 26)), set(range(26, 37))
    assert theirs - (offline | running) == ours - (offline | running) == set()
    assert theirs - running == set(), "a bus that starts sees it by itself"
    assert len(theirs - offline) <= 1, "a full disk is seen when it is full"


async def healthy(scene: Scene) -> None:
    await scene.engine()


async def test_doctor_finds_nothing_wrong_with_a_healthy_engine(tmp_path):
    async with made(healthy, tmp_path) as scene:
        report = await examine_scene(scene)
    assert report.findings == []
    (source, output) = report.seen
    assert "its replay answers from seq" in source.text
    assert "block size 16" in source.text
    assert output.text.count("is free") == 2


async def test_doctor_probes_the_server_of_a_log(tmp_path):
    async def no_server(scene: Scene) -> None:
        await scene.engine()
        scene.over["model"] = "m"
        scene.output = {"name": "log", "type": "redis", "endpoint": f"tcp://127.0.0.1:{free_port()}"}

    async with made(no_server, tmp_path) as scene:
        report = await examine_scene(scene)
    assert [finding.key for finding in report.findings] == ["outputs[0].endpoint"]


async def test_doctor_names_an_output_that_it_cannot_test(tmp_path):
    async def plane(scene: Scene) -> None:
        await scene.engine()
        scene.over["model"] = "m"
        scene.output = {"name": "plane", "type": "dynamo", "dynamo": {"discovery": f"file://{tmp_path}"}}

    async with made(plane, tmp_path) as scene:
        report = await examine_scene(scene)
    text = render(report, as_json=False, colour=False)
    assert text.startswith(
        "note: output plane was not tested: doctor has no test for outputs of type dynamo [outputs[0].type]"
    )
    assert "nothing is wrong" not in text


def test_the_operations_manual_has_the_number_of_mistakes() -> None:
    assert f"`tests/doctor` makes {len(OFFLINE)} mistakes on purpose" in OPERATIONS.read_text()
