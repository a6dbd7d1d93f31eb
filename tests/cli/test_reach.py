"""Tests that ``kvbus tail`` and ``kvbus record`` explain why no publisher answers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvbus.cli import reach
from kvbus.cli.reach import UnreachableError, explained, obstacle
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port
from tests.system.test_play_record import run
from tests.typed import there


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def deaf():
    """Return a port whose connection queue is full, so that the kernel drops new connections, as a firewall would."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        while True:
            waiting.append(socket.socket())
            waiting[-1].settimeout(0.2)
            try:
                waiting[-1].connect(server.getsockname())
            except TimeoutError:
                break
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for each in waiting:
            each.close()


async def test_kvbus_names_the_reason_if_an_endpoint_has_no_publisher(listening, deaf):
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as engine:
        assert await obstacle(engine.endpoint, None) == ""
        assert "is a replay (ROUTER) socket" in await obstacle(there(engine.replay_endpoint), None)
    assert "nothing listens" in await obstacle(f"tcp://127.0.0.1:{free_port()}", None)
    assert "does not resolve" in await obstacle("tcp://no-such-host.invalid:5557", None)
    assert "firewall" in await obstacle(deaf, None)
    assert "sends nothing" in await obstacle(listening, None)


async def test_an_obstacle_is_logged_once_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(reach, "LOOK_AFTER_S", 0.01)
    looked = 0
    answers = ["first", "first", "second", "", "first"]

    async def found(_endpoint: str, _curve: object) -> str:
        nonlocal looked
        looked += 1
        return answers[looked - 1]

    monkeypatch.setattr(reach, "obstacle", found)
    async with explained("tcp://x:1", None, lambda: looked == len(answers)):
        while looked < len(answers):  # noqa: ASYNC110 - what is awaited is a number
            await asyncio.sleep(0.005)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["first", "second", "first"]


async def test_a_silent_publisher_is_not_an_error():
    engine = EnginePublisher("tcp://127.0.0.1:*", None, bind=True)
    async with engine, explained(engine.endpoint, None, lambda: False):
        pass
    with pytest.raises(UnreachableError, match="nothing listens"):
        async with explained(f"tcp://127.0.0.1:{free_port()}", None, lambda: False):
            pass


@pytest.mark.parametrize("command", ["tail", "record"])
def test_tail_and_record_fail_at_a_port_where_nothing_listens(command, tmp_path):
    more = [tmp_path / "capture.jsonl"] if command == "record" else []
    code, said = run(command, f"tcp://127.0.0.1:{free_port()}", *more, "--seconds", 0.2)
    assert (code, "nothing listens" in said) == (69, True), said
