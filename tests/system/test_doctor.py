"""Tests for ``kvbus doctor`` as a process: its output, its exit codes, its timeout, and that it disturbs no other
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doctor.mistakes import HOST
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.ports import free_port
from tests.system.test_check import kvbus


def nowhere() -> list[str]:
    """Return command-line options with endpoints at which no process listens, and with the HTTP server turned off."""
    free = [free_port() for _ in range(4)]
    source, output = (f"{HOST}:{one},{HOST}:{other}" for one, other in (free[:2], free[2:]))
    return ["--source", source, "--output", output, "--set", "http=null"]


@pytest.fixture
def dropping():
    """An endpoint at which the queue of new connections is full, so that the kernel drops each attempt to connect."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"{HOST}:{full.getsockname()[1]}"
        for filler in fillers:
            filler.close()


def test_the_doctor_prints_a_line_for_each_finding_source_and_output():
    done = kvbus("doctor", *nowhere())
    assert (done.returncode, done.stderr) == (1, "")
    first, source, output = done.stdout.splitlines()
    assert first.startswith(f"nothing listens at {HOST}:")
    assert "[sources[0].endpoint]: start the engine" in first
    assert source.startswith("  sources[0] engine: ")
    assert output.startswith("  outputs[0] routers: ")


def test_the_doctor_prints_its_findings_as_json():
    done = kvbus("doctor", *nowhere(), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["healthy"]) == (1, False)
    (finding,) = report["findings"]
    assert finding.keys() == {"id", "severity", "text", "key", "remedy", "link", "since"}
    assert (finding["key"], finding["severity"]) == ("sources[0].endpoint", "problem")
    assert [seen["key"] for seen in report["seen"]] == ["sources[0]", "outputs[0]"]


def test_the_doctor_refuses_a_bad_configuration_and_wrong_options(tmp_path):
    bad = tmp_path / "kvbus.yaml"
    bad.write_text("sorces: []\n")
    done = kvbus("doctor", str(bad))
    assert done.returncode == 78
    assert "sorces" in done.stderr
    assert kvbus("doctor", str(bad), "-c", str(bad)).returncode == 2
    assert kvbus("doctor", str(bad), "--http", "127.0.0.1:1").returncode == 2
    # The file on the command line and --http take precedence over KVBUS_CONFIG.
    env = {"KVBUS_CONFIG": "/nowhere"}
    assert "sorces" in kvbus("doctor", str(bad), env=env).stderr
    assert kvbus("doctor", "--http", "127.0.0.1:1", env=env).stdout.startswith("no bus answers at http://127.0.0.1:1")


def test_check_with_connect_prints_the_findings_of_the_doctor():
    done = kvbus("check", *nowhere(), "--connect")
    assert done.returncode == 1
    assert done.stdout.startswith("model: null")
    findings = [line for line in done.stderr.splitlines() if not line.startswith("access: ")]
    assert "nothing listens" in findings[0]


def test_the_doctor_ends_within_its_timeout(dropping):
    done = kvbus(
        "doctor", "--source", dropping, "--output", f"{HOST}:{free_port()}", "--set", "http=null", "--timeout", "1"
    )
    assert "a firewall drops the packets, or the machine is down (within 1 s)" in done.stdout.splitlines()[0]


def test_the_doctor_shows_its_progress_on_a_terminal_and_ends_at_ctrl_c(dropping):
    main, terminal = pty.openpty()
    args = [
        "doctor",
        "--source",
        dropping,
        "--output",
        f"{HOST}:{free_port()}",
        "--set",
        "http=null",
        "--timeout",
        "120",
    ]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-m", "kvbus", *args], stderr=terminal, stdout=subprocess.PIPE, env=env)
    os.close(terminal)
    try:
        seen = b""
        while f"waiting for engine {dropping}".encode() not in seen:
            seen += os.read(main, 1024)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stdout is not None
        assert process.stdout.read() == b""
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        os.close(main)


async def doctor(*args: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(kvbus, "doctor", *args)


async def test_the_doctor_prints_the_findings_of_a_running_kvbus():
    async with running_bus() as bus:
        assert bus.daemon.http_address is not None
        host, port = bus.daemon.http_address
        url = f"http://{host}:{port}"
        await eventually(lambda: bus.source.unreachable, "the bus has looked itself")
        done = await doctor("--http", url)
        assert done.returncode == 1
        assert done.stdout.startswith("source engine: nothing listens at")
        assert "[sources[0].endpoint]: start the engine" in done.stdout
        async with EnginePublisher(bus.engine, bus.engine_replay, bind=True):
            await eventually(lambda: bus.source.state == "live", "the engine is there")
            done = await doctor("--http", f"{host}:{port}")
            assert (done.returncode, done.stdout.splitlines()[0]) == (0, "nothing is wrong")
    done = await doctor("--http", f"{host}:{port}")
    assert (done.returncode, done.stdout.startswith("no bus answers at")) == (1, True)


def test_the_doctor_without_a_configuration_asks_the_local_kvbus():
    done = kvbus("doctor")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("no bus answers at http://127.0.0.1:9477 (")


async def test_the_doctor_names_the_sources_of_a_kvbus_that_listens_for_its_engine(tmp_path):
    http = free_port()
    async with running_bus(one_port=True, http=f"127.0.0.1:{http}") as bus:
        config = tmp_path / "kvbus.yaml"
        config.write_text(
            f"http: 127.0.0.1:{http}\n"
            f"sources: [{{endpoint: '{bus.engine}', replay_endpoint: '{bus.engine_replay}', bind: true}}]\n"
            f"outputs: [{{endpoint: '{bus.out}', replay_endpoint: '{bus.out_replay}', interpose: true}}]\n"
        )
        done = await doctor(str(config))
        seen = f"{bus.engine}; the running bus listens here, so only its /sources shows the engine"
        assert seen in done.stdout, done.stdout + done.stderr


async def test_the_doctor_does_not_disturb_a_healthy_running_kvbus(tmp_path):
    http = free_port()
    async with (
        running_bus(http=f"127.0.0.1:{http}") as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        for n in range(50):
            engine.publish(payload(store([n + 1]), ts=time.time()))
        await eventually(lambda: bus.caught_up(49), "all relayed")
        before = engine.replay_requests
        config = tmp_path / "kvbus.yaml"
        config.write_text(
            f"http: 127.0.0.1:{http}\n"
            f"sources: [{{endpoint: '{bus.engine}', replay_endpoint: '{bus.engine_replay}'}}]\n"
            f"outputs: [{{endpoint: '{bus.out}', replay_endpoint: '{bus.out_replay}'}}]\n"
        )
        done = await doctor(str(config))
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "nothing is wrong"), done.stdout
        assert f"{bus.out} PUB" in done.stdout
        assert f"{bus.out_replay} ROUTER answers" in done.stdout
        assert engine.replay_requests >= before + 1
        stats = bus.daemon.output_stats[0]
        assert stats.states_sent.total() == 0
        assert bus.source.state == "live"
