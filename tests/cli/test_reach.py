"""Silence has a reason: what ``tail`` and ``record`` say where nobody is."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvbus.cli import reach
from kvbus.cli.reach import explained, obstacle
from kvbus.errors import BindError
from tests.ports import free_port
from tests.system.test_play_record import run


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def deaf():
    """A port whose queue of connections is full, so that the kernel drops what comes: a firewall, as peers see it."""
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


async def test_every_obstacle_has_a_name(listening, deaf, tmp_path: Path):
    assert await obstacle(listening) is None
    assert await obstacle(f"tcp://127.0.0.1:{free_port()}") == "Connection refused"
    assert await obstacle(f"tcp://[::1]:{free_port()}") == "Connection refused"
    assert await obstacle(f"ipc://{tmp_path}/none") == "No such file or directory"
    assert "does not resolve" in (await obstacle("tcp://no-such-host.invalid:5557") or "")
    assert "firewall" in (await obstacle(deaf) or "")


async def test_an_obstacle_is_said_once_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(reach, "LOOK_AFTER_S", 0.01)
    looked = 0
    answers = ["first", "first", "second", None, "first"]

    async def found(_endpoint: str) -> str | None:
        nonlocal looked
        looked += 1
        return answers[looked - 1]

    monkeypatch.setattr(reach, "obstacle", found)
    async with explained("tcp://x:1", lambda: looked == len(answers)):
        while looked < len(answers):  # noqa: ASYNC110 - what is awaited is a number
            await asyncio.sleep(0.005)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["first", "second", "first"]


async def test_silence_where_somebody_listens_is_no_error(listening):
    async with explained(listening, lambda: False):
        pass
    with pytest.raises(BindError, match="Connection refused"):
        async with explained(f"tcp://127.0.0.1:{free_port()}", lambda: False):
            pass


@pytest.mark.parametrize("command", ["tail", "record"])
def test_a_dead_port_is_an_error(command, tmp_path):
    more = [tmp_path / "capture.jsonl"] if command == "record" else []
    code, said = run(command, f"tcp://127.0.0.1:{free_port()}", *more, "--seconds", 0.2)
    assert (code, "Connection refused" in said) == (69, True), said
